"""Archives in MedMNIST's layout, read and checked in one place."""

import math
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.lib import format as npy
from numpy.typing import NDArray

from lightning_fedstop.data.archives.decoded import DecodedArrays
from lightning_fedstop.data.classes import IntArray, label_vector
from lightning_fedstop.utilities.paths import local_path

SPLITS = ("train", "val", "test")
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    ValueError,
    KeyError,
    RuntimeError,
    NotImplementedError,
    MemoryError,
)


class ImageArchive:
    """A ``.npz`` file with ``{train,val,test}_images`` and ``{train,val,test}_labels``.

    Images are uint8 of shape ``(n, H, W)``, ``(n, H, W, 1)`` or ``(n, H, W, 3)``; labels are whole numbers of shape
    ``(n,)`` or ``(n, 1)``. The training split is required, the others may be absent or empty.

    Args:
        path: the file. Only its headers are read here; arrays are read when asked for, one at a time.
        cache_dir: where images are kept decoded, from where other processes map the same memory; a folder is made
            under it. ``None`` decodes them into this process's memory.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is unreadable, or an array is missing or has another shape.
        TypeError: if the labels are no whole numbers, or ``cache_dir`` no path.

    Attributes:
        height, width, in_chans: of the images, the same in all splits.
    """

    def __init__(self, path: str | Path, cache_dir: str | Path | None = None) -> None:
        self.path = local_path(path, "path")
        folder = checked_cache_dir(cache_dir)
        self._decoded = None if folder is None else DecodedArrays(self.path, folder)
        if not self.path.is_file():
            reason = ", which is a folder" if self.path.is_dir() else ""
            raise FileNotFoundError(
                f"There is no image archive at '{self.path}'{reason}: give the path of a .npz file."
            )
        with self._reading():
            self._headers = _headers(self.path)
        if "train_images" not in self._headers or "train_labels" not in self._headers:
            missing = [key for key in ("train_images", "train_labels") if key not in self._headers]
            raise ValueError(
                f"'{self.path}' has no array {' and '.join(map(repr, missing))}; it holds "
                f"{', '.join(sorted(self._headers)) or 'nothing'}."
            )
        self.sizes = {split: self._checked_size(split) for split in SPLITS}
        if not self.sizes["train"]:
            raise ValueError(f"'train_images' in '{self.path}' is empty.")
        shapes = {split: _image_shape(self._headers[f"{split}_images"][0]) for split in SPLITS if self.sizes[split]}
        self.height, self.width, self.in_chans = shapes["train"]
        for split, shape in shapes.items():
            if shape != shapes["train"]:
                raise ValueError(
                    f"'{split}_images' in '{self.path}' has images of (height, width, channels) {shape}, but "
                    f"'train_images' of {shapes['train']}."
                )

    def _checked_size(self, split: str) -> int:
        images, labels = self._headers.get(f"{split}_images"), self._headers.get(f"{split}_labels")
        if images is None and labels is None:
            return 0
        if images is None or labels is None:
            absent = "images" if images is None else "labels"
            raise ValueError(f"'{self.path}' has no array '{split}_{absent}', but the other of the pair.")
        (shape, dtype), where = images, f"'{split}_images' in '{self.path}'"
        if labels[1].kind not in "iub":
            raise TypeError(f"'{split}_labels' in '{self.path}' must hold whole class numbers, got dtype {labels[1]}.")
        if dtype != np.uint8:
            raise ValueError(f"{where} must be uint8, got {dtype}.")
        if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (1, 3)) or 0 in shape[1:]:
            reason = ""
            if len(shape) == 4 and shape[1] in (1, 3):
                reason = " (channels first: save `images.transpose(0, 2, 3, 1)`)"
            elif len(shape) > 3 and shape[3:] not in ((2,), (4,)):
                reason = " (volumes are not served)"
            raise ValueError(f"{where} must have shape (n, H, W), (n, H, W, 1) or (n, H, W, 3), got {shape}{reason}.")
        if not labels[0] or labels[0][0] != shape[0]:
            raise ValueError(f"{where} holds {shape[0]} images, but '{split}_labels' has shape {labels[0]}.")
        return shape[0]

    def labels(self, split: str, num_classes: int | None = None) -> IntArray:
        """The class numbers of a split, shape ``(n,)``.

        Raises:
            ValueError: if they are multi-label, negative or not below ``num_classes``.
            TypeError: if they are no whole numbers.
        """
        where = f"'{split}_labels' in '{self.path}'"
        labels = label_vector(self._array(f"{split}_labels"), where)
        if len(labels) and (labels.min() < 0 or (num_classes is not None and labels.max() >= num_classes)):
            allowed = "0 upwards" if num_classes is None else f"0 to {num_classes - 1}"
            raise ValueError(f"{where} must be class numbers from {allowed}, got {labels.min()} to {labels.max()}.")
        return labels

    def read(self, split: str, num_classes: int) -> tuple[NDArray[np.uint8], IntArray] | None:
        """Images ``(n, H, W, C)`` and class numbers ``(n,)``, or ``None`` where the split is absent or empty."""
        if not self.sizes[split]:
            return None
        labels = self.labels(split, num_classes)
        key = f"{split}_images"
        mapped = self._mapped(key)
        images = np.ascontiguousarray(self._array(key) if mapped is None else mapped, dtype=np.uint8)
        return images.reshape(len(images), self.height, self.width, self.in_chans), labels

    def _array(self, key: str) -> NDArray[Any]:
        with self._reading(), zipfile.ZipFile(self.path) as archive, archive.open(f"{key}.npy") as file:
            array = npy.read_array(file, allow_pickle=False)
            file.read()  # to the end, where the checksum is compared
            return np.asarray(array)

    def _mapped(self, key: str) -> NDArray[Any] | None:
        """An array out of ``cache_dir``, or ``None`` without one and, with a warning, where it cannot be used."""
        if self._decoded is None:
            return None
        with self._reading():
            try:
                return self._decoded[key]
            except OSError as error:
                reason = error.strerror or error
                rank_zero_warn(
                    f"`cache_dir='{self._decoded.cache_dir}'` cannot be used ({reason}): '{self.path}' is decoded into "
                    "memory instead."
                )
                self._decoded = None
                return None

    def check(self, num_classes: int, soon: Collection[str] = ()) -> None:
        """Read every array to its end, so that a fault in one that is needed only later is found now.

        What is whole in ``cache_dir`` counts as read.

        Args:
            num_classes: labels must be below it.
            soon: splits whose images are read next in any case.

        Raises:
            ValueError: if an array is damaged or ends early, or a label is out of range.
        """
        done = set() if self._decoded else {f"{split}_images.npy" for split in soon}
        for split in SPLITS:
            if self.sizes[split]:
                self.labels(split, num_classes)
                if self._mapped(f"{split}_images") is not None:
                    done.add(f"{split}_images.npy")
        with self._reading(), zipfile.ZipFile(self.path) as archive:
            for member in archive.infolist():
                if member.filename not in done:
                    _read_through(archive, member)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except _UNREADABLE as error:
            if isinstance(error, OSError) and error.strerror:
                raise ValueError(f"'{self.path}' cannot be read: {error.strerror}.") from error
            reason = str(error).partition(" on line")[0].strip(".") or type(error).__name__
            raise ValueError(
                f"'{self.path}' cannot be read as an image archive: truncated, damaged or no .npz file ({reason})."
            ) from error


def checked_cache_dir(value: Any) -> Path | None:
    """The folder that ``cache_dir`` names.

    Raises:
        TypeError: if it is no path.
        ValueError: if it is empty.
    """
    if value is None:
        return None
    if not isinstance(value, str | Path):
        raise TypeError(f"`cache_dir` must be the path of a folder or None, got {value!r}.")
    if not str(value).strip():
        raise ValueError(f"`cache_dir` must be the path of a folder or None, got {str(value)!r}.")
    return local_path(value, "cache_dir")


def _read_through(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Read a member to its end, where its checksum is compared."""
    with archive.open(member) as file:
        while file.read(2**20):
            pass


def _image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    return shape[1], shape[2], shape[3] if len(shape) == 4 else 1


def _headers(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and dtype of each array, from the first bytes of each member."""
    found = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            if not member.endswith(".npy"):
                continue
            with archive.open(member) as file:
                version = npy.read_magic(file)
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, dtype = read(file)
                # Before anything of the size that the header claims is made room for.
                claimed, there = math.prod(shape) * dtype.itemsize, archive.getinfo(member).file_size - file.tell()
            if claimed != there and not dtype.hasobject:
                raise ValueError(f"'{member}' says that it has {claimed} bytes, but has {there}")
            found[member[: -len(".npy")]] = (shape, dtype)
    return found
