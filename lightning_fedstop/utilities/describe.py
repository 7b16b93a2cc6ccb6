"""Descriptions of objects by their arguments, and of nested settings by flat names."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any


def constructor_arguments(owner: object) -> dict[str, Any]:
    """Return an object's constructor arguments, as far as it keeps them under their names.

    >>> from lightning_fedstop.data import DirichletSkew
    >>> constructor_arguments(DirichletSkew(0.3))["concentration"]
    0.3
    """
    if not hasattr(owner, "__dict__"):  # keeps nothing under a name, as an array does
        return {}
    try:
        parameters = inspect.signature(type(owner)).parameters.values()
    except (ValueError, TypeError):  # classes written in C
        return {}
    kept = {}
    for parameter in parameters:
        # `_version` of a logger is what it was given, `version` the number that it takes.
        name = f"_{parameter.name}" if f"_{parameter.name}" in vars(owner) else parameter.name
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and hasattr(owner, name):
            value = getattr(owner, name)
            # Not what was made of the argument, such as the seconds of a duration.
            if not isinstance(value, float) or _may_be_float(parameter):
                kept[parameter.name] = value
    return kept


def leaves(value: Any, key: str = "", into_lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Walk nested settings: yield each value that holds no further names, with its keys joined by points.

    Args:
        value: Mappings of any depth; an empty one is a value.
        key: What the names begin with.
        into_lists: Lists of mappings or lists are walked too, with their places as keys.

    >>> list(leaves({"trainer": {"rounds": 5, "callbacks": [{"class_path": "Stop"}]}}, into_lists=True))
    [('trainer.rounds', 5), ('trainer.callbacks.0.class_path', 'Stop')]
    """
    parts: Mapping[Any, Any] = {}
    if isinstance(value, Mapping):
        parts = value
    elif into_lists and isinstance(value, list) and any(isinstance(part, Mapping | list) for part in value):
        parts = dict(enumerate(value))
    if not parts:
        yield key, value
    for name, part in parts.items():
        yield from leaves(part, f"{key}.{name}" if key else str(name), into_lists)


def _may_be_float(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    return annotation is parameter.empty or any(word in str(annotation) for word in ("float", "Any"))
