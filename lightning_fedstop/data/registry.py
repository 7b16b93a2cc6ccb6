"""The skews and data modules of this package, found by looking: a new file needs no entry in a list."""

from collections.abc import Iterator
from importlib import import_module
from inspect import isabstract
from pkgutil import iter_modules
from typing import TypeVar

Base = TypeVar("Base")


def public_classes(base: type[Base]) -> dict[str, type[Base]]:
    """Find the classes below ``base`` that modules of ``data`` and ``data.partitions`` define, by name."""
    for package in ("lightning_fedstop.data", "lightning_fedstop.data.partitions"):
        for module in iter_modules(import_module(package).__path__):
            import_module(f"{package}.{module.name}")
    found = {kind.__name__: kind for kind in _below(base) if is_own(kind)}
    return {name: found[name] for name in sorted(found) if not name.startswith("_") and not isabstract(found[name])}


def is_own(kind: type) -> bool:
    """Check whether a class is one of this package."""
    return kind.__module__.partition(".")[0] == "lightning_fedstop"


def _below(base: type[Base]) -> Iterator[type[Base]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _below(kind)
