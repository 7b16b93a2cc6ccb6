"""Clients' vectors beside a checkpoint; a round rewrites only what it changed."""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedstop.core.client_states import DTYPES, Key

IntArray = NDArray[np.int64]
_TYPES = {**DTYPES, "float64": torch.float64, "float16": torch.float16}


class StateFile:
    """Vectors in the slots of one file. What a written checkpoint refers to is never overwritten.

    A changed vector goes to a free slot; the slot it had before becomes free once the checkpoint that refers to the new
    one is in place. So a run that is killed at any moment leaves a checkpoint whose vectors are whole, a round writes M
    vectors and not those of all clients ever trained, and the file holds at most about twice what is in use.

    Args:
        path: the file; it is created with the first vector.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        # By name: shape (clients seen,), the slot of each client's vector or -1, and the CRC-32 of its bytes. Arrays,
        # since with 100,000 clients a dictionary would take seconds of every round to write down.
        self._places: dict[str, IntArray] = {}
        self._free: list[int] = []
        self._replaced: list[int] = []
        self._count = 0

    def write(self, changed: Mapping[Key, Tensor]) -> dict[str, Any]:
        """Write vectors to free slots and flush them.

        Args:
            changed: by name and client, each of shape ``(d,)``; all of one length and type.

        Returns:
            What a checkpoint holds in place of the vectors; :func:`read_states` takes it.
        """
        if changed:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "r+b" if self.path.exists() else "w+b") as file:
                for key, vector in sorted(changed.items()):
                    content = _bytes_of(vector)
                    slot = self._free.pop() if self._free else self._count
                    self._count = max(self._count, slot + 1)
                    file.seek(slot * len(content))
                    file.write(content)
                    place = self._place(*key)
                    if place[0] >= 0:
                        self._replaced.append(int(place[0]))
                    place[:] = slot, zlib.crc32(content)
                    self._dim, self._dtype = vector.numel(), str(vector.dtype).removeprefix("torch.")
                file.flush()
                os.fsync(file.fileno())
        if not self._places:
            return {}
        slots = {}
        for name, places in sorted(self._places.items()):
            clients = np.flatnonzero(places[:, 0] >= 0)
            slots[name] = torch.from_numpy(np.column_stack([clients, places[clients]]))
        return {"file": self.path.name, "dim": self._dim, "dtype": self._dtype, "slots": slots}

    def _place(self, name: str, client: int) -> IntArray:
        """Slot and checksum of a vector, to be written to; a slot of -1 before its first time."""
        places = self._places.get(name, np.empty((0, 2), np.int64))
        if client >= len(places):
            more = np.full((max(client + 1, 2 * len(places)) - len(places), 2), -1, np.int64)
            self._places[name] = places = np.concatenate([places, more])
        row: IntArray = places[client]
        return row

    def settle(self) -> None:
        """Free the slots that the checkpoint, now in place, has done with."""
        self._free += self._replaced
        self._replaced = []


def read_states(manifest: Mapping[str, Any], checkpoint: str | os.PathLike[str]) -> dict[str, dict[int, Tensor]]:
    """Read the vectors that a checkpoint refers to, as ``{name: {client: vector}}``.

    Args:
        manifest: what :meth:`StateFile.write` gave.
        checkpoint: the checkpoint's path; the file lies beside it.

    Raises:
        ValueError: if the file is missing, too short, or not the one that the checkpoint was written with.
    """
    if not manifest:
        return {}
    path = Path(checkpoint).parent / manifest["file"]
    if not path.is_file():
        raise ValueError(
            f"{os.fspath(checkpoint)!r} needs the file {manifest['file']!r} beside it, with the clients' vectors: "
            "move both together."
        )
    dtype = _TYPES[manifest["dtype"]]
    length = manifest["dim"] * dtype.itemsize
    content = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    states: dict[str, dict[int, Tensor]] = {}
    for name, places in manifest["slots"].items():
        for client, slot, checksum in places.tolist():
            part = content[slot * length : (slot + 1) * length].tobytes()
            if len(part) != length or zlib.crc32(part) != checksum:
                raise ValueError(f"{str(path)!r} does not belong to {os.fspath(checkpoint)!r}, or is damaged.")
            states.setdefault(name, {})[client] = torch.frombuffer(bytearray(part), dtype=dtype)
    return states


def _bytes_of(vector: Tensor) -> bytes:
    return vector.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
