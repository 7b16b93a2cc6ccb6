"""The local solver: a module's own optimizer and scheduler, fresh for each client, its rate set once per round."""

from collections import defaultdict
from collections.abc import Sequence
from copy import copy, deepcopy
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_fedstop.parameters import FlatParameters


class LocalSolver:
    """The optimizer and the learning rate scheduler that a module configures.

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

    def with_copies(self, module: LightningModule, optimizer: Optimizer) -> "LocalSolver":
        """The same solver for copies of the module and its optimizer, at this round's rates."""
        other = copy(self)
        other.module, other.optimizer, other.scheduler_config = module, optimizer, None
        return other

    def _groups(self) -> list[dict[str, Any]]:
        return [{k: deepcopy(v) for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]

    def start_round(self) -> None:
        """Note the round's rates, which every client of the round starts from."""
        self._round_groups = self._groups()

    def start_client(self) -> None:
        """Forget what the last client's steps left in the optimizer."""
        self._restore_groups()
        self.optimizer.state.clear()
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
        self._restore_groups()
        self._round_groups = None
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
        self.module.lr_scheduler_step(config.scheduler, metric)

    def _restore_groups(self) -> None:
        """Undo what a client's steps may have done to the round's rates."""
        for group, saved in zip(self.optimizer.param_groups, self._round_groups or self._groups(), strict=True):
            group.update(deepcopy(saved))

    @property
    def _first_group(self) -> dict[str, Any]:
        return (self._round_groups or self.optimizer.param_groups)[0]

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self._first_group["lr"])

    @property
    def moves(self) -> bool:
        """Whether any learning rate of this round is not 0."""
        return any(float(group["lr"]) != 0 for group in self._round_groups or self.optimizer.param_groups)

    @property
    def momentum(self) -> float:
        """The heavy-ball momentum of the first parameter group, 0 where the optimizer has none."""
        return float(self._first_group.get("momentum", 0.0))

    @property
    def is_plain_sgd(self) -> bool:
        """Whether K steps of a constant gradient g move a model by -lr * S(K, momentum) * g: see methods.Federation."""
        groups = self.optimizer.param_groups
        plain = not any(g.get("dampening") or g.get("nesterov") or g.get("maximize") for g in groups)
        same = len({(g["lr"], g.get("momentum")) for g in groups}) == 1
        return type(self.optimizer) is SGD and plain and same

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state and the rates it has set."""
        config = self.scheduler_config
        groups = deepcopy(self._round_groups) or self._groups()
        return {"groups": groups, "scheduler": config.scheduler.state_dict() if config else {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of :meth:`state_dict` back."""
        for group, saved in zip(self.optimizer.param_groups, state_dict["groups"], strict=True):
            group.update(saved)
        if self.scheduler_config is not None:
            self.scheduler_config.scheduler.load_state_dict(state_dict["scheduler"])
        self.start_round()


ELEMENTWISE = (SGD, Adam, AdamW, Adamax, NAdam, RAdam, Adadelta, RMSprop, Rprop, ASGD)
"""Optimizers that treat each number by itself, so that a stack of clients is to them one longer vector."""


class StackSolver:
    """A solver's optimizer for the local models of several clients at once, in one tensor.

    Args:
        solver: whose optimizer and rates are taken; it is left as it is.
        parameters: the module's trainable parameters.
        x: shape ``(M, d)``; the local models.
        grad: shape ``(M, d)``; what moves them.
    """

    def __init__(self, solver: LocalSolver, parameters: FlatParameters, x: Tensor, grad: Tensor) -> None:
        # A copy has the rates and neither the hooks nor the counter that a scheduler puts on `step`.
        self.optimizer = copy(solver.optimizer)
        self._spans = _spans(solver.optimizer, parameters)
        self._groups = solver.optimizer.param_groups
        self._place(x, grad, None)

    @staticmethod
    def refusal(solver: LocalSolver) -> str | None:
        """Why there can be none for this optimizer, ``None`` if there can."""
        optimizer = solver.optimizer
        name = type(optimizer).__name__
        if type(optimizer) not in ELEMENTWISE:
            return f"the optimizer {name} is none of {', '.join(kind.__name__ for kind in ELEMENTWISE)}"
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return f"the optimizer {name} has step hooks, which see one client's parameters"
        return None

    def step(self) -> None:
        """Move all local models."""
        self.optimizer.step()

    def keep(self, rows: Tensor, x: Tensor, grad: Tensor) -> None:
        """Go on with these clients alone, whose models and gradients are now in ``x`` and ``grad``."""
        self._place(x, grad, rows)

    def _place(self, x: Tensor, grad: Tensor, rows: Tensor | None) -> None:
        """Let the optimizer work on ``x`` and ``grad``; its state of the clients ``rows`` goes with them."""
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        groups: list[dict[str, Any]] = []
        old = [leaf for group in self.optimizer.param_groups for leaf in group["params"]]
        for group, spans in zip(self._groups, self._spans, strict=True):
            leaves = [x[:, start:stop] for start, stop in spans]
            groups.append({**deepcopy({k: v for k, v in group.items() if k != "params"}), "params": leaves})
            for leaf, (start, stop) in zip(leaves, spans, strict=True):
                leaf.grad = grad[:, start:stop]
                if rows is not None:
                    kept = self.optimizer.state[old.pop(0)]
                    state[leaf] = {k: v[rows] if _is_stacked(v) else v for k, v in kept.items()}
        self.optimizer.param_groups = groups
        self.optimizer.state = state


def _is_stacked(value: Any) -> bool:
    """Whether an optimizer's state is a number for each parameter, not one such as the count of steps."""
    return isinstance(value, Tensor) and value.dim() > 1


def _spans(optimizer: Optimizer, parameters: FlatParameters) -> list[list[tuple[int, int]]]:
    """For each group of the optimizer, where its parameters lie in the vector, neighbours in one span."""
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    spans: list[list[tuple[int, int]]] = [[] for _ in optimizer.param_groups]
    stop = 0
    for parameter, size in zip(parameters.parameters, parameters.sizes, strict=True):
        start, stop = stop, stop + size
        number = group_of.get(id(parameter))
        if number is None:
            continue
        if spans[number] and spans[number][-1][1] == start:
            start, _ = spans[number].pop()
        spans[number].append((start, stop))
    return spans


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
