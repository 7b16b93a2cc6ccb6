import copy
import pickle

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from lightning_fedstop.core.seeding import torch_generator
from lightning_fedstop.data import (
    DirichletSkew,
    Federated,
    FederatedDataModule,
    Iid,
    PathologicalSkew,
    QuantitySkew,
    Skew,
)
from lightning_fedstop.records.partition_record import read_partition, write_partition
from tests.helpers import ToyModule, bits, fit, same


class Own(LightningDataModule):
    """A data module as a user might have it: it knows nothing of federations."""

    def __init__(self, n: int = 60, batch_size: int = 4):
        super().__init__()
        self.n, self.batch_size, self.calls = n, batch_size, []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")
        self.data = TensorDataset(torch.arange(self.n).float()[:, None], torch.arange(self.n) % 3)

    def teardown(self, stage):
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=30)

    def state_dict(self):
        return {"calls": len(self.calls)}

    def load_state_dict(self, state_dict):
        self.restored = state_dict


class Hooked(Own):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + 1, batch[1]


class ByPart(Skew):
    """A skew of one's own: each part of a joined data set is a client."""

    needs_labels = False

    def __init__(self, lengths):
        self.lengths = lengths

    def partition(self, labels, num_clients, seed=0):
        return np.split(np.arange(len(labels)), np.cumsum(self.lengths)[:-1])


def federate(loader, **options):
    class Given(LightningDataModule):
        def train_dataloader(self):
            return loader

    return Federated(Given(), **({"num_clients": 2} | options))


def epoch(batches):
    return [[float(x) for x in batch[0].flatten()] for batch in batches]


@pytest.fixture
def module():
    module = FederatedDataModule.from_datamodule(Own(), 5, DirichletSkew(0.5), seed=3)
    module.prepare_data()
    module.setup("fit")
    return module


def test_deals_the_training_set(module):
    assert isinstance(module, Federated)
    expected = DirichletSkew(0.5).partition(np.arange(60) % 3, 5, 3)
    assert module.client_sizes == [len(client) for client in expected]
    for client, indices in enumerate(expected):
        batches = epoch(module.client_dataloader(client, torch.Generator()))
        assert sorted(x for batch in batches for x in batch) == indices.tolist()
    assert module.train_labels.tolist() == (np.arange(60) % 3).tolist()


def test_client_epochs_come_from_the_generator_alone(module):
    loader = module.client_dataloader(0, torch_generator(0, "client", 1, 0))
    torch.manual_seed(1)
    first, second = epoch(loader), epoch(loader)
    torch.manual_seed(2)
    again = module.client_dataloader(0, torch_generator(0, "client", 1, 0))
    assert [epoch(again), epoch(again)] == [first, second]
    assert first != second
    before = torch.get_rng_state()
    epoch(again)
    assert torch.equal(torch.get_rng_state(), before)


def test_keeps_batch_size_collation_and_the_short_last_batch():
    data = TensorDataset(torch.arange(14.0), torch.arange(14) % 2)
    loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=lambda items: ("mine", len(items)))
    module = federate(loader)
    module.setup("fit")
    assert list(module.client_dataloader(0, torch.Generator())) == [("mine", 4), ("mine", 3)]
    assert module.batch_size == 4
    smaller = federate(loader, batch_size=2)
    smaller.setup("fit")
    assert [size for _, size in smaller.client_dataloader(0, torch.Generator())] == [2, 2, 2, 1]


def test_drop_last_is_kept_and_clients_without_a_batch_count_as_empty():
    data = TensorDataset(torch.arange(14.0), torch.arange(14) % 2)
    module = federate(DataLoader(data, batch_size=4, shuffle=True, drop_last=True), num_clients=4)
    with pytest.warns(
        UserWarning, match=r"2 of 4 clients \(the first is client 2 with 3 samples\) have no whole batch of 4"
    ):
        module.setup("fit")
    assert module.client_sizes == [4, 4, 0, 0]
    assert [len(list(module.client_dataloader(client, torch.Generator()))) for client in range(4)] == [1, 1, 0, 0]
    assert module.partition.sizes.tolist() == [4, 4, 3, 3]


def test_a_client_without_samples_has_no_batches():
    module = Federated(Own(n=3), num_clients=8, skew=Iid(min_samples=0))
    module.setup("fit")
    assert module.client_sizes == [1, 1, 1, 0, 0, 0, 0, 0]
    empty = module.client_dataloader(7, torch.Generator())
    assert [list(empty), list(empty)] == [[], []]


def test_data_without_classes():
    loader = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=2)
    for skew in (Iid(), QuantitySkew(1.0), None):
        module = federate(loader, skew=skew)
        module.setup("fit")
        assert sum(module.client_sizes) == 10
        assert module.train_labels is None
    for skew in (DirichletSkew(), PathologicalSkew()):
        with pytest.raises(ValueError, match=f"{type(skew).__name__} needs the class of each training sample"):
            federate(loader, skew=skew).setup("fit")


def test_loaders_that_cannot_be_dealt_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(TypeError, match=r"`Given.train_dataloader\(\)` streams an IterableDataset"):
        federate(DataLoader(Stream())).setup("fit")
    for loader in ([1, 2], {"a": DataLoader([1])}):
        with pytest.raises(TypeError, match="must return one torch DataLoader"):
            federate(loader).setup("fit")
    with pytest.raises(TypeError, match="must be a LightningDataModule, got int"):
        Federated(3)
    with pytest.raises(ValueError, match="cannot deal 60 samples to 61 clients"):
        Federated(Own(), num_clients=61).setup("fit")


def test_parts_that_could_be_clients_are_named(caplog):
    parts = [TensorDataset(torch.arange(n).float()) for n in (2, 3, 4)]
    with caplog.at_level("INFO"):
        federate(DataLoader(ConcatDataset(parts), batch_size=2)).setup("fit")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "joins 3 data sets" in line
    assert "write a `FederatedDataModule` of your own" in line
    caplog.clear()
    with caplog.at_level("INFO"):
        federate(DataLoader(ConcatDataset(parts), batch_size=2), skew=ByPart([2, 3, 4]), num_clients=3).setup("fit")
    assert caplog.records == []
    for several in (parts, {"a": DataLoader(parts[0])}, CombinedLoader([DataLoader(part) for part in parts])):
        with pytest.raises(TypeError, match=r"`FederatedDataModule` of your own, whose `client_dataloader` gives"):
            federate(several).setup("fit")
    with pytest.raises(
        TypeError, match=r"must be a LightningDataModule, got list: .*`FederatedDataModule` of your own"
    ):
        Federated(parts)


def test_a_skew_of_ones_own_that_holds_an_array_trains_and_is_recorded(tmp_path):
    data = TensorDataset(torch.randn(9, 4), torch.arange(9) % 2)
    own = LightningDataModule()
    own.train_dataloader = lambda: DataLoader(data, batch_size=2)
    loop, _ = fit(tmp_path, data=Federated(own, 3, ByPart(np.array([2, 3, 4]))), max_rounds=1)
    assert read_partition(loop.log_dir).sizes == [2, 3, 4]
    module = ToyModule.load_from_checkpoint(loop.summary["checkpoint"], weights_only=True)
    assert same(bits(module), bits(loop.module))
    checkpoint = torch.load(loop.summary["checkpoint"], weights_only=True)
    assert checkpoint["datamodule_hyper_parameters"]["skew"]["init_args"] == {"lengths": [2, 3, 4]}
    assert "ByPart" in (tmp_path / "lightning_logs" / "version_0" / "config.yaml").read_text()


def test_another_split_of_the_same_data_is_dealt_again():
    class Folds(LightningDataModule):
        data = TensorDataset(torch.arange(10).float(), torch.arange(10) % 2)
        fold = range(5)

        def train_dataloader(self):
            return DataLoader(self.data, batch_size=2, sampler=SubsetRandomSampler(self.fold))

    own = Folds()
    module = Federated(own, num_clients=2, skew=DirichletSkew(1.0))
    for fold in (range(5), range(4, 10)):
        own.fold = fold
        module.setup("fit")
        batches = [epoch(module.client_dataloader(client, torch.Generator())) for client in range(2)]
        assert sorted(x for client in batches for batch in client for x in batch) == list(fold)
        assert module.train_labels.tolist() == [k % 2 for k in fold]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_clients": 0}, "`num_clients`"), ({"batch_size": 0}, "`batch_size`"), ({"seed": -1}, "`seed`")],
)
def test_wrong_arguments_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        Federated(Own(), **options)


def test_a_skew_must_be_one():
    with pytest.raises(TypeError, match="`skew` must be a Skew"):
        Federated(Own(), skew="DirichletSkew")


def test_before_setup_there_is_no_partition():
    with pytest.raises(RuntimeError, match=r'call `setup\("fit"\)` first'):
        _ = Federated(Own()).client_sizes


def test_seed_is_the_one_of_seed_everything(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "9")
    assert Federated(Own()).seed == 9
    assert Federated(Own(), seed=4).seed == 4


def test_passes_everything_else_through(module):
    own = module.datamodule
    assert own.calls == ["prepare_data", "setup fit"]
    module.setup("validate")
    module.teardown("fit")
    assert own.calls[2:] == ["setup validate", "teardown fit"]
    assert sum(len(x) for x, _ in module.val_dataloader()) == 60
    assert module.test_dataloader() == module.predict_dataloader() == []
    assert module.state_dict() == {"calls": 4}
    module.load_state_dict({"calls": 1})
    assert own.restored == {"calls": 1}
    module.trainer = "trainer"
    assert own.trainer == module.trainer == "trainer"
    assert module.to("cpu") is module


def test_hooks_are_those_of_the_wrapped_module():
    module = Federated(Hooked())
    assert is_overridden("on_after_batch_transfer", module)
    assert not is_overridden("on_before_batch_transfer", module)
    assert not is_overridden("on_after_batch_transfer", Federated(Own()))
    assert module.on_after_batch_transfer((1, 2), 0) == (2, 2)
    clone = copy.deepcopy(module)
    assert clone.on_after_batch_transfer.__self__ is clone.datamodule
    assert pickle.loads(pickle.dumps(module)).datamodule.n == 60


def test_knows_what_the_wrapped_module_knows_of_its_images():
    own = Own()
    own.num_classes = 3
    module = Federated(own)
    assert module.num_classes == 3
    assert not hasattr(module, "in_chans")
    assert not hasattr(module, "anything_else")


def test_labels_are_read_once_over_repeated_setups():
    class Counted(TensorDataset):
        reads = 0

        def __getitem__(self, index):
            Counted.reads += 1
            return {"image": self.tensors[0][index], "label": int(index) % 2}

    module = federate(DataLoader(Counted(torch.zeros(10, 1)), batch_size=2), skew=PathologicalSkew(1))
    module.setup("fit")
    module.setup("fit")
    assert Counted.reads == 10


def test_works_in_a_plain_trainer(quiet_trainer, linear):
    model, module = linear(1, 3), Federated(Hooked(), num_clients=5)
    trainer = quiet_trainer()
    trainer.fit(model, module)
    assert min(low for _, _, low, _, _ in model.seen) == 1.0
    assert len(model.seen) == 15
    # The two sanity batches, then the epoch.
    assert model.evaluated == 60 + 60
    assert module.datamodule.trainer is trainer


def test_a_saved_partition_is_used(tmp_path, module):
    path = module.partition.save(tmp_path / "deal.npz")
    loaded = Federated(Own(), num_clients=5, partition_path=path, seed=99)
    loaded.setup("fit")
    np.testing.assert_array_equal(loaded.partition.indices, module.partition.indices)
    same = FederatedDataModule.from_datamodule(Own(), 5, DirichletSkew(0.5), partition_path=path)
    same.setup("fit")
    with pytest.raises(ValueError, match="has 5 clients, but `num_clients=6`"):
        Federated(Own(), num_clients=6, partition_path=path).setup("fit")
    with pytest.raises(ValueError, match="made for other data"):
        Federated(Own(n=61), num_clients=5, partition_path=path).setup("fit")
    with pytest.raises(ValueError, match="leave one of the two out"):
        Federated(Own(), num_clients=5, skew=DirichletSkew(0.6), partition_path=path).setup("fit")


def test_a_saved_partition_fits_whether_or_not_classes_had_to_be_read(tmp_path):
    items = [(torch.zeros(1), k % 2) for k in range(20)]
    for skew in (Iid(), PathologicalSkew(1)):
        module = federate(DataLoader(items, batch_size=2), skew=skew)
        module.setup("fit")
        path = module.partition.save(tmp_path / "deal.npz")
        loaded = federate(DataLoader(items, batch_size=2), partition_path=path)
        loaded.setup("fit")
        assert loaded.client_sizes == module.client_sizes


def test_hyperparameters_are_plain():
    module = Federated(Own(), num_clients=5, skew=DirichletSkew(0.5))
    assert module.hparams["skew"] == DirichletSkew(0.5).as_config()
    assert "datamodule" not in module.hparams
    again = Federated(Own(), **module.hparams)
    assert repr(again.skew) == repr(module.skew)


def test_a_data_module_of_ones_own():
    class Given(FederatedDataModule):
        client_sizes = [2, 3]

        def client_dataloader(self, client, generator):
            return [client]

    module = Given(num_clients=2)
    assert module.client_dataloader(1, torch.Generator()) == [1]
    with pytest.raises(NotImplementedError, match="FederatedDataModule must implement"):
        FederatedDataModule().client_dataloader(0, torch.Generator())


TARGETS = {
    "negative": torch.arange(-20, 20),
    "large": torch.arange(0, 200_000, 5000),
    "very large": torch.arange(40) + 10**12,
    "unlabelled": torch.full((40,), -1),
    "floats": torch.arange(-20.0, 20.0),
    "multi-label": torch.zeros(40, 14, dtype=torch.int64),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("skew", [Iid(), QuantitySkew(1.0)], ids=repr)
def test_whole_numbers_as_targets_are_no_classes_unless_a_skew_asks_for_them(tmp_path, skew, name):
    class Unread(TensorDataset):
        def __getitem__(self, index):
            assert not setting_up
            return super().__getitem__(index)

    setting_up = True
    data = Unread(torch.zeros(40, 1), TARGETS[name])
    module = federate(DataLoader(data, batch_size=4), skew=skew, num_clients=4)
    module.setup("fit")
    setting_up = False
    assert module.train_labels is None
    assert sum(len(y) for client in range(4) for _, y in module.client_dataloader(client, torch.Generator())) == 40
    write_partition(tmp_path, module)
    assert (tmp_path / "partition.json").stat().st_size < 300
    read = read_partition(tmp_path)
    assert (read.sizes, read.counts, read.skew) == (module.client_sizes, [], repr(skew))
    again = federate(DataLoader(data), num_clients=4, partition_path=module.partition.save(tmp_path / "p.npz"))
    again.setup("fit")
    assert again.partition.digest == module.partition.digest


@pytest.mark.parametrize("ids", [[-8, 5, 10**12], ["cat", "dog", "hen"]], ids=str)
@pytest.mark.parametrize("skew", [DirichletSkew(1.0), PathologicalSkew(2)], ids=repr)
def test_classes_may_have_any_numbers_or_names(tmp_path, skew, ids):
    items = [(torch.zeros(1), ids[k % 3]) for k in range(30)]
    module = federate(DataLoader(items, batch_size=4), skew=skew, num_clients=4)
    module.setup("fit")
    assert [module.label_names[k] for k in module.train_labels] == [str(label) for _, label in items]
    write_partition(tmp_path, module)
    read = read_partition(tmp_path)
    assert read.class_names == module.label_names == [str(name) for name in ids]
    assert np.sum(read.counts, 0).tolist() == [10, 10, 10]
    again = federate(DataLoader(items), num_clients=4, partition_path=module.partition.save(tmp_path / "p.npz"))
    again.setup("fit")
    assert again.train_labels.tolist() == module.train_labels.tolist()


def test_very_many_classes_leave_sizes_alone(tmp_path):
    data = TensorDataset(torch.zeros(3000, 1), torch.arange(3000) // 2)
    module = federate(DataLoader(data, batch_size=4), skew=DirichletSkew(1.0), num_clients=4)
    module.setup("fit")
    write_partition(tmp_path, module)
    assert read_partition(tmp_path).counts == []
    assert (tmp_path / "partition.json").stat().st_size < 300


def test_more_classes_than_a_module_says_are_counted(tmp_path):
    own = Own()
    own.num_classes = 1  # as for a single logit
    module = Federated(own, num_clients=2, skew=DirichletSkew(1.0))
    module.setup("fit")
    write_partition(tmp_path, module)
    assert read_partition(tmp_path).class_names == ["0", "1", "2"]


def test_labels_of_another_length_are_refused():
    with pytest.raises(ValueError, match="those of the 5 training samples, got 4"):
        FederatedDataModule(num_clients=2).deal(np.zeros(4, int), 5)
