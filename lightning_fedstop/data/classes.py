"""Classes of samples: any whole numbers or strings, numbered from 0."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
UNLABELLED = -1


def label_vector(labels: Any, where: str = "`labels`") -> IntArray:
    """Class numbers of shape ``(n,)`` as int64; ``(n, 1)`` is accepted, as MedMNIST stores them."""
    array = np.asarray(labels)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        reason = ": one-hot and multi-label arrays are not served" if array.ndim == 2 else ""
        raise ValueError(
            f"{where} must have one class number per sample, in shape (n,) or (n, 1), got {array.shape}{reason}."
        )
    if array.dtype.kind not in "iub":
        raise TypeError(f"{where} must hold whole class numbers, got dtype {array.dtype}.")
    if array.dtype == np.uint64 and len(array) and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{where} must be class numbers below 2**63, got {array.max()}.")
    return array.astype(np.int64)


def class_ids(labels: Any, where: str = "`labels`") -> NDArray[Any]:
    """The class of each sample as it was given, shape ``(n,)``: int64, uint64 or strings.

    Args:
        labels: whole numbers or strings of shape ``(n,)`` or ``(n, 1)``.
        where: what they are, for messages.

    Raises:
        TypeError: if they are neither.
        ValueError: if they have another shape.
    """
    array = np.asarray(labels)
    if array.dtype.kind == "O" and all(isinstance(label, str) for label in array.flat):
        array = array.astype(np.str_)
    if array.dtype.kind != "U" and array.dtype != np.uint64:
        return label_vector(array, where)
    label_vector(np.zeros(array.shape, np.int8), where)
    return array.reshape(-1)


def class_numbers(
    labels: Any, num_classes: int | None = None, where: str = "`labels`"
) -> tuple[IntArray, list[str] | None]:
    """The class of each sample as a number from 0 to C - 1, and what the classes are called.

    Numbers from 0 that lie below ``num_classes``, or below the number of samples, stay as they are. All others,
    negative or large numbers and strings, are numbered in their sorted order: C is at most the number of samples.

    Returns:
        int64 of shape ``(n,)``, and the C names, or ``None`` where the numbers are those that were given.

    >>> class_numbers(["cat", "dog", "cat"])[0].tolist(), class_numbers([7, -3, 7, 10**12])[1]
    ([0, 1, 0], ['-3', '7', '1000000000000'])
    """
    ids = class_ids(labels, where)
    bound = max(len(ids), num_classes or 0)
    if len(ids) == 0 or (ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() < bound):
        return ids.astype(np.int64), None
    found, numbers = np.unique(ids, return_inverse=True)
    return numbers.reshape(-1).astype(np.int64), [str(name) for name in found.tolist()]


def unlabelled(labels: Any) -> int:
    """Count the samples that -1 marks as of no class; none where the classes are -1 and 1."""
    ids = class_ids(labels)
    marked = int(np.count_nonzero(ids == UNLABELLED)) if ids.dtype.kind == "i" else 0
    return 0 if marked and set(np.unique(ids).tolist()) == {-1, 1} else marked


MOST_CLASSES = 1000
_MOST_CELLS = 10**7


def are_tabulated(num_clients: int, num_classes: int) -> bool:
    """Check that a table of clients by classes is small enough to be drawn and read."""
    return num_classes <= MOST_CLASSES and num_clients * num_classes <= _MOST_CELLS


def dealt_classes(datamodule: Any) -> list[str] | None:
    """The names of the classes in a data module's ``train_labels``; ``None`` without, or of too many classes."""
    labels = getattr(datamodule, "train_labels", None)
    if labels is None or len(labels) == 0:
        return None
    names: list[str] | None = getattr(datamodule, "label_names", None)
    count = max(int(labels.max()) + 1, known_number(datamodule) or 0) if names is None else len(names)
    if not are_tabulated(len(datamodule.client_sizes), count):
        return None
    if names is not None:
        return names
    given = getattr(datamodule, "class_names", None) or ()
    return [str(name) for name in given] if len(given) == count else [str(k) for k in range(count)]


def known_number(datamodule: Any) -> int | None:
    """The ``num_classes`` of a data module, if it has such a number."""
    count = getattr(datamodule, "num_classes", None)
    return count if isinstance(count, int) else None
