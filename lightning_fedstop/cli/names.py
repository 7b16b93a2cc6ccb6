"""Classes and arguments that a configuration may name."""

import inspect
from collections.abc import Iterable, Iterator
from pkgutil import resolve_name
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint

from lightning_fedstop.data.arrays import ArrayDataModule
from lightning_fedstop.loop.arguments import TRAINER_ONLY
from lightning_fedstop.methods import FederatedMethod
from lightning_fedstop.stopping.callbacks.base import CriterionCallback

CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
# What a configuration is of no use to name: bases of other classes, and what only a `Trainer` can serve.
NOT_OFFERED: set[Any] = {
    *(Callback, Checkpoint, CriterionCallback, FederatedMethod, LightningDataModule, LightningModule),
    *(ArrayDataModule, *TRAINER_ONLY),
}
# What `LightningCLI` passes to an optimizer or a scheduler itself.
_NOT_GIVEN = ("self", "params", "optimizer")


def shown(value: Any) -> str:
    """Write a value of a configuration as YAML does, shortened."""
    names = {None: "null", True: "true", False: "false"}
    text = names[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def all_parameters(target: Any) -> dict[str, inspect.Parameter]:
    """Parameters of a class or function, with those passed to parents by ``**kwargs``."""
    found: dict[str, inspect.Parameter] = {}
    for owner in target.__mro__ if inspect.isclass(target) else [target]:
        function: Any = owner.__init__ if inspect.isclass(owner) else owner
        parameters = inspect.signature(function).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        found = {name: p for name, p in parameters.items() if p.kind not in variable} | found
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    return found


def resolved(path: str) -> Any:
    """Object of an import path, or ``None``."""
    try:
        return resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        return None


def argument_names(target: Any) -> list[str]:
    """Arguments that a configuration can give to a class."""
    return [] if target is None else [name for name in all_parameters(target) if name not in _NOT_GIVEN]


def class_names(bases: Iterable[Any], taking: str | None = None) -> list[str]:
    """Names of the classes below some bases, this package's first.

    Args:
        bases: The bases; what is no class has no names.
        taking: An argument that the classes must take.
    """
    found: list[type] = [sub for base in bases if isinstance(base, type) for sub in _concrete_subclasses(base)]
    if taking is not None:
        found = [sub for sub in found if taking in all_parameters(sub)]
    ordered = sorted(found, key=lambda sub: (not _is_own(sub), sub.__name__.startswith("Released"), sub.__name__))
    return list(dict.fromkeys(sub.__name__ for sub in ordered))


def _concrete_subclasses(base: type) -> Iterator[type]:
    subclasses: list[type] = type.__subclasses__(base)
    for sub in subclasses:
        if not (sub.__name__.startswith("_") or sub in NOT_OFFERED or inspect.isabstract(sub)):
            yield sub
        yield from _concrete_subclasses(sub)


def _is_own(cls: type) -> bool:
    return cls.__module__.startswith("lightning_fedstop.")
