"""Two processes on the CPU against one."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests import federation_script

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[1]
METHODS = ["fedavg", "scaffold", "fedlesam", "fedwmsam", "one client"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All cases, with one process here and with two of their own."""
    root = tmp_path_factory.mktemp("processes")
    federation_script.main(str(root), 1)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.federation_script", str(root), "2"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return root, done.stdout


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Bits are equal at equal numbers of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(root, name):
    return [torch.load(root / f"{processes}-{name}.pt", weights_only=True) for processes in (1, 2)]


def test_each_process_goes_on_with_its_own_loss_scale(runs):
    root, _ = runs
    for one in load(root, "scaled"):
        assert all(torch.equal(value, one["resumed"][name]) for name, value in one["whole"].items())
    checkpoint = next((root / "2-whole").rglob("last.ckpt"))
    scales = torch.load(checkpoint, weights_only=True)["federated"]["loss_scales"]
    assert len(scales) == 2
    assert scales[0] != scales[1]


def test_each_process_stacks_its_hand(runs):
    root, _ = runs
    one, two = load(root, "stacked")
    for name, value in one["state"].items():
        torch.testing.assert_close(two["state"][name], value, rtol=1e-5, atol=1e-6)
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-5)


@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "fedlesam", "fedwmsam", "one client", "noise", "diverging", "teacher", "resumed"]
)
def test_processes_do_not_change_the_bits(runs, name):
    one, two = load(runs[0], name)
    assert one["state"].keys() == two["state"].keys()
    for key, value in one["state"].items():
        assert torch.equal(value, two["state"][key]), key


@pytest.mark.parametrize("name", [*METHODS, "noise", "diverging"])
def test_processes_do_not_change_metrics_rounds_and_reasons(runs, name):
    one, two = load(runs[0], name)
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-5, nan_ok=True)
    assert (two["round"], two["reason"]) == (one["round"], one["reason"])


def test_one_process_alone_writes(runs):
    root, printed = runs
    for name in ("fedavg", "diverging"):
        files = sorted(str(path.relative_to(root / f"2-{name}")) for path in (root / f"2-{name}").rglob("*.*"))
        version = "lightning_logs/version_0"
        assert [f for f in files if not Path(f).is_dir()] == [
            f"{version}/{name}"
            for name in ("checkpoints/last.ckpt", "config.yaml", "metrics.csv", "partition.json", "summary.json")
        ]
    assert printed.count("Stopped at round") == len(list(root.glob("2-*/lightning_logs/*/summary.json")))


@pytest.mark.parametrize(("rank", "hook"), [(0, "on_client_end"), (1, "on_train_epoch_end")])
def test_one_process_that_fails_ends_all_with_its_message(tmp_path, rank, hook):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.failing_script", str(tmp_path), str(rank), hook]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode != 0
    assert f"ValueError: no luck on {rank}" in done.stderr
    if rank == 1:
        assert "The run ended because process 1 failed: ValueError: no luck on 1" in done.stderr
    last = tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["federated"]["round"] == 1


@pytest.mark.skipif(os.name != "posix", reason="there is no SIGKILL")
@pytest.mark.parametrize("when", ["in a launch", "in a round"])
def test_when_the_first_process_is_killed_the_other_does_not_wait_for_it(tmp_path, when):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-m", "tests.gone_script", str(tmp_path), when]
    second = tmp_path / "second"
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as done:
        try:
            # Both hold the pipe, so that its end is that of both. The time is a limit for a hang, not for slowness.
            said = done.communicate(timeout=900)[1]
        except subprocess.TimeoutExpired:
            done.kill()
            with suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int(second.read_text()), signal.SIGKILL)
            raise
    assert done.returncode == -signal.SIGKILL
    assert f"Process {second.read_text()} ends: process {done.pid}, which started it, has gone." in said
