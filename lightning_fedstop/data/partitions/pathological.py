"""Label skew of a few classes each, equation (3) of the paper."""

from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from lightning_fedstop.data.classes import IntArray, class_ids
from lightning_fedstop.data.partitions.draws import (
    by_class,
    client_prior_draw,
    legacy_generator,
    lists_of,
    partition_generator,
)
from lightning_fedstop.data.partitions.skew import Skew, Variant
from lightning_fedstop.utilities.validate import one_of, whole_number


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


def holders_per_class(
    class_sizes: IntArray, num_clients: int, classes_per_client: int, min_samples: int, rng: np.random.Generator
) -> IntArray:
    """How many clients hold each class, shape ``(C,)``: as even as possible.

    A class of ``n_k`` samples has at most ``n_k / share`` holders, so that each gets ``share`` samples of it, with
    ``share = min_samples / c``. Where that leaves too few places, the largest share that leaves enough is taken.
    """
    places = min(num_clients * classes_per_client, int(np.minimum(class_sizes, num_clients).sum()))

    def capacity(share: int) -> IntArray:
        return np.minimum(np.maximum(class_sizes // share, 1), num_clients)

    share = max(1, -(-min_samples // classes_per_client))
    if capacity(share).sum() < places:
        enough, too_much = 1, share
        while too_much - enough > 1:
            middle = (enough + too_much) // 2
            enough, too_much = (middle, too_much) if capacity(middle).sum() >= places else (enough, middle)
        share = enough
    return _spread(places, capacity(share), rng)


def _spread(places: int, capacity: IntArray, rng: np.random.Generator) -> IntArray:
    """``places`` spread over entries of at most ``capacity``, the smallest served first; the sum is exact."""
    shuffled = rng.permutation(len(capacity))
    order = shuffled[np.argsort(capacity[shuffled], kind="stable")]
    spread = np.zeros_like(capacity)
    for done, k in enumerate(order):
        spread[k] = min(int(capacity[k]), places // (len(order) - done))
        places -= int(spread[k])
    return spread


def deal_classes(holders: IntArray, num_clients: int, classes_per_client: int, rng: np.random.Generator) -> IntArray:
    """The classes of each client, shape ``(c, N)``, all different within a client; -1 where a place is empty.

    The classes are laid out one after another and dealt round the table: no class has more holders than clients, so
    that nobody gets one twice. Pairs of clients then swap classes at random, which keeps both counts.
    """
    places = np.full(classes_per_client * num_clients, -1, np.int64)
    classes = rng.permutation(len(holders))
    places[: holders.sum()] = np.repeat(classes, holders[classes])
    slots = places.reshape(classes_per_client, num_clients)
    for _ in range(min(16 * classes_per_client, 64)):
        _swap(slots, rng)
    return slots[:, rng.permutation(num_clients)]


def _swap(slots: IntArray, rng: np.random.Generator) -> None:
    c, num_clients = slots.shape
    pairs = rng.permutation(num_clients)
    left, right = pairs[: num_clients // 2], pairs[num_clients // 2 : 2 * (num_clients // 2)]
    a, b = rng.integers(c, size=(2, len(left)))
    x, y = slots[a, left], slots[b, right]
    fine = (x >= 0) & (y >= 0) & ~(slots[:, left] == y).any(0) & ~(slots[:, right] == x).any(0)
    slots[a[fine], left[fine]], slots[b[fine], right[fine]] = y[fine], x[fine]


def split_classes(slots: IntArray, order: IntArray, class_sizes: IntArray, rng: np.random.Generator) -> IntArray:
    """The owner of each sample, shape ``(n,)``: a class is split evenly over its holders; -1 where it has none."""
    num_clients = slots.shape[1]
    flat = slots.reshape(-1)
    shuffled = rng.permutation(np.flatnonzero(flat >= 0))
    places = shuffled[np.argsort(flat[shuffled], kind="stable")]
    holders = np.bincount(flat[places], minlength=len(class_sizes))
    rank = np.arange(len(places)) - np.repeat(np.cumsum(holders) - holders, holders)
    held = flat[places]
    sizes = class_sizes[held] // holders[held] + (rank < class_sizes[held] % holders[held])
    owner = np.full(len(order), -1, np.int64)
    used = np.repeat(holders > 0, class_sizes)
    owner[order[used]] = np.repeat(places % num_clients, sizes)
    return owner


def warn_of_gaps(
    holders: IntArray, class_sizes: IntArray, names: NDArray[Any], num_clients: int, classes_per_client: int
) -> None:
    """Say which samples stay unused, and that clients hold fewer than c classes, where eq. (3) leaves no other way."""
    places = num_clients * classes_per_client
    if (holders == 0).any():
        rank_zero_warn(
            f"{num_clients} clients of {classes_per_client} classes hold at most {places} of {len(holders)} classes: "
            f"{int(class_sizes[holders == 0].sum())} samples of the classes "
            f"{', '.join(map(str, names[holders == 0][:10]))} stay unused."
        )
    if holders.sum() < places:
        rank_zero_warn(
            f"The training set has too few samples to give each of {num_clients} clients {classes_per_client} classes: "
            f"some hold fewer."
        )
