"""Vectors that a method keeps for each client between rounds: created when first written, in memory or on disk."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

Key = tuple[str, int]
SPILL_PREFIX = ".client_states."
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ClientStates:
    """Vectors of shape ``(d,)`` by name and client; a vector never written is zero and takes no memory.

    Args:
        storage: ``"memory"`` keeps them on the CPU, ``"disk"`` in one file, of which the system keeps in memory
            what has room there; it is created with the first vector and removed at the end.
        dtype: ``"float32"``, or ``"bfloat16"`` for half the room and about three digits; ``None`` is the model's own,
            at least float32.

    Raises:
        ValueError: for another storage or dtype.

    >>> states = ClientStates()
    >>> states.open(torch.zeros(3))
    >>> states.set("c", 7, torch.ones(3))
    tensor([1., 1., 1.])
    >>> states.get("c", 7), states.get("c", 8)
    (tensor([1., 1., 1.]), tensor([0., 0., 0.]))
    """

    def __init__(
        self, storage: Literal["memory", "disk"] = "memory", dtype: Literal["float32", "bfloat16"] | None = None
    ) -> None:
        if storage not in ("memory", "disk"):
            raise ValueError(f"`storage` of ClientStates must be 'memory' or 'disk', got {storage!r}.")
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"`dtype` of ClientStates must be one of {', '.join(DTYPES)} or None, got {dtype!r}.")
        self.storage = storage
        self.dtype = dtype
        self._backend: _Memory | _Disk = _Memory()
        self._companions: list[ClientStates] = []
        self._pending: dict[Key, Tensor] | None = None
        self._changed: set[Key] = set()

    def open(self, like: Tensor, folder: str | os.PathLike[str] | None = None) -> None:
        """Open an empty store.

        Args:
            like: shape ``(d,)``; gives the length of the vectors, and dtype and device of what :meth:`get` returns.
            folder: where a file may lie; a temporary folder if ``None``.
        """
        self.close()
        self._like = like.new_empty(0)
        self._dim = like.numel()
        self._folder = folder
        dtype = like.dtype if self.dtype is None else DTYPES[self.dtype]
        self._backend = _Memory(dtype) if self.storage == "memory" else _Disk(dtype, self._dim, folder)

    def close(self) -> None:
        """Forget everything and remove the file."""
        self._backend.close()
        self._pending = None
        self._changed = set()
        for companion in self._companions:
            companion.close()
        self._companions = []

    def companion(self) -> "ClientStates":
        """Make a second store, closed with this one, for vectors of no client."""
        other = ClientStates(self.storage)
        other.open(self._like.new_empty(self._dim), self._folder)
        self._companions.append(other)
        return other

    def begin(self) -> None:
        """Begin a round: what is written from here on becomes part of the state with :meth:`commit`."""
        self._pending = {}

    def commit(self) -> None:
        """Take over what was written in a valid round."""
        pending, self._pending = self._pending or {}, None
        for key, value in pending.items():
            self._backend.write(key, value)
            self._changed.add(key)

    def discard(self) -> None:
        """Forget what was written in a void round."""
        self._pending = None

    def pop_changed(self) -> dict[Key, Tensor]:
        """Give the vectors that have changed since the last call, as stored."""
        changed = {key: vector for key in self._changed if (vector := self._backend.read(key)) is not None}
        self._changed = set()
        return changed

    def get(self, name: str, client: int) -> Tensor:
        """Copy the vector of a client to the model's device; zeros if it was never written."""
        stored = (self._pending or {}).get((name, client))
        stored = self._backend.read((name, client)) if stored is None else stored
        if stored is None:
            return self._like.new_zeros(self._dim)
        return stored.to(self._like, copy=True)

    def set(self, name: str, client: int, value: Tensor) -> Tensor:
        """Keep a copy of ``value``, shape ``(d,)``.

        Returns:
            What :meth:`get` gives from now on: ``value`` itself, or its rounding where :attr:`dtype` is shorter. A sum
            over clients must be made of these, else it drifts away from what the clients hold.

        Raises:
            ValueError: if it has another shape.
        """
        if value.shape != (self._dim,):
            raise ValueError(
                f"{name!r} of client {client} must have the shape ({self._dim},), got {tuple(value.shape)}."
            )
        if self._pending is not None:
            self._pending[name, client] = value.detach().to("cpu", self._backend.dtype, copy=True)
        else:
            self._backend.write((name, client), value)
            self._changed.add((name, client))
        return value.to(self._backend.dtype).to(self._like)

    def written(self) -> list[Key]:
        """List what was written before this round, as ``(name, client)``."""
        return list(self._backend.keys())

    def pop(self, key: Key) -> Tensor:
        """Take a vector out, as it is stored; the client's is zero again."""
        stored = self._backend.read(key)
        if stored is None:
            raise KeyError(key)
        self._backend.drop(key)
        self._changed.discard(key)
        return stored

    def state_dict(self) -> dict[str, Any]:
        """All that was written before this round, as ``{name: {client: vector}}``."""
        state: dict[str, dict[int, Tensor]] = {}
        for name, client in sorted(self.written()):
            stored = self._backend.read((name, client))
            assert stored is not None
            state.setdefault(name, {})[client] = stored
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of :meth:`state_dict` back; what was written before is dropped."""
        for key in self.written():
            self._backend.drop(key)
        self._pending = None
        self._changed = set()
        for name, vectors in state_dict.items():
            for client, vector in vectors.items():
                self.set(name, int(client), vector)


class _Memory:
    """Vectors in a dictionary."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self._vectors: dict[Key, Tensor] = {}

    def read(self, key: Key) -> Tensor | None:
        return self._vectors.get(key)

    def write(self, key: Key, value: Tensor) -> None:
        self._vectors[key] = value.detach().to("cpu", self.dtype, copy=True)

    def keys(self) -> Iterable[Key]:
        return self._vectors.keys()

    def drop(self, key: Key) -> None:
        del self._vectors[key]

    def close(self) -> None:
        self._vectors.clear()


class _Disk:
    """Vectors in the slots of one file; a slot is taken when its vector is first written.

    Read and written, not mapped: where a mapped file meets a full disk, the system ends the process without a word.
    """

    def __init__(self, dtype: torch.dtype, dim: int, folder: str | os.PathLike[str] | None) -> None:
        self.dtype = dtype
        self.dim = dim
        self.folder = folder
        self.path: Path | None = None
        self._file: BinaryIO | None = None
        self._slots: dict[Key, int] = {}
        self._free: list[int] = []
        self._lock = Lock()  # a file has one position for all threads

    def read(self, key: Key) -> Tensor | None:
        if key not in self._slots:
            return None
        vector = torch.empty(self.dim, dtype=self.dtype)
        with self._at(key) as file:
            if file.readinto(_bytes_of(vector)) != vector.nbytes:  # type: ignore[attr-defined]
                raise OSError(f"ends before {key[0]!r} of client {key[1]}")
        return vector

    def write(self, key: Key, value: Tensor) -> None:
        content = value.detach().to("cpu", self.dtype).contiguous()
        if key not in self._slots:
            self._slots[key] = self._free.pop() if self._free else len(self._slots)
        with self._at(key) as file:
            file.write(_bytes_of(content))
            file.flush()

    @contextmanager
    def _at(self, key: Key) -> Iterator[BinaryIO]:
        """The file at the slot of a vector.

        Raises:
            OSError: naming the file, where it cannot be read or written.
        """
        try:
            with self._lock:
                if self._file is None:
                    descriptor, path = tempfile.mkstemp(prefix=SPILL_PREFIX, dir=self.folder)
                    self.path, self._file = Path(path), os.fdopen(descriptor, "r+b")
                self._file.seek(self._slots[key] * self.dim * self.dtype.itemsize)
                yield self._file
        except OSError as error:
            where = self.folder or tempfile.gettempdir() if self.path is None else self.path
            raise OSError(
                f"The clients' vectors cannot be kept in '{where}' ({error.strerror or error}): make room, or use "
                "`ClientStates(storage='memory')`."
            ) from error

    def keys(self) -> Iterable[Key]:
        return self._slots.keys()

    def drop(self, key: Key) -> None:
        self._free.append(self._slots.pop(key))

    def close(self) -> None:
        self._slots.clear()
        self._free.clear()
        if self._file is not None:
            # What the last write could not put on a full disk is not wanted any more.
            with suppress(OSError):
                self._file.close()
            self._file = None
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None


def _bytes_of(vector: Tensor) -> memoryview:
    return vector.view(torch.uint8).numpy().data
