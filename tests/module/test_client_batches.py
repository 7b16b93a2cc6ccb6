"""What a data module of one's own says of its clients, and gives as their batches."""

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from lightning_fedstop import SCAFFOLD
from lightning_fedstop.data import FederatedDataModule
from lightning_fedstop.module.batches import LocalBatches, client_sizes
from tests.helpers import ToyData, ToyModule, bits, fit, same


class Given(ToyData):
    """Batches of clients in whatever form."""

    def __init__(self, make, sizes=(6, 4, 7)):
        super().__init__(sizes, evaluated=False)
        self.make = make

    def client_dataloader(self, client, generator):
        return self.make(self.client_dataset(client))


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter([self.data[k] for k in range(len(self.data))])


class Lazy:
    """Batches without a length."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        yield from DataLoader(self.data, 4)


def dicts(data):
    return DataLoader([{"x": x, "y": y, "name": "n"} for x, y in data], 4)


FORMS = {
    "loader": lambda data: DataLoader(data, 4),
    "stream": lambda data: DataLoader(Stream(data), 4),
    "worker": lambda data: DataLoader(Stream(data), 4, num_workers=1),
    "no length": Lazy,
    "list of batches": lambda data: list(DataLoader(data, 4)),
    "dicts": dicts,
    "combined": lambda data: CombinedLoader([DataLoader(data, 4)], "max_size_cycle"),
    "in a dict": lambda data: {"one": DataLoader(data, 4), "other": DataLoader(data, 1)},
}


class Unpacks(ToyModule):
    """Takes a batch in whatever form."""

    def training_step(self, batch, batch_idx):
        if isinstance(batch, dict):
            batch = batch["one"] if "one" in batch else (batch["x"], batch["y"])
        return super().training_step(batch[0] if isinstance(batch[0], (list, tuple)) else batch, batch_idx)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.filterwarnings("ignore:.*(ambiguous collection|your .iterable. was initialized|combined_loader).*")
def test_any_iterable_of_batches_trains_alike(tmp_path, name):
    arguments = {"local_epochs": 2, "clients_per_round": 3, "max_rounds": 2, "method": SCAFFOLD()}
    expected, module = (
        fit(tmp_path / run, module=Unpacks(), data=Given(FORMS[run]), **arguments)[1] for run in ("loader", name)
    )
    if name == "in a dict":  # the longer loader is the epoch, as in a Trainer
        assert not same(bits(module), bits(ToyModule()))
        return
    assert same(bits(module), bits(expected))


@pytest.mark.filterwarnings("ignore")
def test_several_loaders_are_combined_as_a_trainer_combines_them(tmp_path):
    class Notes(ToyModule):
        def training_step(self, batch, batch_idx):
            seen.append([[part.shape[0] for part in one] for one in batch.values()])
            return super().training_step(batch["a"], batch_idx)

    data = ToyData([6]).client_dataset(0)
    loaders = {"a": DataLoader(data, 4), "b": DataLoader(data, 2)}
    seen = []
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    Trainer(accelerator="cpu", max_epochs=1, **quiet).fit(Notes(), loaders)
    expected, seen = seen, []
    fit(tmp_path, module=Notes(), data=Given(lambda _: loaders, [6]), max_rounds=1, clients_per_round=1)
    assert seen == expected
    assert len(LocalBatches(loaders, 0, "Mine")) == 3


class Once(IterableDataset):
    """Used up after one pass."""

    def __init__(self, data):
        self.items = iter([data[k] for k in range(len(data))])

    def __iter__(self):
        return self.items


@pytest.mark.parametrize("form", [lambda data: iter(DataLoader(data, 4)), lambda data: DataLoader(Once(data), 4)])
@pytest.mark.parametrize("workers", ["sequential", "stacked"])
def test_batches_that_are_used_up_before_the_last_local_epoch_are_refused(tmp_path, form, workers):
    arguments = {"max_rounds": 1, "clients_per_round": 3, "client_backend": workers}
    with pytest.raises(
        ValueError, match=r"of client \d are used up after one pass: `Given.client_dataloader` must give"
    ):
        fit(tmp_path, data=Given(form), local_epochs=2, **arguments)
    loop, _ = fit(tmp_path, data=Given(form), local_epochs=1, **arguments)
    assert loop.current_epoch == 1


@pytest.mark.parametrize("given", [None, {"x": torch.zeros(3)}, 3, "batches"])
def test_what_gives_no_batches_is_refused(tmp_path, given):
    with pytest.raises(TypeError, match=r"`Given.client_dataloader` must give the batches of client \d, .* got"):
        fit(tmp_path, data=Given(lambda _: given), max_rounds=1, clients_per_round=3)


@pytest.mark.parametrize("sizes", [[2, 0], (2, 0), np.array([2, 0]), torch.tensor([2, 0]), range(2, -1, -2)])
def test_sizes_are_whole_numbers_of_any_kind(sizes):
    data = ToyData()
    data.client_sizes = sizes
    assert [(type(size), size) for size in client_sizes(data)] == [(int, 2), (int, 0)]


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        (
            [2.0, 3],
            TypeError,
            r"`ToyData.client_sizes` must be whole numbers, one for each client in order, got \[2.0, 3\]",
        ),
        ({0: 2}, TypeError, "must be whole numbers, one for each client"),
        ("22", TypeError, "must be whole numbers"),
        (7, TypeError, "must be whole numbers"),
        (None, TypeError, "must be whole numbers"),
        ([], TypeError, "must be whole numbers"),
        ([2, -1], ValueError, "must be at least 0, got -1 for client 1"),
    ],
)
def test_sizes_that_are_none_are_refused_before_anything_is_written(tmp_path, sizes, error, message):
    data = ToyData()
    data.client_sizes = sizes
    with pytest.raises(error, match=message):
        fit(tmp_path, data=data)
    assert list(tmp_path.iterdir()) == []


def test_a_data_module_that_neither_deals_nor_knows_its_sizes_is_told_both_ways(tmp_path):
    with pytest.raises(
        RuntimeError, match="in which a data module of your own calls `deal`, or override `client_sizes`"
    ):
        fit(tmp_path, data=FederatedDataModule(num_clients=2))
