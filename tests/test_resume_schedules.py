"""A run that is stopped and resumed sets the rates of the whole run, whatever scheduler and optimizer a module has."""

import inspect
from collections import Counter

import numpy as np
import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

from lightning_fedstop.records import read_rounds
from tests.helpers import ToyModule, bits, fit, same

SCHEDULES = {
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.ExponentialLR(o, 0.9), schedules.MultiStepLR(o, [1, 3])], o
    ),
    "ConstantLR": lambda o: schedules.ConstantLR(o, 0.5, 3),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 2, scale_fn=lambda x: 0.8**x),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, np.float64(0.9)),
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.1, 1, 4),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [1, 3, 3], 0.5),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda epoch: 0.9),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=10),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 6),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0, threshold=1.0),
    "SWALR": lambda o: SWALR(o, 0.01, 3),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, 1, 2), schedules.MultiStepLR(o, [1])], [2]
    ),
    "StepLR": lambda o: schedules.StepLR(o, 2, 0.5),
}

OPTIMIZERS = {
    "Adadelta": lambda p: optim.Adadelta(p, 0.5),
    "Adafactor": lambda p: optim.Adafactor(p, 0.05),
    "Adagrad": lambda p: optim.Adagrad(p, 0.1, initial_accumulator_value=0.3),
    "Adam": lambda p: optim.Adam(p, np.float64(0.05), amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, torch.tensor(0.05)),
    "Adamax": lambda p: optim.Adamax(p, 0.05),
    "ASGD": lambda p: optim.ASGD(p, 0.05, t0=1),
    "Muon": lambda p: optim.Muon([x for x in p if x.ndim == 2], 0.05),
    "NAdam": lambda p: optim.NAdam(p, 0.05),
    "RAdam": lambda p: optim.RAdam(p, 0.05),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: optim.Rprop(p, 0.01),
    "SGD": lambda p: optim.SGD([{"params": p[:1], "lr": 0.2, "by": Counter("ab")}, {"params": p[1:]}], 0.1),
}
# LBFGS needs a closure; SparseAdam needs sparse gradients.
UNSERVED = {"LBFGS", "SparseAdam"}


class Configured(ToyModule):
    def __init__(self, optimizer=None, schedule=None):
        super().__init__()
        self.optimizer, self.schedule = optimizer, schedule

    def configure_optimizers(self):
        optimizer = (self.optimizer or (lambda p: optim.SGD(p, 0.1)))(list(self.parameters()))
        schedule = (self.schedule or (lambda o: schedules.StepLR(o, 1, 0.7)))(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def check_resume(tmp_path, make):
    whole, first = fit(tmp_path / "whole", module=make(), max_rounds=6)
    fit(tmp_path / "parts", module=make(), max_rounds=3)
    parts, second = fit(tmp_path / "parts", module=make(), max_rounds=6, ckpt_path="last")
    rates = [[row["lr"] for row in read_rounds(f"{loop.log_dir}/metrics.csv")] for loop in (whole, parts)]
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1
    assert same(bits(first), bits(second))
    live = [loop.lr_scheduler_configs[0].scheduler.state_dict() for loop in (whole, parts)]
    assert str(live[0]) == str(live[1])  # in their own types too
    checkpoint = torch.load(next((tmp_path / "parts").rglob("version_1/**/last.ckpt")), weights_only=True)
    assert checkpoint["federated"]["round"] == 6


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_schedule_goes_on(tmp_path, recwarn, schedule):
    check_resume(tmp_path, lambda: Configured(schedule=schedule))
    assert not [warning for warning in recwarn if "solver" in str(warning.message)]


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if hasattr(optim, name)])  # Muon is newer than others
def test_every_optimizer_goes_on(tmp_path, name):
    check_resume(tmp_path, lambda: Configured(optimizer=OPTIMIZERS[name]))


def test_no_class_of_torch_is_missing_here():
    found = {name for name, kind in inspect.getmembers(schedules, inspect.isclass) if _is_public(kind)}
    assert found - {"LRScheduler"} <= SCHEDULES.keys()
    found = {name for name, kind in inspect.getmembers(optim, inspect.isclass) if issubclass(kind, optim.Optimizer)}
    assert found - {"Optimizer"} - UNSERVED <= OPTIMIZERS.keys()


def _is_public(kind):
    return issubclass(kind, schedules.LRScheduler) and not kind.__name__.startswith("_")
