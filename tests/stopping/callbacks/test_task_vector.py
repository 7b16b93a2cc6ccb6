import logging
import math
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_fedstop.stopping import StoppingReason, TaskVectorEarlyStopping
from tests.oracles import read_oracles
from tests.stopping.walkers import SATURATING, Regression, Walker, trainer


def stop_of(module, callback=None, max_epochs=8, **arguments):
    callback = callback or TaskVectorEarlyStopping(threshold=0.01, patience=3)
    ran = trainer(callback, max_epochs=max_epochs, **arguments)
    ran.fit(module)
    return callback, ran


class Watch(Callback):
    """Keeps what is logged after every epoch."""

    def __init__(self):
        self.logged = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_end(self, trainer, pl_module):
        self.on_train_epoch_start(trainer, pl_module)


def test_stops_a_plain_trainer():
    callback, ran = stop_of(Walker())
    assert ran.current_epoch == 6
    assert (callback.stopped_epoch, callback.stop_round, callback.wait_count) == (5, 6, 3)
    assert callback.stopped
    assert callback.stopping_reason is StoppingReason.SATURATED
    assert callback.stopping_reason_message == (
        "The distance from the start (1.612) has grown by less than 1 % an epoch, 3 epochs in a row."
    )


@pytest.mark.parametrize("variant", ["paper", "released_code"])
@pytest.mark.parametrize("index", [1, 3, 5, 7])
def test_oracles(index, variant):
    case = read_oracles("stopping")[index]
    callback = TaskVectorEarlyStopping(case["tau"], case["patience"], variant=variant)
    stop_of(Walker(case["delta"]), callback, max_epochs=len(case["delta"]))
    assert callback.stop_round == case["paper_round" if variant == "paper" else "authors_code_round_1based"]


def test_a_run_that_is_not_stopped():
    callback, ran = stop_of(Walker([1.0, 2.0, 4.0, 8.0]), max_epochs=4)
    assert ran.current_epoch == 4
    assert (callback.stopped, callback.stopped_epoch, callback.stop_round) == (False, 0, None)
    assert callback.stopping_reason is StoppingReason.NOT_STOPPED
    assert callback.stopping_reason_message is None


def test_a_stop_in_epoch_0_is_told_from_none():
    callback, ran = stop_of(Walker([math.nan] * 4))
    assert ran.current_epoch == 1
    assert (callback.stopped, callback.stopped_epoch, callback.stop_round) == (True, 0, 1)
    assert callback.stopping_reason is StoppingReason.DIVERGED
    assert "NaN or infinite" in callback.stopping_reason_message


def test_a_model_that_never_moves():
    callback, ran = stop_of(Walker([0.0] * 8))
    assert ran.current_epoch == 4
    assert callback.stopping_reason is StoppingReason.NOT_MOVING


def test_divergence_that_is_let_go_is_said_once():
    callback = TaskVectorEarlyStopping(check_finite=False)
    with pytest.warns(UserWarning, match="NaN or infinite since epoch 1") as warned:
        _, ran = stop_of(Walker([1.0, math.nan, math.nan, math.nan]), callback, max_epochs=4)
    assert (ran.current_epoch, callback.stopped) == (4, False)
    assert sum("NaN or infinite" in str(warning.message) for warning in warned) == 1


@pytest.mark.parametrize(
    "arguments",
    [{"precision": "64-true"}, {"precision": "bf16-mixed"}, {"max_epochs": -1}, {"barebones": True}],
    ids=lambda arguments: str(next(iter(arguments.values()))),
)
def test_trainer_arguments(arguments):
    callback, ran = stop_of(Walker(), **arguments)
    assert (callback.stop_round, ran.current_epoch) == (6, 6)


def test_mixed_precision_of_a_real_net():
    callback, _ = stop_of(Regression(), TaskVectorEarlyStopping(0.1, 2), max_epochs=30, precision="bf16-mixed")
    assert callback.stopping_reason is StoppingReason.SATURATED
    assert {theta.dtype for theta in callback.criterion.theta_0} == {torch.float32}


def test_gradient_accumulation():
    # Lightning divides the loss by the number of batches accumulated.
    module = Walker([2 * distance for distance in SATURATING], batches=2)
    callback, ran = stop_of(module, accumulate_grad_batches=2)
    assert (callback.stop_round, ran.global_step) == (6, 6)


def test_measures_trainable_parameters_only():
    watch = Watch()
    module = Walker([3.0, 3.0])

    def move_frozen(*_):
        module.frozen.data += 100
        module.still.data[0] = 5.0  # moved by 4

    callback = TaskVectorEarlyStopping()
    other = Callback()
    other.on_train_batch_end = move_frozen
    trainer(other, callback, watch, max_epochs=1).fit(module)
    assert watch.logged[-1]["task_vector/distance"] == 5.0


@pytest.mark.parametrize("owner", ["module", "callback before", "callback after"])
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_the_fit_starts_with_its_first_batch_whatever_hooks_set_before(hook, owner):
    def set_weights(*_):
        with torch.no_grad():
            module.moving.add_(100.0)

    callback, other, watch = TaskVectorEarlyStopping(), Callback(), Watch()
    module = Walker([3.0])
    if owner == "module":
        module = type("Sets", (Walker,), {hook: set_weights})([3.0])
    else:
        setattr(other, hook, set_weights)
    order = [callback, other] if owner == "callback after" else [other, callback]
    trainer(*order, watch, max_epochs=1).fit(module)
    assert watch.logged[-1]["task_vector/distance"] == pytest.approx(3.0, abs=1e-4)


def test_logs_what_it_sees(tmp_path):
    watch = Watch()
    callback = TaskVectorEarlyStopping(0.01, 3)
    ran = trainer(callback, watch, logger=CSVLogger(tmp_path, name="", version=""), log_every_n_steps=1)
    ran.fit(Walker())
    last = watch.logged[-1]
    assert last["task_vector/distance"] == pytest.approx(1.612)
    assert last["task_vector/growth_rate"] == pytest.approx(0.003 / 1.609, rel=1e-3)
    assert last["task_vector/wait_count"] == 3.0
    assert math.isnan(watch.logged[1]["task_vector/growth_rate"])
    assert ran.progress_bar_metrics["task_vector/wait_count"] == 3.0
    header = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"task_vector/distance", "task_vector/growth_rate", "task_vector/wait_count"} <= set(header)


def test_what_it_logs_can_be_monitored(tmp_path):
    best = ModelCheckpoint(tmp_path, monitor="task_vector/growth_rate", mode="min")
    lightnings = EarlyStopping("task_vector/distance", stopping_threshold=1.55, mode="max")
    ran = trainer(lightnings, best, TaskVectorEarlyStopping(0.01, 3))
    ran.fit(Walker())
    assert ran.current_epoch == 3
    assert best.best_model_score == pytest.approx(0.1 / 1.5, rel=1e-3)


def test_two_side_by_side(tmp_path):
    slow, fast = TaskVectorEarlyStopping(0.01, 5, check_every_n_epochs=2), TaskVectorEarlyStopping(0.1, 2)
    watch = Watch()
    ran = trainer(slow, fast, watch, ModelCheckpoint(tmp_path, filename="end"))
    ran.fit(Walker())
    assert ran.current_epoch == 4  # growth .5, .067, .003: the looser rule comes first
    assert (slow.stopped, fast.stopped) == (False, True)
    assert watch.logged[-1]["task_vector/wait_count"] == slow.wait_count == 0
    assert watch.logged[-1]["task_vector_2/wait_count"] == fast.wait_count == 2
    states = torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"]
    assert states[slow.state_key]["criterion"]["round"] == 2
    assert states[fast.state_key]["criterion"]["round"] == 4


def test_state_key_names_what_decides():
    keys = {
        TaskVectorEarlyStopping(**arguments).state_key
        for arguments in (
            {},
            {"threshold": 0.1},
            {"patience": 3},
            {"min_rounds": 3},
            {"check_finite": False},
            {"check_every_n_epochs": 2},
            {"variant": "released_code"},
            {"observe_only": True},
        )
    }
    assert len(keys) == 8
    assert TaskVectorEarlyStopping(verbose=True).state_key == TaskVectorEarlyStopping().state_key


def test_check_every_n_epochs():
    callback = TaskVectorEarlyStopping(0.01, 1, check_every_n_epochs=2)
    stop_of(Walker(), callback)  # checks 1.5, 1.605, 1.612
    assert (callback.stop_round, callback.stopped_epoch) == (3, 5)


def test_observe_only_lets_it_run():
    callback = TaskVectorEarlyStopping(0.01, 3, observe_only=True)
    callback, ran = stop_of(Walker(), callback)
    assert ran.current_epoch == 8
    assert (callback.stopped, callback.stopped_epoch, callback.stop_round, callback.wait_count) == (True, 5, 6, 5)
    assert callback.stopping_reason is StoppingReason.SATURATED


def test_min_epochs_is_decided_anew():
    # Standing still in epochs 2 to 4, moving from then on: Lightning's own callback would stop at epoch 7.
    walk = [1.0, 2.0, 2.001, 2.002, 2.003, 4.0, 8.0, 16.0]
    callback, ran = stop_of(Walker(walk), min_epochs=7)
    assert (ran.current_epoch, callback.stopped) == (8, False)
    callback, ran = stop_of(Walker(), min_epochs=7)
    assert (ran.current_epoch, callback.stopped_epoch, callback.wait_count) == (7, 6, 4)


def test_min_steps_is_kept():
    callback, ran = stop_of(Walker(), min_steps=7)
    assert (ran.current_epoch, callback.stopped_epoch) == (7, 6)


def test_min_rounds():
    callback, ran = stop_of(Walker(), TaskVectorEarlyStopping(0.01, 3, min_rounds=8))
    assert (ran.current_epoch, callback.stop_round) == (8, 8)


def test_off_under_fast_dev_run():
    callback, ran = stop_of(Walker([math.nan] * 8), fast_dev_run=True)
    assert not callback.stopped
    assert callback.criterion.theta_0 is None
    assert "task_vector/distance" not in ran.callback_metrics


def test_a_second_fit_starts_clean():
    callback, _ = stop_of(Walker())
    assert callback.stopped
    again, ran = stop_of(Walker(), callback)
    assert (ran.current_epoch, again.stopped_epoch, again.stop_round, again.wait_count) == (6, 5, 6, 3)
    other, _ = stop_of(Walker([1.0, 2.0, 4.0]), callback, max_epochs=3)
    assert (other.stopped, other.stopped_epoch, other.wait_count) == (False, 0, 0)
    assert other.stopping_reason_message is None


def test_a_second_fit_of_the_same_trainer_starts_from_where_it_is():
    callback, module = TaskVectorEarlyStopping(0.01, 3), Walker()
    ran = trainer(callback, max_epochs=2)
    ran.fit(module)
    ran.fit_loop.max_epochs = 8
    ran.fit(module)
    assert callback.criterion.theta_0[0][0, 0] == pytest.approx(5.0 + SATURATING[1])
    assert callback.criterion.round == ran.current_epoch - 2


def test_start_weights_on_cpu_is_one_copy_on_the_cpu(monkeypatch):
    taken = []
    copied = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **k: taken.append((a, k)) or copied(self, *a, **k))
    stop_of(Walker(), TaskVectorEarlyStopping(start_weights_on_cpu=True), max_epochs=1)
    assert taken.count((("cpu",), {"copy": True})) == 2  # two trainable parameters


def test_unfrozen_parameters_are_watched_from_then_on():
    class Tuned(Walker):
        def __init__(self):
            super().__init__([3.0] * 6)
            self.backbone = torch.nn.Linear(1, 1, bias=False)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) - self.backbone.weight.sum()

    watch, callback = Watch(), TaskVectorEarlyStopping(0.01, 9)
    tuning = BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_lr=4.0, should_align=False)
    module = Tuned()
    trainer(callback, tuning, watch, max_epochs=3).fit(module)
    assert [row["task_vector/distance"] for row in watch.logged[1:]] == pytest.approx([3.0, 3.0, 5.0])


def test_unfrozen_within_an_epoch_is_said():
    class Unfreeze(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            pl_module.frozen.requires_grad = True

    callback = TaskVectorEarlyStopping()
    with pytest.warns(UserWarning, match="frozen became trainable in the middle of epoch 0"):
        trainer(callback, Unfreeze(), max_epochs=2).fit(Walker())
    assert len(callback.criterion.theta_0) == 3


def test_frozen_again_stays_in_the_distance():
    class Freeze(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            pl_module.still.requires_grad = trainer.current_epoch == 0

    watch = Watch()
    trainer(TaskVectorEarlyStopping(), Freeze(), watch, max_epochs=3).fit(Walker([1.0, 2.0, 3.0]))
    assert watch.logged[-1]["task_vector/distance"] == pytest.approx(3.0)


def test_parameters_must_keep_their_names():
    class Rename(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                pl_module.renamed = pl_module.still
                del pl_module.still

    class Module(Walker):
        def training_step(self, batch, batch_idx):
            return self.moving.sum()

    with pytest.raises(MisconfigurationException, match="measures still from the start of the fit, but Module has no"):
        trainer(TaskVectorEarlyStopping(), Rename()).fit(Module())


def test_needs_something_trainable():
    module = Walker()
    for parameter in (module.moving, module.still):
        parameter.requires_grad = False
    module.configure_optimizers = lambda: None
    with pytest.raises(MisconfigurationException, match="needs a trainable parameter, and Walker has none"):
        trainer(TaskVectorEarlyStopping()).fit(module)


def test_lazy_parameters_are_refused():
    module = Walker()
    module.lazy = torch.nn.LazyLinear(2)
    with pytest.raises(MisconfigurationException, match=r"lazy.weight has no shape yet; run one batch"):
        trainer(TaskVectorEarlyStopping()).fit(module)


@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"])
def test_sharding_strategies_are_refused(name):
    base = type(name, (), {"zero_stage_3": name == "DeepSpeedStrategy"})
    ran = SimpleNamespace(callbacks=[], strategy=type("Users", (base,), {})())
    with pytest.raises(MisconfigurationException, match="needs whole parameters, but Users keeps a shard of them"):
        TaskVectorEarlyStopping().setup(ran, Walker(), "fit")


def test_sharded_parameters_are_refused():
    module = Walker()
    module.still.ds_id = 0  # what DeepSpeed leaves on a partitioned parameter
    with pytest.raises(MisconfigurationException, match="the owner of still keeps a shard"):
        trainer(TaskVectorEarlyStopping()).fit(module)


class Kept(logging.Handler):
    """Keeps what one logger itself is told."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def messages_of(callback=None):
    logger, kept = logging.getLogger("lightning.pytorch.fedstop"), Kept()
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        stop_of(Walker(), callback)
    finally:
        logger.removeHandler(kept)
        logger.setLevel(level)
    return kept.messages


def test_prints_the_stop_and_with_verbose_every_check():
    quiet = messages_of()
    verbose = messages_of(TaskVectorEarlyStopping(0.01, 3, verbose=True))
    assert quiet == [
        "TaskVectorEarlyStopping stops the fit in epoch 5. "
        "The distance from the start (1.612) has grown by less than 1 % an epoch, 3 epochs in a row."
    ]
    assert verbose[:2] == [
        "Epoch 0: distance 1, saturated 0 of 3.",
        "Epoch 1: distance 1.5, growth rate 0.5, saturated 0 of 3.",
    ]
    assert verbose[-1:] == quiet
    assert len(verbose) == 6


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"threshold": 0.0}, ValueError, "`threshold` must be a finite number above 0, got 0.0"),
        ({"patience": -1}, ValueError, "`patience` must be an integer of at least 1, got -1"),
        ({"min_rounds": 1.5}, TypeError, "`min_rounds` must be an integer of at least 0"),
        ({"check_every_n_epochs": 0}, ValueError, "`check_every_n_epochs` must be an integer of at least 1"),
        ({"check_finite": 1}, TypeError, "`check_finite` must be True or False"),
        ({"verbose": "yes"}, TypeError, "`verbose` must be True or False"),
        ({"log_rank_zero_only": None}, TypeError, "`log_rank_zero_only` must be True or False"),
        ({"observe_only": 0}, TypeError, "`observe_only` must be True or False"),
        ({"start_weights_on_cpu": "cpu"}, TypeError, "`start_weights_on_cpu` must be True or False"),
        ({"variant": "v2"}, ValueError, "`variant` must be one of"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        TaskVectorEarlyStopping(**arguments)


def test_runs_in_the_other_namespace():
    other = pytest.importorskip("pytorch_lightning")

    class Module(other.LightningModule):
        __init__ = Walker.__init__
        training_step = Walker.training_step
        configure_optimizers = Walker.configure_optimizers
        train_dataloader = Walker.train_dataloader

    module = Module.__new__(Module)
    other.LightningModule.__init__(module)
    walker = Walker()
    module.__dict__.update(
        {name: walker.__dict__[name] for name in ("distances", "batches", "_parameters", "_buffers")}
    )
    callback = TaskVectorEarlyStopping(0.01, 3)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    ran = other.Trainer(accelerator="cpu", devices=1, max_epochs=8, callbacks=[callback], **quiet)
    ran.fit(module)
    assert (ran.current_epoch, callback.stopped_epoch) == (6, 5)
    assert float(ran.callback_metrics["task_vector/wait_count"]) == 3.0
