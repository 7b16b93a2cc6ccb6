"""Image sets dealt to clients: the skews, the partition, and the data modules."""

from lightning_fedstop.data.arrays import ArrayDataModule
from lightning_fedstop.data.digits import Digits
from lightning_fedstop.data.federated import Federated, FederatedDataModule
from lightning_fedstop.data.medmnist import MedMNIST
from lightning_fedstop.data.npz import NpzImages
from lightning_fedstop.data.partitions.partition import Partition
from lightning_fedstop.data.partitions.skew import DirichletSkew, Iid, PathologicalSkew, QuantitySkew, Skew

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
