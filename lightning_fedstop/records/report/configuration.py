"""Saved configurations in the terms of a report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from lightning_fedstop.records.report.numbers import is_value
from lightning_fedstop.utilities.describe import leaves

# What does not change the model that a run arrives at, or names the run rather than the setting.
_SAME_TRAINING = (
    "seed_everything",
    "ckpt_path",
    "verbose",
    "trainer.accelerator",
    "trainer.callbacks",
    "trainer.check_",
    "trainer.client_states",
    "trainer.default_root_dir",
    "trainer.devices",
    "trainer.enable_",
    "trainer.logger",
    "trainer.num_nodes",
    "trainer.seed",
    "trainer.strategy",
    "data.init_args.cache_dir",
    "data.init_args.download",
    "data.init_args.eval_batch_size",
    "data.init_args.partition_path",
    "data.init_args.root",
    "data.init_args.seed",
)
_SECRET = re.compile(r"(^|[._])(\w*(password|secret|token|credential)s?|\w*api_?key)$", re.IGNORECASE)
_SKEWS = {"DirichletSkew": "Dirichlet", "QuantitySkew": "quantity", "PathologicalSkew": "pathological", "Iid": "IID"}
_DEGREES = ("concentration", "classes_per_client")


@dataclass(frozen=True)
class Rule:
    """Stopping rule of a configuration."""

    name: str
    threshold: float | None
    patience: int | None
    observes: bool

    def __str__(self) -> str:
        settings = [is_value("τ", self.threshold)] if self.threshold is not None else []
        settings += [is_value("ρ", self.patience)] if self.patience is not None else []
        return self.name + (f" ({', '.join(settings)})" if settings else "")


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Join nested keys by points; secrets are not shown.

    >>> flat({"trainer": {"max_rounds": 5, "callbacks": [{"class_path": "Stop"}]}, "wandb_api_key": "x"})
    {'trainer.max_rounds': 5, 'trainer.callbacks.0.class_path': 'Stop', 'wandb_api_key': '(hidden)'}
    """
    named = leaves(config, into_lists=True) if config else ()
    return {key: "(hidden)" if _SECRET.search(key) and value is not None else value for key, value in named}


def training(config: Mapping[str, Any]) -> dict[str, Any]:
    """Select the flat keys on which the trained model depends, without seeds.

    Runs belong together if these are equal.
    """
    # A class without arguments is written with an empty mapping or with none.
    given = {key: value for key, value in flat(config).items() if value not in ({}, [])}
    kept = {key: value for key, value in given.items() if not key.startswith(_SAME_TRAINING)}
    short = {key: class_name(value) if key.endswith("class_path") else value for key, value in kept.items()}
    for name in [key for key in short if key.startswith("trainer.method")]:
        short[name.removeprefix("trainer.")] = short.pop(name)
    if short.pop("method", None) is None:
        # `null` is FedAvg.
        short.setdefault("method.class_path", "FedAvg")
    return short


def class_name(path: Any) -> str:
    """Name a class without its modules; methods of the released code say so.

    >>> class_name("lightning_fedstop.methods.released_code.FedLESAM")
    'FedLESAM (released code)'
    """
    text = str(path)
    return text.rpartition(".")[2] + (" (released code)" if "released_code." in text else "")


def method(config: Mapping[str, Any]) -> str | None:
    """Return the method's name."""
    if not config:
        return None
    chosen = _dig(config, "trainer", "method")
    path = chosen.get("class_path") if isinstance(chosen, Mapping) else chosen
    return "FedAvg" if path is None else class_name(path)


def data_set(config: Mapping[str, Any]) -> str | None:
    """Name the data set: of MedMNIST, of a file, or of the data module."""
    arguments = _dig(config, "data", "init_args") or {}
    if isinstance(arguments.get("dataset"), str):
        return str(arguments["dataset"])
    if isinstance(arguments.get("path"), str):
        return PurePath(arguments["path"]).stem
    path = _dig(config, "data", "class_path")
    return None if path is None else class_name(path)


def skew(config: Mapping[str, Any]) -> tuple[str, float | None] | None:
    """Return the kind of the skew and its degree c, or ``None`` without a skew.

    The degree is the concentration, or the classes a client.
    """
    arguments = _dig(config, "data", "init_args")
    if not isinstance(arguments, Mapping) or "skew" not in arguments:
        return None
    chosen = arguments["skew"]
    if not isinstance(chosen, Mapping):
        return (_SKEWS["Iid"] if chosen is None else str(chosen), None)
    name = class_name(chosen.get("class_path"))
    degrees = [(chosen.get("init_args") or {}).get(key) for key in _DEGREES]
    known = [float(value) for value in degrees if isinstance(value, int | float)]
    return _SKEWS.get(name, name), known[0] if known else None


def skew_text(config: Mapping[str, Any]) -> str | None:
    """Describe the skew in words."""
    found = skew(config)
    if found is None:
        return None
    kind, degree = found
    return kind if degree is None else f"{kind}, {is_value('c', degree)}"


def without_degree(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Leave the skew's degree c out of the result of :func:`training`."""
    return {
        key: value
        for key, value in settings.items()
        if not key.endswith(tuple(f"skew.init_args.{d}" for d in _DEGREES))
    }


def seed(config: Mapping[str, Any]) -> int | None:
    """Return the seed of a run."""
    for value in (_dig(config, "trainer", "seed"), config.get("seed_everything")):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def rules(config: Mapping[str, Any]) -> list[Rule]:
    """List the stopping rules among the callbacks."""
    callbacks = _dig(config, "trainer", "callbacks") or []
    found = []
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        if not isinstance(callback, Mapping):
            continue
        kind, given = class_name(callback.get("class_path")), callback.get("init_args") or {}
        name = {
            "TaskVectorEarlyStopping": "task vector",
            "ConsensusEarlyStopping": "consensus",
            "ValidationEarlyStopping": _MONITORS.get(given.get("monitor", "val_loss"), str(given.get("monitor"))),
            "EarlyStopping": f"EarlyStopping on {given.get('monitor')}",
        }.get(kind)
        if name is None:
            continue
        threshold, patience = given.get("threshold", given.get("min_delta")), given.get("patience")
        found.append(
            Rule(
                name,
                float(threshold) if isinstance(threshold, int | float) else None,
                patience if isinstance(patience, int) else None,
                bool(given.get("observe_only", False)),
            )
        )
    return found


_MONITORS = {"val_loss": "validation loss", "val_acc": "validation accuracy"}


def _dig(config: Mapping[str, Any], *keys: str) -> Any:
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
