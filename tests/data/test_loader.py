"""What a user's training loader draws, and how it makes batches, is what the clients get."""

import inspect

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_fedstop.data import DirichletSkew, Federated, PathologicalSkew
from lightning_fedstop.data.loader import DECIDED, KEPT, TrainingLoader

N = 20
DATA = TensorDataset(torch.arange(N).float(), torch.arange(N) % 2)
CHOSEN = [3, 5, 8, 13, 14, 17, 2]
WEIGHTS = [float(k in CHOSEN) for k in range(N)]
SOURCE = "`Mine.train_dataloader()`"


class Tagged(SubsetRandomSampler):
    """A subclass that is gone through as its parent is."""


class Backwards(SubsetRandomSampler):
    """A subclass that draws something else."""

    def __iter__(self):
        return iter(range(N))


def federate(loader, num_clients=2, **options):
    class Mine(LightningDataModule):
        def train_dataloader(self):
            return loader

    module = Federated(Mine(), num_clients, **options)
    module.setup("fit")
    return module


def batches_of(module):
    generator = torch.Generator()
    return [batch for client in range(module.num_clients) for batch in module.client_dataloader(client, generator)]


def dealt(module):
    """The items that clients train on, in ascending order."""
    return sorted(int(x) for batch in batches_of(module) for x in batch[0])


WHOLE = list(range(N))
SAMPLERS = {
    "SubsetRandomSampler": (lambda: SubsetRandomSampler(CHOSEN), CHOSEN),
    "its subclass": (lambda: Tagged(torch.tensor(CHOSEN)), CHOSEN),
    "range": (lambda: SubsetRandomSampler(range(4, 9)), range(4, 9)),
    "twice": (lambda: SubsetRandomSampler(CHOSEN * 2), CHOSEN),
    "list": (lambda: CHOSEN, CHOSEN),
    "array": (lambda: np.array(CHOSEN), CHOSEN),
    "RandomSampler": (lambda: RandomSampler(DATA), WHOLE),
    "of fewer": (lambda: RandomSampler(DATA, num_samples=3), WHOLE),
    "with replacement": (lambda: RandomSampler(DATA, replacement=True), WHOLE),
    "of a part": (lambda: RandomSampler(range(11)), range(11)),
    "SequentialSampler": (lambda: SequentialSampler(DATA), WHOLE),
    "in order, of a part": (lambda: SequentialSampler(range(6)), range(6)),
    "weights": (lambda: WeightedRandomSampler(WEIGHTS, 50), CHOSEN),
    "DistributedSampler": (lambda: DistributedSampler(DATA, num_replicas=3, rank=1), WHOLE),
}


@pytest.mark.parametrize("way", ["sampler", "batch_sampler"])
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.filterwarnings("ignore:.*without replacement instead")
def test_clients_have_what_the_sampler_can_draw_once(name, way):
    make, expected = SAMPLERS[name]
    options = {"batch_size": 4, "sampler": make()} if way == "sampler" else {way: BatchSampler(make(), 4, False)}
    loader = DataLoader(DATA, **options)
    module = federate(loader, skew=DirichletSkew(1.0))
    assert dealt(module) == sorted(expected)
    assert module.partition.num_samples == sum(module.client_sizes) == len(module.train_labels) == len(expected)
    assert module.train_labels.tolist() == [k % 2 for k in sorted(expected)]
    drawn = {int(x) for _ in range(60) for batch in loader for x in batch[0]}
    assert drawn <= set(expected)


def test_a_sampler_over_a_subset_counts_the_items_of_the_subset():
    part = Subset(DATA, list(range(10, 20)))
    module = federate(DataLoader(part, batch_size=2, sampler=SubsetRandomSampler([0, 4, 7])))
    assert dealt(module) == [10, 14, 17]


class Batched(Dataset):
    """Indexed by lists of items, as tables are."""

    def __len__(self):
        return N

    def __getitem__(self, items):
        assert isinstance(items, list)
        return {"x": torch.tensor(items), "y": torch.tensor(items) % 2}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [None, 2])
def test_a_data_set_of_whole_batches_is_indexed_by_lists(size, drop_last):
    sampler = BatchSampler(SubsetRandomSampler(range(14)), 3, drop_last)
    module = federate(
        DataLoader(Batched(), sampler=sampler, batch_size=None), batch_size=size, skew=PathologicalSkew(1)
    )
    sizes = [len(batch["x"]) for batch in batches_of(module)]
    expected = {
        (None, False): [3, 3, 1] * 2,
        (None, True): [3, 3] * 2,
        (2, False): [2, 2, 2, 1] * 2,
        (2, True): [2] * 6,
    }
    assert sizes == expected[size, drop_last]
    assert {len(set(batch["y"].tolist())) for batch in batches_of(module)} == {1}
    assert {int(x) for batch in batches_of(module) for x in batch["x"]} <= set(range(14))


def test_items_that_are_batches_stay_whole_unless_a_batch_size_is_given():
    items = [torch.full((k + 1,), float(k)) for k in range(4)]
    module = federate(DataLoader(items, batch_size=None, shuffle=True))
    assert sorted(len(batch) for batch in batches_of(module)) == [1, 2, 3, 4]
    assert module.client_sizes == [2, 2]
    single = federate(DataLoader(DATA, batch_size=None), batch_size=5)
    assert [len(batch[0]) for batch in batches_of(single)] == [5, 5, 5, 5]


class Own(Sampler):
    def __iter__(self):
        return iter(CHOSEN)


class Pairs(BatchSampler):
    def __iter__(self):
        yield [0, 1]


class Prefetching(DataLoader):
    def __iter__(self):
        return iter(list(super().__iter__()))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            lambda: DataLoader(DATA, sampler=Own()),
            "draws with Own, and which samples that can draw is unknown: put .*`Subset`",
        ),
        (lambda: DataLoader(DATA, sampler=Backwards(CHOSEN)), "draws with Backwards, .*`Subset`"),
        (lambda: DataLoader(DATA, batch_sampler=BatchSampler(Own(), 2, False)), "draws with Own, .*`Subset`"),
        (
            lambda: DataLoader(DATA, batch_sampler=Pairs(Own(), 2, True)),
            "draws batches with Pairs, which cannot be dealt",
        ),
        (lambda: DataLoader(DATA, batch_sampler=[[0, 1], [2]]), "draws batches with list, which cannot be dealt"),
        (lambda: DataLoader(DATA, sampler=Pairs(CHOSEN, 2, True), batch_size=None), "draws with Pairs, .*`Subset`"),
        (lambda: Prefetching(DATA, batch_size=2), "returns a Prefetching, whose own `__iter__`"),
    ],
)
@pytest.mark.parametrize("size", [None, 2])
def test_what_cannot_be_dealt_is_refused_in_one_sentence(loader, message, size):
    with pytest.raises(TypeError, match=message) as caught:
        federate(loader(), batch_size=size)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("items", [[0, 20], [-1, 3]])
def test_items_that_do_not_exist_are_refused(items):
    with pytest.raises(ValueError, match=rf"draws the items {items[0]} to {items[1]} of a data set that has 20"):
        federate(DataLoader(DATA, sampler=SubsetRandomSampler(items)))


@pytest.mark.parametrize("name", ["weights", "twice", "of fewer", "with replacement"])
def test_samples_drawn_more_or_less_often_are_told(name):
    with pytest.warns(UserWarning, match="without replacement instead"):
        federate(DataLoader(DATA, batch_size=4, sampler=SAMPLERS[name][0]()))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["SubsetRandomSampler", "RandomSampler", "SequentialSampler", "DistributedSampler"])
def test_each_sample_once_an_epoch_is_what_clients_do(name):
    federate(DataLoader(DATA, batch_size=4, sampler=SAMPLERS[name][0]()))


def test_every_argument_of_a_loader_is_kept_or_decided_on():
    there = set(inspect.signature(DataLoader).parameters)
    assert there <= {*KEPT, *DECIDED}
    assert not set(KEPT) & set(DECIDED)


def init(worker):
    return None


def collate(items):
    return items


@pytest.mark.parametrize("by_list", [False, True])
def test_what_is_kept_is_that_of_the_loader(by_list):
    given = {
        "collate_fn": collate,
        "num_workers": 1,
        "pin_memory": False,
        "timeout": 7,
        "worker_init_fn": init,
        "multiprocessing_context": "fork",
        "prefetch_factor": 3,
        "persistent_workers": True,
        "pin_memory_device": "",
        "in_order": False,
    }
    given = {name: value for name, value in given.items() if name in inspect.signature(DataLoader).parameters}
    drawer = (
        {"sampler": BatchSampler(RandomSampler(DATA), 3, True), "batch_size": None} if by_list else {"batch_size": 3}
    )
    generator = torch.Generator()
    loader = TrainingLoader(DataLoader(DATA, **drawer, **given), SOURCE).of(np.arange(9), generator)
    found = {name: getattr(loader, name) for name in given}
    assert found.pop("multiprocessing_context").get_start_method() == given.pop("multiprocessing_context")
    assert found == given
    assert loader.generator is generator


class Endless(Dataset):
    """A data set without a length, of which a sampler names the items."""

    targets = (0, 1)

    def __getitem__(self, index):
        return torch.tensor(float(index)), index % 2


def test_a_data_set_without_a_length_is_dealt_where_the_sampler_names_its_items():
    module = federate(DataLoader(Endless(), batch_size=4, sampler=SubsetRandomSampler(CHOSEN)), skew=DirichletSkew(1.0))
    assert dealt(module) == sorted(CHOSEN)
    assert module.train_labels.tolist() == [k % 2 for k in sorted(CHOSEN)]


@pytest.mark.parametrize("by_list", [False, True])
def test_workers_that_persist_go_through_every_epoch(by_list):
    sampler = BatchSampler(RandomSampler(DATA), 3, False)
    drawer = {"sampler": sampler, "batch_size": None} if by_list else {"batch_sampler": sampler}
    module = federate(DataLoader(DATA, **drawer, num_workers=1, persistent_workers=True))
    loader = module.client_dataloader(1, torch.Generator().manual_seed(5))
    epochs = [[batch[0].tolist() for batch in loader] for _ in range(3)]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[3, 3, 3, 1]] * 3
    assert [sorted(x for batch in epoch for x in batch) for epoch in epochs] == [
        sorted(module.partition[1].tolist())
    ] * 3
    assert epochs[0] != epochs[1]
