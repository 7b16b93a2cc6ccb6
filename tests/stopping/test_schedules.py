"""What the documentation says of learning-rate schedules."""

import itertools
from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler as schedules

from lightning_fedstop.stopping import stopping_round

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "stopping.md"
SCHEDULES = {
    "constant": lambda o: schedules.ConstantLR(o, 1.0),
    "`LinearLR`, a warm-up of 20 rounds": lambda o: schedules.LinearLR(o, 0.01, 1.0, 20),
    "`CosineAnnealingLR`, over 200": lambda o: schedules.CosineAnnealingLR(o, 200),
    "`CosineAnnealingLR`, over 100": lambda o: schedules.CosineAnnealingLR(o, 100),
    "`CosineAnnealingLR`, over 50": lambda o: schedules.CosineAnnealingLR(o, 50),
    "`CosineAnnealingWarmRestarts`, every 40": lambda o: schedules.CosineAnnealingWarmRestarts(o, 40),
    "`StepLR`, a tenth every 30": lambda o: schedules.StepLR(o, 30),
    "`ExponentialLR`, 0.95": lambda o: schedules.ExponentialLR(o, 0.95),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_straight_line_is_stopped_where_the_table_says(name):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = SCHEDULES[name](optimizer), []
    for _ in range(200):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    stop = stopping_round(itertools.accumulate(rates), threshold=0.01, patience=10)
    assert f"| {name} | {stop} | {rates[stop - 1]:.2f} |" in DOCUMENT.read_text(encoding="utf-8")


def test_the_table_has_no_other_rows():
    section = DOCUMENT.read_text(encoding="utf-8").partition("## Learning-rate schedules")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")]
    assert set(rows) - {"schedule", "---"} == set(SCHEDULES)
