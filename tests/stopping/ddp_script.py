"""Fits under DDP in two forked processes; each writes what it saw. Started by ``test_early_stopping_ddp.py``."""

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset

from lightning_fedstop.stopping import TaskVectorEarlyStopping

from .walkers import Regression, trainer


class Reporting(TaskVectorEarlyStopping):
    """With ``hasty`` the second process alone finds the rule met at the second check."""

    def __init__(self, name, hasty=False, **arguments):
        super().__init__(**arguments)
        self.name, self.hasty = name, hasty

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        if self.hasty and trainer.global_rank == 1:
            self.criterion.threshold, self.criterion.patience = 1e9, 1

    def on_fit_end(self, trainer, pl_module):
        seen = {
            "world_size": trainer.world_size,
            "epochs": trainer.current_epoch,
            "stopped_epoch": self.stopped_epoch,
            "stop_round": self.stop_round,
            "reason": self.stopping_reason.value,
            "message": self.stopping_reason_message,
            "wait_count": self.wait_count,
            "logged": float(trainer.callback_metrics["task_vector/wait_count"]),
            "weights": torch.cat([p.detach().flatten() for p in pl_module.parameters()]).tolist(),
        }
        (Path(sys.argv[1]) / f"{self.name}-{trainer.global_rank}.json").write_text(json.dumps(seen))


class Shared(Regression):
    """Each process has its part of the data, in one order (Lightning's own sampler would shuffle)."""

    def train_dataloader(self):
        mine = range(self.trainer.global_rank, len(self.data), self.trainer.world_size)
        return DataLoader(Subset(self.data, mine), batch_size=self.batch_size)


def fit(callback, **arguments):
    ran = trainer(callback, max_epochs=30, limit_val_batches=0, use_distributed_sampler=False, **arguments)
    ran.fit(Shared(batches=4))


if __name__ == "__main__":
    rule = {"threshold": 0.05, "patience": 3}
    two = {"strategy": "ddp_fork", "devices": 2}
    fit(Reporting("two", **rule), **two)
    fit(Reporting("hasty", hasty=True, **rule), **two)
    fit(Reporting("steps", check_every_n_steps=2, **rule), **two)  # a process takes two steps an epoch
    fit(Reporting("one", **rule), limit_train_batches=2)  # as many steps as each of two processes takes
