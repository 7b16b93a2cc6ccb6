"""Paths that a user gives, and folders looked through with their links."""

import os
import re
from collections.abc import Iterator
from pathlib import Path


def local_path(value: str | os.PathLike[str], name: str) -> Path:
    """Expand a leading ``~``, and refuse a path of another machine.

    Args:
        value: The path.
        name: The argument it was given for.

    Raises:
        ValueError: For a path such as ``s3://bucket/runs``.

    >>> local_path("runs", "default_root_dir").name
    'runs'
    """
    text = os.fspath(value)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text):
        raise ValueError(f"`{name}` must be a path of this machine, without `://`, got {text!r}.")
    return Path(text).expanduser()


def walk(root: str | os.PathLike[str]) -> Iterator[tuple[Path, list[str]]]:
    """Go through a folder and all below it, links to folders included, each folder once.

    What is reached without a link comes first, by that name. A loop of links ends.

    Yields:
        Each folder, and the names of the files in it.
    """
    seen: set[str] = set()
    starts = [os.fspath(root)]
    while starts:
        links: list[str] = []
        for start in starts:
            for folder, folders, files in os.walk(start):
                real = os.path.realpath(folder)
                if real in seen:
                    folders.clear()
                    continue
                seen.add(real)
                links += [path for name in sorted(folders) if os.path.islink(path := os.path.join(folder, name))]
                yield Path(folder), files
        starts = links
