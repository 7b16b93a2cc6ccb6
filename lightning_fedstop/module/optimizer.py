"""The local solver: a module's own optimizer and scheduler, fresh for each client, its rate set once per round."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

from lightning.fabric.plugins.precision import Precision
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_fedstop.core.parameters import FlatParameters
from lightning_fedstop.module.flat_optimizer import FlatSolver
from lightning_fedstop.utilities.plain import as_in


class LocalSolver:
    """Optimizer and learning rate scheduler that a module configures.

    The optimizer forgets its state (momentum buffers, moments, counters) before every client; the scheduler steps once
    per round, whatever its ``interval`` says.

    Args:
        module: its ``configure_optimizers`` is called once.

    Raises:
        MisconfigurationException: unless the module uses automatic optimization with exactly one optimizer.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        name = type(module).__name__
        if not module.automatic_optimization:
            raise MisconfigurationException(
                f"{name} sets `automatic_optimization=False`, but the local training loop needs automatic optimization."
            )
        self.optimizer, self.scheduler_config = _parse(module.configure_optimizers(), name)
        self._state = deepcopy(self.optimizer.state_dict()["state"])
        self._round_groups: list[dict[str, Any]] | None = None
        self._settled_groups: list[dict[str, Any]] | None = None
        self._flat: FlatSolver | None = None
        self._withheld_in: set[int] = set()

    def with_copies(self, module: LightningModule, optimizer: Optimizer) -> "LocalSolver":
        """Make the same solver for copies of the module and its optimizer."""
        other = copy(self)
        other.module, other.optimizer, other.scheduler_config = module, optimizer, None
        other._flat = None
        return other

    def flatten(self, parameters: FlatParameters, precision: Precision) -> None:
        """Take the steps on the vector of parameters until :meth:`expose`, where allowed."""
        if not self._state and FlatSolver.refusal(self.optimizer, self.module, precision) is None:
            self._flat = FlatSolver(self.optimizer, parameters, parameters.vector, parameters.grad)

    @contextmanager
    def withheld(self) -> Iterator[None]:
        """Let :meth:`expose` refuse, in this thread, inside a block in which clients step with copies."""
        thread = threading.get_ident()
        self._withheld_in.add(thread)
        try:
            yield
        finally:
            self._withheld_in.discard(thread)

    def expose(self) -> Optimizer:
        """Give out the module's own optimizer, which takes the steps itself from now on.

        Raises:
            MisconfigurationException: in a step of several clients, each of which has an optimizer of its own.
        """
        if threading.get_ident() in self._withheld_in:
            raise MisconfigurationException(
                f"{type(self.module).__name__} asks for the optimizer in a step, but each of the clients in training"
                f" has its own: train with `client_backend='sequential'`."
            )
        self.unflatten()
        return self.optimizer

    def unflatten(self) -> None:
        """Let the module's own optimizer take the steps from now on, on parameters one by one."""
        if self._flat is not None:
            self._flat.hand_back()
            self._flat = None

    @property
    def is_flat(self) -> bool:
        """True while the steps are taken on the vector of parameters."""
        return self._flat is not None

    def step(self, precision: Precision) -> None:
        """Take a step with the gradients that the parameters hold."""
        if self._flat is None:
            precision.optimizer_step(self.optimizer)
        else:
            self._flat.step()

    def _groups(self) -> list[dict[str, Any]]:
        return [{k: deepcopy(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]

    def settle(self) -> None:
        """Note the rates between two rounds, which a checkpoint from within the next one holds."""
        self._settled_groups = self._groups()

    def start_round(self) -> None:
        """Note the round's rates, which every client of the round starts from."""
        self._round_groups = self._groups()

    def end_clients(self) -> None:
        """Go back to the round's rates; what changes them from now on lasts."""
        self._restore_groups()
        self._round_groups = None

    @property
    def has_changed(self) -> bool:
        """True if the rates are no longer the round's."""
        return self._round_groups is not None and self._groups() != self._round_groups

    def start_client(self) -> None:
        """Forget what the last client's steps left in the optimizer."""
        self._restore_groups()
        self.optimizer.state.clear()
        if self._flat is not None:
            self._flat.restart()
        if self._state:
            state_dict = self.optimizer.state_dict()
            self.optimizer.load_state_dict({**state_dict, "state": deepcopy(self._state)})

    def end_round(self, metrics: dict[str, Tensor], round: int) -> None:
        """Let the scheduler set the next round's rates.

        Args:
            metrics: what a ``ReduceLROnPlateau`` may monitor.
            round: the finished round, from 1; the scheduler's ``frequency`` counts rounds.

        Raises:
            MisconfigurationException: if the monitored metric is missing and the scheduler's config is ``strict``.
        """
        config = self.scheduler_config
        if config is None or round % config.frequency:
            return
        metric = None
        if config.reduce_on_plateau:
            metric = metrics.get(config.monitor or "")
            if metric is None:
                if config.strict:
                    raise MisconfigurationException(
                        f"The scheduler monitors {config.monitor!r}, which is not logged; logged are {sorted(metrics)}."
                    )
                return
        # The clients' steps are taken by copies, and the scheduler warns where it has seen none of its own optimizer.
        vars(self.optimizer)["_opt_called"] = True
        self.module.lr_scheduler_step(config.scheduler, metric)

    def _restore_groups(self) -> None:
        """Undo what a client's steps may have done to the round's rates."""
        for group, saved in zip(self.optimizer.param_groups, self._round_groups or self._groups(), strict=True):
            group.update(deepcopy(saved))

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group, as it is now."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def moves(self) -> bool:
        """True if any learning rate is not 0 now."""
        return any(float(group["lr"]) != 0 for group in self.optimizer.param_groups)

    @property
    def momentum(self) -> float:
        """Heavy-ball momentum of the first parameter group, 0 without one."""
        return float(self.optimizer.param_groups[0].get("momentum", 0.0))

    @property
    def is_plain_sgd(self) -> bool:
        """True for steps of SGD with at most heavy-ball momentum and no dampening."""
        groups = self.optimizer.param_groups
        return type(self.optimizer) is SGD and not any(
            g.get("dampening") or g.get("nesterov") or g.get("maximize") for g in groups
        )

    @property
    def rates(self) -> list[tuple[float, float]]:
        """Learning rate and momentum of each parameter group, as they are now."""
        return [(float(group["lr"]), float(group.get("momentum") or 0.0)) for group in self.optimizer.param_groups]

    def runs(self, parameters: FlatParameters) -> list[tuple[int | None, int]]:
        """List group (``None`` if no step moves it) and size of each tensor."""
        groups = self.optimizer.param_groups
        owner = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        return [(owner.get(id(p)), size) for p, size in zip(parameters.parameters, parameters.sizes, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Give the scheduler's state and the rates it has set."""
        config = self.scheduler_config
        during_round = deepcopy(self._settled_groups or self._round_groups)
        groups = self._groups() if self._round_groups is None else during_round
        return {"groups": groups, "scheduler": config.scheduler.state_dict() if config else {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of :meth:`state_dict` back."""
        for group, saved in zip(self.optimizer.param_groups, state_dict["groups"], strict=True):
            group.update(as_in(group, saved))
        if self.scheduler_config is not None:
            scheduler = self.scheduler_config.scheduler
            scheduler.load_state_dict(as_in(scheduler.state_dict(), state_dict["scheduler"]))


def _parse(configured: Any, name: str) -> tuple[Optimizer, LRSchedulerConfig | None]:
    """The optimizer and scheduler in any of the forms ``configure_optimizers`` may return."""
    optimizers: list[Any] = []
    schedulers: list[Any] = []
    monitor = None
    if isinstance(configured, Optimizer):
        optimizers = [configured]
    elif isinstance(configured, dict):
        optimizers = [configured.get("optimizer")]
        schedulers = [configured["lr_scheduler"]] if configured.get("lr_scheduler") else []
        monitor = configured.get("monitor")
    elif isinstance(configured, Sequence) and len(configured) == 2 and isinstance(configured[0], Sequence):
        optimizers, schedulers = list(configured[0]), list(configured[1])
    elif isinstance(configured, Sequence) and configured:
        if all(isinstance(item, dict) for item in configured) and len(configured) == 1:
            return _parse(configured[0], name)
        optimizers = list(configured)
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer) or len(schedulers) > 1:
        found = [type(optimizer).__name__ for optimizer in optimizers if optimizer is not None] or "none"
        raise MisconfigurationException(
            f"{name}.configure_optimizers must return exactly one optimizer and at most one scheduler, got {found}."
        )
    return optimizers[0], _scheduler_config(schedulers[0], monitor) if schedulers else None


def _scheduler_config(scheduler: Any, monitor: str | None) -> LRSchedulerConfig:
    if isinstance(scheduler, LRSchedulerConfig):
        return scheduler
    config = LRSchedulerConfig(**scheduler) if isinstance(scheduler, dict) else LRSchedulerConfig(scheduler)
    config.interval = "epoch"
    config.reduce_on_plateau = isinstance(config.scheduler, ReduceLROnPlateau)
    config.monitor = config.monitor or monitor or getattr(config.scheduler, "monitor", None)
    if config.reduce_on_plateau and config.monitor is None:
        raise MisconfigurationException(
            "ReduceLROnPlateau needs `monitor`, the name of a logged metric, in its config."
        )
    return config
