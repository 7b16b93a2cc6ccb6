"""Import path kept for users' scripts: :mod:`lightning_fedstop.federation.local_training`."""

from lightning_fedstop.federation.local_training import LocalTrainer

__all__ = ["LocalTrainer"]
