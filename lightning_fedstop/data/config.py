"""Skews and paths in the plain types that checkpoints and configuration files hold."""

import inspect
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fedstop.data.partitions.iid import Iid
from lightning_fedstop.data.partitions.skew import Skew


def as_skew(value: Skew | Mapping[str, Any] | None) -> Skew:
    """A skew from itself, from what :meth:`Skew.as_config` gave, or :class:`Iid` from ``None``.

    Raises:
        TypeError: if ``value`` is neither, or names a class that is no skew, which is not called.

    >>> as_skew({"class_path": "lightning_fedstop.data.partitions.iid.Iid", "init_args": {}})
    Iid(variant='paper', min_samples=1)
    """
    if value is None:
        return Iid()
    if isinstance(value, Mapping) and "class_path" in value:
        module, _, name = str(value["class_path"]).rpartition(".")
        # The mapping may come from a checkpoint: whatever else its path names must not be called.
        named = getattr(import_module(module), name)
        if inspect.isclass(named) and issubclass(named, Skew):
            value = named(**value.get("init_args", {}))
    if not isinstance(value, Skew):
        raise TypeError(f"`skew` must be a Skew such as `DirichletSkew(concentration=0.1)`, got {value!r}.")
    return value


def plain(value: Any) -> Any:
    """A hyperparameter as a checkpoint that loads with ``weights_only=True`` may hold it."""
    if isinstance(value, Skew):
        config = value.as_config()
        # A skew of one's own may hold an array, such as the site of each sample.
        return config | {"init_args": {name: plain(argument) for name, argument in config["init_args"].items()}}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return str(value) if isinstance(value, Path) else value
