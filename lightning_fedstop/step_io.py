"""What a local step takes and gives: how many batches, and the forms that ``training_step`` may return."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor


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
    if isinstance(limit, float):
        length = length_of(batches)
        if length is None and 0 < limit < 1:
            raise ValueError(f"A share of the batches ({limit}) needs batches whose number is known; give an integer.")
        limit = {0.0: 0, 1.0: None}.get(limit, max(1, int(limit * (length or 0))))
    return islice(batches, limit)


def length_of(batches: Iterable[Any]) -> int | None:
    """The number of batches, ``None`` where it is not known."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
