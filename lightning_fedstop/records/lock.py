"""Who is writing to a version folder: a lock that the system lets go of when its process ends, however that ends."""

import errno
import os
import socket
import sys
from pathlib import Path

LOCK_FILE = ".lock"
_HELD_BY_OTHERS = (errno.EACCES, errno.EAGAIN)
# A second lock on a file of its own would be granted to a process, and let go of with the first that is closed.
_own: set[Path] = set()


class RunLock:
    """Marks a version folder as in use, from :meth:`acquire` to :meth:`release` or the end of the process.

    The file stays behind when a process is killed; the lock on it does not, so that it blocks nothing. Where the
    system has no such locks (Windows, some network folders) nothing is marked.

    Args:
        folder: the version folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder).resolve() / LOCK_FILE
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Mark the folder."""
        if sys.platform == "win32" or self._descriptor is not None:
            return
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        _try_lock(self._descriptor)
        _own.add(self.path)

    def release(self) -> None:
        """Let the folder go; nothing happens if it was not marked, or is gone."""
        if self._descriptor is None:
            return
        self.path.unlink(missing_ok=True)
        _own.discard(self.path)
        os.close(self._descriptor)
        self._descriptor = None


def holder(folder: str | os.PathLike[str]) -> str | None:
    """The other live process that has marked a folder, in words, or ``None``."""
    path = Path(folder).resolve() / LOCK_FILE
    if sys.platform == "win32" or path in _own or not path.is_file():
        return None
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        who = os.read(descriptor, 200).decode(errors="replace")
        return None if _try_lock(descriptor) else who or "a process"
    finally:
        os.close(descriptor)


def refuse_live(path: str | os.PathLike[str]) -> None:
    """Refuse to continue from a checkpoint of a run that is still going on.

    Raises:
        ValueError: naming the process.
    """
    for folder in list(Path(path).resolve().parents)[:2]:
        if who := holder(folder):
            raise ValueError(
                f"{os.fspath(path)!r} belongs to a run that {who} is still training: wait for its end, or end it first."
            )


def _try_lock(descriptor: int) -> bool:
    """Lock an open file; ``False`` if another process has."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _HELD_BY_OTHERS
    return True
