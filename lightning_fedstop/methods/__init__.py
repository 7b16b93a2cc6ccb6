"""Federated methods, one file each."""

from lightning_fedstop.methods.base import Client, FederatedMethod, Federation, LocalStep
from lightning_fedstop.methods.fedavg import FedAvg

__all__ = ["Client", "FedAvg", "FederatedMethod", "Federation", "LocalStep"]
