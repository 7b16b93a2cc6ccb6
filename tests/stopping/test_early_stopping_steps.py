"""Rules in fits whose epochs are no measure: streams without an end, streams that end, gradient accumulation."""

import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_fedstop.stopping import (
    ConsensusEarlyStopping,
    StoppingReason,
    TaskVectorEarlyStopping,
    ValidationEarlyStopping,
)
from tests.helpers import Deep
from tests.helpers import fit as fit_loop

from .walkers import SATURATING, Regression, Walker, trainer


class Stream(IterableDataset):
    """Ones, without an end, or ``length`` of them in its whole life."""

    def __init__(self, length=math.inf):
        self.left = length

    def __iter__(self):
        while self.left > 0:
            self.left -= 1
            yield torch.ones(1)


class Streamed(Walker):
    """Walks by optimizer steps, not by epochs: after step s its distance is ``distances[s - 1]``."""

    def __init__(self, distances=SATURATING, length=math.inf, accumulated=1, lr=1.0):
        super().__init__(distances)
        self.stream, self.accumulated, self.lr = Stream(length), accumulated, lr

    def training_step(self, batch, batch_idx):
        step = self.trainer.global_step
        past = [0.0, *self.distances, self.distances[-1]]
        there = min(step, len(self.distances))
        return -self.moving[0, 0] * (past[there + 1] - past[there]) + 0 * self.still.sum()

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)

    def train_dataloader(self):
        return DataLoader(self.stream, batch_size=1)

    def val_dataloader(self):
        return DataLoader(torch.ones(2, 1))

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0)


def stop_of(module, callback, *others, ckpt_path=None, **arguments):
    ran = trainer(callback, *others, **{"max_epochs": -1, "max_steps": 40, "limit_val_batches": 0} | arguments)
    ran.fit(module, ckpt_path=ckpt_path)
    return ran


def by_steps(n=1, threshold=0.01, patience=3, **arguments):
    return TaskVectorEarlyStopping(threshold, patience, check_every_n_steps=n, **arguments)


def test_an_endless_epoch_is_checked_every_n_steps():
    ran = stop_of(Streamed(), callback := by_steps())
    assert (ran.global_step, ran.current_epoch, callback.stop_round, callback.stopped_epoch) == (6, 1, 6, 0)
    assert callback.stopping_reason is StoppingReason.SATURATED
    slow = [distance for distance in SATURATING for _ in range(5)]
    ran = stop_of(Streamed(slow), callback := by_steps(5))
    assert (ran.global_step, callback.stop_round) == (30, 6)


def test_checks_at_the_end_of_an_endless_epoch_come_with_a_hint(caplog):
    with caplog.at_level("INFO"):
        stop_of(Streamed(), callback := TaskVectorEarlyStopping())
    assert callback.criterion.round == 1
    assert "this one has no end that is known: for an endless stream, give `check_every_n_steps`" in caplog.text


def test_a_model_that_never_moves_is_found_on_an_endless_stream():
    ran = stop_of(Streamed(lr=0.0), callback := by_steps(10, 0.5, 2))
    assert (ran.global_step, callback.stopping_reason) == (30, StoppingReason.NOT_MOVING)


@pytest.mark.parametrize("accumulated", [1, 4])
def test_accumulated_batches_are_one_step(accumulated):
    module = Streamed()
    ran = stop_of(module, callback := by_steps(), accumulate_grad_batches=accumulated)
    assert (ran.global_step, callback.stop_round, callback.criterion.round) == (6, 6, 6)
    assert callback.criterion.distance == pytest.approx(SATURATING[5])
    assert ran.fit_loop.total_batch_idx + 1 == 6 * accumulated


def test_steps_go_on_from_epoch_to_epoch():
    class Finite(Streamed):
        def train_dataloader(self):
            return DataLoader(torch.ones(4, 1))

    ran = stop_of(Finite([distance for distance in SATURATING for _ in range(3)]), callback := by_steps(3))
    assert (ran.global_step, ran.current_epoch, callback.stop_round, callback.stopped_epoch) == (18, 5, 6, 4)


def test_several_optimizers_count_several_steps():
    class Pair(Streamed):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(-self.moving[0, 0] - self.still.sum())
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD([parameter], lr=1.0) for parameter in (self.moving, self.still)]

    stop_of(Pair(), callback := by_steps(3, 1e-9, observe_only=True), max_steps=20)
    assert callback.criterion.round == 6  # at steps 4, 6, 10, 12, 16 and 18


def test_min_steps_is_kept_and_decided_again():
    ran = stop_of(Streamed(), callback := by_steps(), min_steps=7, min_epochs=0)
    assert (ran.global_step, callback.stop_round) == (7, 7)
    again = [1.0, 2.0, 2.001, 2.002, 2.003, 4.0, 8.0, 16.0]
    ran = stop_of(Streamed(again), callback := by_steps(), min_steps=7, min_epochs=0, max_steps=8)
    assert (ran.global_step, callback.stopped) == (8, False)


def test_min_steps_that_keeps_an_endless_epoch_from_ending_is_said():
    with pytest.warns(UserWarning, match=r"stops no epoch before `min_epochs=1` are over.* pass `min_epochs=0`"):
        ran = stop_of(Streamed(), callback := by_steps(), min_steps=7)
    assert (ran.global_step, callback.stopped) == (40, False)


def test_observe_only_goes_on():
    ran = stop_of(Streamed(), callback := by_steps(observe_only=True), max_steps=8)
    assert (ran.global_step, callback.stop_round, callback.criterion.round) == (8, 6, 8)


def test_a_check_is_logged_at_its_step():
    class Watch(Callback):
        seen = ()

        def on_train_batch_end(self, trainer, *_):
            self.seen += (float(trainer.callback_metrics.get("task_vector/distance", -1)),)

    watch = Watch()
    stop_of(Streamed(), by_steps(2, 1e-9, observe_only=True), watch, max_steps=5)
    # What a callback logs within a step is a metric from the next hook on.
    assert watch.seen == pytest.approx((-1, 1.5, 1.5, 1.605, 1.605))


def test_the_stop_names_the_step(caplog):
    with caplog.at_level("INFO"):
        stop_of(Streamed(), by_steps())
    assert "TaskVectorEarlyStopping stops the fit in epoch 0 at step 6. The distance" in caplog.text


class SaveBefore(Callback):
    """Saves at a step at which the rule, which comes later, has not checked yet."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")


@pytest.mark.parametrize("before", [False, True], ids=["after the check", "before the check"])
def test_resumed_amid_an_epoch_it_counts_on(tmp_path, before):
    def run(rule, **arguments):
        ran = stop_of(Regression(), callback := by_steps(2, **rule), **arguments)
        return ran.global_step, callback.stop_round, callback.wait_count, callback.criterion.distance

    rule = {"threshold": 0.03, "patience": 4}
    whole = run(rule)
    assert whole[1] is not None
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    stop_of(Regression(), by_steps(2, **rule), SaveBefore(tmp_path) if before else saver)
    for step in (5, 6, 7, whole[0] - 2):
        assert run(rule, ckpt_path=tmp_path / f"step={step}.ckpt") == whole, step


def test_either_epochs_or_steps():
    with pytest.raises(ValueError, match="Only one of `check_every_n_epochs` and `check_every_n_steps` can be given"):
        TaskVectorEarlyStopping(check_every_n_epochs=1, check_every_n_steps=5)
    with pytest.raises(ValueError, match="`check_every_n_steps` must be an integer of at least 1, got 0"):
        TaskVectorEarlyStopping(check_every_n_steps=0)
    assert TaskVectorEarlyStopping().check_every_n_epochs == 1
    assert TaskVectorEarlyStopping(check_every_n_steps=5).check_every_n_epochs is None
    keys = {TaskVectorEarlyStopping(check_every_n_steps=n).state_key for n in (None, 1, 2)}
    assert len(keys) == 3


def test_in_a_federation_a_round_is_the_unit(tmp_path):
    with pytest.raises(MisconfigurationException, match="in a FederatedLoop a round is the unit: use `check"):
        fit_loop(tmp_path, TaskVectorEarlyStopping(check_every_n_steps=5))


RULES = {
    "task vector": lambda: TaskVectorEarlyStopping(0.5, 2),
    "validation": lambda: ValidationEarlyStopping("val_loss", patience=2),
}


@pytest.mark.parametrize("limit", [0, None], ids=["without validation", "with validation"])
def test_epochs_of_a_stream_that_is_used_up_are_no_checks(limit):
    callback = TaskVectorEarlyStopping(0.5, 2)
    with pytest.warns(UserWarning, match="No optimizer has stepped in epoch 1") as warned:
        ran = stop_of(Streamed(length=5), callback, max_epochs=9, limit_val_batches=limit)
    assert (ran.current_epoch, callback.stopped, callback.criterion.round) == (9, False, 1)
    assert sum("No optimizer has stepped" in str(warning.message) for warning in warned) == 1


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("limit", [{"limit_train_batches": 0}, {}], ids=["no batches", "an empty stream"])
def test_a_fit_in_which_nothing_was_trained_is_not_stopped(rule, limit):
    stop_of(Streamed(length=0), callback := rule(), max_epochs=5, limit_val_batches=None, **limit)
    assert (callback.stopped, callback.criterion.round) == (False, 0)


def test_optimizers_that_a_module_drives_past_its_trainer_are_checked_still():
    class Raw(Walker):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            super().training_step(batch, batch_idx).backward()
            optimizer.step()

    ran = trainer(callback := TaskVectorEarlyStopping(0.01, 3))
    ran.fit(Raw())
    assert (ran.global_step, callback.stop_round) == (0, 6)


SCHEDULED = {
    "one rule": [TaskVectorEarlyStopping],
    "two rules": [lambda: TaskVectorEarlyStopping(0.1, 3), TaskVectorEarlyStopping],
    "validation": [ValidationEarlyStopping],
}


@pytest.mark.parametrize("rules", SCHEDULED.values(), ids=SCHEDULED)
def test_a_schedule_is_said_once_a_fit(caplog, rules):
    ran = trainer(*[rule() for rule in rules], max_epochs=2)
    with caplog.at_level("INFO"):
        ran.fit(Regression())
    assert caplog.text.count("The learning rate follows ExponentialLR: where it falls, weights move less") == 1


@pytest.mark.parametrize("rules", [[TaskVectorEarlyStopping], [ConsensusEarlyStopping]])
def test_a_schedule_is_said_in_a_federation_too(tmp_path, caplog, rules):
    with caplog.at_level("INFO"):
        fit_loop(tmp_path, *[rule() for rule in rules], module=Deep())
    assert caplog.text.count("The learning rate follows ExponentialLR") == 1


def test_without_a_rule_or_a_schedule_nothing_is_said(tmp_path, caplog):
    with caplog.at_level("INFO"):
        fit_loop(tmp_path, module=Deep())
        trainer(TaskVectorEarlyStopping(), max_epochs=1).fit(Walker())
    assert "The learning rate follows" not in caplog.text
