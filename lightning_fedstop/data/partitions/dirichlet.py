"""Label skew by Dirichlet shares, equation (2) of the paper."""

import numpy as np

from lightning_fedstop.data.classes import IntArray
from lightning_fedstop.data.partitions.draws import (
    by_class,
    client_prior_draw,
    dirichlet_logits,
    largest_remainder,
    legacy_generator,
    lists_of,
    partition_generator,
    repair,
    softmax,
)
from lightning_fedstop.data.partitions.skew import Skew, Variant
from lightning_fedstop.utilities.validate import one_of, positive, whole_number


class DirichletSkew(Skew):
    r"""Label skew (Dirichlet): the samples of class z are dealt in proportions :math:`p^{(z)} \sim Dir_N(c)`, eq. (2).

    Every sample goes to exactly one client. Sizes are cut from the cumulative proportions and rounded by the largest
    remainder, so that they add up; then one sample at a time moves from the currently largest client (smallest class
    first) until every client has ``min_samples``. Weights are drawn in log space: no concentration is too small.

    ``variant="released_code"`` is the authors' draw instead, bit for bit under ``np.random.RandomState``: a prior
    :math:`p_m \sim Dir_C(c)` over the classes for each *client*, equal sizes (the remainder to client 0), and classes
    that start again when exhausted. Samples are **reused**, others never used, and the pooled class frequencies come
    out nearly uniform, so that it also re-balances the classes.

    Args:
        concentration: c; the smaller, the stronger the skew.
        variant: ``"paper"`` or ``"released_code"``.
        min_samples: samples each client gets at least; 0 allows empty clients, as eq. (2) by itself does.
        balance: a client that already has n / N samples gets nothing of the following classes (as NIID-Bench does).

    Raises:
        ValueError: if an argument is out of range.

    >>> labels = np.repeat([0, 1, 2], 100)
    >>> clients = DirichletSkew(concentration=1e-6).partition(labels, 20)
    >>> sum(map(len, clients)), min(map(len, clients))
    (300, 1)
    """

    def __init__(
        self, concentration: float = 0.1, variant: Variant = "paper", min_samples: int = 1, balance: bool = False
    ) -> None:
        self.concentration = positive("concentration", concentration)
        self.variant = one_of("variant", variant, ("paper", "released_code"))
        self.min_samples = whole_number("min_samples", min_samples, 0)
        self.balance = bool(balance)
        if self.balance and variant == "released_code":
            raise ValueError("`balance=True` needs `variant='paper'`: the released code gives all clients equal sizes.")

    def partition(self, labels: IntArray, num_clients: int, seed: int = 0) -> list[IntArray]:
        """Deal the samples; see :meth:`Skew.partition`."""
        labels = self._checked(labels, num_clients, seed)
        if self.variant == "released_code":
            return self._released_code(labels, num_clients, seed)
        classes = np.unique(labels, return_inverse=True)[1]
        rng = partition_generator(seed)
        order, class_sizes = by_class(classes, rng)
        owner, held, start = np.empty(len(labels), np.int64), np.zeros(num_clients, np.int64), 0
        for size in class_sizes.tolist():
            logits = dirichlet_logits(rng, self.concentration, num_clients)
            if self.balance:
                # Fewer than n samples are dealt so far, so that at least one client is below n / N.
                logits[held * num_clients >= len(labels)] = -np.inf
            shares = largest_remainder(softmax(logits), size)
            owner[order[start : start + size]] = np.repeat(np.arange(num_clients), shares)
            held += shares
            start += size
        repair(owner, classes, num_clients, self.min_samples, rng)
        return lists_of(owner, num_clients)

    def _released_code(self, labels: IntArray, num_clients: int, seed: int) -> list[IntArray]:
        num_classes = int(labels.max()) + 1
        rng = legacy_generator(seed)
        order = rng.permutation(len(labels)).astype(np.int64)
        with np.errstate(invalid="ignore", divide="ignore"):
            priors = rng.dirichlet([self.concentration] * num_classes, size=num_clients)
        return client_prior_draw(labels, order, priors, np.cumsum(priors, axis=1), rng)
