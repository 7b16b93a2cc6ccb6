"""What a stopping rule asks of a trainer that trains a federation."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class FederatedTrainer(Protocol):
    """What a trainer of a federation knows beyond a ``Trainer``; a ``FederatedLoop`` is one.

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
        """How many clients' updates went into the present round; 0 makes it no check of any rule."""

    @property
    def takes_update(self) -> bool:
        """Whether the update of the client that has just ended goes into the round."""


def has_trained(trainer: Any) -> bool:
    """Whether anything was trained in this epoch: in a round of a federation, nobody may have."""
    return not isinstance(trainer, FederatedTrainer) or trainer.trained_clients > 0
