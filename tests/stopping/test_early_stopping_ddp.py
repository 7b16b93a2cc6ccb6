import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not (hasattr(os, "fork") and torch.distributed.is_available()), reason="needs fork and torch.distributed"
    ),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    command = [sys.executable, "-m", "tests.stopping.ddp_script", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, cwd=root)
    assert done.returncode == 0, done.stderr
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_two_processes_stop_together_and_where_one_does(seen):
    first, second, alone = seen["two-0"], seen["two-1"], seen["one-0"]
    assert first == second
    assert (first["world_size"], alone["world_size"]) == (2, 1)
    assert first["weights"] == pytest.approx(alone["weights"], rel=1e-5)
    for name in ("epochs", "stopped_epoch", "stop_round", "reason", "wait_count", "logged"):
        assert first[name] == alone[name], name
    assert first["reason"] == "saturated"
    assert first["wait_count"] == first["logged"] == 3
    assert 5 < first["epochs"] < 30


def test_two_processes_stop_together_by_steps(seen):
    assert seen["steps-0"] == seen["steps-1"]
    unsaid = {"message": None}
    assert seen["steps-0"] | unsaid == seen["two-0"] | unsaid


def test_one_process_stops_all(seen):
    calm, hasty = seen["hasty-0"], seen["hasty-1"]
    assert calm["epochs"] == hasty["epochs"] == 2
    assert calm["stopped_epoch"] == hasty["stopped_epoch"] == 1
    assert calm["reason"] == hasty["reason"] == "saturated"
    assert calm["message"] == "Another process asked to stop (saturated)."
    assert calm["wait_count"] == 0
