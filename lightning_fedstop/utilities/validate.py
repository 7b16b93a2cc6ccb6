"""Checks of arguments: wrong types raise ``TypeError``, wrong ranges ``ValueError``."""

import math
import operator
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any


def number(name: str, value: Any, allowed: str, fits: Callable[[float], bool], owner: object = None) -> float:
    """Return ``value`` as a float, refused unless it is a number that fits.

    Args:
        name: The argument's name.
        value: What was given for it.
        allowed: The words for what is allowed, as in "a number in [0, 1]".
        fits: The range; NaN fits no comparison.
        owner: The object that was given it, for the message.

    Raises:
        TypeError: If ``value`` is not a number (``True`` is none).
        ValueError: If it does not fit.

    >>> number("momentum", 0.9, "a number in [0, 1)", lambda value: 0 <= value < 1)
    0.9
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(_wrong(name, value, allowed, owner))
    if not fits(float(value)):
        raise ValueError(_wrong(name, value, allowed, owner))
    return float(value)


def positive(name: str, value: Any, owner: object = None) -> float:
    """Return ``value`` as a float, refused unless it is finite and above 0.

    >>> positive("threshold", 1)
    1.0
    """
    return number(name, value, "a finite number above 0", lambda value: 0 < value < math.inf, owner)


def not_negative(name: str, value: Any, owner: object = None) -> float:
    """Return ``value`` as a float, refused unless it is finite and at least 0."""
    return number(name, value, "a finite number of at least 0", lambda value: 0 <= value < math.inf, owner)


def within_unit(name: str, value: Any, owner: object = None) -> float:
    """Return ``value`` as a float, refused unless it lies in [0, 1]."""
    return number(name, value, "a number in [0, 1]", lambda value: 0 <= value <= 1, owner)


def whole_number(name: str, value: Any, least: int, owner: object = None) -> int:
    """Return ``value`` as an int, refused unless it is an integer of at least ``least``.

    Raises:
        TypeError: If ``value`` is not an integer (``True`` and ``10.0`` are not).
        ValueError: If it is below ``least``.

    >>> whole_number("patience", 10, least=1)
    10
    """
    wrong = _wrong(name, value, f"an integer of at least {least}", owner)
    if isinstance(value, bool):
        raise TypeError(wrong)
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(wrong) from None
    if count < least:
        raise ValueError(wrong)
    return count


def flag(name: str, value: Any, owner: object = None) -> bool:
    """Return ``value``, refused with a ``TypeError`` unless it is ``True`` or ``False``.

    >>> flag("verbose", False)
    False
    """
    if not isinstance(value, bool):
        raise TypeError(_wrong(name, value, "True or False", owner))
    return value


def one_of(name: str, value: Any, choices: Sequence[Any], owner: object = None) -> Any:
    """Return ``value``, refused with a ``ValueError`` unless it is among ``choices``.

    >>> one_of("variant", "paper", ("paper", "released_code"))
    'paper'
    """
    if value not in choices:
        raise ValueError(_wrong(name, value, f"one of {', '.join(map(repr, choices))}", owner))
    return value


def instance_of(name: str, value: Any, parent: type) -> None:
    """Refuse ``value`` with a ``TypeError`` unless it is an instance of ``parent``."""
    if not isinstance(value, parent):
        hint = other_package(type(value))
        allowed = f"of the class {parent.__module__}.{parent.__name__}"
        raise TypeError(f"`{name}` must be {allowed}, got {value!r}{hint}.")


def other_package(kind: type) -> str:
    """Hint at ``lightning.pytorch`` for a class of ``pytorch_lightning``; empty for any other.

    >>> other_package(dict)
    ''
    """
    if any(base.__module__.partition(".")[0] == "pytorch_lightning" for base in kind.__mro__):
        return "; `pytorch_lightning` is another package: import from `lightning.pytorch` instead"
    return ""


def _wrong(name: str, value: Any, allowed: str, owner: object) -> str:
    of = "" if owner is None else f" of {type(owner).__name__}"
    return f"`{name}`{of} must be {allowed}, got {value!r}."
