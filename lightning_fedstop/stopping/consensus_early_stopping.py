"""Import path kept for saved configurations: :mod:`lightning_fedstop.stopping.callbacks.consensus`."""

from lightning_fedstop.stopping.callbacks.consensus import ConsensusEarlyStopping

__all__ = ["ConsensusEarlyStopping"]
