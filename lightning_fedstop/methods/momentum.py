"""Distance that local steps with momentum move the model along a constant gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor

Rates = Sequence[tuple[float, float]]
"""Learning rate and momentum of each parameter group; the momentum is 0 where the solver has none."""


def momentum_gain(steps: float, momentum: float) -> float:
    """Distance S(K, mu) of K heavy-ball steps along a constant gradient.

    In units of ``lr * gradient``, S(K, mu) = [K - mu (1 - mu^K) / (1 - mu)] / (1 - mu),
    with S(K, 0) = K and S(K, 1) = K (K + 1) / 2.

    >>> momentum_gain(5, 0.0), round(momentum_gain(5, 0.9), 4)
    (5.0, 13.1441)
    """
    if momentum == 0:
        return float(steps)
    if momentum == 1:
        return steps * (steps + 1) / 2
    return float((steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum))


class Motion:
    """Distance that a constant gradient of 1 moves each parameter group.

    The k-th step of SGD with heavy-ball momentum moves the numbers of a group by ``-lr_k b_k``, with
    ``b_k = momentum_k b_{k-1} + 1``. With one rate and one momentum, K steps come to ``lr S(K, momentum)``.

    Args:
        rates: of each group before the first step.
        runs: the parameter group of each stretch of the vector, ``None`` if no step moves it, and its length; not
            needed where there is one group.
        is_sgd: the solver is SGD with at most heavy-ball momentum, so that its steps come to these distances.

    Attributes:
        steps: K, the steps taken.
        started_even: it was so before the first step.

    >>> motion = Motion([(0.1, 0.9), (0.0, 0.9)], [(0, 1), (1, 2)])
    >>> motion.add_step()
    >>> motion.is_even, motion.distance(1, torch.zeros(3))
    (False, tensor([0.1000, 0.0000, 0.0000]))
    """

    def __init__(self, rates: Rates, runs: Sequence[tuple[int | None, int]] = (), is_sgd: bool = True) -> None:
        self.steps = 0
        self.is_sgd = is_sgd
        self._runs = runs
        self._moving = sorted({group for group, _ in runs if group is not None}) or list(range(len(rates)))
        self._buffers = [0.0] * len(rates)
        self._distances = [0.0] * len(rates)
        self._totals = [0.0] * len(rates)
        self._first = rates[self._moving[0]]
        self._is_same = True
        self.see(rates)
        self.started_even = self.is_even

    def see(self, rates: Rates) -> None:
        """Note the rates of the next step."""
        self._rates = rates
        self._is_same = self._is_same and all(rates[group] == self._first for group in self._moving)

    def add_step(self) -> None:
        """Note that a step was taken."""
        self.steps += 1
        for group in self._moving:
            lr, momentum = self._rates[group]
            self._buffers[group] = momentum * self._buffers[group] + 1
            self._distances[group] += lr * self._buffers[group]
            self._totals[group] += lr

    @property
    def is_even(self) -> bool:
        """Whether all steps are SGD with one rate and one momentum for all that moves."""
        return self._is_same and self.is_sgd

    @property
    def rests(self) -> bool:
        """Whether all rates are 0, so that nothing moves."""
        return not any(self._totals[group] or self._rates[group][0] for group in self._moving)

    def distance(self, steps: int, like: Tensor) -> float | Tensor:
        """Return the distance of the steps so far; a tensor where groups differ.

        Args:
            steps: K, their number.
            like: shape ``(..., d)``; gives dtype and device.

        Returns:
            A number for all, or shape ``(d,)``.
        """
        if self._is_same:
            lr, momentum = self._first
            return lr * momentum_gain(steps, momentum)
        return self._spread(self._distances, like)

    def mean_lr(self, like: Tensor) -> float | Tensor:
        """Return the mean learning rate so far, in the form of :meth:`distance`."""
        if self._is_same:
            return self._first[0]
        return self._spread([total / max(1, self.steps) for total in self._totals], like)

    def _spread(self, values: Sequence[float], like: Tensor) -> float | Tensor:
        """Repeat each group's value over its numbers of the vector."""
        different = {values[group] for group in self._moving}
        if len(different) == 1:
            return different.pop()
        parts = [like.new_full((count,), 0.0 if group is None else values[group]) for group, count in self._runs]
        return torch.cat(parts)
