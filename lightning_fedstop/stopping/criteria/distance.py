"""The task vector and its norm, for torch tensors and NumPy arrays: equations (5) and (7).

Parameters are one tensor or array, or an iterable of them (shapes may differ). torch is never imported here: a tensor
can only be met where its library already is. NumPy is imported with the first parameter: deciding on recorded distances
needs none of it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np
else:

    class _NumPyWhenUsed:
        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("numpy"), name)

    np = _NumPyWhenUsed()

Parameters: TypeAlias = Any
"""One tensor or array, or an iterable of tensors, arrays or numbers."""

_CHUNK = 1 << 20  # elements held in float64 at a time: 8 MiB for each operand
_SMALLEST_SAFE_SQUARE = 1e-280  # a sum of squares below it has lost digits to underflow


def task_vector(parameters: Parameters, start: Parameters) -> Any:
    """Return equation (5): v_r = theta_r - theta_0.

    Args:
        parameters: theta_r, in any of the forms of this module.
        start: theta_0, in the same form and shapes.

    Returns:
        One tensor or array if ``parameters`` is one, else a list of them.

    Raises:
        TypeError: If something in it is neither a tensor, nor an array, nor a number.
        ValueError: If numbers of parameters or shapes differ.

    >>> task_vector(np.array([2.0, 5.0]), np.array([1.0, 1.0]))
    array([1., 4.])
    """
    now, then = paired(parameters, start)
    vector = [_subtract(a, b) for a, b in zip(now, then, strict=True)]
    return vector[0] if _is_single(parameters) else vector


def task_vector_distance(parameters: Parameters, start: Parameters) -> float:
    """Return equation (7): delta_r = ||theta_r - theta_0||_2 over all parameters together.

    Differences and squares are taken in float64, a chunk at a time, whatever the precision of the parameters. A
    distance that float64 can hold neither overflows nor vanishes on the way.

    Args:
        parameters: theta_r, in any of the forms of this module.
        start: theta_0, in the same form and shapes; it may lie on another device.

    Returns:
        The distance; NaN or infinite if a parameter is not finite.

    Raises:
        TypeError: If something in it is neither a tensor, nor an array, nor a number.
        ValueError: If there is no parameter, or numbers of parameters or shapes differ.

    >>> task_vector_distance([3.0, np.array([[1.0], [4.0]])], [0.0, np.array([[1.0], [0.0]])])
    5.0
    """
    now, then = paired(parameters, start)
    square = _sum_of_squares(now, then, scale=1.0)
    if _SMALLEST_SAFE_SQUARE < square < math.inf:
        return math.sqrt(square)
    largest = _largest_difference(now, then)
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(_sum_of_squares(now, then, scale=largest))


def as_list(parameters: Parameters) -> list[Any]:
    """List the parameters as tensors and arrays, none of them copied.

    >>> as_list([1.0, np.zeros(2)])
    [array(1.), array([0., 0.])]
    """
    if _is_single(parameters):
        items = [parameters]
    elif isinstance(parameters, Iterable) and not isinstance(parameters, str | bytes | Mapping):
        items = list(parameters)
    else:
        hint = " Pass `module.parameters()`." if hasattr(parameters, "parameters") else ""
        raise TypeError(
            "`parameters` must be a tensor or array, or an iterable of tensors, arrays or numbers, "
            f"got {type(parameters).__name__}.{hint}"
        )
    listed = [item if is_tensor(item) else _as_array(item, index) for index, item in enumerate(items)]
    if sum(math.prod(item.shape) for item in listed) == 0:
        raise ValueError("`parameters` is empty: there is nothing whose movement could be measured.")
    return listed


def paired(parameters: Parameters, start: Parameters) -> tuple[list[Any], list[Any]]:
    """List both, refused unless their shapes agree."""
    now, then = as_list(parameters), as_list(start)
    if len(now) != len(then):
        raise ValueError(f"`parameters` holds {len(now)} tensors or arrays, but the start holds {len(then)}.")
    for index, (a, b) in enumerate(zip(now, then, strict=True)):
        if tuple(a.shape) != tuple(b.shape):
            raise ValueError(f"Parameter {index} has shape {tuple(a.shape)}, but {tuple(b.shape)} at the start.")
    return now, then


def copied(parameters: Parameters, device: str | None = None) -> list[Any]:
    """Copy each parameter, tensors on ``device`` if one is named.

    >>> copied(np.float32(1.5))
    [array(1.5, dtype=float32)]
    """
    copies = []
    for item in as_list(parameters):
        if is_tensor(item):
            copies.append(item.detach().to(device or item.device, copy=True))
        else:
            copies.append(np.array(item, dtype=_native_type(item)))
    return copies


def beside(start: list[Any], parameters: list[Any]) -> list[Any]:
    """Move each tensor of ``start`` to the device of its parameter."""
    return [
        then.to(now.device) if is_tensor(then) and is_tensor(now) else then
        for then, now in zip(start, parameters, strict=True)
    ]


def storable(arrays: list[Any]) -> list[Any]:
    """NumPy arrays as tensors where torch is loaded, so that ``torch.load(weights_only=True)`` takes them back."""
    torch = sys.modules.get("torch")
    return arrays if torch is None else [item if is_tensor(item) else torch.from_numpy(item) for item in arrays]


def is_tensor(item: Any) -> bool:
    """Check for a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(item, torch.Tensor)


def _is_single(parameters: Any) -> bool:
    return is_tensor(parameters) or hasattr(parameters, "__array__")


def _as_array(item: Any, index: int) -> np.ndarray:
    if not (hasattr(item, "__array__") or isinstance(item, int | float | complex)):
        raise TypeError(f"Parameter {index} must be a tensor, an array or a number, got {type(item).__name__}.")
    array = np.asarray(item)
    if array.dtype.kind in "OSUMm":
        raise TypeError(f"Parameter {index} must hold numbers, got an array of type {array.dtype}.")
    return array


def _native_type(array: np.ndarray) -> np.dtype[Any]:
    # What torch has no type for (extended precision, other libraries' bfloat16) is kept as float64.
    if array.dtype.kind == "c":
        return np.dtype(np.complex128)
    known = array.dtype.kind == "f" and array.dtype.itemsize <= 8
    return array.dtype.newbyteorder("=") if known else np.dtype(np.float64)


def _subtract(now: Any, then: Any) -> Any:
    if is_tensor(now):
        then = then if is_tensor(then) else sys.modules["torch"].from_numpy(np.array(then, dtype=_native_type(then)))
        return now.detach() - then.detach().to(now)
    return now - (then.detach().cpu().numpy() if is_tensor(then) else then)


def _differences(now: list[Any], then: list[Any]) -> Iterator[Any]:
    """The task vector in float64, flat, a chunk at a time."""
    for a, b in zip(now, then, strict=True):
        if is_tensor(a) or is_tensor(b):
            yield from _tensor_differences(_flat_tensor(a), _flat_tensor(b))
        else:
            a, b = _flat_array(a), _flat_array(b)
            for i in range(0, a.size, _CHUNK):
                with np.errstate(over="ignore", invalid="ignore"):
                    yield a[i : i + _CHUNK].astype(np.float64) - b[i : i + _CHUNK].astype(np.float64)


def _tensor_differences(now: Any, then: Any) -> Iterator[Any]:
    # Apple's GPUs have no float64.
    device = "cpu" if now.device.type == "mps" else now.device
    for i in range(0, now.numel(), _CHUNK):
        yield now[i : i + _CHUNK].to(device).double() - then[i : i + _CHUNK].to(device).double()


def _flat_tensor(item: Any) -> Any:
    torch = sys.modules["torch"]
    tensor = item.detach() if is_tensor(item) else torch.from_numpy(np.array(item, dtype=_native_type(item)))
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)


def _flat_array(array: np.ndarray) -> np.ndarray:
    flat = array.reshape(-1)
    return np.ascontiguousarray(flat, np.complex128).view(np.float64) if array.dtype.kind == "c" else flat


def _sum_of_squares(now: list[Any], then: list[Any], scale: float) -> float:
    totals: dict[Any, Any] = {}  # one a device: a device is waited for once, not once a chunk
    for difference in _differences(now, then):
        device = difference.device if is_tensor(difference) else None
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            scaled = difference if scale == 1.0 else difference / scale
            totals[device] = totals.get(device, 0.0) + (scaled * scaled).sum()
    return math.fsum(map(float, totals.values())) if len(totals) > 1 else float(next(iter(totals.values())))


def _largest_difference(now: list[Any], then: list[Any]) -> float:
    largest = [float(abs(difference).max()) for difference in _differences(now, then) if len(difference)]
    return math.nan if any(map(math.isnan, largest)) else max(largest)
