"""When to stop: the growth-rate criterion and its callback.

The callback needs Lightning and is imported when first asked for, so that the criterion works without it.
"""

from typing import TYPE_CHECKING, Any

from lightning_fedstop.stopping.criterion import (
    Criterion,
    Decision,
    StopDecision,
    StoppingReason,
    TaskVectorCriterion,
    growth_rate,
    saturation_count,
    stopping_round,
    task_vector,
    task_vector_distance,
    zero_based_round,
)

if TYPE_CHECKING:
    from lightning_fedstop.stopping.callback import CriterionCallback
    from lightning_fedstop.stopping.early_stopping import TaskVectorEarlyStopping

__all__ = [
    "Criterion",
    "CriterionCallback",
    "Decision",
    "StopDecision",
    "StoppingReason",
    "TaskVectorCriterion",
    "TaskVectorEarlyStopping",
    "growth_rate",
    "saturation_count",
    "stopping_round",
    "task_vector",
    "task_vector_distance",
    "zero_based_round",
]


def __getattr__(name: str) -> Any:
    if name == "CriterionCallback":
        from lightning_fedstop.stopping.callback import CriterionCallback

        return CriterionCallback
    if name == "TaskVectorEarlyStopping":
        from lightning_fedstop.stopping.early_stopping import TaskVectorEarlyStopping

        return TaskVectorEarlyStopping
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
