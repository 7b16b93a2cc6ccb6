"""Files that are there whole or not at all."""

import os
import pickle
import zipfile
from pathlib import Path


class atomic_file:
    """Path to write to, renamed to ``path`` if the block succeeds, else removed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> Path:
        return self.temporary

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if kind is None:
                with self.temporary.open("rb+") as file:
                    os.fsync(file.fileno())
                os.replace(self.temporary, self.path)
        finally:
            self.temporary.unlink(missing_ok=True)


def reason_unreadable(error: Exception) -> str:
    """Say why ``torch.load(weights_only=True)`` failed, without torch's advice to unpickle."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, pickle.UnpicklingError):
        # torch's own advice is to unpickle whatever is in it.
        return "it holds other objects than tensors and plain values, which are never unpickled"
    if isinstance(error, zipfile.BadZipFile | EOFError):
        return "it is truncated, or no checkpoint"
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
