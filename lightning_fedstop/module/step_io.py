"""What a local step takes and gives: how many batches, and the forms that ``training_step`` may return."""

from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor


@dataclass
class LocalProgress:
    """The place of a client in its local training.

    Attributes:
        batches: its loader.
        limit: see :func:`limited`.
        batch_idx: the batch that is trained on, by its number in the local epoch; -1 before the first.
    """

    batches: Iterable[Any]
    limit: int | float | None
    batch_idx: int = -1

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch is the last of its epoch; False where their number is not known."""
        return self.batch_idx + 1 == limited_length(self.batches, self.limit)


local_progress: ContextVar[LocalProgress | None] = ContextVar("local_progress", default=None)
"""The progress of the client that is trained in this thread, ``None`` outside of local training."""


def loss_of(outputs: Any) -> Tensor | None:
    """The loss in what ``training_step`` returned.

    Raises:
        TypeError: if there is none.
    """
    if isinstance(outputs, dict) and "loss" not in outputs:
        raise TypeError(
            f"`training_step` must return a dict with 'loss', got one with {', '.join(map(repr, outputs))}."
        )
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs
    if loss is None or isinstance(loss, Tensor):
        return loss
    raise TypeError(
        f"`training_step` must return a loss tensor, a dict with 'loss', or None, got {type(loss).__name__}."
    )


def told(outputs: Any) -> dict[str, Any]:
    """What a ``Trainer`` tells callbacks of a step: ``loss`` and what else was returned; empty if it was skipped."""
    extra = outputs if isinstance(outputs, dict) else {}
    loss = loss_of(outputs)
    return {} if loss is None else {**extra, "loss": loss.detach()}


def limited(batches: Iterable[Any], limit: int | float | None) -> Iterator[Any]:
    """The first ``limit`` batches (int), that share of them (float), or all (``None``)."""
    return islice(batches, _count(batches, limit))


def limited_length(batches: Iterable[Any], limit: int | float | None) -> int | None:
    """The number of batches that :func:`limited` gives, ``None`` where it is not known."""
    length, count = length_of(batches), _count(batches, limit)
    return length if count is None or length is None else min(length, count)


def _count(batches: Iterable[Any], limit: int | float | None) -> int | None:
    if not isinstance(limit, float):
        return limit
    length = length_of(batches)
    if length is None and 0 < limit < 1:
        raise ValueError(f"A share of the batches ({limit}) needs batches whose number is known; give an integer.")
    return {0.0: 0, 1.0: None}.get(limit, max(1, int(limit * (length or 0))))


def length_of(batches: Iterable[Any]) -> int | None:
    """The number of batches, ``None`` where it is not known."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
