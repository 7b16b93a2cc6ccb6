"""Objects in checkpoints, which only ``torch.load(weights_only=False)`` unpickles."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import torch
from torch import Tensor


class Pickled:
    """Stand-in for an object in a checkpoint, which ``weights_only=False`` loads.

    Its pickle lies in the checkpoint as bytes, with one call of ``pickle.loads`` around it. So a reader that puts
    :class:`Unread` in place of that one function reads everything else, whatever the object is made of.

    Args:
        value: the object.

    Raises:
        Exception: whatever the object raises when it cannot be pickled.

    >>> import io
    >>> torch.save({"object": Pickled([print])}, file := io.BytesIO())
    >>> torch.load(io.BytesIO(file.getvalue()), weights_only=False)["object"]
    [<built-in function print>]
    """

    def __init__(self, value: Any) -> None:
        file = BytesIO()
        _CompactPickler(file).dump(value)
        self._content = file.getvalue()

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._content,)


class Unread:
    """Empty stand-in that is read in place of a :class:`Pickled` object."""

    def __init__(self, content: bytes) -> None:
        pass


# torch knows what it may call by its names; so is `pickle.loads` called in pickles of protocol 2, which it writes.
Unread.__module__, Unread.__name__, Unread.__qualname__ = "pickle", "loads", "loads"


@contextmanager
def objects_unread() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` give :class:`Unread` for each :class:`Pickled` object."""
    # `torch.serialization.safe_globals` does this as of torch 2.5.
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([Unread])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed)


class _CompactPickler(pickle.Pickler):
    """Pickler of tensors without the vector that they are views of."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor:
            return NotImplemented
        compact: Any = value.detach().cpu().clone().requires_grad_(value.requires_grad)
        return compact.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
