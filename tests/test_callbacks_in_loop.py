"""Lightning's own callbacks and a user's, unmodified, in the loop."""

import inspect
from importlib.util import find_spec

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from tests.helpers import Scripted, ToyData, ToyModule, fit, flat, make_loop

# The data of a client comes from `client_dataloader`; a Trainer's own loaders and its state have no counterpart.
NOT_COMPARED = {"train_dataloader", "val_dataloader", "test_dataloader", "state_dict", "load_state_dict"}


def _recording(parent, names, who, log):
    """A subclass of ``parent`` whose hooks note their calls in ``log``."""

    def hook(name, original):
        def call(self, *args, **kwargs):
            log.append(f"{who}.{name}")
            return original(self, *args, **kwargs)

        call.__signature__ = inspect.signature(original)
        return call

    hooks = {name: hook(name, getattr(parent, name)) for name in names if name != "on_exception"}
    return type(parent.__name__, (parent,), hooks)


def _hook_names(cls):
    plain = {"setup", "teardown", "prepare_data", "configure_model", "configure_optimizers", "configure_callbacks"}
    plain |= {"transfer_batch_to_device", "optimizer_step", "optimizer_zero_grad", "backward", "training_step"}
    plain |= {"validation_step", "configure_gradient_clipping", "lr_scheduler_step"}
    functions = [name for name, _ in inspect.getmembers(cls, callable)]
    skipped = NOT_COMPARED | {"on_gpu", "on_save_checkpoint", "on_load_checkpoint"}
    return [name for name in functions if (name.startswith("on_") or name in plain) and name not in skipped]


def _recorders():
    log = []
    scheduler = torch.optim.lr_scheduler

    class Scheduled(ToyModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [scheduler.StepLR(optimizer, 1)]

    callback = _recording(Callback, _hook_names(Callback), "callback", log)()
    module = _recording(Scheduled, _hook_names(LightningModule), "module", log)()
    data = _recording(ToyData, _hook_names(LightningDataModule), "data", log)(sizes=[6])
    return log, callback, module, data


def test_hooks_come_in_a_trainers_order(tmp_path):
    expected, callback, module, data = _recorders()
    Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[callback],
        gradient_clip_val=1.0,
    ).fit(module, data)

    got, callback, module, data = _recorders()
    make_loop(
        tmp_path,
        callback,
        max_rounds=1,
        clients_per_round=1,
        limit_test_batches=0,
        enable_checkpointing=False,
        gradient_clip_val=1.0,
    ).fit(module, data)
    # The loop steps the scheduler once a round, after the evaluation and before callbacks see the round's end.
    expected.remove("module.lr_scheduler_step")
    got.remove("module.lr_scheduler_step")
    assert got == expected


FALLING_THEN_FLAT = [1.0, 0.9, 0.8, 0.85, 0.8, 0.7, 0.6, 0.5]


@pytest.mark.parametrize("check_on_train_epoch_end", [None, True, False])
def test_early_stopping(tmp_path, check_on_train_epoch_end):
    stop = EarlyStopping("val_loss", patience=2, check_on_train_epoch_end=check_on_train_epoch_end)
    loop, _ = fit(tmp_path, stop, module=Scripted(FALLING_THEN_FLAT), max_rounds=8)
    assert (loop.current_epoch, stop.stopped_epoch, stop.best_score.item()) == (5, 4, pytest.approx(0.8))
    assert loop.summary["stop_reason"] == stop.stopping_reason_message
    assert loop.summary["share_used"] == 5 / 8


def test_early_stopping_on_a_training_metric_without_any_evaluation_data(tmp_path):
    class Steady(ToyModule):
        def training_step(self, batch, batch_idx):
            self.log("steady", 1.0)
            return self.loss(batch)

    loop, _ = fit(
        tmp_path, EarlyStopping("steady", patience=1), module=Steady(), data=ToyData(evaluated=False), max_rounds=6
    )
    assert loop.current_epoch == 2


def test_a_stop_wished_before_min_rounds_is_not_saved_up(tmp_path):
    """Counts of patience 1 run out in rounds 4 and 7: with `min_rounds=5` only the second one stops."""
    values = [1.0, 0.9, 0.8, 0.85, 0.7, 0.6, 0.65, 0.5]
    stop = EarlyStopping("val_loss", patience=1)
    loop, _ = fit(tmp_path, stop, module=Scripted(values), max_rounds=8, min_rounds=5)
    assert loop.current_epoch == 7


CHECKPOINTS = {
    "best": {"monitor": "val_loss", "save_top_k": 2, "save_last": True},
    "all": {"save_top_k": -1},
    "every_2_epochs": {"every_n_epochs": 2, "save_top_k": -1},
    "at_train_end": {"monitor": "val_loss", "save_on_train_epoch_end": True, "save_top_k": 2},
    "at_validation_end": {"monitor": "val_loss", "save_on_train_epoch_end": False, "save_last": True},
    "worst": {"monitor": "val_loss", "mode": "max", "filename": "{epoch}-{val_loss:.2f}"},
    "last_only": {"save_top_k": 0, "save_last": True},
}


@pytest.mark.parametrize("arguments", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_model_checkpoint_saves_what_it_saves_in_a_trainer(tmp_path, arguments):
    values = [0.5, 0.3, 0.4, 0.2]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    expected = ModelCheckpoint(tmp_path / "trainer", **arguments)
    Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=4,
        limit_train_batches=1,
        num_sanity_val_steps=0,
        callbacks=[expected],
        default_root_dir=tmp_path,
        **quiet,
    ).fit(Scripted(values), ToyData())
    got = ModelCheckpoint(tmp_path / "loop", **arguments)
    fit(tmp_path, got, module=Scripted(values), max_rounds=4)

    def saved(folder):
        files = {path.name: torch.load(path, weights_only=True) for path in (tmp_path / folder).glob("*.ckpt")}
        return {name: (content["epoch"], content["global_step"]) for name, content in files.items()}

    assert saved("loop") == saved("trainer") != {}
    assert got.best_model_path.rpartition("/")[2] == expected.best_model_path.rpartition("/")[2]


def test_model_checkpoint_by_steps_saves_the_global_model_of_the_round_before(tmp_path):
    """A server update is a global step: after 2 and 4 of them, seen at the next local batch of any client."""
    thetas = {}
    note = LambdaCallback(on_train_epoch_end=lambda loop, module: thetas.update({loop.global_step: flat(module)}))
    saver = ModelCheckpoint(tmp_path / "steps", every_n_train_steps=2, save_top_k=-1)
    fit(tmp_path, saver, note, max_rounds=5)
    files = {path.name: torch.load(path, weights_only=True) for path in (tmp_path / "steps").glob("*.ckpt")}
    assert sorted(content["global_step"] for content in files.values()) == [2, 4]
    for content in files.values():
        saved = torch.cat([value.reshape(-1) for value in content["state_dict"].values()])
        assert torch.equal(saved, thetas[content["global_step"]])


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_timer(tmp_path, interval):
    """The timer has run out in the second round: the round is finished and nothing follows."""
    timer = Timer("01:00:00:00", interval=interval)

    def run_out(loop, module):
        if loop.current_epoch == 1:
            timer._duration = 0.0

    loop, _ = fit(tmp_path, timer, LambdaCallback(on_train_epoch_start=run_out), max_rounds=5)
    assert loop.current_epoch == 2
    assert "should_stop" in loop.summary["stop_reason"]


def test_a_stop_before_the_first_round_trains_nothing(tmp_path):
    module = ToyModule()
    before = flat(module)
    loop, _ = fit(tmp_path, Timer("00:00:00:00"), module=module)
    assert loop.summary["stop_round"] == 0
    assert torch.equal(flat(module), before)


def test_lambda_callback_gets_loop_and_module(tmp_path):
    seen = []
    hooks = {
        "on_train_epoch_start": lambda loop, module: seen.append(("start", loop.current_epoch, module.current_epoch)),
        "on_validation_end": lambda loop, module: seen.append(("validation", loop.current_epoch, loop.global_step)),
        "on_train_epoch_end": lambda loop, module: seen.append(("end", loop.current_epoch, loop.global_step)),
        "on_fit_end": lambda loop, module: seen.append(("fit", loop.current_epoch, loop.global_step)),
    }
    fit(tmp_path, LambdaCallback(**hooks), max_rounds=2)
    rounds = [[("start", r, r), ("validation", r, r + 1), ("end", r, r + 1)] for r in (0, 1)]
    assert seen == [*rounds[0], *rounds[1], ("fit", 2, 2)]


class Decaying(ToyModule):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@pytest.mark.parametrize("interval", [None, "epoch"])
def test_learning_rate_monitor(tmp_path, interval):
    monitor, logger = LearningRateMonitor(logging_interval=interval), CSVLogger(tmp_path / "csv")
    fit(tmp_path, monitor, module=Decaying(), logger=logger)
    assert monitor.lrs == {"lr-SGD": pytest.approx([0.1, 0.05, 0.025])}
    assert "lr-SGD" in (tmp_path / "csv/lightning_logs/version_0/metrics.csv").read_text()


def test_learning_rate_monitor_needs_a_logger_but_not_in_a_dry_run(tmp_path):
    with pytest.raises(MisconfigurationException, match="logger"):
        fit(tmp_path, LearningRateMonitor(), logger=False)
    fit(tmp_path, LearningRateMonitor(), fast_dev_run=True)


needs_psutil = pytest.mark.skipif(find_spec("psutil") is None, reason="DeviceStatsMonitor needs psutil on the CPU")
DISPLAYS = [TQDMProgressBar, RichProgressBar, ModelSummary, RichModelSummary]
DISPLAYS.append(pytest.param(DeviceStatsMonitor, marks=needs_psutil))


@pytest.mark.parametrize("display", DISPLAYS)
def test_displays(tmp_path, display, capsys):
    loop, _ = fit(tmp_path, display(), max_rounds=2, enable_progress_bar=None)
    assert loop.current_epoch == 2
    if display is RichModelSummary:
        assert "Linear" in capsys.readouterr().out


@pytest.mark.parametrize(
    "callback",
    [
        lambda: StochasticWeightAveraging(swa_lrs=0.1),
        lambda: GradientAccumulationScheduler({0: 2}),
        EMAWeightAveraging,
        BatchSizeFinder,
        LearningRateFinder,
    ],
)
def test_callbacks_that_need_a_trainers_own_loop_are_refused(tmp_path, callback):
    with pytest.raises(TypeError, match="cannot run in a FederatedLoop"):
        make_loop(tmp_path, callback())

    class Configured(ToyModule):
        def configure_callbacks(self):
            return callback()

    with pytest.raises(TypeError, match="cannot run in a FederatedLoop"):
        fit(tmp_path, module=Configured())


class TwoParts(ToyModule):
    def __init__(self):
        super().__init__(net=nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
        self.backbone = self.net[0]

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Finetuning(BaseFinetuning):
    """A user's own, of which nobody knows when it unfreezes."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        pass


@pytest.mark.parametrize("callback", [BackboneFinetuning(unfreeze_backbone_at_epoch=2), Finetuning()])
def test_finetuning_is_refused_at_construction(tmp_path, callback):
    message = f"`callbacks` holds {type(callback).__name__}, which unfreezes parameters during a fit"
    with pytest.raises(TypeError, match=message):
        make_loop(tmp_path, callback, max_rounds=3)

    class Configured(TwoParts):
        def configure_callbacks(self):
            return callback

    with pytest.raises(TypeError, match=message):
        fit(tmp_path, module=Configured(), max_rounds=3)
    assert not list(tmp_path.iterdir())


def test_parameters_that_are_frozen_during_a_fit_are_refused(tmp_path):
    freeze = LambdaCallback(on_train_start=lambda loop, module: module.net[0].weight.requires_grad_(False))
    with pytest.raises(ValueError, match=r"net\.0\.weight changed"):
        fit(tmp_path, freeze, module=TwoParts())


def test_backbone_finetuning_that_keeps_the_backbone_frozen_runs(tmp_path):
    module = TwoParts()
    before = module.backbone.weight.clone()
    fit(tmp_path, BackboneFinetuning(unfreeze_backbone_at_epoch=3), module=module)
    assert torch.equal(module.backbone.weight, before)
