"""Hyperparameters of a run for loggers: its federation, rules, module and data."""

from collections.abc import Mapping
from typing import Any

from lightning_fedstop.core.seeding import resolve_seed
from lightning_fedstop.stopping.callbacks.base import CriterionCallback
from lightning_fedstop.utilities.describe import constructor_arguments


def logged_hyperparameters(loop: Any) -> dict[str, Any]:
    """Collect the hyperparameters of federation, stopping rules, module and data module.

    Args:
        loop: the loop, once its settings are known.

    Returns:
        By name: ``method`` and ``method/mu``, ``local_epochs``, ``clients_per_round``, ``num_clients``, ``skew`` and
        ``skew/concentration``, ``rule``, ``threshold``, ``patience``, ``seed`` and the like. A further rule's begin
        with its class, ``ConsensusEarlyStopping/threshold``. A hyperparameter of the module or the data module whose
        name is taken by another value begins with ``model/`` or ``data/``.
    """
    found = _run_hyperparameters(loop) | _rule_hyperparameters(loop)
    for prefix, owner in (("model", loop.module), ("data", loop.datamodule)):
        if not getattr(owner, "_log_hyperparams", False):
            continue
        for name, value in owner.hparams_initial.items():
            if name.startswith("_") or (prefix == "data" and name == "skew" and "skew" in found):
                continue  # how the command line built it; what is told of the skew already
            is_taken = name in found and not (type(found[name]) is type(value) and found[name] == value)
            found[f"{prefix}/{name}" if is_taken else name] = value
    return found


def _run_hyperparameters(loop: Any) -> dict[str, Any]:
    settings: Mapping[str, Any] = loop.checkpoints.settings
    start = "trainer."
    found = {name.removeprefix(start).replace(".", "/"): v for name, v in settings.items() if name.startswith(start)}
    found |= {name: getattr(loop, name) for name in ("max_rounds", "min_rounds", "on_nonfinite")}
    found |= {"seed": resolve_seed(loop.seed), "num_clients": len(loop.datamodule.client_sizes)}
    skew = getattr(loop.datamodule, "skew", None)
    return found if skew is None else found | _named("skew", skew)


def _rule_hyperparameters(loop: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rule in (callback for callback in loop.own_callbacks.given if isinstance(callback, CriterionCallback)):
        named = _named("rule", rule) if not found else _named(type(rule).__name__, rule)
        found |= {key.removeprefix("rule/"): value for key, value in named.items()}
    return found


def _named(name: str, part: object) -> dict[str, Any]:
    arguments = {f"{name}/{key}": value for key, value in constructor_arguments(part).items()}
    return {name: type(part).__name__} | arguments
