"""Distance of the global model from its start, measured after every round."""

import math
from typing import Any

from torch import Tensor

from lightning_fedstop.stopping.criteria.distance import task_vector_distance
from lightning_fedstop.stopping.criteria.task_vector import growth_rate


class DistanceFromStart:
    """Measures delta_r = ||theta_r - theta_0||_2 and its growth.

    Growth is that since the last round in which a client trained.

    Args:
        device: where theta_0 is held; beside the global model by default.

    Attributes:
        start: shape ``(d,)``; theta_0, ``None`` before round 1.
        now: delta_r of the present round, or of the last one, ``None`` before round 1.

    >>> import torch
    >>> distance = DistanceFromStart()
    >>> distance.begin(torch.zeros(2))
    >>> for round, x in ((1, 3.0), (2, 4.5)):
    ...     distance.next_round(round, trained=True)
    ...     distance.measure(torch.tensor([x, 0.0]))
    >>> distance.row()
    {'distance': 4.5, 'growth_rate': 0.5}
    """

    def __init__(self, device: str | None = None) -> None:
        self.start: Tensor | None = None
        self.now: float | None = None
        self._device = device
        self._round = 0
        self._trained = False
        self._before: float | None = None  # of the last round before this one in which a client trained

    def begin(self, theta: Tensor) -> None:
        """Take theta_0, shape ``(d,)``, unless there is one already."""
        if self.start is None:
            self.start = theta.detach().to(self._device or theta.device, copy=True)

    def next_round(self, round: int, trained: bool) -> None:
        """Go on to a round.

        Args:
            round: its number, from 1.
            trained: whether a client's update went into it.
        """
        if self._trained and self.now is not None:
            self._before = self.now
        self._round, self._trained = round, trained

    def measure(self, theta: Tensor) -> None:
        """Measure the distance of the round's ``theta``, shape ``(d,)``, with float64 sums."""
        assert self.start is not None
        self.now = task_vector_distance(theta, self.start)

    def row(self) -> dict[str, float]:
        """Columns of the round; growth is NaN in the first round with a client, and left out without one."""
        assert self.now is not None
        found = {"distance": self.now}
        if self._trained:
            found["growth_rate"] = math.nan if self._before is None else growth_rate(self.now, self._before)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        return {
            # A start that no round has moved away from is taken again, after the hooks that come before round 1.
            "start": None if self.now is None else self.start,
            "now": self.now,
            "round": self._round,
            "trained": self._trained,
            "before": self._before,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state."""
        start = state_dict["start"]
        self.start = start if start is None or self._device is None else start.to(self._device)
        self.now, self._round, self._trained = state_dict["now"], state_dict["round"], state_dict["trained"]
        self._before = state_dict["before"]
