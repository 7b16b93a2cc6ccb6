"""Data-free early stopping for federated learning, and ten federated methods, in PyTorch Lightning."""

from lightning_fedstop.__about__ import __version__
from lightning_fedstop.loop import FederatedLoop

__all__ = ["FederatedLoop", "__version__"]
