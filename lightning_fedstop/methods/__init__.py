"""Federated methods, one file each."""

from lightning_fedstop.core.aggregation import RunningMean, RunningSum
from lightning_fedstop.methods.base import Client, FederatedMethod, Federation, LocalStep, add_scaled
from lightning_fedstop.methods.fedavg import FedAvg
from lightning_fedstop.methods.feddyn import FedDyn
from lightning_fedstop.methods.fedgamma import FedGamma
from lightning_fedstop.methods.fedlesam import FedLESAM
from lightning_fedstop.methods.fedprox import FedProx
from lightning_fedstop.methods.fedsam import FedSAM
from lightning_fedstop.methods.fedsmoo import FedSMOO
from lightning_fedstop.methods.fedspeed import FedSpeed
from lightning_fedstop.methods.fedwmsam import FedWMSAM
from lightning_fedstop.methods.scaffold import SCAFFOLD

__all__ = [
    "SCAFFOLD",
    "Client",
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
    "Federation",
    "LocalStep",
    "RunningMean",
    "RunningSum",
    "add_scaled",
]
