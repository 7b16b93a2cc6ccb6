"""The random draws under the skews: proportions, exact rounding, repair, and the authors' slot-by-slot draw."""

import heapq
import math

import numpy as np
from numpy.typing import NDArray

from lightning_fedstop.core.seeding import derive_seed
from lightning_fedstop.data.classes import IntArray

FloatArray = NDArray[np.float64]

# The authors' draw picks a client at random until one with room is found; above this many expected picks it is refused.
MAX_PICKS = 10**8


def partition_generator(seed: int) -> np.random.Generator:
    """The stream of the partition draws of this package."""
    return np.random.default_rng(derive_seed(seed, "partition"))


def legacy_generator(seed: int) -> np.random.RandomState:
    """The stream ``np.random.seed(seed)`` starts; seeds of more than 32 bits are given as words."""
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF] if seed >= 2**32 else seed
    return np.random.RandomState(words)


def dirichlet_logits(rng: np.random.Generator, concentration: float, size: int) -> FloatArray:
    """Logarithms of unnormalised Dirichlet weights, shape ``(size,)``.

    With G' ~ Gamma(c + 1) and U ~ Uniform(0, 1), G' * U**(1/c) ~ Gamma(c): its logarithm stays finite where Gamma(c)
    itself underflows to 0 for every client. Outside [1e-300, 1e15] the draw is one-hot or even to machine precision.
    """
    c = min(max(concentration, 1e-300), 1e15)
    return np.log(rng.standard_gamma(c + 1, size)) - rng.standard_exponential(size) / c


def softmax(logits: FloatArray) -> FloatArray:
    """Proportions from logarithms; at least one entry must be finite."""
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def largest_remainder(proportions: FloatArray, total: int) -> IntArray:
    """Whole numbers close to ``proportions * total`` that sum to ``total`` exactly.

    >>> largest_remainder(np.array([0.5, 0.3, 0.2]), 9).tolist()
    [4, 3, 2]
    """
    exact = proportions * total
    sizes = np.floor(exact).astype(np.int64)
    left = total - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:left]] += 1
    return sizes


def by_class(classes: IntArray, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Sample numbers grouped by class, in random order within one, and the class sizes."""
    order = np.lexsort((rng.permutation(len(classes)), classes))
    return order.astype(np.int64), np.bincount(classes).astype(np.int64)


def repair(owner: IntArray, classes: IntArray, num_clients: int, min_samples: int, rng: np.random.Generator) -> None:
    """Give every client at least ``min_samples`` samples, in place.

    One sample at a time goes from the currently largest client (the first of equals), from its smallest class, drawn
    by ``rng`` within that class. Whoever gives holds more than ``min_samples``, because the mean is at least that.

    Args:
        owner: shape ``(n,)``; the client of each sample, changed in place.
        classes: shape ``(n,)``; class numbers.
        num_clients: the number of clients N, with ``n >= N * min_samples``.
        min_samples: what each client holds at least afterwards.
        rng: decides which sample of a class moves.
    """
    sizes = np.bincount(owner, minlength=num_clients)
    missing = np.maximum(min_samples - sizes, 0)
    if not missing.any():
        return
    order = np.lexsort((rng.permutation(len(owner)), classes, owner))
    front = (np.cumsum(sizes) - sizes).tolist()
    heap = [(-int(sizes[m]), int(m)) for m in np.flatnonzero(sizes > min_samples)]
    heapq.heapify(heap)
    moved = []
    for _ in range(int(missing.sum())):
        size, donor = heap[0]
        moved.append(front[donor])
        front[donor] += 1
        heapq.heapreplace(heap, (size + 1, donor))
    owner[order[moved]] = np.repeat(np.arange(num_clients), missing)


def lists_of(owner: IntArray, num_clients: int) -> list[IntArray]:
    """The samples of each client in ascending order; samples with owner -1 belong to nobody."""
    sizes = np.bincount(owner[owner >= 0], minlength=num_clients)
    order = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :].astype(np.int64)
    return cut(order, sizes)


def cut(order: IntArray, sizes: IntArray) -> list[IntArray]:
    """Consecutive parts of the given sizes; ``np.split`` takes ten times as long for 100,000 of them.

    >>> [part.tolist() for part in cut(np.array([3, 1, 2]), np.array([1, 0, 2]))]
    [[3], [], [1, 2]]
    """
    ends = np.cumsum(sizes).tolist()
    return [order[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def client_prior_draw(
    labels: IntArray, order: IntArray, priors: FloatArray, cumulative: FloatArray, rng: np.random.RandomState
) -> list[IntArray]:
    """Fill the clients slot by slot as the authors' code does; samples are reused when a class runs out.

    All clients have ``n // N`` slots, the first also the remainder. A client with room is picked at random, a class is
    drawn from its prior by inverse CDF, and the next sample of the class is taken from the end of its list. An
    exhausted list starts again from its end, after one more draw of the class.

    Args:
        labels: shape ``(n,)``; class numbers 0 to C - 1.
        order: shape ``(n,)``; the permutation of the training set drawn first.
        priors: shape ``(N, C)``; the class probabilities of each client.
        cumulative: shape ``(N, C)``; what a uniform draw is compared with, the first entry not below it being taken.
        rng: the legacy stream, after the draws of permutation and priors.
    """
    num_clients, num_classes = priors.shape
    room = [len(labels) // num_clients] * num_clients
    room[0] += len(labels) % num_clients
    lists = [np.flatnonzero(labels[order] == k) for k in range(num_classes)]
    _refuse_endless(priors, np.array([len(members) > 0 for members in lists]), room)
    clients = [np.empty(slots, np.int64) for slots in room]
    left = [len(members) for members in lists]
    for _ in range(len(labels)):
        client = rng.randint(num_clients)
        while room[client] == 0:
            client = rng.randint(num_clients)
        room[client] -= 1
        while True:
            label = int(np.argmax(rng.uniform() <= cumulative[client]))
            if left[label] > 0:
                break
            left[label] = len(lists[label])
        left[label] -= 1
        clients[client][room[client]] = order[lists[label][left[label]]]
    return clients


def _refuse_endless(priors: FloatArray, present: NDArray[np.bool_], room: list[int]) -> None:
    if max(room) * len(room) > MAX_PICKS:
        raise ValueError(
            f"`variant='released_code'` would need about {max(room) * len(room):.0e} random picks of a client for "
            f"{sum(room)} samples and {len(room)} clients: use `variant='paper'` or fewer clients."
        )
    # Where numpy's Dirichlet draw underflowed to NaN, every comparison fails and the class drawn is 0.
    reachable = np.where(np.isnan(priors).any(1), float(present[0]), np.nansum(priors * present, axis=1))
    if (reachable < 1e-4).any():
        client = int(np.argmin(reachable))
        raise ValueError(
            f"`variant='released_code'` would not end: the class prior of client {client} lies on classes without "
            f"training samples ({', '.join(map(str, np.flatnonzero(~present)))}); use `variant='paper'`."
        )


def legacy_proportions(rng: np.random.RandomState, concentration: float, size: int, seed: int) -> FloatArray:
    """Dirichlet proportions from the legacy stream; drawn in log space where that stream gives 0/0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        proportions = rng.dirichlet([concentration] * size)
    if not np.isfinite(proportions).all():
        proportions = softmax(dirichlet_logits(partition_generator(seed), concentration, size))
    total = math.fsum(proportions)
    # numpy's multinomial refuses sums above 1 + 1e-12, which rounding reaches for very many clients.
    return proportions / total if total > 1 + 1e-13 else proportions
