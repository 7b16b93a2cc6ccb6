"""Import path kept for saved configurations: :mod:`lightning_fedstop.stopping.callbacks.validation`."""

from lightning_fedstop.stopping.callbacks.validation import ValidationEarlyStopping

__all__ = ["ValidationEarlyStopping"]
