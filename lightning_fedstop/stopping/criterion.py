"""Import path kept for saved configurations: :mod:`lightning_fedstop.stopping.criteria.task_vector`."""

from lightning_fedstop.stopping.criteria.task_vector import (
    Decision,
    StoppingReason,
    TaskVectorCriterion,
    stopping_round,
)

__all__ = ["Decision", "StoppingReason", "TaskVectorCriterion", "stopping_round"]
