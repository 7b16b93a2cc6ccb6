"""Archives in MedMNIST's layout, read and checked in one place."""

import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from lightning_fedstop.data._checks import IntArray, label_vector

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

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is unreadable, or an array is missing or has another shape.
        TypeError: if the labels are no whole numbers.

    Attributes:
        height, width, in_chans: of the images, the same in all splits.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
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
            reason = " (volumes are not served)" if len(shape) > 3 and shape[3:] not in ((2,), (4,)) else ""
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
        images = np.ascontiguousarray(self._array(f"{split}_images"), dtype=np.uint8)
        return images.reshape(len(images), self.height, self.width, self.in_chans), labels

    def _array(self, key: str) -> NDArray[Any]:
        with self._reading(), np.load(self.path, allow_pickle=False) as file:
            return np.asarray(file[key])

    def check(self, num_classes: int) -> None:
        """Read every array to its end, so that a fault in one that is needed only later is found now.

        Raises:
            ValueError: if an array is damaged or ends early, or a label is out of range.
        """
        for split in SPLITS:
            if self.sizes[split]:
                self.labels(split, num_classes)
        with self._reading(), zipfile.ZipFile(self.path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"'{damaged}' is damaged")

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
