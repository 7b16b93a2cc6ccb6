"""The part of a federation's trainer that stopping rules use."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class FederatedTrainer(Protocol):
    """Figures of a federation that a ``Trainer`` lacks; a ``FederatedLoop`` has them.

    The server measures the global model in its own precision, which a module in bfloat16 only rounds, so rules decide
    on what the record holds.
    """

    @property
    def start_weights(self) -> Tensor | None:
        """Shape ``(d,)``; theta_0, the trainable parameters as round 1 began to train; ``None`` before."""

    @property
    def task_vector_distance(self) -> float | None:
        """The distance of the global model from ``start_weights``; ``None`` before the end of round 1."""

    @property
    def trained_clients(self) -> int:
        """Number of updates in the present round; 0 makes it no check."""

    @property
    def takes_update(self) -> bool:
        """True if the update of the client that has just ended goes into the round."""


def has_trained(trainer: Any) -> bool:
    """Tell if anything was trained in this epoch; a round may be idle."""
    return not isinstance(trainer, FederatedTrainer) or trainer.trained_clients > 0
