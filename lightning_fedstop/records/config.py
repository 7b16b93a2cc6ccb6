"""Configuration of a run that was built in Python, for its record."""

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lightning_fedstop.utilities.describe import constructor_arguments

HEADER = (
    "# Described from the objects of a run that was built in Python. `fedstop fit --config` runs it again where each\n"
    "# class can be imported and keeps its arguments under their names, or as hyperparameters.\n"
)


def write_config(path: Path, trainer: Mapping[str, Any], model: Any, datamodule: Any, seed: str | None) -> None:
    """Write ``config.yaml`` in the layout of the command line, unless there is one.

    Args:
        path: the file.
        trainer: the loop's arguments by name, as :func:`described` gives them.
        model: the module.
        datamodule: its data.
        seed: what ``seed_everything`` set, as text; ``None`` if it was not called.
    """
    if path.exists():
        return
    everything: dict[str, Any] = {} if seed is None else {"seed_everything": int(seed)}
    content = everything | {"trainer": dict(trainer), "model": described(model), "data": described(datamodule)}
    path.write_text(HEADER + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def described(value: Any) -> Any:
    """Describe a value in YAML's types, as the command line does.

    Args:
        value: numbers and text stay as they are, objects become their class and their arguments, functions their path.

    >>> from functools import partial
    >>> described(partial(dict, a=(1, 2)))
    {'class_path': 'builtins.dict', 'init_args': {'a': [1, 2]}}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, np.generic):
        return described(value.item())
    if isinstance(value, Mapping):
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [described(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, functools.partial):
        return _class(value.func, value.keywords)
    if inspect.isclass(value) or inspect.isroutine(value):
        return _path(value)
    return _class(type(value), _arguments(value))


def _arguments(owner: Any) -> Mapping[str, Any]:
    """Hyperparameters where the object has saved any, else what it keeps of its arguments."""
    hparams = dict(getattr(owner, "hparams_initial", None) or {})
    kept = constructor_arguments(owner)
    package = type(owner).__module__.partition(".")[0]
    if package == "lightning":
        return {name: value for name, value in kept.items() if not _is_default(owner, name, value)}
    if package == "lightning_fedstop":
        return kept | hparams
    # An attribute of somebody else's class may be anything of the argument's name: `self.net = net or default()`.
    return hparams or {name: value for name, value in kept.items() if _is_plain(value)}


def _is_default(owner: object, name: str, value: object) -> bool:
    return bool(inspect.signature(type(owner)).parameters[name].default == value)


def _class(kind: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    init_args = {str(name): described(value) for name, value in arguments.items()}
    return {"class_path": _path(kind)} | ({"init_args": init_args} if init_args else {})


def _path(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | str | Path)
