import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_fedstop.module.evaluator import Evaluator, as_loaders, given_loaders
from tests.helpers import ToyData, ToyModule, fit, make_loop


@pytest.mark.parametrize(
    ("given", "listed"),
    [(None, []), ([], []), ([1, 2], [1, 2]), ((1,), [1]), ({"a": 1, "b": 2}, [1, 2]), (3, [3])],
)
def test_as_loaders(given, listed):
    assert as_loaders(given) == listed


def test_given_loaders_of_the_first_owner_that_defines_them():
    class Owns(ToyModule):
        def val_dataloader(self):
            return [1]

    class Duck:
        def val_dataloader(self):
            return [2]

    assert given_loaders("val_dataloader", LightningDataModule(), Owns()) == [1]
    assert given_loaders("val_dataloader", Duck(), Owns()) == [2]
    assert given_loaders("val_dataloader", None, ToyModule()) is None


class Unsized(IterableDataset):
    def __iter__(self):
        return iter(range(5))


@pytest.mark.parametrize(
    ("limit", "counts"), [(None, [5, float("inf")]), (2, [2, 2]), (9, [5, 9]), (1.0, [5, float("inf")])]
)
def test_num_batches(limit, counts):
    fabric = Fabric(accelerator="cpu", devices=1)
    evaluator = Evaluator(ToyModule(), fabric, None, None, None, "validation", limit)
    assert evaluator.num_batches([[0] * 5, DataLoader(Unsized(), batch_size=None)]) == counts


@pytest.mark.parametrize(("limit", "wanted"), [(None, True), (0, False), (0.0, False), (1, True)])
def test_is_wanted(limit, wanted):
    fabric = Fabric(accelerator="cpu", devices=1)
    assert Evaluator(ToyModule(), fabric, None, None, None, "validation", limit).is_wanted is wanted
    assert not Evaluator(LightningModule(), fabric, None, None, None, "test", limit).is_wanted


class Watches(ToyModule):
    """Notes the state of the module in its steps."""

    def __init__(self):
        super().__init__(net=nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.9)))
        self.net[1].eval()  # a layer that its owner wants in this state
        self.seen = []

    def validation_step(self, batch, batch_idx):
        self.seen.append((self.training, torch.is_grad_enabled(), self.trainer.validating, len(batch[0])))


def test_steps_run_without_gradients_in_eval_mode_and_the_modes_come_back():
    module = Watches()
    make_loop("unused").validate(module, ToyData(), verbose=False)
    assert module.seen == [(False, False, True, 4), (False, False, True, 4), (False, False, True, 2)]
    assert module.training
    assert not module.net[1].training


class TwoLoaders(ToyData):
    def val_dataloader(self):
        return [super().val_dataloader(), DataLoader(self.dataset(0, 3), batch_size=3)]


class Multi(ToyModule):
    def __init__(self):
        super().__init__()
        self.seen = []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen.append((dataloader_idx, batch_idx, len(batch[0])))
        self.log("size", float(len(batch[0])))
        self.log("all", 1.0, add_dataloader_idx=False)

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append(dataloader_idx)


def test_several_loaders():
    module = Multi()
    (metrics,) = make_loop("unused").validate(module, TwoLoaders(), verbose=False)
    assert module.seen == [(0, 0, 4), 0, (0, 1, 4), 0, (0, 2, 2), 0, (1, 0, 3), 1]
    assert metrics == {
        "size/dataloader_idx_0": pytest.approx((16 + 16 + 4) / 10),
        "size/dataloader_idx_1": 3,
        "all": 1,
    }


def test_one_loader_gives_no_index_to_steps_and_hooks_that_take_none():
    class One(Multi):
        def validation_step(self, *args):
            self.seen.append(len(args))

        def on_validation_batch_end(self, outputs, batch, batch_idx):
            pass

    module = One()
    make_loop("unused").validate(module, ToyData(), verbose=False)
    assert module.seen == [2, 2, 2]


def test_a_step_that_takes_the_batch_alone():
    class BatchAlone(ToyModule):
        def test_step(self, batch):
            self.log("n", float(len(batch[0])), batch_size=1)

    assert make_loop("unused").test(BatchAlone(), ToyData(), verbose=False) == [{"n": pytest.approx(10 / 3)}]


def test_what_is_logged_at_the_end_of_the_epoch_is_there_for_on_validation_end(tmp_path):
    class Ends(ToyModule):
        def on_validation_epoch_end(self):
            self.log("ended", 5.0)

        def on_validation_end(self):
            self.got = float(self.trainer.callback_metrics["ended"])

    _, module = fit(tmp_path, module=Ends(), max_rounds=1)
    assert module.got == 5
