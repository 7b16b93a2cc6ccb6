"""A process killed at 20 random moments and resumed each time ends with the bits of one that was left alone."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_fedstop.loop.checkpoint_file import find_last, read_checkpoint
from lightning_fedstop.records.run_record import read_rounds

pytestmark = [pytest.mark.process, pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")]
ROOT = Path(__file__).resolve().parents[1]
KILLS = int(os.environ.get("KILLS", "20"))  # more of them for a longer hunt
TIMES = {"seconds_train", "seconds_idle", "seconds_eval", "seconds_criterion"}


class Runner:
    """Starts fits, one after the other."""

    def __init__(self):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-W", "ignore", "-m", "tests.kill_script"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def start(self, *arguments):
        self.process.stdin.write(" ".join(map(str, arguments)) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self):
        return int(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def left(root):
    """What the newest run under a root has left."""
    folder = max(root.glob("lightning_logs/version_*"), key=lambda path: int(path.name.split("_")[1]))
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in read_rounds(folder / "metrics.csv")]
    return json.loads((folder / "summary.json").read_text())["parameters_hash"], rows


@pytest.fixture(scope="module")
def runner():
    runner = Runner()
    yield runner
    runner.close()


@pytest.mark.parametrize(
    ("storage", "rounds", "kills", "pace"), [("memory", 40, KILLS, 2), ("disk", 12, KILLS // 2, 1)]
)
def test_killed_at_random_moments_and_resumed(tmp_path, runner, storage, rounds, kills, pace):
    """``pace``: the longest time between two kills, in even shares of the run's; 1 is in quick succession."""
    began = time.monotonic()
    runner.start(tmp_path / "whole", rounds, storage)
    assert runner.end() == 0
    duration = time.monotonic() - began

    root, moments, before, killed = tmp_path / "killed", random.Random(0), 0, 0
    for _ in range(kills):
        child = runner.start(root, rounds, storage)
        time.sleep(moments.uniform(0, pace * duration / kills))
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.kill(child, signal.SIGKILL)
        killed += runner.end() == signal.SIGKILL
        try:
            state = read_checkpoint(find_last(root))["federated"]
        except FileNotFoundError:
            continue
        assert state["round"] >= before  # the last finished round is never lost
        before = state["round"]
    runner.start(root, rounds, storage)
    assert runner.end() == 0

    assert killed
    parameters, rows = left(root)
    assert [int(row["round"]) for row in rows] == list(range(1, rounds + 1))
    assert (parameters, rows) == left(tmp_path / "whole")
