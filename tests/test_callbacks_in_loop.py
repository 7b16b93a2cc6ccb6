"""Lightning's own callbacks and a user's, unmodified, in the loop."""

import functools
import inspect
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    DeviceStatsMonitor,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from tests.helpers import ToyData, ToyModule, fit, flat, make_loop

# The data of a client comes from `client_dataloader`; a Trainer's own loaders and its state have no counterpart.
NOT_COMPARED = {"train_dataloader", "val_dataloader", "test_dataloader", "state_dict", "load_state_dict"}


def _recording(parent, names, who, log):
    """A subclass of ``parent`` whose hooks note their calls in ``log``."""

    def hook(name, original):
        @functools.wraps(original)
        def call(self, *args, **kwargs):
            log.append(f"{who}.{name}")
            return original(self, *args, **kwargs)

        return call

    hooks = {name: hook(name, getattr(parent, name)) for name in names if name != "on_exception"}
    return type(parent.__name__, (parent,), hooks)


def _hook_names(cls):
    plain = {"setup", "teardown", "prepare_data", "configure_model", "configure_optimizers", "configure_callbacks"}
    plain |= {"transfer_batch_to_device", "optimizer_step", "optimizer_zero_grad", "backward", "training_step"}
    plain |= {"validation_step", "configure_gradient_clipping", "lr_scheduler_step"}
    functions = [name for name, _ in inspect.getmembers(cls, callable)]
    skipped = NOT_COMPARED | {"on_gpu", "on_save_checkpoint", "on_load_checkpoint"}
    return [name for name in functions if (name.startswith("on_") or name in plain) and name not in skipped]


def _recorders():
    log = []
    scheduler = torch.optim.lr_scheduler

    class Scheduled(ToyModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [scheduler.StepLR(optimizer, 1)]

    callback = _recording(Callback, _hook_names(Callback), "callback", log)()
    module = _recording(Scheduled, _hook_names(LightningModule), "module", log)()
    data = _recording(ToyData, _hook_names(LightningDataModule), "data", log)(sizes=[6])
    return log, callback, module, data


def test_hooks_come_in_a_trainers_order(tmp_path):
    expected, callback, module, data = _recorders()
    Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[callback],
        gradient_clip_val=1.0,
    ).fit(module, data)

    got, callback, module, data = _recorders()
    make_loop(
        tmp_path,
        callback,
        max_rounds=1,
        clients_per_round=1,
        limit_test_batches=0,
        enable_checkpointing=False,
        gradient_clip_val=1.0,
    ).fit(module, data)
    assert "\n".join(got) == "\n".join(expected)
