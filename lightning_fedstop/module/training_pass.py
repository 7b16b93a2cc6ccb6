"""A pass over a batch: the module's ``training_step``, and the gradient of its loss."""

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


def batch_end_outputs(outputs: Any) -> dict[str, Any]:
    """What a ``Trainer`` tells callbacks of a step: ``loss`` and what else was returned; empty if it was skipped."""
    extra = outputs if isinstance(outputs, dict) else {}
    loss = loss_of(outputs)
    return {} if loss is None else {**extra, "loss": loss.detach()}
