"""Numbers as a reader wants them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_SPACE = "\N{NO-BREAK SPACE}"


def percent(value: float | None) -> str | None:
    r"""A percentage with one digit after the point, ``None`` if there is no finite value.

    >>> percent(62.96)
    '63.0\xa0%'
    """
    return None if value is None or not math.isfinite(value) else f"{value:.1f}{_SPACE}%"


def seconds(value: float | None) -> str | None:
    r"""A duration in the units that suit it.

    >>> seconds(4411.9), seconds(0.0312)
    ('1\xa0h 14\xa0min', '31.2\xa0ms')
    """
    if value is None or not math.isfinite(value):
        return None
    if value < 1:
        return f"{value * 1000:.3g}{_SPACE}ms"
    if value < 120:
        return f"{value:.1f}{_SPACE}s"
    minutes = round(value / 60)
    return f"{minutes // 60}{_SPACE}h {minutes % 60}{_SPACE}min" if minutes >= 60 else f"{minutes}{_SPACE}min"


def size(value: float | None) -> str | None:
    r"""Bytes in decimal units.

    >>> size(135_598_720)
    '136\xa0MB'
    """
    if value is None or not math.isfinite(value):
        return None
    units = ["B", "kB", "MB", "GB", "TB"]
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.3g}{_SPACE}{units[0]}"


def number(value: float | None, digits: int = 3) -> str | None:
    """A number with so many significant digits, ``None`` if it is not finite.

    >>> number(0.0123456), number(74.0), number(float("nan"))
    ('0.0123', '74', None)
    """
    return None if value is None or not math.isfinite(value) else f"{value:.{digits}g}"


def signed(value: float | None, digits: int = 1) -> str | None:
    """A difference with its sign.

    >>> signed(2.25), signed(-2.25)
    ('+2.2', '−2.2')
    """
    if value is None or not math.isfinite(value):
        return None
    text = f"{value:+.{digits}f}"
    return text.replace("-", "\N{MINUS SIGN}") if float(text) else f"{0:.{digits}f}"


def finite(values: Sequence[float | None]) -> list[float]:
    """The finite ones among the values."""
    return [value for value in values if value is not None and math.isfinite(value)]


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of the finite values, ``None`` without any."""
    known = finite(values)
    return statistics.fmean(known) if known else None


def spread(values: Sequence[float | None]) -> float | None:
    """The standard deviation of the finite values as a sample, ``None`` for fewer than two."""
    known = finite(values)
    return statistics.stdev(known) if len(known) > 1 else None


def is_value(name: str, value: float) -> str:
    r"""``name = value`` that does not break at the end of a line.

    >>> is_value("τ", 0.01)
    'τ\xa0=\xa00.01'
    """
    return f"{name}{_SPACE}={_SPACE}{value:g}"


def rounds(values: Sequence[float]) -> str | None:
    r"""Numbers of rounds: one that all share as it is, else mean and standard deviation.

    >>> rounds([120, 120]), rounds([72, 79])
    ('120', '75.5\xa0±\xa04.9')
    """
    return f"{values[0]:.0f}" if len(set(values)) == 1 else mean_and_spread(values)


def mean_and_spread(values: Sequence[float | None], digits: int = 1, unit: str = "") -> str | None:
    r"""``mean ± standard deviation``, or the value if there is one only.

    >>> mean_and_spread([72, 78], 0), mean_and_spread([61.0], unit="%"), mean_and_spread([None])
    ('75\xa0±\xa04', '61.0\xa0%', None)
    """
    middle, deviation = mean(values), spread(values)
    if middle is None:
        return None
    text = f"{middle:.{digits}f}"
    text += "" if deviation is None else f"{_SPACE}±{_SPACE}{deviation:.{digits}f}"
    return text + (f"{_SPACE}{unit}" if unit else "")
