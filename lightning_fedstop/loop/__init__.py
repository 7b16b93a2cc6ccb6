"""The loop over rounds: set-up, rounds, callbacks, checkpoints, the record."""

from lightning_fedstop.loop.federated_loop import FederatedLoop

__all__ = ["FederatedLoop"]
