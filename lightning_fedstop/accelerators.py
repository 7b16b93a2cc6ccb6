"""Import path kept for saved configurations: :mod:`lightning_fedstop.utilities.accelerators`."""

from lightning_fedstop.utilities.accelerators import ROCmAccelerator

__all__ = ["ROCmAccelerator"]
