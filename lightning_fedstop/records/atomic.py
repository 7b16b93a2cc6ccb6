"""Files that are there whole or not at all."""

import os
from pathlib import Path


class atomic_file:
    """A path to write to, flushed and renamed to ``path`` if the block succeeds and removed if it does not."""

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
