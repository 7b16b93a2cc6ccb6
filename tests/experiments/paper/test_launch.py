import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from experiments.paper import launch
from experiments.paper.__main__ import main
from experiments.paper.launch import Job, child_environment, run_jobs
from lightning_fedstop.loop.signals import Terminated

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[3]

WAIT = "import pathlib, sys, time\nend = time.monotonic() + 30\nwhile not pathlib.Path(sys.argv[2]).exists():\n" + (
    "    assert time.monotonic() < end\n    time.sleep(0.01)\n"
)
MEET = "import pathlib, sys\npathlib.Path(sys.argv[1]).touch()\n" + WAIT
ALONE = (
    "import os, pathlib, sys\nassert not list(pathlib.Path(sys.argv[1]).glob('busy*'))\n"
    "busy = pathlib.Path(sys.argv[1]) / f'busy{os.getpid()}'\nbusy.touch()\nbusy.unlink()\n"
)
# As `fedstop fit` does: it ends in good order by a termination signal.
UNTIL_TERMINATED = (
    "import pathlib, sys, time\nfrom lightning_fedstop.loop.signals import SignalGuard, Terminated\n"
    "with SignalGuard():\n    try:\n        pathlib.Path(sys.argv[1]).touch()\n        time.sleep(60)\n"
    "    except Terminated:\n        pathlib.Path(sys.argv[2]).touch()\n"
)


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """Jobs of some Python code each, instead of `fedstop`."""
    monkeypatch.setattr(launch, "COMMAND", [sys.executable, "-c"])

    def make(*codes_and_arguments):
        return [Job(f"job{n}", given, tmp_path / f"job{n}") for n, given in enumerate(codes_and_arguments)]

    return make


def test_a_failing_job_does_not_end_the_others(jobs, tmp_path):
    lines = []
    made = jobs(["print('one')"], ["print('two'); raise SystemExit(3)"], ["print('three')"])
    assert run_jobs(made, 1, report=lines.append) == ["job1"]
    assert [(tmp_path / f"job{n}" / "output.txt").read_text().strip() for n in range(3)] == ["one", "two", "three"]
    assert [line.partition(" (")[0] for line in lines] == [
        "[1/3] job0: done",
        f"[2/3] job1: failed with exit code 3, see {tmp_path / 'job1' / 'output.txt'}",
        "[3/3] job2: done",
    ]


def test_so_many_jobs_run_at_once(jobs, tmp_path):
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    assert run_jobs(jobs([MEET, here, there], [MEET, there, here]), 2, report=lambda line: None) == []


def test_no_more_jobs_run_at_once(jobs, tmp_path):
    assert run_jobs(jobs(*[[ALONE, str(tmp_path)]] * 4), 1, report=lambda line: None) == []


def test_the_output_of_an_earlier_attempt_is_kept(jobs, tmp_path):
    for word in ("first", "second"):
        run_jobs(jobs([f"print({word!r})"]), 1, report=lambda line: None)
    assert (tmp_path / "job0" / "output.txt").read_text().split() == ["first", "second"]


@pytest.mark.parametrize(("signum", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_an_interruption_lets_the_processes_end_by_themselves(jobs, tmp_path, signum, error):
    started, stopped = tmp_path / "started", tmp_path / "stopped"

    def interrupt():
        while not started.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signum)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(error):
        run_jobs(jobs([UNTIL_TERMINATED, str(started), str(stopped)], ["never"]), 1, report=lambda line: None)
    thread.join()
    assert stopped.exists()
    assert not (tmp_path / "job1").exists()
    assert signal.getsignal(signal.SIGTERM) is before


IN_BACKGROUND = """
import sys
from pathlib import Path
from experiments.paper import launch
launch.COMMAND = [sys.executable, "-c"]
job = launch.Job("job", sys.argv[2:], Path(sys.argv[1]))
launch.run_jobs([job], 1)
"""


@pytest.mark.skipif(os.name != "posix", reason="a shell's `&`")
def test_in_the_background_where_ctrl_c_is_ignored_they_end_too(tmp_path):
    started, stopped = tmp_path / "started", tmp_path / "stopped"
    background = subprocess.Popen(
        [sys.executable, "-c", IN_BACKGROUND, str(tmp_path), UNTIL_TERMINATED, str(started), str(stopped)],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        cwd=ROOT,
    )
    while not started.exists():
        assert background.poll() is None
        time.sleep(0.01)
    began = time.monotonic()
    background.terminate()
    assert background.wait(timeout=60) == 128 + signal.SIGTERM
    assert time.monotonic() - began < launch.SECONDS_TO_END
    assert stopped.exists()


@pytest.mark.parametrize(
    ("signum", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "term")]
)
def test_the_command_says_how_to_go_on(tmp_path, monkeypatch, capsys, signum, code, word):
    def run(*_):
        raise KeyboardInterrupt if signum == signal.SIGINT else Terminated(signum)

    monkeypatch.setattr("experiments.paper.__main__.run_jobs", run)
    with pytest.raises(SystemExit) as exit:
        main(["figure5", "--root", str(tmp_path), "--scale", "tiny", "--jobs", "1"])
    assert exit.value.code == code
    said = capsys.readouterr().err
    assert f"python -m experiments.paper: {word}" in said
    assert "; the same command goes on from the last checkpoints." in said
    assert "ckpt_path" not in said


DEAF = (
    "import os, pathlib, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "pathlib.Path(sys.argv[1] + 'x').write_text(str(os.getpid()))\nos.rename(sys.argv[1] + 'x', sys.argv[1])\n"
    "time.sleep(60)\n"
)


@pytest.mark.parametrize("twice", [False, True])
def test_a_process_that_does_not_listen_is_killed_at_once_where_the_user_does_not_wait(
    jobs, tmp_path, monkeypatch, twice
):
    monkeypatch.setattr(launch, "SECONDS_TO_END", 30 if twice else 0.2)
    started = tmp_path / "started"

    def report(line):
        while not started.exists():
            time.sleep(0.01)
        if twice:
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs([DEAF, str(started)], ["pass"]), 2, report=report)
    assert time.monotonic() - began < 20
    with suppress(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
        raise AssertionError("it still runs")


def test_cores_are_shared_out_unless_the_user_has_said_how(monkeypatch):
    monkeypatch.setattr(launch, "_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert child_environment(0, 3)["OMP_NUM_THREADS"] == "2"
    assert child_environment(0, 16)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert child_environment(0, 3)["OMP_NUM_THREADS"] == "5"


def test_accelerators_are_dealt_in_turn(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [child_environment(slot, 3, ["4", "7"])["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["4", "7", "4"]
    assert child_environment(1, 3, ["4", "7"])["HIP_VISIBLE_DEVICES"] == "7"
    assert "CUDA_VISIBLE_DEVICES" not in child_environment(0, 3)


def test_the_command_is_this_package(tmp_path):
    job = Job("version", ["--version"], tmp_path)
    assert run_jobs([job], 1, report=lambda line: None) == []
    assert (tmp_path / "output.txt").read_text().startswith("fedstop ")
