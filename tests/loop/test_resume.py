"""A run is resumed with the settings it has, or not at all."""

import logging

import pytest
import torch

from lightning_fedstop.federation.cohort import ScheduledCohort
from lightning_fedstop.loop.resume import (
    check_resumable,
    client_difference,
    clients_known,
    differences,
    run_differences,
)
from lightning_fedstop.methods import FedProx
from tests.helpers import Deep, ToyData, ToyModule, fit


class Slower(Deep):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


class Steeper(Deep):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.6)]


class Another(Deep):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02)


CHANGES = {
    "trainer.local_epochs was 1 and is 2": {"local_epochs": 2},
    "trainer.gradient_clip_val was None and is 3.0": {"gradient_clip_val": 3.0},
    "trainer.weighting was 'uniform' and is 'samples'": {"weighting": "samples"},
    "trainer.limit_train_batches was None and is 1": {"limit_train_batches": 1},
    "trainer.method.mu was 0.5 and is 0.1": {"method": FedProx(0.1)},
    "trainer.clients_per_round was 2 and is 3": {"clients_per_round": 3},
    "data.batch_size was 4 and is 8": {"data": ToyData(batch_size=8)},
    "model was 'Deep' and is 'Slower'": {"module": Slower()},
    "; optimizer.lr was 0.02 and is 0.01)": {"module": Slower()},
    "; lr_scheduler.gamma was 0.7 and is 0.6)": {"module": Steeper()},
    "; optimizer was 'Adam' and is 'SGD'; lr_scheduler was 'ExponentialLR' and is None)": {"module": Another()},
}


@pytest.mark.parametrize("sentence", CHANGES)
def test_what_would_make_it_another_run_is_named_and_refused(tmp_path, sentence):
    fit(tmp_path, module=Deep(), method=FedProx(0.5), max_rounds=2)
    given = {"module": Deep(), "method": FedProx(0.5), "max_rounds": 4} | CHANGES[sentence]
    with pytest.raises(ValueError, match=r"last.ckpt' comes from another run \(") as caught:
        fit(tmp_path, **given, ckpt_path="last")
    assert sentence in str(caught.value)


def test_the_models_own_hyperparameters_count(tmp_path):
    fit(tmp_path, module=ToyModule(lr=0.1))
    with pytest.raises(ValueError, match=r"model.lr was 0.1 and is 0.2; optimizer.lr was 0.1 and is 0.2"):
        fit(tmp_path, module=ToyModule(lr=0.2), max_rounds=4, ckpt_path="last")


def test_what_may_change_is_named_and_goes_on(tmp_path, caplog):
    fit(tmp_path, max_rounds=2)
    with caplog.at_level(logging.INFO):
        loop, _ = fit(tmp_path, max_rounds=4, on_nonfinite="drop", ckpt_path="last")
    assert loop.current_epoch == 4
    assert "max_rounds was 2 and is 4; on_nonfinite was 'stop' and is 'drop'" in caplog.text


def test_settings_that_came_or_went_differ():
    assert differences({"a": 1}, {"b": None, "a": 1}) == []
    assert differences({"a": 1}, {"b": 2}) == ["a was 1 and is None", "b was None and is 2"]


def test_a_schedule_of_clients_counts(tmp_path):
    fit(tmp_path, cohort=ScheduledCohort([[0, 1], [2, 3]]))
    with pytest.raises(ValueError, match=r"trainer.cohort.schedule was \[\[0, 1\], \[2, 3\]\] and is \[\[0, 1\]\]"):
        fit(tmp_path, cohort=ScheduledCohort([[0, 1]]), max_rounds=4, ckpt_path="last")


def test_a_class_that_is_another_one_is_named_without_its_arguments():
    then = {"lr_scheduler": "StepLR", "lr_scheduler.step_size": 3, "lr_scheduler_x": 1}
    assert differences(then, {}) == ["lr_scheduler was 'StepLR' and is None", "lr_scheduler_x was 1 and is None"]


def test_long_values_are_shortened():
    (said,) = differences({"a": [0] * 500}, {"a": [1] * 500})
    assert len(said) < 150


def test_rates_that_a_scheduler_derives_are_not_named_beside_the_rate():
    then = {"optimizer.group_0.lr": 1, "optimizer.group_0.initial_lr": 1, "lr_scheduler.base_lrs": [1]}
    assert differences(then, dict.fromkeys(then, 2)) == ["optimizer.group_0.lr was 1 and is 2"]
    assert len(differences(then, then | {"lr_scheduler.base_lrs": [2]})) == 1


READING = [
    "data.root",
    "data.data_dir",
    "data.download",
    "data.datamodule.num_workers",
    "data.eval_batch_size",
    "data.val_batch_size",
    "data.cache_dir",
    "data.cache",
    "data.pin_memory",
    "data.datamodule.persistent_workers",
    "data.prefetch_factor",
    "data.partition_path",
]
DEALING = ["data.num_clients", "data.seed", "data.skew", "data.skew.concentration"]
NEITHER = ["data.size", "data.batch_size", "data.normalize_twice", "data.datamodule.val_split", "model.root"]


@pytest.mark.parametrize("key", [*READING, *DEALING, *NEITHER])
def test_how_data_is_read_may_change_and_how_it_was_dealt_where_the_partition_is_known(key):
    refused = [bool(run_differences({key: 1}, {key: 2}, same_partition)) for same_partition in (True, False)]
    assert refused == [key in NEITHER, key not in READING]


class Named(ToyData):
    """Clients with names, of equal sizes."""

    def __init__(self, names):
        super().__init__([4] * len(names))
        self.names = names

    def client_fingerprint(self, client):
        return self.names[client]


@pytest.mark.parametrize(
    ("then", "now", "sentence"),
    [
        (ToyData([6, 4, 7]), ToyData([6, 7, 4]), "the number of samples of client 1 was 4 and is 7"),
        (ToyData([6, 4, 7]), ToyData([6, 4, 8]), "the number of samples of client 2 was 7 and is 8"),
        (Named("abc"), Named("acb"), "the fingerprint of client 1 was 'b' and is 'c'"),
    ],
)
def test_clients_that_have_changed_places_are_named_and_refused(tmp_path, then, now, sentence):
    fit(tmp_path, data=then)
    with pytest.raises(ValueError, match=rf"comes from other clients \({sentence}\): resume with the same clients in"):
        fit(tmp_path, data=now, ckpt_path="last", max_rounds=4)
    loop, _ = fit(tmp_path, data=then, ckpt_path="last", max_rounds=4)
    assert loop.current_epoch == 4


def test_a_checkpoint_of_before_knows_no_clients_and_fingerprints_may_be_added():
    known = clients_known(ToyData([3, 2]))
    assert client_difference({}, known) is None
    named = clients_known(Named("ab"))
    assert client_difference(clients_known(ToyData([4, 4])), named) is None
    assert client_difference(named, named) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "FedDyn"}, "comes from FedAvg, this run uses FedDyn"),
        ({"seed": 2}, "comes from seed 1, this run uses 2"),
    ],
)
def test_check_resumable(change, message):
    checkpoint = {"federated": {"method": "FedAvg", "seed": 1}}
    check_resumable(checkpoint, "x", "FedAvg", 1)
    with pytest.raises(ValueError, match=message):
        check_resumable(checkpoint, "x", **{"method": "FedAvg", "seed": 1} | change)
    with pytest.raises(ValueError, match="'x' holds weights only"):
        check_resumable({}, "x", "FedAvg", 1)
