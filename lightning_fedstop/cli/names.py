"""The classes and arguments that a configuration may name, to say what is allowed where something else was given."""

import inspect
from collections.abc import Iterator
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint

from lightning_fedstop.loop.arguments import TRAINER_ONLY
from lightning_fedstop.methods import FederatedMethod
from lightning_fedstop.stopping.callbacks.base import CriterionCallback

BASES = (Callback, Checkpoint, CriterionCallback, FederatedMethod, LightningDataModule, LightningModule)
CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
_MANY = 12
# What `LightningCLI` passes to an optimizer or a scheduler itself.
_NOT_GIVEN = ("self", "params", "optimizer")


def near_class_key(name: str) -> str | None:
    """The key of a class's configuration that ``name`` is a misspelling of.

    >>> near_class_key("class_pth"), near_class_key("init_arg"), near_class_key("concentration")
    ('class_path', 'init_args', None)
    """
    return next(iter(get_close_matches(name.lower().replace("-", "_"), CLASS_KEYS, n=1, cutoff=0.85)), None)


def misformed(where: str, value: Any) -> str | None:
    """What is wrong with the form of a class's configuration at the key ``where``, if it is one.

    >>> misformed("data", {"class_path": None})
    'data.class_path: must be the name or the import path of a class, got null.'
    """
    if not isinstance(value, dict):
        return None
    arguments = value.get("init_args", {})
    is_class = "class_path" in value or "init_args" in value
    for key in [*value, *(arguments if isinstance(arguments, dict) else ())] if is_class else ():
        if not isinstance(key, str):
            return f"{where}: each key must be a name, got {shown(key)}."
    if "class_path" in value and not (isinstance(value["class_path"], str) and value["class_path"]):
        return f"{where}.class_path: must be the name or the import path of a class, got {shown(value['class_path'])}."
    if is_class and not isinstance(arguments, dict):
        return (
            f"{where}.init_args: must hold arguments by name, as in `init_args: {{seed: 1}}`, or be left out, "
            f"got {shown(arguments)}."
        )
    for key in value:
        if isinstance(key, str) and key not in CLASS_KEYS and (near := near_class_key(key)):
            return f"{where}.{key}: there is no such key; did you mean {where}.{near}?"
    return None


def shown(value: Any) -> str:
    """A value of a configuration as YAML has it, shortened."""
    names = {None: "null", True: "true", False: "false"}
    text = names[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def parameters_of(target: Any) -> dict[str, inspect.Parameter]:
    """What a class or function takes, with what a class passes on to its parents by ``**kwargs``."""
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
    """What an import path stands for, or ``None``."""
    try:
        return resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        return None


def arguments_of(class_path: str) -> list[str]:
    """The arguments that a configuration can give to a class."""
    target = resolved(class_path)
    return [] if target is None else [name for name in parameters_of(target) if name not in _NOT_GIVEN]


def unknown_argument(class_path: str, name: str) -> str:
    """What to say of an argument that the class does not take, or that no class was named for."""
    if near := near_class_key(name.partition(".")[0]):
        return f"there is no key '{name.partition('.')[0]}'; did you mean '{near}'?"
    target, short = resolved(class_path), class_path.rpartition(".")[2]
    if inspect.isclass(target) and not is_usable(target):
        takers = [sub.__name__ for sub in usable_subclasses(target) if name in parameters_of(sub)]
        if takers:
            return f"name the class that takes '{name}', which is one of {', '.join(sorted(takers)[:_MANY])}."
    names = arguments_of(class_path)
    hint = f"; did you mean '{close[0]}'?" if (close := get_close_matches(name, names, n=1)) else "."
    return f"{short} has no argument '{name}'{hint} It takes {', '.join(names) or 'none'}."


def unknown_class(name: str, bases: list[Any]) -> str:
    """What to say of a class that does not exist, or is of another kind than ``bases``."""
    classes = sorted(
        {sub for base in bases if inspect.isclass(base) for sub in usable_subclasses(base)}, key=_own_first
    )
    known = {sub.__name__.lower(): sub.__name__ for sub in classes}
    if same := known.get(name.lower()):
        return f"there is no class '{name}'; did you mean {same} (upper and lower case count)?"
    near = [known[lower] for lower in get_close_matches(name.lower(), known, n=3)]
    if near:
        return f"there is no class '{name}'; did you mean {' or '.join(near)}?"
    # All of our own, and some of whatever else has been imported, which may be many.
    own = [sub.__name__ for sub in classes if _is_own(sub)]
    some = list(dict.fromkeys([*own, *known.values()]))[: max(_MANY, len(own))]
    rest = ", ..." if len(some) < len(known) else ""
    return (
        f"there is no class '{name}'; there are {', '.join(some)}{rest}, and any import path such as mymodule.MyClass."
    )


def usable_subclasses(base: Any) -> Iterator[type]:
    """The classes below ``base`` that can be named in a configuration."""
    for sub in type.__subclasses__(base):
        if is_usable(sub):
            yield sub
        yield from usable_subclasses(sub)


def is_usable(cls: type) -> bool:
    """Whether a class is more than a base of others, and of use in a ``FederatedLoop``."""
    if cls.__name__.startswith("_") or cls in BASES or inspect.isabstract(cls) or issubclass(cls, TRAINER_ONLY):
        return False
    methods = (getattr(cls, name, None) for name in dir(cls) if not name.startswith("_"))
    return not any("NotImplementedError" in getattr(method, "__code__", _no_code).co_names for method in methods)


def _own_first(cls: type) -> tuple[bool, bool, str]:
    return not _is_own(cls), cls.__module__.endswith(".released_code"), cls.__name__.lower()


def _is_own(cls: type) -> bool:
    return cls.__module__.startswith("lightning_fedstop.")


_no_code = (lambda: None).__code__
