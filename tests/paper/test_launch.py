import os
import signal
import sys
import threading
import time

import pytest

from lightning_fedstop.paper import launch
from lightning_fedstop.paper.launch import Job, child_environment, run_jobs

WAIT = "import pathlib, sys, time\nend = time.monotonic() + 30\nwhile not pathlib.Path(sys.argv[2]).exists():\n" + (
    "    assert time.monotonic() < end\n    time.sleep(0.01)\n"
)
MEET = "import pathlib, sys\npathlib.Path(sys.argv[1]).touch()\n" + WAIT
ALONE = (
    "import os, pathlib, sys\nassert not list(pathlib.Path(sys.argv[1]).glob('busy*'))\n"
    "busy = pathlib.Path(sys.argv[1]) / f'busy{os.getpid()}'\nbusy.touch()\nbusy.unlink()\n"
)
UNTIL_INTERRUPTED = (
    "import pathlib, sys, time\ntry:\n    pathlib.Path(sys.argv[1]).touch()\n    time.sleep(60)\n"
    "except KeyboardInterrupt:\n    pathlib.Path(sys.argv[2]).touch()\n"
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


def test_an_interruption_lets_the_processes_end_by_themselves(jobs, tmp_path):
    started, stopped = tmp_path / "started", tmp_path / "stopped"

    def terminate():
        while not started.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=terminate)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs([UNTIL_INTERRUPTED, str(started), str(stopped)], ["never"]), 1, report=lambda line: None)
    thread.join()
    assert stopped.exists()
    assert not (tmp_path / "job1").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_does_not_listen_is_ended(jobs, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "SECONDS_TO_END", 0.2)
    started = tmp_path / "started"
    deaf = (
        "import pathlib, signal, sys, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1]).touch()\ntime.sleep(60)\n"
    )

    def report(line):
        while not started.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    made = jobs([deaf, str(started)], ["pass"])
    with pytest.raises(KeyboardInterrupt):
        run_jobs(made, 2, report=report)


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
