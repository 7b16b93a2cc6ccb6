"""The folder of a run fails under it: a clear error, and the former checkpoint stays whole."""

import errno
import shutil
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from lightning_fedstop import checkpoint as checkpoints
from lightning_fedstop.records import atomic
from tests.helpers import bits, fit, same


class Does(Callback):
    """Does something at the start of one round."""

    def __init__(self, round, action):
        self.round, self.action = round, action

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch + 1 == self.round:
            self.action(Path(trainer.log_dir))


def full_disk(monkeypatch, module, name):
    def fails(*arguments, **keywords):
        raise OSError(errno.ENOSPC, "No space left on device", str(arguments[-1]))

    return lambda _: monkeypatch.setattr(module, name, fails)


@pytest.mark.parametrize(
    ("module", "name"), [(checkpoints.torch, "save"), (atomic.os, "replace"), (atomic.os, "fsync")]
)
def test_a_full_disk_leaves_the_former_checkpoint(tmp_path, monkeypatch, module, name):
    whole, expected = fit(tmp_path / "whole", max_rounds=4)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="could not be written") as caught:
        fit(tmp_path / "cut", Does(3, full_disk(patch, module, name)), max_rounds=4)
    assert "No space left on device" in str(caught.value)
    assert "the run is kept up to round 2" in str(caught.value)
    assert not list((tmp_path / "cut").rglob("*.tmp"))
    again, module = fit(tmp_path / "cut", max_rounds=4, ckpt_path="last")
    assert same(bits(module), bits(expected))
    assert again.summary["parameters_hash"] == whole.summary["parameters_hash"]


def test_a_folder_that_vanishes_is_named(tmp_path):
    with pytest.raises(OSError, match="could not be written") as caught:
        fit(tmp_path, Does(2, shutil.rmtree), max_rounds=4, enable_checkpointing=False)
    assert "metrics.csv" in str(caught.value)


def test_a_checkpoint_folder_that_vanishes_is_made_again(tmp_path):
    loop, _ = fit(tmp_path, Does(2, lambda folder: shutil.rmtree(folder / "checkpoints")), max_rounds=3)
    path = Path(loop.log_dir) / "checkpoints" / "last.ckpt"
    assert torch.load(path, weights_only=True)["federated"]["round"] == 3
