"""Gives memory that was freed back to the system."""

import ctypes
import time

MOST_OFTEN = 1.0
"""Seconds between two times: it takes hundredths of one."""


def release_memory(last: float) -> float:
    """Let go of what the C library keeps for later, unless that was done less than a second ago.

    glibc keeps a pool for each thread. What a client's batches have left in one is of no use to the other threads, and
    pools full of holes came to a fifth of a process's memory.

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


try:
    _trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
except (OSError, TypeError):  # Windows has no library that is the program itself.
    _trim = None
