"""Checks of the arguments that the stopping criteria and their callbacks share."""

import math
import operator
from numbers import Real
from typing import Any


def require_positive(name: str, value: Any) -> float:
    """``value`` as a float, if it is a finite number above 0.

    Raises:
        TypeError: If ``value`` is not a number.
        ValueError: If ``value`` is not finite or not above 0.

    >>> require_positive("threshold", 1)
    1.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a finite number above 0, got {value!r}.")
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"`{name}` must be a finite number above 0, got {value!r}.")
    return number


def require_count(name: str, value: Any, least: int) -> int:
    """``value`` as an int, if it is an integer of at least ``least``.

    Raises:
        TypeError: If ``value`` is not an integer (``True`` and ``10.0`` are not).
        ValueError: If ``value`` is below ``least``.

    >>> require_count("patience", 10, least=1)
    10
    """
    wrong = f"`{name}` must be an integer of at least {least}, got {value!r}."
    if isinstance(value, bool):
        raise TypeError(wrong)
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(wrong) from None
    if count < least:
        raise ValueError(wrong)
    return count


def require_flag(name: str, value: Any) -> bool:
    """``value``, if it is ``True`` or ``False``.

    Raises:
        TypeError: If ``value`` is anything else.

    >>> require_flag("verbose", False)
    False
    """
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}.")
    return value


def require_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """``value``, if it is one of ``choices``.

    Raises:
        ValueError: If it is not.

    >>> require_choice("variant", "paper", ("paper", "released_code"))
    'paper'
    """
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}.")
    return str(value)
