"""Weighted means over the clients of a round, taken while the clients come in.

Sums are float64 and hold weights times values, divided once at the end: for the float32 (or shorter) values of a round
and integer weights such a sum is exact in all but extreme cases, so neither the order of clients nor their split over
processes shows in the mean.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Reduce = Callable[[Tensor, str], Tensor]
"""Reduces a tensor over processes; the second argument is ``"sum"`` or ``"max"``."""


def reduce_alone(tensor: Tensor, op: str) -> Tensor:
    """Reduce over a single process: give the tensor itself."""
    return tensor


def gather_alone(items: list[Any]) -> list[list[Any]]:
    """Gather over a single process."""
    return [items]


class RunningMean:
    """Weighted mean of vectors that are added one at a time. Memory: one float64 vector.

    Args:
        like: a tensor of the shape and device of what will be added.

    >>> mean = RunningMean(torch.zeros(2))
    >>> mean.add(torch.tensor([1.0, 2.0]), weight=1)
    >>> mean.add(torch.tensor([4.0, 8.0]), weight=2)
    >>> mean.compute()
    tensor([3., 6.], dtype=torch.float64)
    """

    def __init__(self, like: Tensor) -> None:
        self.total = torch.zeros_like(like, dtype=torch.float64)
        self.weight = 0.0

    def add(self, value: Tensor, weight: float = 1.0) -> None:
        """Add one vector with its weight."""
        if weight == 1:
            self.total.add_(value)
        else:
            self.total.add_(value.double(), alpha=weight)
        self.weight += weight

    def total_weight(self, reduce: Reduce = reduce_alone) -> float:
        """Add up the weights of all processes; 0 if nothing was added."""
        return float(reduce(torch.tensor(self.weight, dtype=torch.float64, device=self.total.device), "sum"))

    def compute(self, reduce: Reduce = reduce_alone) -> Tensor:
        """Compute the mean over all processes, float64.

        Raises:
            ValueError: if nothing was added on any process.
        """
        total = reduce(self.total, "sum")
        weight = self.total_weight(reduce)
        if weight <= 0:
            raise ValueError("The mean of no client is undefined: at least one client with a sample must take part.")
        return total / weight


class RunningSum:
    """Sum of vectors over the clients of a round, taken at its end. Memory: one float64 vector, while in use.

    Args:
        like: a tensor of the shape and device of what will be added.
    """

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.total: Tensor | None = None

    def add(self, value: Tensor) -> None:
        """Add one vector."""
        if self.total is None:
            self.total = torch.zeros_like(self.like, dtype=torch.float64)
        self.total.add_(value)

    def take(self, reduce: Reduce = reduce_alone) -> Tensor:
        """Give the sum over all processes, float64, and start again at zero."""
        total = torch.zeros_like(self.like, dtype=torch.float64) if self.total is None else self.total
        self.total = None
        return reduce(total, "sum")


class RunningMaximum:
    """Element-wise maximum of integer tensors that are added one at a time.

    Args:
        like: a tensor of the shape and device of what will be added.
    """

    def __init__(self, like: Tensor) -> None:
        self.largest = torch.full_like(like, torch.iinfo(torch.int64).min, dtype=torch.int64)

    def add(self, value: Tensor, weight: float = 1.0) -> None:
        """Add one tensor; its weight has no part in it."""
        self.largest = torch.maximum(self.largest, value.long())

    def compute(self, reduce: Reduce = reduce_alone) -> Tensor:
        """Compute the maximum over all processes, int64."""
        return reduce(self.largest, "max")
