import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedstop.stopping import StoppingReason, ValidationEarlyStopping, validation_stopping_round
from tests.helpers import Scripted, ToyData, fit, make_loop
from tests.stopping.walkers import trainer

VALUES = [0.5, 0.4, 0.41, 0.42, 0.41, 0.3, 0.3, 0.3]


class Plain(LightningModule):
    """Logs a scripted validation figure in a ``Trainer``."""

    def __init__(self, values, name):
        super().__init__()
        self.values, self.name = values, name
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        return self.weight.sum() * 0

    def validation_step(self, batch, batch_idx):
        value = self.values[min(self.current_epoch, len(self.values) - 1)]
        self.log(self.name, torch.tensor(9.0 if self.trainer.sanity_checking else value))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(2)))

    val_dataloader = train_dataloader


@pytest.mark.parametrize(("monitor", "threshold"), [("val_loss", 0.01), ("val_acc", 1.0), ("val_acc", 0.5)])
def test_stops_a_plain_trainer_where_the_rule_says(monitor, threshold):
    mode, scale = ("max", 100) if monitor == "val_acc" else ("min", 1)
    expected = validation_stopping_round([scale * value for value in VALUES], threshold, 3, mode)
    callback = ValidationEarlyStopping(monitor, threshold, patience=3)
    ran = trainer(callback, max_epochs=8, num_sanity_val_steps=2)
    ran.fit(Plain(VALUES, monitor))
    assert callback.stop_round == ran.current_epoch == expected
    assert callback.stopping_reason is StoppingReason.NOT_IMPROVING
    assert monitor in callback.stopping_reason_message


def test_percentage_points_are_the_default_for_accuracies_alone():
    assert ValidationEarlyStopping("val_acc").percent
    assert not ValidationEarlyStopping("val_loss").percent
    assert ValidationEarlyStopping("val/f1").mode == "max"
    assert not ValidationEarlyStopping("val_acc", percent=False).percent
    with pytest.raises(ValueError, match="`mode` must be 'min' or 'max' for `monitor='perplexing'`"):
        ValidationEarlyStopping("perplexing")
    with pytest.raises(TypeError, match="`monitor` must be the name"):
        ValidationEarlyStopping(3)


def test_in_a_federation_it_stops_or_only_observes(tmp_path):
    stops = ValidationEarlyStopping("val_loss", 0.01, patience=3)
    loop, _ = fit(tmp_path, stops, module=Scripted(VALUES), max_rounds=8)
    assert (stops.stop_round, loop.current_epoch) == (5, 5)
    watches = ValidationEarlyStopping("val_loss", 0.01, patience=3, observe_only=True)
    loop, _ = fit(tmp_path, watches, module=Scripted(VALUES), max_rounds=8)
    assert (watches.stop_round, loop.current_epoch) == (5, 8)
    assert loop.summary["rules"][0]["stop_round"] == 5
    assert loop.summary["rules"][0]["monitor"] == "val_loss"
    assert "budget" in loop.summary["stop_reason"]


def test_evaluations_are_counted_not_rounds(tmp_path):
    callback = ValidationEarlyStopping("val_loss", 0.01, patience=2)
    loop, _ = fit(tmp_path, callback, module=Scripted([0.5] * 9), max_rounds=9, check_val_every_n_round=2)
    assert (callback.stop_round, loop.current_epoch) == (3, 6)


def test_resumed_it_counts_on(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole = ValidationEarlyStopping("val_loss", 0.01, patience=3)
    fit(tmp_path / "whole", whole, saver, module=Scripted(VALUES), max_rounds=8)
    again = ValidationEarlyStopping("val_loss", 0.01, patience=3)
    loop, _ = fit(tmp_path / "again", again, module=Scripted(VALUES), max_rounds=8, ckpt_path=tmp_path / "epoch=2.ckpt")
    assert (again.stop_round, loop.current_epoch) == (whole.stop_round, 5)
    once_more = ValidationEarlyStopping("val_loss", 0.01, patience=3)
    loop, _ = fit(
        tmp_path / "more", once_more, module=Scripted(VALUES), max_rounds=8, ckpt_path=tmp_path / "epoch=4.ckpt"
    )
    assert loop.current_epoch == 5
    assert loop.should_stop


def test_added_later_it_says_that_it_counts_from_there(tmp_path, caplog):
    fit(tmp_path, ValidationEarlyStopping("val_acc"), module=WithAccuracy([1.0] * 9), max_rounds=2)
    late = ValidationEarlyStopping("val_loss", 0.01, patience=9)
    with caplog.at_level("INFO"):
        fit(tmp_path, late, module=WithAccuracy([1.0] * 9), max_rounds=5, ckpt_path="last")
    assert "ValidationEarlyStopping counts from here on, since " in caplog.text
    assert late.criterion.round == 3


class WithAccuracy(Scripted):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_acc", 0.5)


def test_a_figure_that_is_not_logged_is_named(tmp_path):
    with pytest.raises(
        MisconfigurationException, match=r"monitors 'val_acc', which was not logged; there are .*val_loss"
    ):
        fit(tmp_path, ValidationEarlyStopping("val_acc"), module=Scripted([1.0]))


def test_nothing_happens_in_a_dry_run(tmp_path):
    callback = ValidationEarlyStopping("val_acc", patience=1)
    loop = make_loop(tmp_path, callback, fast_dev_run=2)
    loop.fit(Scripted([1.0, 1.0]), ToyData())
    assert callback.criterion.round == 0
