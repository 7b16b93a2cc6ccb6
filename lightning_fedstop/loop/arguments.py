"""Checks of the arguments of a loop, its module and its data."""

from typing import Any, get_args

from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Checkpoint,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_fedstop.core.client_states import ClientStates
from lightning_fedstop.core.seeding import resolve_seed
from lightning_fedstop.federation.backends.choice import ClientBackend
from lightning_fedstop.federation.cohort import Cohort, check_clients_per_round, cohort_size
from lightning_fedstop.federation.server import OnNonfinite, Weighting
from lightning_fedstop.methods import FederatedMethod
from lightning_fedstop.module.batches import client_sizes
from lightning_fedstop.utilities.accelerators import accelerator_for_fabric
from lightning_fedstop.utilities.validate import instance_of, one_of, other_package, positive, whole_number

TRAINER_ONLY = (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
UNFREEZES_AT = "unfreeze_backbone_at_epoch"
_WHOLE_NUMBERS = {
    "max_rounds": 1,
    "local_epochs": 1,
    "min_rounds": 0,
    "num_nodes": 1,
    "check_val_every_n_round": 1,
    "check_test_every_n_round": 1,
    "stack_chunk_size": 1,
    "fast_dev_run": 0,
}
_OPTIONAL = ("check_val_every_n_round", "check_test_every_n_round", "stack_chunk_size")


def check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse bad arguments of ``FederatedLoop``.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
        TypeError: for a method, cohort or callback of another class.
    """
    for name, least in _WHOLE_NUMBERS.items():
        if not (
            (arguments[name] is None and name in _OPTIONAL)
            or (name == "fast_dev_run" and isinstance(arguments[name], bool))
        ):
            whole_number(name, arguments[name], least)
    if arguments["min_rounds"] > arguments["max_rounds"]:
        raise ValueError(
            f"`min_rounds` must be at most `max_rounds`, {arguments['max_rounds']}, got {arguments['min_rounds']}."
        )
    if arguments["gradient_clip_val"] is not None:
        positive("gradient_clip_val", arguments["gradient_clip_val"])
    for stage in ("train", "val", "test"):
        _check_limit(f"limit_{stage}_batches", arguments[f"limit_{stage}_batches"])
    check_clients_per_round(arguments["clients_per_round"])
    if str(arguments["strategy"]).endswith(("_spawn", "_fork", "_notebook")):
        raise ValueError(
            f"`strategy` must start whole processes, as 'ddp' does, not copies of this one, got"
            f" {arguments['strategy']!r}."
        )
    one_of("weighting", arguments["weighting"], get_args(Weighting))
    one_of("on_nonfinite", arguments["on_nonfinite"], get_args(OnNonfinite))
    one_of("client_backend", arguments["client_backend"], get_args(ClientBackend))
    if arguments["stack_chunk_size"] is not None and arguments["client_backend"] != "stacked":
        raise ValueError("`stack_chunk_size` needs `client_backend='stacked'`: nothing else makes stacks.")
    instance_of("method", arguments["method"], FederatedMethod)
    instance_of("cohort", arguments["cohort"], Cohort)
    instance_of("client_states", arguments["client_states"], ClientStates)
    check_callbacks(arguments["callbacks"], arguments["max_rounds"])
    saves = any(isinstance(callback, ModelCheckpoint) for callback in arguments["callbacks"])
    if saves and arguments["enable_checkpointing"] is False:
        raise ValueError("`enable_checkpointing` must not be False when `callbacks` holds a ModelCheckpoint.")
    logger = arguments["logger"]
    for one in logger if isinstance(logger, list | tuple) else [logger]:
        if not (one is None or isinstance(one, bool | Logger)):
            hint = other_package(type(one))
            raise TypeError(f"`logger` must be a Logger, a list of them, a bool or None, got {one!r}{hint}.")
    if arguments["seed"] is not None:
        resolve_seed(arguments["seed"])
    stateful = [callback for callback in arguments["callbacks"] if type(callback).state_dict != Callback.state_dict]
    keys = [callback.state_key for callback in stateful]
    twice = {key for key in keys if keys.count(key) > 1}
    if twice:
        raise ValueError(f"`callbacks` holds two with the same arguments, whose states would mix: {sorted(twice)}.")


def make_fabric(**options: Any) -> Fabric:
    """Make a ``Fabric``, whose refusals then name the arguments they are about.

    Raises:
        MisconfigurationException: naming those that were given.
    """
    try:
        return Fabric(**options | {"accelerator": accelerator_for_fabric(options.get("accelerator", "auto"))})
    except Exception as error:
        given = ", ".join(f"`{name}={value!r}`" for name, value in options.items() if value not in ("auto", None, 1))
        raise MisconfigurationException(f"{given or '`accelerator`'} cannot be used: {error}") from error


def check_callbacks(callbacks: list[Any], max_rounds: int) -> None:
    """Refuse objects that are no callbacks, and callbacks that need a ``Trainer``.

    Raises:
        TypeError: naming the callback.
        ValueError: for one with an argument that means nothing here.
    """
    for callback in callbacks:
        instance_of("callbacks", callback, Callback)
        name = type(callback).__name__
        if isinstance(callback, TRAINER_ONLY):
            raise TypeError(
                f"`callbacks` holds {name}, which reaches into a Trainer's own loop or swaps its weights, and cannot"
                f" run in a FederatedLoop, where the server alone sets the global model."
            )
        # One that unfreezes after the last round only freezes.
        if isinstance(callback, BaseFinetuning) and getattr(callback, UNFREEZES_AT, 0) < max_rounds:
            raise TypeError(
                f"`callbacks` holds {name}, which unfreezes parameters during a fit, and all rounds of a FederatedLoop"
                f" train the same: set `requires_grad` before `fit`, or fit once more with other parameters trained."
            )
        if isinstance(callback, LearningRateMonitor) and callback.logging_interval == "step":
            raise ValueError(
                "`callbacks` holds LearningRateMonitor(logging_interval='step'), which would log nothing in a"
                " FederatedLoop, where a round is a step and an epoch: give it logging_interval='epoch'."
            )


def check_module(module: object, trains: bool = False) -> LightningModule:
    """Return the module if it is a ``LightningModule`` that can run."""
    if isinstance(module, LightningModule):
        if trains and not is_overridden("training_step", module):
            raise MisconfigurationException(f"{type(module).__name__} needs a `training_step` to be trained.")
        return module
    hint = other_package(type(module))
    if isinstance(getattr(module, "_orig_mod", None), LightningModule):  # what `torch.compile` wraps
        hint = "; give the module itself, and compile what its steps call: `module.net = torch.compile(module.net)`"
    raise TypeError(f"`model` must be a `lightning.pytorch.LightningModule`, got {type(module).__name__}{hint}.")


def check_datamodule(datamodule: object) -> Any:
    """Return the data module if it knows its clients.

    Raises:
        MisconfigurationException: with how to federate an ordinary data module.
    """
    if datamodule is not None and hasattr(datamodule, "client_dataloader"):
        return datamodule
    if isinstance(datamodule, LightningDataModule):
        name = type(datamodule).__name__
        raise MisconfigurationException(
            f"{name} has no clients: wrap it with `FederatedDataModule.from_datamodule({name}(...), num_clients=...)`,"
            f" in a configuration with `data: {{class_path: Federated, init_args: {{datamodule: ...}}}}`."
        )
    raise MisconfigurationException(
        f"`datamodule` must be a `FederatedDataModule`, which knows its clients, got {type(datamodule).__name__}"
        f"{other_package(type(datamodule))}."
    )


def check_federation(
    clients_per_round: int | float, cohort: Cohort, datamodule: Any, module: LightningModule, drops_single: bool
) -> None:
    """Refuse a federation that cannot be trained, before anything is written.

    Raises:
        ValueError: for more clients a round than there are, a schedule of clients that do not exist, clients without
            any samples, or batches of one sample for a module with BatchNorm.
    """
    sizes = client_sizes(datamodule)
    cohort.check(len(sizes), cohort_size(clients_per_round, len(sizes)))
    empty = [client for client, size in enumerate(sizes) if not size]
    if len(empty) == len(sizes):
        raise ValueError(f"None of the {len(sizes)} clients of {type(datamodule).__name__} has a sample to train on.")
    if empty:
        rank_zero_warn(
            f"{len(empty)} of {len(sizes)} clients (the first is client {empty[0]}) have no samples: drawn for a round,"
            f" they are skipped."
        )
    batch_size = getattr(datamodule, "batch_size", None)
    drops_single = drops_single or getattr(datamodule, "drop_last", False) is True
    if drops_single or not batch_size or not any(isinstance(m, _BatchNorm) for m in module.modules()):
        return
    single = [client for client, size in enumerate(sizes) if size and (size % batch_size == 1 or batch_size == 1)]
    if single:
        raise ValueError(
            f"{type(module).__name__} has BatchNorm, which needs batches of at least 2 samples, but {len(single)}"
            f" clients (the first is client {single[0]} with {sizes[single[0]]} samples) have a batch of 1 at the batch"
            f" size {batch_size}: set `drop_single_sample_batches=True`"
            " (`--trainer.drop_single_sample_batches true`) or another batch size."
        )


def reorder_callbacks(callbacks: list[Callback]) -> list[Callback]:
    """Order callbacks so that those that write checkpoints come last."""
    return sorted(callbacks, key=lambda callback: isinstance(callback, Checkpoint))


def _check_limit(name: str, value: Any) -> None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return
    if not isinstance(value, float) or not 0 <= value <= 1:
        raise ValueError(
            f"`{name}` must be a number of batches (integer of at least 0), a share (float in [0, 1]) or None,"
            f" got {value!r}."
        )
