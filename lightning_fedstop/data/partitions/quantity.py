"""Quantity skew, equation (4) of the paper."""

import numpy as np

from lightning_fedstop.data.classes import IntArray
from lightning_fedstop.data.partitions.draws import cut, legacy_generator, legacy_proportions
from lightning_fedstop.data.partitions.skew import Skew, Variant
from lightning_fedstop.utilities.validate import one_of, positive, whole_number


class QuantitySkew(Skew):
    r"""Quantity skew: client sizes from :math:`q \sim Dir_N(c)`, eq. (4); the classes stay as they are.

    Sizes are ``min_samples`` + Multinomial(n - N·``min_samples``, q), dealt as consecutive slices of a random
    permutation: every sample exactly once. With ``min_samples=1`` this is the authors' draw, bit for bit under
    ``np.random.RandomState``; only where that stream underflows to 0/0 are the proportions drawn in log space.

    Args:
        concentration: c; the smaller, the stronger the skew.
        min_samples: samples each client gets at least; 0 allows empty clients.
        variant: accepted for symmetry; ``"paper"`` and ``"released_code"`` are the same draw.

    Raises:
        ValueError: if an argument is out of range.

    >>> [len(client) for client in QuantitySkew(concentration=0.1).partition(np.zeros(7007, int), 100)][:5]
    [6, 15, 160, 1, 42]
    """

    needs_labels = False

    def __init__(self, concentration: float = 0.1, min_samples: int = 1, variant: Variant = "paper") -> None:
        self.concentration = positive("concentration", concentration)
        self.min_samples = whole_number("min_samples", min_samples, 0)
        self.variant = one_of("variant", variant, ("paper", "released_code"))

    def partition(self, labels: IntArray, num_clients: int, seed: int = 0) -> list[IntArray]:
        """Deal the samples; see :meth:`Skew.partition`."""
        n = len(self._checked(labels, num_clients, seed))
        rng = legacy_generator(seed)
        order = rng.permutation(n).astype(np.int64)
        proportions = legacy_proportions(rng, self.concentration, num_clients, seed)
        sizes = self.min_samples + rng.multinomial(n - num_clients * self.min_samples, proportions)
        return cut(order, sizes)
