"""States as plain values, which ``torch.load(weights_only=True)`` reads, and back in the types their owner keeps."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from copy import copy
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_NUMBERS_AND_TEXT = (bool, int, float, complex, str, bytes)
_ATOMS = (type(None), *_NUMBERS_AND_TEXT, Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device)
_MAPPINGS = (dict, OrderedDict)
_COLLECTIONS = (list, tuple, set)
_ABSENT = object()


def is_plain(value: Any) -> bool:
    """Check that ``torch.load(weights_only=True)`` gives the value back as it is."""
    if type(value) in _MAPPINGS:
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return all(map(is_plain, value)) if type(value) in _COLLECTIONS else type(value) in _ATOMS


def plain_state(state: Mapping[Any, Any], left_out: list[str] | None = None, name: str = "") -> dict[Any, Any]:
    """Turn a state into plain mappings, lists, numbers and tensors.

    Args:
        state: of any owner: a scheduler, an optimizer, a callback.
        left_out: gets the names of the entries that have no plain form; the result lacks them.
        name: what the state is called in those names.

    >>> from collections import Counter, deque
    >>> plain_state({"milestones": Counter([1, 3, 3]), "last": deque([0.5]), "rule": print}, names := [])
    {'milestones': {1: 1, 3: 2}, 'last': [0.5]}
    >>> names
    ['rule']
    """
    left_out = [] if left_out is None else left_out
    found = {}
    for key, value in state.items():
        where = f"{name}.{key}" if name else str(key)
        kept = _plain(value, left_out, where)
        if kept is _ABSENT or not is_plain(plain_key := _plain(key, [], "")):
            left_out.append(where)
        else:
            found[plain_key] = kept
    return found


def _plain(value: Any, left_out: list[str], name: str) -> Any:
    """The plain form of a value, ``_ABSENT`` where it has none."""
    if is_plain(value):
        return value
    if isinstance(value, Enum):
        return _plain(value.value, left_out, name)
    if isinstance(value, Mapping):
        return plain_state(value, left_out, name)
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist() if isinstance(value, np.generic) or value.dtype == object else torch.tensor(value)
        return value if is_plain(value) else _ABSENT
    for kind in _NUMBERS_AND_TEXT:
        if isinstance(value, kind):
            return kind(value)  # type: ignore[arg-type]
    if isinstance(value, Sequence | Set):
        items = [_plain(item, left_out, name) for item in value]
        if any(item is _ABSENT for item in items):
            return _ABSENT
        return tuple(items) if isinstance(value, tuple) else set(items) if isinstance(value, Set) else items
    return _ABSENT


def as_in(live: Any, saved: Any) -> Any:
    """Restore a result of :func:`plain_state` in the types of the owner's present state.

    Args:
        live: the owner's present state, or a value in it.
        saved: the saved one; it is not changed.

    >>> from collections import Counter
    >>> as_in({"milestones": Counter([5])}, {"milestones": {1: 1, 3: 2}})
    {'milestones': Counter({3: 2, 1: 1})}
    """
    if isinstance(saved, dict) and isinstance(live, Mapping):
        keys = {_plain(key, [], ""): key for key in live}
        known = {keys[key]: as_in(live[keys[key]], item) for key, item in saved.items() if key in keys}
        return _refilled(live, known | {key: item for key, item in saved.items() if key not in keys})
    if isinstance(saved, _COLLECTIONS) and isinstance(live, Sequence | Set) and not isinstance(live, str | bytes):
        if len(live) == len(saved) and not isinstance(live, Set):
            saved = type(saved)(as_in(*pair) for pair in zip(live, saved, strict=True))
        return _refilled(live, saved)
    if isinstance(live, np.ndarray) and isinstance(saved, Tensor):
        return saved.numpy()
    is_derived = type(live) not in _ATOMS and isinstance(live, (Enum, np.generic, *_NUMBERS_AND_TEXT))
    return type(live)(saved) if is_derived and type(_plain(live, [], "")) is type(saved) else saved


def _refilled(live: Any, items: Any) -> Any:
    """Copy of ``live``, its default or length included, that holds ``items``."""
    if type(live) in (*_MAPPINGS, *_COLLECTIONS):
        return items
    if isinstance(live, tuple):
        return live._make(items) if hasattr(live, "_make") else type(live)(items)
    if not hasattr(live, "clear"):
        return type(live)(items)
    made = copy(live)
    made.clear()
    fill = made.extend if isinstance(live, Sequence) else made.update
    fill(items)
    return made
