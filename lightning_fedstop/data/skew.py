"""Import path kept for saved configurations: :mod:`lightning_fedstop.data.partitions.skew`."""

from lightning_fedstop.data.partitions.skew import DirichletSkew, Iid, PathologicalSkew, QuantitySkew, Skew

__all__ = ["DirichletSkew", "Iid", "PathologicalSkew", "QuantitySkew", "Skew"]
