"""What makes a run the run it is: settings that must not change between its parts."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_fedstop.solver import LocalSolver

RUN_ARGUMENTS = (
    "local_epochs",
    "gradient_clip_val",
    "weighting",
    "precision",
    "drop_single_sample_batches",
    "limit_train_batches",
)
"""Arguments of the loop that decide what a round computes; all others may change when a run is resumed."""

OTHER_ARGUMENTS = ("max_rounds", "min_rounds", "on_nonfinite", "check_val_every_n_round", "check_test_every_n_round")
"""Arguments whose change is worth a word."""

Settings = dict[str, Any]


def run_settings(loop: Any, solver: LocalSolver) -> Settings:
    """The settings of a run by key: numbers, text and ``None`` only.

    Args:
        loop: the loop, with its module and data.
        solver: the module's optimizer, before a checkpoint's rates are loaded into it.
    """
    found: Settings = {f"trainer.{name}": _plain(getattr(loop, name, None)) for name in RUN_ARGUMENTS}
    found["trainer.precision"] = str(loop.fabric.strategy.precision.precision)
    for name in ("method", "cohort"):
        part = getattr(loop, name)
        found[f"trainer.{name}"] = type(part).__name__
        found |= {f"trainer.{name}.{key}": value for key, value in _arguments(part)}
    found |= {f"model.{key}": value for key, value in _flat(dict(loop.module.hparams))}
    found["data.batch_size"] = _plain(getattr(loop.datamodule, "batch_size", None))
    found["optimizer"] = type(solver.optimizer).__name__
    for number, group in enumerate(solver.optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        where = "optimizer" if len(solver.optimizer.param_groups) == 1 else f"optimizer.group_{number}"
        found |= {f"{where}.{key}": value for key, value in _flat(options)}
    if solver.scheduler_config is not None:
        scheduler: Any = solver.scheduler_config.scheduler
        found["lr_scheduler"] = type(scheduler).__name__
        state = {key: value for key, value in scheduler.state_dict().items() if not key.startswith("_")}
        found |= {f"lr_scheduler.{key}": value for key, value in _flat(state)}
    return found


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, in words.

    >>> differences({"model.lr": 0.1, "trainer.local_epochs": 5}, {"model.lr": 0.01, "trainer.local_epochs": 5})
    ['model.lr was 0.1 and is 0.01']
    """
    keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    return [f"{key} was {then.get(key)!r} and is {now.get(key)!r}" for key in keys]


def _arguments(part: object) -> Iterator[tuple[str, Any]]:
    """What an object was built with, as far as it keeps it under the arguments' names."""
    names = inspect.signature(type(part)).parameters
    return _flat({name: getattr(part, name) for name in names if hasattr(part, name)})


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif _is_plain(value) or (isinstance(value, list | tuple) and all(map(_is_plain, value))):
            yield f"{prefix}{key}", _plain(value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
