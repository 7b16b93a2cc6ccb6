"""Locks on version folders, which end with the process that holds them, however that ends."""

import os
from pathlib import Path

from filelock import FileLock, Timeout

LOCK_FILE = ".lock"


class RunLock:
    """Mark on a version folder that is in use, until :meth:`release`.

    The file stays behind when a process is killed; the lock on it does not, so that it blocks nothing.

    Args:
        folder: The version folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._lock = _lock_of(Path(folder))

    def acquire(self) -> None:
        """Mark the folder.

        Raises:
            TimeoutError: If another process has marked it.
        """
        self._lock.acquire(timeout=0)

    def release(self) -> None:
        """Let the folder go; nothing happens if it was not marked, or is gone."""
        if self._lock.is_locked:
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release(force=True)


def is_live(folder: str | os.PathLike[str]) -> bool:
    """Check for another process that has marked a folder."""
    lock = _lock_of(Path(folder))
    if not Path(lock.lock_file).is_file():
        return False
    try:
        # Processes that resume together ask at the same moment: each holds the lock while it asks.
        with lock.acquire(timeout=1, poll_interval=0.01):
            return False
    except Timeout:
        return True
    except OSError:  # a folder that may only be read
        return False


def refuse_live(path: str | os.PathLike[str]) -> None:
    """Refuse to continue from a checkpoint of a run that is still going on.

    Raises:
        ValueError: If another process trains the run.
    """
    if any(map(is_live, list(Path(path).resolve().parents)[:2])):
        raise ValueError(
            f"{os.fspath(path)!r} belongs to a run that another process is still training: wait for its end, or end it "
            "first."
        )


def _lock_of(folder: Path) -> FileLock:
    # One object a file in this process, whose own lock does not block it; any thread may release it.
    return FileLock(folder.resolve() / LOCK_FILE, thread_local=False, is_singleton=True)
