"""`control_variate_stability` of the oracles, by the real SCAFFOLD: which divisors keep the control variates bounded.

The federation that gives the listed numbers to all digits: 20 clients of F_m(x) = ||x - b_m||^2 / 2 in 3 dimensions,
b_m normal, cohorts of 5 from the same generator, 200 rounds at a learning rate of 1e-6 with momentum 0.9, so that a
client's gradient is all but constant. The numbers are those of the last round.
"""

import json

import numpy as np
import pytest
import torch

from lightning_fedstop.cohort import ScheduledCohort
from lightning_fedstop.methods import SCAFFOLD
from tests.helpers import SHARED, QuadraticData, QuadraticModule, Trace, fit

ORACLES = SHARED / "spec" / "oracles.json"
LISTED = json.loads(ORACLES.read_text())["control_variate_stability"] if ORACLES.exists() else [None] * 6
# What stands for G_m: E n_0 / B of the paper's settings, with E = 5 and B = 256.
GAINS = ["S", "K", 5 * 178 / 256, 5 * 77 / 256, 5 * 995 / 256, 5 / 256]
NAMES = ["S", "K", "Blood", "Derma", "Path", "one sample"]
ROUNDS = 200


class Last(Trace):
    """The last round alone."""

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch + 1 in (ROUNDS, trainer.max_rounds):
            super().on_train_epoch_end(trainer, module)


def train(root, gain, steps, clip):
    """Gives the loop, the largest norm of a client's control variate and the largest norm of a client's gradient."""
    generator = np.random.default_rng(0)
    b = generator.normal(size=(20, 3))
    schedule = [generator.choice(20, 5, replace=False).tolist() for _ in range(ROUNDS)]
    last = Last()
    loop, module = fit(
        root,
        last,
        module=QuadraticModule([0.0] * 3, lr=1e-6, momentum=0.9),
        data=QuadraticData([np.eye(3).tolist()] * 20, b.tolist(), steps),
        method=SCAFFOLD(control_gain=gain),
        max_rounds=ROUNDS,
        cohort=ScheduledCohort(schedule),
        gradient_clip_val=clip,
        enable_checkpointing=False,
    )
    control = max(vector.norm().item() for vector in last.rounds[-1]["states"].values()) if last.rounds else None
    gradient = (last.rounds[-1]["theta"] - torch.tensor(b)).norm(dim=-1).max().item() if last.rounds else None
    return loop, control, gradient
