"""The configuration of a run that was built in Python, for its record."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

HEADER = "# Described from the objects of a run that was built in Python; the command line may lack what they need.\n"


def write_config(path: Path, trainer: Mapping[str, Any], model: Any, datamodule: Any) -> None:
    """Write ``config.yaml`` in the layout of the command line, unless the command line has written it.

    Args:
        path: the file.
        trainer: the loop's arguments by name.
        model: its class, and the hyperparameters it has saved.
        datamodule: the same.
    """
    if path.exists():
        return
    arguments = {name: _plain(value) for name, value in trainer.items()}
    content = {"trainer": arguments, "model": _described(model), "data": _described(datamodule)}
    path.write_text(HEADER + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _described(owner: Any) -> dict[str, Any]:
    kind = type(owner)
    described: dict[str, Any] = {"class_path": f"{kind.__module__}.{kind.__qualname__}"}
    hparams = getattr(owner, "hparams_initial", None) or _arguments_of(owner)
    if hparams:
        described["init_args"] = {str(name): _plain(value) for name, value in dict(hparams).items()}
    return described


def _arguments_of(owner: Any) -> dict[str, Any]:
    """What a plain object of this package was built with: its public attributes."""
    if not type(owner).__module__.startswith("lightning_fedstop."):
        return {}
    return {name: value for name, value in vars(owner).items() if not name.startswith("_") and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    """A value that YAML can hold: numbers and text as they are, objects by class and arguments."""
    if _is_plain(value):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return _described(value)
