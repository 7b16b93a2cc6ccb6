"""The code in the documentation runs, and does what the text says."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_fedstop.data import Iid, Partition
from lightning_fedstop.methods import FedAvg
from lightning_fedstop.models import ImageClassifier
from tests.helpers import make_loop
from tests.methods.problems import ALL, quadratic

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])


@pytest.fixture
def fedcm():
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "add_a_method.md").read_text(), flags=re.DOTALL)
    names = {}
    exec(compile(code, "add_a_method.md", "exec"), names)
    return names["FedCM"]


def test_the_documented_method_is_fedavg_without_momentum(fedcm, tmp_path):
    for mine, theirs in zip(quadratic(fedcm(alpha=1.0), tmp_path), quadratic(FedAvg(), tmp_path), strict=True):
        assert torch.equal(mine["theta"], theirs["theta"])


def test_the_documented_method_follows_its_formula(fedcm, tmp_path):
    plain = {"momentum": 0.0, "wd": 0.0, "clip": None, "lr_decay": 1.0, "K": 1, "lr": 0.1}
    rounds = quadratic(fedcm(alpha=0.5), tmp_path, ALL, **plain)
    A = torch.tensor([[[2.0, 0.5], [0.5, 1.0]], [[1.0, 0.0], [0.0, 3.0]], [[1.5, -0.5], [-0.5, 2.0]]]).double()
    b = torch.tensor([[1.0, 0.0], [-1.0, 2.0], [0.5, -1.5]]).double()
    theta, momentum = torch.tensor([0.3, -0.2]).double(), torch.zeros(2).double()
    for got in rounds:
        gradient = torch.stack([A[m] @ (theta - b[m]) for m in range(3)]).mean(0)
        momentum = 0.5 * gradient + 0.5 * momentum
        theta = theta - 0.1 * momentum
        assert torch.allclose(got["theta"], theta, atol=1e-12)


def test_the_documented_method_refuses_a_bad_share(fedcm):
    with pytest.raises(ValueError, match="must lie in"):
        fedcm(alpha=0.0)


def tables(page):
    """The blocks of lines that begin with a bar, outside of code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [block.splitlines() for block in re.findall(r"(?:^\| .*\n){2,}", text, flags=re.MULTILINE)]


def cells(row):
    return re.split(r"(?<!\\)\|", row.strip().strip("|"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_table_is_one_to_markdown(page):
    for header, rule, *rows in tables(page):
        assert re.fullmatch(r"\|(?: *:?-+:? *\|)+", rule), f"{rule!r} below {header!r} does not make a table"
        assert {len(cells(row)) for row in (rule, *rows)} == {len(cells(header))}, header


def documented(page, name):
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    names = {"__name__": "documented"}
    exec(compile(code, page, "exec"), names)
    return names[name]


def test_the_documented_skew_deals_as_it_says():
    skew = documented("add_a_skew.md", "GeometricSkew")(factor=0.5)
    partition = Partition.create(skew, np.zeros(107, int), 3, seed=1)
    assert partition.sizes.tolist() == [60, 31, 16]
    assert sorted(partition.indices.tolist()) == list(range(107))
    assert partition.digest != Partition.create(skew, np.zeros(107, int), 3, seed=2).digest
    with pytest.raises(ValueError, match="cannot deal 2 samples"):
        skew.partition(np.zeros(2, int), 3)


def test_the_documented_data_set_trains(tmp_path):
    data = documented("add_a_dataset.md", "Bars")(num_clients=4, skew=Iid())
    model = ImageClassifier("test_resnet", num_classes=2, in_chans=1, lr=0.05)
    loop = make_loop(tmp_path, max_rounds=1, clients_per_round=2, local_epochs=1)
    loop.fit(model, data)
    assert data.client_sizes == [150] * 4
    assert loop.current_epoch == 1
