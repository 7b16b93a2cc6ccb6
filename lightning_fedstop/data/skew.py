"""Import path kept for saved configurations."""

from lightning_fedstop.data import DirichletSkew, Iid, PathologicalSkew, QuantitySkew, Skew

__all__ = ["DirichletSkew", "Iid", "PathologicalSkew", "QuantitySkew", "Skew"]
