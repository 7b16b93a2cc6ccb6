"""An optimizer's steps on a vector: one tensor for each group, not for each parameter.

Most of what a step of a small model costs on a CPU is the count of operations.
"""

from collections import defaultdict
from copy import copy
from itertools import accumulate
from typing import Any

import torch
from lightning.fabric.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import SGD, Adadelta, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.asgd import ASGD

from lightning_fedstop.core.parameters import FlatParameters

ELEMENTWISE = (SGD, Adam, AdamW, Adamax, NAdam, RAdam, Adadelta, RMSprop, Rprop, ASGD)
"""Optimizers that treat each number by itself, so that many parameters, or clients, are to them one longer vector."""

PLAIN_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
"""Precisions whose step, without a scaler, is the optimizer's."""


class FlatSolver:
    """Optimizer of local models in one tensor, of one client or a stack.

    Args:
        optimizer: its settings and rates are taken; it is left as it is.
        parameters: the module's trainable parameters.
        x: shape ``(d,)`` or ``(M, d)``; the local models.
        grad: the same shape; what moves them.

    Attributes:
        optimizer: a copy of the given one, whose parameters are parts of ``x``.
    """

    def __init__(self, optimizer: Optimizer, parameters: FlatParameters, x: Tensor, grad: Tensor) -> None:
        # A copy has the rates and neither the hooks nor the counter that a scheduler puts on `step`.
        self.optimizer = copy(optimizer)
        self._source = optimizer
        self._parameters = parameters
        self._spans = _spans(optimizer, parameters)
        self._place(x, grad, None)

    @staticmethod
    def refusal(optimizer: Optimizer, module: LightningModule, precision: Precision) -> str | None:
        """Name the reason why an optimizer must step by itself, ``None`` if there is none."""
        name, kind = type(optimizer).__name__, type(precision)
        if getattr(precision, "scaler", None) or kind not in PLAIN_PRECISIONS:
            return f"the precision {precision.precision!r} has {kind.__name__} take one client's steps"
        if type(optimizer) not in ELEMENTWISE:
            return f"the optimizer {name} is none of {', '.join(kind.__name__ for kind in ELEMENTWISE)}"
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return f"the optimizer {name} has step hooks, which see one client's parameters"
        if any(value is optimizer for value in vars(module).values()):
            return f"{type(module).__name__} keeps the optimizer, and may look at its state"
        return None

    def restart(self) -> None:
        """Forget the last client."""
        self.optimizer.state.clear()

    def step(self) -> None:
        """Move all local models, at the rates that the given optimizer has now."""
        for group, source in zip(self.optimizer.param_groups, self._source.param_groups, strict=True):
            group.update({key: value for key, value in source.items() if key not in ("params", "foreach")})
        self.optimizer.step()

    def keep(self, rows: Tensor, x: Tensor, grad: Tensor) -> None:
        """Go on with these clients of a stack alone, now in ``x`` and ``grad``."""
        self._place(x, grad, rows)

    def hand_back(self) -> None:
        """Give the optimizer the state that its own steps would have left."""
        sizes = dict(zip(self._parameters.parameters, self._parameters.sizes, strict=True))
        starts = dict(zip(sizes, _starts(self._parameters), strict=True))
        for group, spans in zip(self.optimizer.param_groups, self._spans, strict=True):
            for leaf, (start, stop) in zip(group["params"], spans, strict=True):
                for parameter in (p for p in sizes if start <= starts[p] < stop):
                    first = starts[parameter] - start
                    self._source.state[parameter] = {
                        key: _part(value, leaf, slice(first, first + sizes[parameter]), parameter.shape)
                        for key, value in self.optimizer.state[leaf].items()
                    }

    def _place(self, x: Tensor, grad: Tensor, rows: Tensor | None) -> None:
        """Let the optimizer work on ``x`` and ``grad``; its state of the clients ``rows`` goes with them."""
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        groups: list[dict[str, Any]] = []
        old = [leaf for group in self.optimizer.param_groups for leaf in group["params"]]
        for group, spans in zip(self._source.param_groups, self._spans, strict=True):
            leaves = [x[..., start:stop] for start, stop in spans]
            groups.append({**group, "params": leaves})
            if group.get("foreach", True) is None:
                # A group is one tensor as a rule: looking whether many can be taken at once costs as much as a step.
                groups[-1]["foreach"] = False
            for leaf, (start, stop) in zip(leaves, spans, strict=True):
                leaf.grad = grad[..., start:stop]
                if rows is not None:
                    kept = self.optimizer.state[old.pop(0)]
                    state[leaf] = {k: v[rows] if _is_stacked(v) else v for k, v in kept.items()}
        self.optimizer.param_groups = groups
        self.optimizer.state = state


def _part(value: Any, leaf: Tensor, part: slice, shape: torch.Size) -> Any:
    """Cut a part out of an optimizer's state of a whole tensor."""
    if not isinstance(value, Tensor):
        return value
    return value[part].view(shape).clone() if value.shape == leaf.shape else value.clone()


def _is_stacked(value: Any) -> bool:
    """True if a state has a number for each parameter, unlike a count of steps."""
    return isinstance(value, Tensor) and value.dim() > 1


def _starts(parameters: FlatParameters) -> list[int]:
    """List where each parameter begins in the vector."""
    return [0, *accumulate(parameters.sizes[:-1])]


def _spans(optimizer: Optimizer, parameters: FlatParameters) -> list[list[tuple[int, int]]]:
    """For each group of the optimizer, where its parameters lie in the vector, neighbours in one span."""
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    spans: list[list[tuple[int, int]]] = [[] for _ in optimizer.param_groups]
    for parameter, start, size in zip(parameters.parameters, _starts(parameters), parameters.sizes, strict=True):
        number = group_of.get(id(parameter))
        if number is None:
            continue
        stop = start + size
        if spans[number] and spans[number][-1][1] == start:
            start, _ = spans[number].pop()
        spans[number].append((start, stop))
    return spans
