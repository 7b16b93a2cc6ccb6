"""Image sets dealt to clients: the skews, the partition, and the data modules.

The names are imported when they are first used, so that a report on runs loads neither torch nor Lightning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fedstop.data.arrays import ArrayDataModule
    from lightning_fedstop.data.digits import Digits
    from lightning_fedstop.data.federated import Federated, FederatedDataModule
    from lightning_fedstop.data.medmnist import MedMNIST
    from lightning_fedstop.data.npz import NpzImages
    from lightning_fedstop.data.partitions.dirichlet import DirichletSkew
    from lightning_fedstop.data.partitions.iid import Iid
    from lightning_fedstop.data.partitions.partition import Partition
    from lightning_fedstop.data.partitions.pathological import PathologicalSkew
    from lightning_fedstop.data.partitions.quantity import QuantitySkew
    from lightning_fedstop.data.partitions.skew import Skew

_LAZY_IMPORTS = {
    "ArrayDataModule": "arrays",
    "Digits": "digits",
    "DirichletSkew": "partitions.dirichlet",
    "Federated": "federated",
    "FederatedDataModule": "federated",
    "Iid": "partitions.iid",
    "MedMNIST": "medmnist",
    "NpzImages": "npz",
    "Partition": "partitions.partition",
    "PathologicalSkew": "partitions.pathological",
    "QuantitySkew": "partitions.quantity",
    "Skew": "partitions.skew",
}

__all__ = [
    "ArrayDataModule",
    "Digits",
    "DirichletSkew",
    "Federated",
    "FederatedDataModule",
    "Iid",
    "MedMNIST",
    "NpzImages",
    "Partition",
    "PathologicalSkew",
    "QuantitySkew",
    "Skew",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY_IMPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
