"""100,000 clients: a round does no work for those who take no part in it."""

import sys

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn

from lightning_fedstop.core.client_states import ClientStates
from lightning_fedstop.data import DirichletSkew, Iid, NpzImages, Partition, PathologicalSkew, QuantitySkew
from lightning_fedstop.federation.cohort import UniformCohort
from lightning_fedstop.methods import SCAFFOLD, FedAvg, FedDyn
from lightning_fedstop.records.partition_record import read_partition
from tests.helpers import fit

N = 100_000


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Two images of 4 pixels for each of 100,000 clients."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("many") / "images.npz"
    labels = rng.integers(0, 10, 2 * N).astype(np.uint8)
    np.savez(path, train_images=rng.integers(0, 256, (2 * N, 2, 2), np.uint8), train_labels=labels)
    return path


class Linear(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 10)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "skew", [Iid(), DirichletSkew(0.1), DirichletSkew(0.1, min_samples=2), PathologicalSkew(2), QuantitySkew(0.1)]
)
def test_every_skew_deals_to_as_many(skew):
    labels = np.random.default_rng(0).integers(0, 10, 2 * N)
    partition = Partition.create(skew, labels, N)
    assert len(partition) == N
    assert partition.sizes.min() >= skew.min_samples
    assert np.array_equal(np.sort(partition.indices), np.arange(2 * N))


class Lines(Callback):
    """Counts the lines of Python that the last round runs, with its saving and its record."""

    def __init__(self, last):
        self.last, self.count = last, 0

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch + 1 == self.last:
            sys.settrace(self._trace)

    def _trace(self, frame, event, arg):
        self.count += event == "line"
        return self._trace

    def teardown(self, trainer, module, stage):
        sys.settrace(None)


def rounds(folder, archive, num_clients, method, storage):
    lines = Lines(3)
    data = NpzImages(archive, num_clients=num_clients, skew=Iid())
    try:
        loop, _ = fit(folder, lines, module=Linear(), data=data, method=method, client_states=ClientStates(storage))
    finally:
        sys.settrace(None)
    return loop, lines.count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "storage"),
    [(FedAvg, "memory"), (SCAFFOLD, "disk"), (FedDyn, "disk")],
    ids=["FedAvg", "SCAFFOLD", "FedDyn"],
)
def test_a_round_among_many_is_as_short_as_among_few(tmp_path, archive, method, storage):
    few, many = (
        rounds(tmp_path / name, archive, clients, method(), storage) for name, clients in (("few", N // 5), ("many", N))
    )
    assert few[1] > 1000
    # The rest is what a round of one client more or one batch more would take.
    assert many[1] < 1.3 * few[1] + 1000
    folder = tmp_path / "many" / "lightning_logs" / "version_0"
    files = sorted(path.name for path in folder.rglob("*") if path.is_file())
    kept = ["client_states.bin"] * (method is not FedAvg)
    assert files == sorted(["config.yaml", "last.ckpt", "metrics.csv", "partition.json", "summary.json", *kept])
    assert (folder / "checkpoints" / "last.ckpt").stat().st_size < 100_000
    read = read_partition(folder)
    assert (len(read.sizes), sum(read.sizes), set(map(sum, read.counts))) == (N, 2 * N, {2})


def test_a_cohort_of_many():
    clients = UniformCohort().sample(1, N, 50, torch.Generator().manual_seed(0))
    assert clients == sorted(set(clients))
    assert len(clients) == 50
    assert clients[-1] > N // 2


def test_the_picture_of_many_shows_some(tmp_path):
    labels = np.random.default_rng(0).integers(0, 10, 2 * N)
    partition = Partition.create(DirichletSkew(0.1), labels, N)
    picture = partition.plot(tmp_path / "many.svg", labels)
    assert "(400 of 100000 are drawn)" in picture.read_text()
    assert picture.stat().st_size < 1_000_000
    assert "100000 clients" in partition.describe(labels)
