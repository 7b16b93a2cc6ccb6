"""Random streams: each draw has a generator of its own, named by what it is for.

Because a client's stream depends on nothing but ``(seed, round, client)``, neither the order of clients, the number of
processes, an evaluation in between nor a resumed run changes a draw.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import numpy as np
import torch


def resolve_seed(seed: int | None = None) -> int:
    """Find the seed to use: the argument, else the one ``seed_everything`` set, else 0.

    >>> resolve_seed(7)
    7
    """
    if seed is None:
        return int(os.environ.get("PL_GLOBAL_SEED", 0))
    wrong = f"`seed` must be an integer of at least 0, got {seed!r}."
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(wrong)
    if seed < 0:
        raise ValueError(wrong)
    return seed


def derive_seed(seed: int, *path: int | str) -> int:
    """Derive a 63-bit seed for the stream named by ``path``.

    >>> derive_seed(0, "client", 1, 3) == derive_seed(0, "client", 1, 3)
    True
    >>> derive_seed(0, "client", 1, 3) == derive_seed(0, "client", 3, 1)
    False
    """
    words = [crc32(part.encode()) if isinstance(part, str) else part for part in path]
    return int(np.random.SeedSequence([seed, *words]).generate_state(1, np.uint64)[0]) >> 1


def torch_generator(seed: int, *path: int | str) -> torch.Generator:
    """Make a CPU generator for the stream named by ``path``."""
    return torch.Generator().manual_seed(derive_seed(seed, *path))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block under global generators (Python, NumPy, torch) seeded with ``seed``; put them back afterwards.

    Dropout, stochastic depth and a user's own augmentations draw from the global generators.
    """
    before = global_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the global generator is the one that user code draws from
    _seed_torch(seed)
    try:
        yield
    finally:
        restore_state(before)


class RandomStream:
    """Global generators of a client whose work alternates with that of others.

    Blocks under :meth:`resumed` draw what one block under :func:`seeded` would draw in their place.

    Args:
        seed: as for :func:`seeded`.
    """

    def __init__(self, seed: int) -> None:
        with seeded(seed):
            self._state = global_state()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Go on with the stream; the global generators are put back afterwards."""
        outside = global_state()
        restore_state(self._state)
        try:
            yield
        finally:
            self._state = global_state()
            restore_state(outside)


def global_state() -> dict[str, Any]:
    """Copy the state of the global generators on devices in use."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.default_generator.get_state()}
    state["numpy"] = np.random.get_state()  # noqa: NPY002 - see `seeded`
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_state(state: dict[str, Any]) -> None:
    """Let the global generators go on from a state of :func:`global_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002 - see `seeded`
    torch.default_generator.set_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _seed_torch(seed: int) -> None:
    """Seed as ``torch.manual_seed`` does, but queue no seed, 1.7 ms a call, for unused devices."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
