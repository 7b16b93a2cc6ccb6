"""Properties that hold for all inputs: partitions, cohorts, clients' states."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from lightning.pytorch import LightningDataModule
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_fedstop.core.client_states import ClientStates
from lightning_fedstop.data import DirichletSkew, Federated, Iid, Partition, PathologicalSkew, QuantitySkew
from lightning_fedstop.federation.cohort import ScheduledCohort, UniformCohort, cohort_size

few = settings(max_examples=60, deadline=None)
class_sizes = st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any)
minima = st.integers(0, 6)
concentrations = st.floats(1e-12, 1e12)
disjoint = st.one_of(
    st.builds(Iid, min_samples=minima),
    st.builds(DirichletSkew, concentrations, min_samples=minima, balance=st.booleans()),
    st.builds(QuantitySkew, concentrations, min_samples=minima),
    st.builds(PathologicalSkew, st.integers(1, 4), min_samples=minima),
)
reusing = st.one_of(
    st.builds(DirichletSkew, st.floats(1e-3, 1e3), st.just("released_code"), min_samples=minima),
    st.builds(PathologicalSkew, st.integers(1, 4), st.just("released_code"), min_samples=minima),
)


def deal(skew, sizes, num_clients, seed):
    """The partition, or ``None`` where it is refused; and the labels."""
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(len(sizes)), sizes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return Partition.create(skew, labels, num_clients, seed), labels
        except ValueError:
            return None, labels


@few
@given(disjoint, class_sizes, st.integers(1, 30), st.integers(0, 2**40))
def test_partitions_deal_no_sample_twice_and_keep_the_minimum(skew, sizes, num_clients, seed):
    partition, labels = deal(skew, sizes, num_clients, seed)
    if partition is None:
        refusable = isinstance(skew, PathologicalSkew) or len(labels) < num_clients * skew.min_samples
        assert refusable
        return
    assert len(partition) == num_clients
    assert len(np.unique(partition.indices)) == len(partition.indices)
    assert partition.sizes.min() >= skew.min_samples
    if isinstance(skew, PathologicalSkew):
        held = [len(np.unique(labels[partition[client]])) for client in range(num_clients)]
        assert max(held) <= skew.classes_per_client
    else:
        assert len(partition.indices) == len(labels)
    again, _ = deal(skew, sizes, num_clients, seed)
    assert again.digest == partition.digest


chosen_items = st.lists(st.integers(0, 39), min_size=1, max_size=50)
SAMPLERS = {
    "subset": SubsetRandomSampler,
    "list": list,
    "weights": lambda chosen: WeightedRandomSampler([float(k in chosen) for k in range(40)], 60),
    "random": lambda chosen: RandomSampler(range(len(chosen) % 40 + 1)),
    "in order": lambda chosen: SequentialSampler(range(len(chosen) % 40 + 1)),
}


@few
@given(disjoint, st.sampled_from(sorted(SAMPLERS)), chosen_items, st.integers(1, 6), st.booleans(), st.booleans())
def test_clients_train_on_nothing_that_a_loader_cannot_draw_and_on_nothing_twice(
    skew, kind, chosen, num_clients, in_part, drop_last
):
    sampler = SAMPLERS[kind](chosen)
    data = TensorDataset(torch.arange(40), torch.arange(40) % 3)
    order = list(range(39, -1, -1)) if in_part else list(range(40))
    own = LightningDataModule()
    part = Subset(data, order) if in_part else data
    own.train_dataloader = lambda: DataLoader(part, 2, sampler=sampler, drop_last=drop_last)
    module = Federated(own, num_clients, skew=skew)
    positions = getattr(sampler, "data_source", chosen)
    drawable = {order[k] for k in positions}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module.setup("fit")
        except ValueError:
            assert isinstance(skew, PathologicalSkew) or len(drawable) < num_clients * max(skew.min_samples, 1)
            return
    loaders = [module.client_dataloader(client, torch.Generator()) for client in range(num_clients)]
    seen = [int(x) for loader in loaders for batch in loader for x in batch[0]]
    assert len(set(seen)) == len(seen)
    assert set(seen) <= drawable
    sizes = [sum(len(batch[0]) for batch in loader) for loader in loaders]
    if drop_last:
        assert sizes == [size - size % 2 for size in module.partition.sizes]
        assert module.client_sizes == [size if size > 1 else 0 for size in module.partition.sizes]
        return
    assert sizes == module.client_sizes
    if not isinstance(skew, PathologicalSkew):
        assert set(seen) == drawable


@few
@given(reusing, class_sizes, st.integers(1, 20), st.integers(0, 2**33))
def test_partitions_of_the_released_code_give_all_the_same_number(skew, sizes, num_clients, seed):
    partition, labels = deal(skew, sizes, num_clients, seed)
    if partition is not None:
        share = len(labels) // num_clients
        assert partition.sizes.tolist() == [share + len(labels) % num_clients] + [share] * (num_clients - 1)
        assert partition.indices.min() >= 0
        assert partition.indices.max() < len(labels)


@few
@given(skew=disjoint, sizes=class_sizes, num_clients=st.integers(1, 12))
def test_a_partition_is_the_same_once_saved(tmp_path_factory, skew, sizes, num_clients):
    partition, labels = deal(skew, sizes, num_clients, 0)
    if partition is not None:
        path = partition.save(tmp_path_factory.mktemp("partition") / "p.npz")
        assert Partition.load(path, labels, num_clients).digest == partition.digest


@given(st.one_of(st.integers(1, 500), st.floats(1e-9, 1.0)), st.integers(1, 500), st.integers(0, 2**60))
def test_cohorts_are_distinct_clients_that_exist(clients_per_round, num_clients, seed):
    if isinstance(clients_per_round, int) and clients_per_round > num_clients:
        with pytest.raises(ValueError, match="at most the number of clients"):
            cohort_size(clients_per_round, num_clients)
        return
    size = cohort_size(clients_per_round, num_clients)
    assert 1 <= size <= num_clients
    if isinstance(clients_per_round, float):
        assert abs(size - clients_per_round * num_clients) <= 0.5 or size == 1
    generator = torch.Generator()
    drawn = [UniformCohort().sample(3, num_clients, size, generator.manual_seed(seed)) for _ in range(2)]
    assert drawn[0] == drawn[1] == sorted(set(drawn[0]))
    assert len(drawn[0]) == size
    assert {0, num_clients - 1}.issuperset({drawn[0][0], drawn[0][-1]}) or drawn[0][0] >= 0 < num_clients > drawn[0][-1]


@given(st.lists(st.lists(st.integers(-2, 6), max_size=4), max_size=4), st.integers(1, 6))
def test_schedules_are_kept_or_refused(schedule, num_clients):
    fine = bool(schedule) and all(r and len(set(r)) == len(r) for r in schedule)
    exists = fine and all(0 <= c < num_clients for r in schedule for c in r)
    try:
        cohort = ScheduledCohort(schedule)
        cohort.check(num_clients, 1)
    except ValueError:
        assert not exists
        return
    assert exists
    for round in range(1, 2 * len(schedule) + 1):
        assert cohort.sample(round, num_clients, 1, torch.Generator()) == sorted(schedule[(round - 1) % len(schedule)])


class StatesAgainstADictionary(RuleBasedStateMachine):
    """Whatever is written, read, taken out, saved and loaded, a store holds what a dictionary would."""

    storage = "memory"
    keys = st.tuples(st.sampled_from("ab"), st.integers(0, 4))

    @initialize()
    def open(self):
        self.store = ClientStates(self.storage)
        self.store.open(torch.zeros(3))
        self.model = {}

    @rule(key=keys, value=st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3))
    def write(self, key, value):
        vector = torch.tensor(value)
        self.store.set(*key, vector)
        vector += 1  # a copy was kept
        self.model[key] = value

    @rule(key=keys)
    def read(self, key):
        vector = self.store.get(*key)
        assert vector.tolist() == self.model.get(key, [0.0] * 3)
        vector += 1

    @rule(key=keys)
    def take_out(self, key):
        if key in self.model:
            assert self.store.pop(key).tolist() == self.model.pop(key)
        else:
            with pytest.raises(KeyError):
                self.store.pop(key)

    @rule(key=keys, length=st.sampled_from([0, 2, 4]))
    def write_another_length(self, key, length):
        with pytest.raises(ValueError, match="must have the shape"):
            self.store.set(*key, torch.zeros(length))

    @rule()
    def save_and_load(self):
        state = self.store.state_dict()
        other = ClientStates("disk" if self.storage == "memory" else "memory")
        other.open(torch.zeros(3))
        other.set("other", 9, torch.ones(3))
        other.load_state_dict(state)
        assert sorted(other.written()) == sorted(self.model)
        self.store.load_state_dict(other.state_dict())
        other.close()

    @invariant()
    def same(self):
        assert sorted(self.store.written()) == sorted(self.model)

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            assert self.store.written() == []


class StatesOnDisk(StatesAgainstADictionary):
    storage = "disk"


StatesAgainstADictionary.TestCase.settings = StatesOnDisk.TestCase.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None
)
TestStatesInMemory = StatesAgainstADictionary.TestCase
TestStatesOnDisk = StatesOnDisk.TestCase
