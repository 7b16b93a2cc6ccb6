"""Import path kept for users' scripts: :mod:`lightning_fedstop.data.partitions.partition`."""

from lightning_fedstop.data.partitions.partition import Partition, fingerprint

__all__ = ["Partition", "fingerprint"]
