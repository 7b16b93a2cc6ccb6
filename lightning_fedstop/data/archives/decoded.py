"""Arrays of an archive, decoded once into a folder from which any number of processes map them into memory."""

import hashlib
import secrets
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray

_CHUNK = 2**20


class DecodedArrays:
    """The arrays of a ``.npz`` archive as memory maps of ``.npy`` files in a folder.

    A file holds the bytes that the archive would decode to, so that the archive's own sizes and checksums tell whether
    it is whole. Its folder is named by the content of the archive: one that has changed is decoded anew. Processes that
    need an array at the same time wait for the first of them to decode it.

    Maps are copy-on-write: pages are shared between processes and with the file for as long as nobody writes to them,
    and what somebody writes stays in that process, as in an array that was decoded into memory.

    Args:
        archive: the ``.npz`` file.
        cache_dir: under which a folder for this archive is made.
    """

    def __init__(self, archive: Path, cache_dir: Path) -> None:
        self.archive = archive
        self.cache_dir = cache_dir
        self._whole: set[Path] = set()

    def __getitem__(self, name: str) -> NDArray[Any]:
        """An array, decoded before if there is no whole file of it.

        Raises:
            OSError: if the file cannot be written or mapped.
            zipfile.BadZipFile, zlib.error, EOFError: if the archive is damaged.
        """
        with zipfile.ZipFile(self.archive) as archive:
            member = archive.getinfo(f"{name}.npy")
            path = self.cache_dir / f"{self.archive.stem[:100]}-{_content_key(archive)}" / member.filename
            if path not in self._whole and not _is_whole(path, member):
                path.parent.mkdir(parents=True, exist_ok=True)
                with _turn(path.parent) as alone:
                    # Whoever had to wait finds it done.
                    if not alone or not _is_whole(path, member):
                        _decode(archive, member, path, alone)
            self._whole.add(path)
        return np.asarray(np.load(path, mmap_mode="c", allow_pickle=False))


def _content_key(archive: zipfile.ZipFile) -> str:
    """A digest of the archive's directory, which has the size and the CRC-32 of each array."""
    members = sorted((member.filename, member.file_size, member.CRC) for member in archive.infolist())
    return hashlib.sha256(repr(members).encode()).hexdigest()[:16]


def _is_whole(path: Path, member: zipfile.ZipInfo) -> bool:
    """Whether a file has the size and the checksum of what the archive decodes to."""
    if not path.is_file() or path.stat().st_size != member.file_size:
        return False
    checksum = 0
    # Read, not mapped: pages that only the check has touched do not count as this process's memory.
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum == member.CRC


@contextmanager
def _turn(folder: Path) -> Iterator[bool]:
    """Wait until no other process decodes into the folder; ``False`` on a file system without locks.

    The lock ends with the process that holds it, however that ends.
    """
    lock = FileLock(folder / ".lock")
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            rank_zero_info(f"Waiting for another process that decodes into '{folder}'.")
            lock.acquire()
    except (OSError, NotImplementedError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _decode(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path, alone: bool) -> None:
    """Write an array aside and rename it, so that nobody finds half of it, nor one in use changed."""
    if path.exists():
        rank_zero_warn(f"'{path}' is damaged or cut off and is decoded anew.")
    if alone:
        for left_behind in path.parent.glob(f".{path.name}.*.tmp"):
            left_behind.unlink(missing_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        # Not flushed to the disk: what a crash of the system loses, the checksum tells.
        with archive.open(member) as source, aside.open("xb") as target:
            shutil.copyfileobj(source, target, _CHUNK)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
