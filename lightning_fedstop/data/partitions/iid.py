"""Equal shares of the samples."""

import numpy as np

from lightning_fedstop.data.classes import IntArray
from lightning_fedstop.data.partitions.draws import cut, legacy_generator
from lightning_fedstop.data.partitions.skew import Skew, Variant
from lightning_fedstop.utilities.validate import one_of, whole_number


class Iid(Skew):
    """Equal shares of a random permutation.

    Args:
        variant: ``"paper"`` lets sizes differ by at most one; ``"released_code"`` gives the remainder to client 0, as
            the authors' code does.
        min_samples: samples each client gets at least; a partition that cannot give them is refused.

    Raises:
        ValueError: if an argument is out of range.

    >>> [len(client) for client in Iid().partition(np.zeros(10, int), 3)]
    [4, 3, 3]
    """

    needs_labels = False

    def __init__(self, variant: Variant = "paper", min_samples: int = 1) -> None:
        self.variant = one_of("variant", variant, ("paper", "released_code"))
        self.min_samples = whole_number("min_samples", min_samples, 0)

    def partition(self, labels: IntArray, num_clients: int, seed: int = 0) -> list[IntArray]:
        """Deal the samples; see :meth:`Skew.partition`."""
        n = len(self._checked(labels, num_clients, seed))
        sizes = np.full(num_clients, n // num_clients)
        if self.variant == "paper":
            sizes[: n % num_clients] += 1
        else:
            sizes[0] += n % num_clients
        order = legacy_generator(seed).permutation(n).astype(np.int64)
        return cut(order, sizes)
