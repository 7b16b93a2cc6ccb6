"""Checks of a resume: settings, clients and weights that must not have changed."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fedstop.federation.cohort import cohort_size
from lightning_fedstop.module.batches import client_sizes
from lightning_fedstop.module.optimizer import LocalSolver
from lightning_fedstop.utilities.describe import constructor_arguments, leaves

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

FEDERATED_KEY = "federated"
"""The entry of a checkpoint that a ``Trainer`` has no counterpart for."""

Settings = dict[str, Any]

_KINDS: dict[str, type] = {"method": str, "seed": int, "num_clients": int, "round": int, "theta": Tensor}
_ENTRIES = (
    *("round", "pending", "row", "nonfinite_reason", "metrics", "theta", "num_clients", "partition", "seed", "method"),
    *("method_state", "client_states", "solver", "loss_scales", "unsaved_state", "log_dir"),
)

SOLVER_KEYS = ("optimizer", "lr_scheduler")
# How a partition came about: its digest says whether it is the same.
_DEALING = re.compile(r"data\.(\w+\.)*?(num_clients|skew|seed|partition_path)\b")
# Where data lies and how it is read, which another machine may well do otherwise.
_READING = re.compile(
    r"data\.(\w+\.)*?(\w+_)?(root|dir|path|folder|file|download|cache|workers|pin|persistent|prefetch|verbose)(_\w+)?$"
    r"|data\.(\w+\.)*?(eval|val|test|predict)_batch_size$"
)
# How the model computes what it computes.
_COMPUTING = re.compile(r"model\.(compile|channels_last|matmul_layers)$")
_LONGEST = 60


def check_resumable(checkpoint: dict[str, Any], path: str | os.PathLike[str], method: str, seed: int) -> None:
    """Refuse a checkpoint that would not continue the run it comes from.

    Raises:
        ValueError: if it is no checkpoint of a federation, or one of another method or seed.
    """
    name = os.fspath(path)
    state = checkpoint.get(FEDERATED_KEY)
    if not isinstance(state, dict):
        raise ValueError(f"{name!r} holds weights only: resuming needs a checkpoint that `FederatedLoop.fit` wrote.")
    for key, kind in _KINDS.items():
        if not isinstance(state.get(key), kind) and (key in state or key in ("method", "seed")):
            raise ValueError(f"{name!r} was written by another version of this package, or damaged: see {key!r} in it.")
    if state["method"] != method:
        raise ValueError(f"{name!r} comes from {state['method']}, this run uses {method}: resume with the same method.")
    if state["seed"] != seed:
        raise ValueError(f"{name!r} comes from seed {state['seed']}, this run uses {seed}: resume with the same seed.")


def check_fits(then: Mapping[str, Any], now: Mapping[str, Any], path: str | None) -> None:
    """Refuse the state of a run that this one would not continue.

    Args:
        then: the checkpoint's state.
        now: the present ``settings``, ``num_clients``, ``partition``, ``clients`` and ``theta``.
        path: the checkpoint.

    Raises:
        ValueError: with what differs.
    """
    if missing := [key for key in _ENTRIES if key not in then]:
        raise ValueError(f"{path!r} was written by another version of this package: it has no {missing[0]!r}.")
    check_settings(then, now["settings"], now["partition"], path)
    if then["num_clients"] != now["num_clients"]:
        raise ValueError(
            f"{path!r} comes from a federation of {then['num_clients']} clients, this one has"
            f" {now['num_clients']}: resume with the same data and partition."
        )
    if then["partition"] != now["partition"]:
        raise ValueError(f"{path!r} comes from another partition: resume with the same data, skew and seed.")
    if other := client_difference(then.get("clients", {}), now["clients"]):
        raise ValueError(
            f"{path!r} comes from other clients ({other}): resume with the same clients in the same order."
        )
    if then["theta"].shape != now["theta"].shape:
        raise ValueError(
            f"{path!r} comes from a run with {then['theta'].numel()} trainable parameters, this one has"
            f" {now['theta'].numel()}: resume with the same parameters frozen."
        )


def check_settings(state: Mapping[str, Any], settings: Settings, partition: str | None, path: str | None) -> None:
    """Refuse settings that make it another run.

    Args:
        state: the checkpoint's state.
        settings: the present ones.
        partition: the digest of the present partition.
        path: the checkpoint.

    Raises:
        ValueError: naming them all.
    """
    same_partition = partition is not None and state.get("partition") == partition
    if changed := run_differences(state.get("settings", settings), settings, same_partition):
        raise ValueError(
            f"{path!r} comes from another run ({'; '.join(changed)}): resume with the same settings, or start anew."
        )


def partition_digest(datamodule: Any) -> str | None:
    """Digest by which partitions are told apart; ``None`` where the data module deals nothing itself."""
    try:
        return str(datamodule.partition.digest)
    except (AttributeError, RuntimeError):
        return None


def run_settings(loop: Any, solver: LocalSolver | None = None) -> Settings:
    """Settings of a run by key: numbers, text, ``None`` and lists of them.

    Args:
        loop: the loop, with its module and data, after the data's ``setup``.
        solver: the module's optimizer, before a checkpoint's rates are loaded into it; left out by default.
    """
    found: Settings = {f"trainer.{name}": _plain(getattr(loop, name, None)) for name in RUN_ARGUMENTS}
    found["trainer.precision"] = str(loop.fabric.strategy.precision.precision)
    found["trainer.clients_per_round"] = cohort_size(loop.clients_per_round, len(loop.datamodule.client_sizes))
    for name in ("method", "cohort"):
        part = getattr(loop, name)
        found[f"trainer.{name}"] = type(part).__name__
        found |= {f"trainer.{name}.{key}": value for key, value in _flat(constructor_arguments(part))}
    for name, part in _owners(loop):
        found[name] = type(part).__name__
        found |= {f"{name}.{key}": value for key, value in _flat(dict(getattr(part, "hparams", {})))}
    found["data.batch_size"] = _plain(getattr(loop.datamodule, "batch_size", None))
    return found if solver is None else found | _solver_settings(solver)


def rules_start(callbacks: Mapping[str, Any], names: Sequence[str]) -> Tensor | None:
    """Weights of a run's start in the states of its stopping rules, or ``None``.

    Args:
        callbacks: the states in a checkpoint, by the callbacks' ``state_key``.
        names: the trainable parameters.

    Returns:
        Shape ``(d,)``.
    """
    for state in callbacks.values():
        if not isinstance(state, Mapping):
            continue
        if isinstance(theta_0 := state.get("theta_0"), Tensor):
            return theta_0
        start = (state.get("criterion") or {}).get("start") if "parameter_names" in state else None
        starts = dict(zip(state["parameter_names"], start, strict=True)) if start is not None else {}
        if starts.keys() >= set(names):
            wide = [torch.promote_types(starts[name].dtype, torch.float32) for name in names]
            return torch.cat([starts[name].flatten().to(kind) for name, kind in zip(names, wide, strict=True)])
    return None


def _owners(loop: Any) -> Iterator[tuple[str, Any]]:
    yield "model", loop.module
    yield "data", loop.datamodule
    # A data module of the user's that is dealt to clients.
    if (wrapped := getattr(loop.datamodule, "datamodule", None)) is not None:
        yield "data.datamodule", wrapped


def _solver_settings(solver: LocalSolver) -> Settings:
    found: Settings = {"optimizer": type(solver.optimizer).__name__}
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


def run_differences(then: Mapping[str, Any], now: Mapping[str, Any], same_partition: bool) -> list[str]:
    """Differences of settings that make it another run, in words.

    Args:
        then: the settings in the checkpoint.
        now: the present ones, perhaps without those of the optimizer, which are not compared then.
        same_partition: whether each client is known to have the same samples, however that came about.
    """
    with_solver = any(key in now for key in SOLVER_KEYS)
    kept = [
        {
            key: value
            for key, value in settings.items()
            if not (_READING.match(key) or _COMPUTING.match(key) or (same_partition and _DEALING.match(key)))
            and (with_solver or key.partition(".")[0] not in SOLVER_KEYS)
        }
        for settings in (then, now)
    ]
    return differences(*kept)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences in words; a class that is another one hides its arguments.

    >>> differences({"model.lr": 0.1, "trainer.local_epochs": 5}, {"model.lr": 0.01, "trainer.local_epochs": 5})
    ['model.lr was 0.1 and is 0.01']
    >>> differences({"optimizer": "SGD", "optimizer.lr": 0.1}, {"optimizer": "Adam", "optimizer.lr": 0.01})
    ["optimizer was 'SGD' and is 'Adam'"]
    """
    keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    if any(re.match(r"optimizer\.(.*\.)?lr$", key) for key in keys):
        # What a scheduler derives from the rate.
        keys = [key for key in keys if not key.endswith((".initial_lr", ".base_lrs"))]
    classes = tuple(f"{key}." for key in keys if isinstance(then.get(key, now.get(key)), str))
    named = [key for key in keys if not key.startswith(classes)]
    return [f"{key} was {_shown(then.get(key))} and is {_shown(now.get(key))}" for key in named]


def clients_known(datamodule: Any) -> dict[str, Any]:
    """Sizes and fingerprints of clients, without reading their data.

    Args:
        datamodule: gives ``client_sizes``, and perhaps a ``client_fingerprint``, as a ``FederatedDataModule`` does.

    Returns:
        ``sizes``, int64 of shape ``(N,)``, and ``fingerprints``, N texts, or none where all are empty.
    """
    sizes = torch.tensor(client_sizes(datamodule), dtype=torch.int64)
    fingerprint = getattr(datamodule, "client_fingerprint", None)
    prints = [] if fingerprint is None else [str(fingerprint(client)) for client in range(len(sizes))]
    return {"sizes": sizes, "fingerprints": prints if any(prints) else []}


def client_difference(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """First client that is another one, in words.

    Args:
        then: what :func:`clients_known` gave for the checkpoint; empty in one of an older version.
        now: what it gives at present, for as many clients.
    """
    if not then:
        return None
    for what, found in (("fingerprint", "fingerprints"), ("number of samples", "sizes")):
        pairs = zip(_listed(then[found]), _listed(now[found]), strict=False)
        for client, (before, after) in enumerate(pairs):
            if before != after:
                return f"the {what} of client {client} was {_shown(before)} and is {_shown(after)}"
    return None


def _listed(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _flat(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield settings by flat name; of a class as the command line has it, its name and its arguments."""
    for key, value in leaves(values):
        # Names with an underscore: how the command line built it.
        if not re.search(r"(^|\.)_", key) and _is_plain(value):
            if key.endswith(".class_path"):
                key, value = key.removesuffix(".class_path"), str(value).rpartition(".")[2]
            yield key.replace(".init_args.", "."), _plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
