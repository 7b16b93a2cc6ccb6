"""Data-free early stopping for federated learning, and ten federated methods, in PyTorch Lightning.

The public names are imported when they are first used, so that reading a record or printing a help text loads neither
torch nor Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_fedstop.__about__ import __version__

if TYPE_CHECKING:
    from lightning_fedstop.core.client_states import ClientStates
    from lightning_fedstop.data import (
        Digits,
        DirichletSkew,
        Federated,
        FederatedDataModule,
        Iid,
        MedMNIST,
        NpzImages,
        Partition,
        PathologicalSkew,
        QuantitySkew,
        Skew,
    )
    from lightning_fedstop.federation.cohort import Cohort, ScheduledCohort, UniformCohort
    from lightning_fedstop.loop.federated_loop import FederatedLoop
    from lightning_fedstop.methods import (
        SCAFFOLD,
        FedAvg,
        FedDyn,
        FederatedMethod,
        FedGamma,
        FedLESAM,
        FedProx,
        FedSAM,
        FedSMOO,
        FedSpeed,
        FedWMSAM,
    )
    from lightning_fedstop.models import ImageClassifier
    from lightning_fedstop.stopping import (
        ConsensusEarlyStopping,
        StoppingReason,
        TaskVectorCriterion,
        TaskVectorEarlyStopping,
        ValidationEarlyStopping,
        stopping_round,
    )

_HOMES = {
    "core.client_states": ("ClientStates",),
    "federation.cohort": ("Cohort", "ScheduledCohort", "UniformCohort"),
    "data": (
        "Digits",
        "DirichletSkew",
        "Federated",
        "FederatedDataModule",
        "Iid",
        "MedMNIST",
        "NpzImages",
        "Partition",
        "PathologicalSkew",
        "QuantitySkew",
        "Skew",
    ),
    "loop": ("FederatedLoop",),
    "methods": (
        "SCAFFOLD",
        "FedAvg",
        "FedDyn",
        "FedGamma",
        "FedLESAM",
        "FedProx",
        "FedSAM",
        "FedSMOO",
        "FedSpeed",
        "FedWMSAM",
        "FederatedMethod",
    ),
    "models": ("ImageClassifier",),
    "stopping": (
        "ConsensusEarlyStopping",
        "StoppingReason",
        "TaskVectorCriterion",
        "TaskVectorEarlyStopping",
        "ValidationEarlyStopping",
        "stopping_round",
    ),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "SCAFFOLD",
    "ClientStates",
    "Cohort",
    "ConsensusEarlyStopping",
    "Digits",
    "DirichletSkew",
    "FedAvg",
    "FedDyn",
    "FedGamma",
    "FedLESAM",
    "FedProx",
    "FedSAM",
    "FedSMOO",
    "FedSpeed",
    "FedWMSAM",
    "Federated",
    "FederatedDataModule",
    "FederatedLoop",
    "FederatedMethod",
    "Iid",
    "ImageClassifier",
    "MedMNIST",
    "NpzImages",
    "Partition",
    "PathologicalSkew",
    "QuantitySkew",
    "ScheduledCohort",
    "Skew",
    "StoppingReason",
    "TaskVectorCriterion",
    "TaskVectorEarlyStopping",
    "UniformCohort",
    "ValidationEarlyStopping",
    "__version__",
    "stopping_round",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
