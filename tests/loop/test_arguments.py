import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_fedstop.data import FederatedDataModule
from lightning_fedstop.loop.arguments import check_module, reorder_callbacks
from lightning_fedstop.stopping import TaskVectorEarlyStopping
from tests.helpers import ToyData, ToyModule, make_loop

NAN = float("nan")
REFUSED = {
    "max_rounds": ([0, -1, 2.0, "5", True, None], "an integer of at least 1, got"),
    "local_epochs": ([0, 1.5], "an integer of at least 1, got"),
    "num_nodes": ([0], "an integer of at least 1, got"),
    "check_val_every_n_round": ([0, 0.5, True], "an integer of at least 1, got"),
    "fast_dev_run": ([-1, 1.5], "an integer of at least 0, got"),
    "gradient_clip_val": ([0, -1.0, NAN, float("inf"), "1", True], "a finite number above 0, got"),
    "limit_train_batches": ([-1, 1.1, NAN, True, "all"], "a number of batches .* a share .* or None"),
    "limit_val_batches": ([-0.1], "a number of batches"),
    "limit_test_batches": ([2.0], "a number of batches"),
    "clients_per_round": ([0, 1.5, True], "an integer of at least 1 .* or a float in"),
    "weighting": (["size", None], "must be one of 'uniform', 'samples', got"),
    "on_nonfinite": (["ignore"], "must be one of 'stop', 'drop', 'keep', got"),
    "seed": ([-1, 1.0], "an integer of at least 0, got"),
}
CASES = [(name, value, message) for name, (values, message) in REFUSED.items() for value in values]


@pytest.mark.parametrize(("name", "value", "message"), CASES)
def test_values_out_of_range_are_refused_with_what_is_allowed(tmp_path, name, value, message):
    with pytest.raises((TypeError, ValueError), match=f"`{name}` must be .*{message}|`{name}` {message}"):
        make_loop(tmp_path, **{name: value})


@pytest.mark.parametrize("arguments", [{"min_rounds": -1}, {"min_rounds": 1.0}, {"max_rounds": 3, "min_rounds": 4}])
def test_min_rounds(tmp_path, arguments):
    with pytest.raises((TypeError, ValueError), match="`min_rounds` must be"):
        make_loop(tmp_path, **arguments)
    make_loop(tmp_path, max_rounds=3, min_rounds=3)


@pytest.mark.parametrize("name", ["method", "cohort", "callbacks", "logger"])
def test_objects_of_another_class_are_refused(tmp_path, name):
    value = [nn.ReLU()] if name in ("callbacks", "logger") else nn.ReLU()
    with pytest.raises(TypeError, match=rf"`{name}` must be .*, got ReLU\(\)"):
        make_loop(tmp_path, **{name: value})


@pytest.mark.parametrize("name", ["limit_train_batches", "limit_val_batches", "limit_test_batches"])
@pytest.mark.parametrize("value", [None, 0, 5, 0.0, 0.5, 1.0])
def test_limits_that_are_allowed(tmp_path, name, value):
    assert getattr(make_loop(tmp_path, **{name: value}), name) == value


def test_callbacks_whose_states_would_mix_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"whose states would mix: .*val_loss"):
        make_loop(tmp_path, EarlyStopping("val_loss"), EarlyStopping("val_loss"))
    make_loop(tmp_path, EarlyStopping("val_loss"), EarlyStopping("train_loss"), LambdaCallback(), LambdaCallback())
    make_loop(tmp_path, TaskVectorEarlyStopping(0.1, 2), TaskVectorEarlyStopping(0.01, 5))


def test_a_single_callback_needs_no_list(tmp_path):
    callback = LambdaCallback()
    assert callback in make_loop(tmp_path, callbacks=callback).callbacks


def test_a_model_checkpoint_without_checkpointing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`enable_checkpointing` must not be False"):
        make_loop(tmp_path, ModelCheckpoint(), enable_checkpointing=False)


class Ordinary(LightningDataModule):
    pass


@pytest.mark.parametrize(
    ("datamodule", "message"),
    [
        (Ordinary(), r"Ordinary has no clients: wrap it with `FederatedDataModule.from_datamodule\(Ordinary"),
        (None, "`datamodule` must be a `FederatedDataModule`, which knows its clients, got NoneType"),
        ([1], "got list"),
    ],
)
def test_data_without_clients_is_refused(tmp_path, datamodule, message):
    with pytest.raises(MisconfigurationException, match=message):
        make_loop(tmp_path).fit(ToyModule(), datamodule)
    assert not list(tmp_path.iterdir())


def test_modules_of_another_kind_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"must be a `lightning\.pytorch\.LightningModule`, got Linear\.$"):
        check_module(nn.Linear(1, 1))
    twin = type("Twin", (nn.Module,), {"__module__": "pytorch_lightning.core"})
    with pytest.raises(TypeError, match="`pytorch_lightning` is another package"):
        check_module(type("Mine", (twin,), {})())


def test_a_compiled_module_is_refused_with_a_hint():
    compiled = torch.compile(ToyModule(), backend="eager")
    with pytest.raises(TypeError, match=r"got OptimizedModule; give the module itself, .* `module.net = torch"):
        check_module(compiled)


def test_a_learning_rate_monitor_of_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"LearningRateMonitor.*logs? nothing .* give it logging_interval='epoch'"):
        make_loop(tmp_path, LearningRateMonitor(logging_interval="step"))
    make_loop(tmp_path, LearningRateMonitor())


def of_the_other_package():
    twin = type("Twin", (), {"__module__": "pytorch_lightning.core"})
    return type("Mine", (twin,), {})()


@pytest.mark.parametrize(
    "take",
    [
        lambda mine, path: make_loop(path).fit(mine, ToyData()),
        lambda mine, path: make_loop(path).fit(ToyModule(), mine),
        lambda mine, path: FederatedDataModule.from_datamodule(mine, num_clients=2),
        lambda mine, path: make_loop(path, mine),
        lambda mine, path: make_loop(path, logger=mine),
        lambda mine, path: make_loop(path, logger=[mine]),
    ],
)
def test_whatever_comes_from_the_other_package_is_refused_with_its_name(tmp_path, take):
    with pytest.raises((TypeError, MisconfigurationException), match="`pytorch_lightning` is another package: import"):
        take(of_the_other_package(), tmp_path)


def test_a_module_without_a_training_step_is_evaluated_but_not_trained():
    module = LightningModule()
    assert check_module(module) is module
    with pytest.raises(MisconfigurationException, match="LightningModule needs a `training_step` to be trained"):
        check_module(module, trains=True)


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork", "ddp_notebook"])
def test_strategies_that_copy_this_process_are_refused(tmp_path, strategy):
    with pytest.raises(ValueError, match=f"`strategy` must start whole processes, .* got '{strategy}'"):
        make_loop(tmp_path, strategy=strategy)


def test_checkpoints_come_last():
    saver, other = ModelCheckpoint(), LambdaCallback()
    assert reorder_callbacks([saver, other]) == [other, saver]
