"""Samples of each client: kept, saved, counted, tabulated and drawn."""

import hashlib
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from rich.table import Table

from lightning_fedstop.data.classes import IntArray, are_tabulated, class_ids, class_numbers
from lightning_fedstop.data.partitions.picture import draw_clients
from lightning_fedstop.data.partitions.skew import Skew
from lightning_fedstop.data.partitions.table import as_text, clients_table
from lightning_fedstop.data.registry import is_own
from lightning_fedstop.utilities.extras import require_extra
from lightning_fedstop.utilities.paths import local_path
from lightning_fedstop.utilities.validate import whole_number

_KEYS = ("indices", "offsets", "num_samples", "fingerprint", "skew", "seed")


def fingerprint(labels: Any) -> str:
    """A digest of the labels in their order, by which a saved partition knows its training set."""
    return _digest(class_numbers(labels)[0])


def _digest(numbers: IntArray) -> str:
    return hashlib.sha256(numbers.astype("<i8").tobytes()).hexdigest()


def unlabelled_fingerprint(num_samples: int) -> str:
    """The :func:`fingerprint` of a training set that was dealt without classes."""
    return _digest(np.zeros(num_samples, np.int64))


def _fingerprints(labels: Any) -> set[str]:
    """All that a partition of these labels may have: dealt without classes, it knows only how many there were."""
    ids = class_ids(labels)
    # Whole numbers that were no class numbers from 0 used to be digested as they are.
    as_given = {_digest(ids)} if ids.dtype.kind == "i" else set()
    return {fingerprint(labels), unlabelled_fingerprint(len(ids)), *as_given}


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of each client, as one array of sample numbers and where each client's part starts.

    Attributes:
        indices: int64, shape ``(sum of sizes,)``; sample numbers, client after client.
        offsets: int64, shape ``(N + 1,)``; client ``m`` has ``indices[offsets[m]:offsets[m + 1]]``.
        num_samples: size of the training set.
        fingerprint: digest of its labels.
        skew: the skew in words.
        seed: the seed of the draw.

    Raises:
        ValueError: if the arrays do not fit together.

    >>> from lightning_fedstop.data.partitions.iid import Iid
    >>> partition = Partition.create(Iid(), np.array([0, 1, 0, 1, 1]), num_clients=2)
    >>> partition.sizes.tolist(), len(partition)
    ([3, 2], 2)
    """

    indices: IntArray
    offsets: IntArray
    num_samples: int
    fingerprint: str
    skew: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        indices, offsets = self.indices, self.offsets
        if any(array.ndim != 1 or array.dtype != np.int64 for array in (indices, offsets)) or len(offsets) < 2:
            raise ValueError(
                "A partition needs int64 vectors `indices` and `offsets`, the latter for at least 1 client."
            )
        if offsets[0] != 0 or offsets[-1] != len(indices) or (np.diff(offsets) < 0).any():
            raise ValueError(
                f"The `offsets` of a partition must rise from 0 to the {len(indices)} `indices` there are."
            )
        if len(indices) and (indices.min() < 0 or indices.max() >= self.num_samples):
            raise ValueError(f"The `indices` of a partition must be sample numbers from 0 to {self.num_samples - 1}.")
        # Frozen fields alone would leave the memory writeable.
        for name in ("indices", "offsets"):
            view = getattr(self, name).view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)

    @classmethod
    def create(cls, skew: Skew, labels: Any, num_clients: int, seed: int = 0) -> "Partition":
        """Deal a training set.

        Args:
            skew: how.
            labels: shape ``(n,)`` or ``(n, 1)``; the class of each sample, a whole number or a string. For a skew that
                needs none, anything of length n will do.
            num_clients: N.
            seed: decides every draw.

        Raises:
            ValueError: if the skew cannot deal the samples, or did not return ``num_clients`` lists of sample numbers.
        """
        known = _known_classes(labels, skew.needs_labels)
        lists = [np.asarray(part) for part in skew.partition(known, num_clients, seed)]
        if len(lists) != num_clients:
            raise ValueError(f"{skew!r} returned {len(lists)} index lists for {num_clients} clients.")
        if any(part.ndim != 1 or (len(part) and part.dtype.kind not in "iu") for part in lists):
            raise ValueError(f"{skew!r} must return a vector of whole sample numbers for each client.")
        offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        indices = np.concatenate(lists).astype(np.int64)
        partition = cls(indices, offsets, len(known), fingerprint(known), repr(skew), seed)
        partition._warn_of_unused(skew)
        return partition

    def _warn_of_unused(self, skew: Skew) -> None:
        unused = self.num_samples - len(np.unique(self.indices))
        # The package's own say so themselves, or are meant to.
        if unused and not is_own(type(skew)):
            rank_zero_warn(f"{self.skew} gives {unused} of {self.num_samples} samples to no client.")

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> IntArray:
        """The sample numbers of a client, shape ``(n_m,)``."""
        if not 0 <= client < len(self):
            raise IndexError(f"Client {client} does not exist: there are {len(self)}, counted from 0.")
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @cached_property
    def digest(self) -> str:
        """A digest of which samples of which training set each client has."""
        parts = (self.fingerprint.encode(), self.offsets.astype("<i8").tobytes(), self.indices.astype("<i8").tobytes())
        return hashlib.sha256(b"".join(parts)).hexdigest()

    @property
    def sizes(self) -> IntArray:
        """Samples per client, shape ``(N,)``."""
        return np.diff(self.offsets)

    def class_counts(self, labels: Any, num_classes: int) -> IntArray:
        """Samples of each class at each client, shape ``(N, C)``.

        Raises:
            ValueError: if ``labels`` are not the partitioned ones, or of more than ``num_classes`` classes.
        """
        vector = class_numbers(labels, num_classes)[0]
        whole_number("num_classes", num_classes, 1)
        if len(vector) != self.num_samples or vector.min() < 0 or vector.max() >= num_classes:
            raise ValueError(
                f"`labels` must be the {self.num_samples} classes of the training set, from 0 to {num_classes - 1}; "
                f"got {len(vector)} from {vector.min()} to {vector.max()}."
            )
        cells = np.repeat(np.arange(len(self)), self.sizes) * num_classes + vector[self.indices]
        return np.bincount(cells, minlength=len(self) * num_classes).reshape(len(self), num_classes).astype(np.int64)

    def save(self, path: str | Path) -> Path:
        """Write a ``.npz`` file (folders are made, an existing file is replaced in one step) and return its path."""
        path = local_path(path if str(path).endswith(".npz") else f"{path}.npz", "path")
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with aside.open("wb") as file:
            arrays: dict[str, Any] = {key: np.asarray(getattr(self, key)) for key in _KEYS}
            np.savez_compressed(file, **arrays)
        aside.replace(path)
        return path

    @classmethod
    def load(cls, path: str | Path, labels: Any = None, num_clients: int | None = None) -> "Partition":
        """Read a saved partition.

        Args:
            path: the ``.npz`` file.
            labels: if given, the labels it must have been made for.
            num_clients: if given, the number of clients it must have.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is no partition, or one of other data or another number of clients.
        """
        path = local_path(path, "partition_path")
        if not path.is_file():
            raise FileNotFoundError(f"There is no saved partition at '{path}'.")
        try:
            with np.load(path, allow_pickle=False) as file:
                found = {key: file[key] for key in _KEYS}
            partition = cls(
                found["indices"],
                found["offsets"],
                int(found["num_samples"]),
                str(found["fingerprint"]),
                str(found["skew"]),
                int(found["seed"]),
            )
        except (
            KeyError,
            ValueError,
            TypeError,
            OSError,
            EOFError,
            AttributeError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            # NumPy's own advice on a file of another kind is to unpickle it.
            reason = "it is no .npz file, or truncated" if "pickle" in str(error) else str(error).strip(".'\"")
            raise ValueError(f"'{path}' is not a saved partition: {reason}.") from error
        if num_clients is not None and len(partition) != num_clients:
            raise ValueError(f"The partition '{path}' has {len(partition)} clients, but `num_clients={num_clients}`.")
        if labels is not None and partition.fingerprint not in _fingerprints(labels):
            raise ValueError(
                f"The partition '{path}' was made for other data: the labels of its {partition.num_samples} samples "
                f"are not those of this training set of {len(labels)}."
            )
        return partition

    def table(
        self, labels: Any = None, num_classes: int | None = None, class_names: Sequence[str] | None = None
    ) -> Table:
        """A table of sizes and classes per client; above 20 clients the range and the first 10.

        Args:
            labels: the labels of the training set; without them only sizes are shown.
            num_classes: C; by default as many as the labels have.
            class_names: C names for the columns.
        """
        counts, names = self._counts_and_names(labels, num_classes, class_names)
        return clients_table(self._title(), self.sizes, counts, names)

    def describe(
        self, labels: Any = None, num_classes: int | None = None, class_names: Sequence[str] | None = None
    ) -> str:
        """:meth:`table` as plain text."""
        return as_text(self.table(labels, num_classes, class_names))

    def plot(
        self,
        path: str | Path,
        labels: Any = None,
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
    ) -> Path:
        """Write a picture of clients by classes and return its path.

        Args:
            path: the file; its ending (``.png``, ``.svg``, ``.pdf``) says which kind.
            labels: the labels of the training set; without them only sizes are drawn.
            num_classes: C; by default as many as the labels have.
            class_names: C names for the rows.

        Raises:
            ValueError: if the ending is unknown.
        """
        require_extra("matplotlib", "report", "`Partition.plot`")
        from matplotlib import rc_context

        path = local_path(path, "path")
        counts, names = self._counts_and_names(labels, num_classes, class_names)
        with rc_context(
            {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
        ):
            figure = draw_clients(9.0, self.sizes, counts if names else [], names)
            if path.suffix.lstrip(".").lower() not in figure.canvas.get_supported_filetypes():
                raise ValueError(f"A picture is written as .png, .svg or .pdf, got '{path.name}'.")
            figure.suptitle(self._title().replace("): ", ")\n", 1), fontsize=9)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150)
        return path

    def _title(self) -> str:
        return (
            f"{self.skew or 'Partition'}: {len(self)} clients, {len(np.unique(self.indices))} of {self.num_samples} "
            f"samples used, seed {self.seed}"
        )

    def _counts_and_names(
        self, labels: Any, num_classes: int | None, class_names: Sequence[str] | None
    ) -> tuple[IntArray, list[str]]:
        """Samples of each class at each client, and the names; of no class without labels or for too large a table."""
        none: tuple[IntArray, list[str]] = np.zeros((len(self), 0), np.int64), []
        if labels is None:
            return none
        numbers, found = class_numbers(labels, num_classes)
        count = num_classes or (int(numbers.max()) + 1 if found is None else len(found))
        if class_names is not None and len(class_names) != count:
            raise ValueError(f"`class_names` must name the {count} classes, got {len(class_names)}.")
        if not are_tabulated(len(self), count):
            return none
        names = class_names or (found if found and len(found) == count else range(count))
        return self.class_counts(labels, count), [str(name) for name in names]


def _known_classes(labels: Any, needed: bool) -> IntArray:
    """Whole numbers for the classes of samples, as given where they were; zeros where there are no classes."""
    try:
        ids = class_ids(labels)
    except (TypeError, ValueError):
        if needed:
            raise
        return np.zeros(len(labels), np.int64)
    return ids if ids.dtype.kind == "i" else class_numbers(ids)[0]
