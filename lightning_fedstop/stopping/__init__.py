"""Stopping rules: criteria, and the callbacks that ask them.

The callbacks need Lightning and are imported when first asked for, so that the criteria work without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_fedstop.stopping.criteria.consensus import (
    ConsensusCriterion,
    consensus_potential,
    consensus_stopping_round,
)
from lightning_fedstop.stopping.criteria.task_vector import (
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
from lightning_fedstop.stopping.criteria.validation import ValidationCriterion, validation_stopping_round

if TYPE_CHECKING:
    from lightning_fedstop.stopping.average import SaturationAverage
    from lightning_fedstop.stopping.callbacks.base import CriterionCallback
    from lightning_fedstop.stopping.callbacks.consensus import ConsensusEarlyStopping
    from lightning_fedstop.stopping.callbacks.criterion import CriterionEarlyStopping
    from lightning_fedstop.stopping.callbacks.task_vector import TaskVectorEarlyStopping
    from lightning_fedstop.stopping.callbacks.validation import ValidationEarlyStopping

_LAZY_IMPORTS = {
    "ConsensusEarlyStopping": "callbacks.consensus",
    "CriterionCallback": "callbacks.base",
    "CriterionEarlyStopping": "callbacks.criterion",
    "SaturationAverage": "average",
    "TaskVectorEarlyStopping": "callbacks.task_vector",
    "ValidationEarlyStopping": "callbacks.validation",
}

__all__ = [
    "ConsensusCriterion",
    "ConsensusEarlyStopping",
    "Criterion",
    "CriterionCallback",
    "CriterionEarlyStopping",
    "Decision",
    "SaturationAverage",
    "StopDecision",
    "StoppingReason",
    "TaskVectorCriterion",
    "TaskVectorEarlyStopping",
    "ValidationCriterion",
    "ValidationEarlyStopping",
    "consensus_potential",
    "consensus_stopping_round",
    "growth_rate",
    "saturation_count",
    "stopping_round",
    "task_vector",
    "task_vector_distance",
    "validation_stopping_round",
    "zero_based_round",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY_IMPORTS:
        return getattr(import_module(f"{__name__}.{_LAZY_IMPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
