"""Argument checks shared by the skews and the data modules."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


def whole_number(name: str, value: Any, least: int) -> int:
    """``value`` as an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"`{name}` must be a whole number of at least {least}, got {value!r}.")
    return int(value)


def positive_number(name: str, value: Any) -> float:
    """``value`` as a finite float above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be a finite number above 0, got {value!r}.")
    return float(value)


def one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    """``value``, if it is among ``allowed``."""
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
    return value


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


def other_package(kind: type) -> str:
    """A hint for a class of ``pytorch_lightning``, whose names are those of ``lightning.pytorch``; empty for any other.

    >>> other_package(dict)
    ''
    """
    if any(base.__module__.partition(".")[0] == "pytorch_lightning" for base in kind.__mro__):
        return "; `pytorch_lightning` is another package: import from `lightning.pytorch` instead"
    return ""
