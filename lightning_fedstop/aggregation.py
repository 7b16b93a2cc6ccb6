"""Import path kept for saved configurations: :mod:`lightning_fedstop.core.aggregation`."""

from lightning_fedstop.core.aggregation import RunningMean, RunningSum

__all__ = ["RunningMean", "RunningSum"]
