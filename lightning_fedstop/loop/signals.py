"""End of a fit on a signal, but never in the middle of a write."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name))
"""Ctrl-C; what ``kill``, container runtimes and SLURM's pre-emption send; what ``sbatch --signal=USR1`` asks for; a
terminal that was closed, unless ``nohup`` ignores it."""


class Terminated(SystemExit):
    """Exit on a signal other than Ctrl-C, with the code ``128 + signum``.

    Args:
        signum: the signal.

    >>> Terminated(15).code
    143
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


class SignalGuard:
    """Raises on a signal: ``KeyboardInterrupt`` on Ctrl-C, :class:`Terminated` on the others.

    Handlers are set inside the ``with`` block only, from the main thread only, and only in place of Python's own: a
    program that handles a signal itself goes on doing so. Inside :meth:`shielded` a signal is kept for the end.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._depth = 0
        self._kept: int | None = None

    def __enter__(self) -> "SignalGuard":
        self._kept = None
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                before = signal.getsignal(signum)
                if before in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[signum] = before
                    signal.signal(signum, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, before in self._before.items():
            signal.signal(signum, before)
        self._before = {}

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Delay signals until the block has finished."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._kept is not None and not self._depth:
            signum, self._kept = self._kept, None
            _raise(signum)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self._depth:
            self._kept = signum
        else:
            _raise(signum)


def _raise(signum: int) -> None:
    raise KeyboardInterrupt if signum == signal.SIGINT else Terminated(signum)
