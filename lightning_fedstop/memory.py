"""Gives memory that was freed back to the system, where the C library would keep it for later.

glibc keeps pools, one for each thread. What a client's batch has left in one is of no use to the other threads, and
where several clients are trained at once the holes in the pools came to a third of a process's memory.
"""

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""The environment variable by which torch asks for huge pages on a CPU; it is read before the first tensor is made."""

MOST_OFTEN = 1.0
"""Seconds between two times of :func:`release_memory`: it takes hundredths of one."""


class Pools(NamedTuple):
    """What the C library's pools hold.

    Attributes:
        large: bytes from which on a block is in none of them.
        kept: free bytes at the end of each that it may keep.
    """

    large: int
    kept: int


ALONE, TOGETHER = Pools(4 * 2**20, 64 * 2**20), Pools(2**20, 8 * 2**20)
"""Where clients are trained one after the other, and by threads, of which each has a pool."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>


def ask_for_huge_pages() -> None:
    """Have torch ask for huge pages, unless the user has decided; for the start of a program."""
    os.environ.setdefault(HUGE_PAGES, "1")


def return_large_blocks(pools: Pools) -> bool:
    """Have large blocks come from the system and go back to it when they are freed.

    A large block then costs page faults, which with small pages would take a fifth of a step's time. So this is done
    only where torch asks for huge pages, and not where the user has set up the C library himself.

    Args:
        pools: what they are to hold.

    Returns:
        Whether it is so from now on.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    is_set_up = "malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ)
    if _set is None or is_set_up or os.environ.get(HUGE_PAGES) != "1":
        return False
    return bool(_set(_MMAP_THRESHOLD, pools.large) and _set(_TRIM_THRESHOLD, pools.kept))


def release_memory(last: float) -> float:
    """Empty the pools, unless that was done less than a second ago.

    Args:
        last: when it was done before, by ``time.perf_counter``.

    Returns:
        When it was done last; where there is another C library, nothing is done.
    """
    now = time.perf_counter()
    if _trim is None or now - last < MOST_OFTEN:
        return last
    _trim(0)
    return now


def _function(name: str) -> Callable[..., Any] | None:
    """A function of glibc, ``None`` where there is another C library."""
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # Windows has no library that is the program itself.
        return None


_trim, _set = _function("malloc_trim"), _function("mallopt")
