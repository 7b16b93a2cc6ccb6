"""What a stopping rule has looked at, check by check, so that another rule can decide on it anew."""

from array import array
from collections.abc import Iterator

import torch
from torch import Tensor


class History:
    """Rows of an epoch and the figures seen in it, 8 bytes a number.

    >>> history = History()
    >>> history.append(0, 1.5)
    >>> history.append(1, 1.75)
    >>> list(History.of(history.state()))
    [(0.0, 1.5), (1.0, 1.75)]
    """

    def __init__(self) -> None:
        self._numbers = array("d")
        self._width = 1

    def append(self, epoch: int, *figures: float) -> None:
        """Add a row; all rows are of one length."""
        self._width = 1 + len(figures)
        self._numbers.extend((epoch, *figures))

    def __len__(self) -> int:
        """Rows."""
        return len(self._numbers) // self._width

    def __iter__(self) -> Iterator[tuple[float, ...]]:
        """The rows, each an epoch and its figures."""
        for start in range(0, len(self._numbers), self._width):
            yield tuple(self._numbers[start : start + self._width])

    def state(self) -> Tensor:
        """Shape ``(rows, 1 + figures)``, float64."""
        if not self._numbers:
            return torch.empty(0, self._width, dtype=torch.float64)
        return torch.frombuffer(bytearray(self._numbers.tobytes()), dtype=torch.float64).reshape(-1, self._width)

    @classmethod
    def of(cls, state: Tensor) -> "History":
        """What :meth:`state` gave."""
        history = cls()
        history._numbers, history._width = array("d", state.flatten().tolist()), state.shape[1]
        return history
