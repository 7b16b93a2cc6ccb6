"""How a training set is dealt to clients: equations (2) to (4) of the paper, and the authors' released draws.

A partition depends on the labels, the skew, the number of clients and the seed, and on nothing else.
"""

import reprlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import numpy as np

from lightning_fedstop.data.classes import IntArray, class_ids, class_numbers, unlabelled
from lightning_fedstop.data.partitions.draws import (
    by_class,
    client_prior_draw,
    cut,
    dirichlet_logits,
    largest_remainder,
    legacy_generator,
    legacy_proportions,
    lists_of,
    partition_generator,
    repair,
    softmax,
)
from lightning_fedstop.data.partitions.pathological import deal_classes, holders_per_class, split_classes, warn_of_gaps
from lightning_fedstop.utilities.validate import one_of, positive, whole_number

Variant = Literal["paper", "released_code"]
# A skew of one's own may hold a value for each sample.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


class Skew(ABC):
    """How samples are dealt to clients.

    A skew of your own implements :meth:`partition`, and sets ``needs_labels = False`` if it only reads ``len(labels)``.

    Attributes:
        needs_labels: whether the class numbers decide who gets what.
        min_samples: samples each client gets at least.
    """

    needs_labels: ClassVar[bool] = True
    min_samples: int = 1

    @abstractmethod
    def partition(self, labels: IntArray, num_clients: int, seed: int = 0) -> list[IntArray]:
        """Deal the samples.

        Args:
            labels: shape ``(n,)`` (or ``(n, 1)``); the class of each sample. A skew of this package takes any whole
                numbers or strings, one of your own gets whole numbers.
            num_clients: the number of clients N.
            seed: decides every draw.

        Returns:
            N int64 arrays: the sample numbers of each client.

        Raises:
            ValueError: at once, if there are too few samples for ``num_clients`` times ``min_samples``, or samples
                without a class, which -1 marks, where classes decide.
        """

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={_SHORT.repr(value)}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"

    def as_config(self) -> dict[str, Any]:
        """The skew in plain types, as a configuration file names it (attributes are named as the arguments are).

        >>> Iid().as_config()["class_path"]
        'lightning_fedstop.data.partitions.skew.Iid'
        """
        return {"class_path": f"{type(self).__module__}.{type(self).__qualname__}", "init_args": dict(vars(self))}

    def _checked(self, labels: Any, num_clients: int, seed: int) -> IntArray:
        vector = class_numbers(labels)[0] if self.needs_labels else np.zeros(len(labels), np.int64)
        whole_number("num_clients", num_clients, 1)
        whole_number("seed", seed, 0)
        if len(vector) == 0 or len(vector) < num_clients * self.min_samples:
            raise ValueError(
                f"{type(self).__name__} cannot deal {len(vector)} samples to {num_clients} clients with at least "
                f"{self.min_samples} each, which no number of tries would change (0 tries of {self!r}): lower "
                f"`num_clients` or `min_samples`."
            )
        if self.needs_labels and (marked := unlabelled(labels)):
            raise ValueError(
                f"{type(self).__name__} deals by class, and {marked} of {len(vector)} labels are -1, which marks "
                f"samples without one: leave them out with a torch `Subset`, or use `Iid` or `QuantitySkew`."
            )
        return vector


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


class PathologicalSkew(Skew):
    r"""Label skew (Pathological): every client holds samples of exactly c distinct classes, eq. (3).

    The N·c places are spread over the classes as evenly as the class sizes allow, who holds what is shuffled, and each
    class is split evenly over its holders. Every sample goes to exactly one client and every class has a holder if
    N·c >= C; otherwise C - N·c classes stay unused, with a warning. If there are too few samples to give every client
    c classes, some get fewer, with a warning.

    ``variant="released_code"`` is the authors' draw: random c classes per client, equal sizes (the remainder to client
    0), and classes that start again when exhausted, so that samples are **reused** and others never used.

    Args:
        classes_per_client: c.
        variant: ``"paper"`` or ``"released_code"``.
        min_samples: samples each client gets at least.

    Raises:
        ValueError: if an argument is out of range.

    >>> labels = np.repeat(np.arange(10), 50)
    >>> clients = PathologicalSkew(classes_per_client=2).partition(labels, 20)
    >>> {len(np.unique(labels[client])) for client in clients}
    {2}
    """

    def __init__(self, classes_per_client: int = 2, variant: Variant = "paper", min_samples: int = 1) -> None:
        self.classes_per_client = whole_number("classes_per_client", classes_per_client, 1)
        self.variant = one_of("variant", variant, ("paper", "released_code"))
        self.min_samples = whole_number("min_samples", min_samples, 0)

    def partition(self, labels: IntArray, num_clients: int, seed: int = 0) -> list[IntArray]:
        """Deal the samples; see :meth:`Skew.partition`.

        Raises:
            ValueError: if ``classes_per_client`` exceeds the classes there are, or ``min_samples`` cannot be met.
        """
        names = np.unique(class_ids(labels))
        labels = self._checked(labels, num_clients, seed)
        present, classes = np.unique(labels, return_inverse=True)
        if self.classes_per_client > len(present):
            raise ValueError(
                f"`classes_per_client={self.classes_per_client}` is more than the {len(present)} classes the training "
                f"set has."
            )
        if self.variant == "released_code":
            return self._released_code(labels, num_clients, seed)
        rng = partition_generator(seed)
        order, class_sizes = by_class(classes, rng)
        holders = holders_per_class(class_sizes, num_clients, self.classes_per_client, self.min_samples, rng)
        warn_of_gaps(holders, class_sizes, names, num_clients, self.classes_per_client)
        slots = deal_classes(holders, num_clients, self.classes_per_client, rng)
        owner = split_classes(slots, order, class_sizes, rng)
        smallest = int(np.bincount(owner[owner >= 0], minlength=num_clients).min())
        if smallest < self.min_samples:
            raise ValueError(
                f"PathologicalSkew cannot deal {len(labels)} samples to {num_clients} clients with at least "
                f"{self.min_samples} each of {self.classes_per_client} classes: the smallest would hold {smallest}; "
                f"lower `num_clients` or `min_samples`, or raise `classes_per_client`."
            )
        return lists_of(owner, num_clients)

    def _released_code(self, labels: IntArray, num_clients: int, seed: int) -> list[IntArray]:
        rng = legacy_generator(seed)
        order = rng.permutation(len(labels)).astype(np.int64)
        held = np.zeros((num_clients, int(labels.max()) + 1))
        held[:, : self.classes_per_client] = 1
        for row in held:
            rng.shuffle(row)
        c = self.classes_per_client
        # The authors leave a 0 where a class is not held; no draw is below it, so that the class is never taken.
        cumulative = np.where(held > 0, np.cumsum(held, axis=1) / c, 0.0)
        return client_prior_draw(labels, order, held / c, cumulative, rng)


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
