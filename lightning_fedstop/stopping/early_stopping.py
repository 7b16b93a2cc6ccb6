"""Import path kept for saved configurations: :mod:`lightning_fedstop.stopping.callbacks.task_vector`."""

from lightning_fedstop.stopping.callbacks.task_vector import TaskVectorEarlyStopping

__all__ = ["TaskVectorEarlyStopping"]
