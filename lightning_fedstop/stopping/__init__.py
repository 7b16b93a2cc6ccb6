"""When to stop: criteria, and the callbacks that ask them.

The callbacks need Lightning and are imported when first asked for, so that the criteria work without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_fedstop.stopping.consensus import ConsensusCriterion, consensus_potential, consensus_stopping_round
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
from lightning_fedstop.stopping.validation import ValidationCriterion, validation_stopping_round

if TYPE_CHECKING:
    from lightning_fedstop.stopping.average import SaturationAverage
    from lightning_fedstop.stopping.baselines import ValidationEarlyStopping
    from lightning_fedstop.stopping.callback import CriterionCallback
    from lightning_fedstop.stopping.consensus_early_stopping import ConsensusEarlyStopping
    from lightning_fedstop.stopping.early_stopping import TaskVectorEarlyStopping

_HOMES = {
    "ConsensusEarlyStopping": "consensus_early_stopping",
    "CriterionCallback": "callback",
    "SaturationAverage": "average",
    "TaskVectorEarlyStopping": "early_stopping",
    "ValidationEarlyStopping": "baselines",
}

__all__ = [
    "ConsensusCriterion",
    "ConsensusEarlyStopping",
    "Criterion",
    "CriterionCallback",
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
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
