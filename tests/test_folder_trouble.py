"""The folder of a run fails under it: a clear error, and the former checkpoint stays whole."""

import builtins
import errno
import io
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_fedstop.cli.main import main
from lightning_fedstop.loop import checkpoint as checkpoints
from lightning_fedstop.utilities import files as atomic
from tests.cli_tools import TINY
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


def full_disk_for(patch, name):
    """Let no file of a name be opened to write, nor a folder be made: in each way that Python has."""

    def full(original):
        def opened(path, *arguments, **keywords):
            mode = keywords.get("mode", arguments[0] if arguments else "r")
            writes = original is os.mkdir or not isinstance(mode, str) or set(mode) & set("wax+")
            if writes and name in os.path.basename(os.fspath(path) if not isinstance(path, int) else ""):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))
            return original(path, *arguments, **keywords)

        return opened

    for module, function in ((builtins, "open"), (io, "open"), (os, "open"), (os, "mkdir")):
        patch.setattr(module, function, full(getattr(module, function)))
    return nullcontext()


EARLY = {
    "the version folder": ("version_", None, "cannot be recorded under"),
    "its lock": (".lock", None, ".lock' could not be written"),
    "the partition": ("partition.json", None, "partition.json' could not be written"),
    "the configuration": ("config.yaml", None, "config.yaml' could not be written"),
    "a logger's files": ("hparams.yaml", CSVLogger, "version_0' could not be written"),
}


@pytest.mark.parametrize(("name", "logger", "message"), EARLY.values(), ids=EARLY)
def test_a_disk_that_is_full_before_the_first_round_is_said_in_a_sentence(tmp_path, monkeypatch, name, logger, message):
    fit(tmp_path, max_rounds=1)
    before = sorted(tmp_path.rglob("*"))
    more = {} if logger is None else {"logger": logger(tmp_path / "csv")}
    with monkeypatch.context() as patch, full_disk_for(patch, name), pytest.raises(OSError) as caught:
        fit(tmp_path, max_rounds=3, **more)
    assert message in str(caught.value)
    assert "No space left on device" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert name == "version_" or "nothing has been trained yet, and former runs are as they were." in str(caught.value)
    assert logger or sorted(tmp_path.rglob("*")) == before
    fit(tmp_path, max_rounds=1)


def test_a_disk_that_is_full_for_the_commands_configuration_is_said_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch, full_disk_for(patch, "config.yaml"), pytest.raises(SystemExit) as caught:
        main(["fit", *TINY])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "config.yaml' could not be written (No space left on device): nothing has been trained yet" in error
    assert "Traceback" not in error


def test_a_folder_that_vanishes_is_named(tmp_path):
    with pytest.raises(OSError, match="could not be written") as caught:
        fit(tmp_path, Does(2, shutil.rmtree), max_rounds=4, enable_checkpointing=False)
    assert "metrics.csv" in str(caught.value)


def test_a_checkpoint_folder_that_vanishes_is_made_again(tmp_path):
    loop, _ = fit(tmp_path, Does(2, lambda folder: shutil.rmtree(folder / "checkpoints")), max_rounds=3)
    path = Path(loop.log_dir) / "checkpoints" / "last.ckpt"
    assert torch.load(path, weights_only=True)["federated"]["round"] == 3
