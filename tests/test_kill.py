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

from lightning_fedstop.checkpoint import find_last, read_checkpoint
from lightning_fedstop.records.run_record import read_rounds
from tests.kill_script import ROUNDS

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
ROOT = Path(__file__).resolve().parents[1]
KILLS = 20
TIMES = {"seconds_train", "seconds_idle", "seconds_eval", "seconds_criterion"}


class Runner:
    """Starts fits under one root, and kills them."""

    def __init__(self, root):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-W", "ignore", "-m", "tests.kill_script", str(root)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def start(self):
        self.process.stdin.write("fit\n")
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


def test_killed_at_random_moments_and_resumed(tmp_path):
    whole = Runner(tmp_path / "whole")
    began = time.monotonic()
    whole.start()
    assert whole.end() == 0
    duration = time.monotonic() - began
    whole.close()

    root, moments, before, killed = tmp_path / "killed", random.Random(0), 0, 0
    runner = Runner(root)
    for _ in range(KILLS):
        child = runner.start()
        time.sleep(moments.uniform(0, 2 * duration / KILLS))
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.kill(child, signal.SIGKILL)
        killed += runner.end() == signal.SIGKILL
        try:
            state = read_checkpoint(find_last(root))["federated"]
        except FileNotFoundError:
            continue
        assert state["round"] >= before  # the last finished round is never lost
        before = state["round"]
    runner.start()
    assert runner.end() == 0
    runner.close()

    assert killed
    parameters, rows = left(root)
    assert [int(row["round"]) for row in rows] == list(range(1, ROUNDS + 1))
    assert (parameters, rows) == left(tmp_path / "whole")
