"""Accuracy and growth rate over rounds, with the stop points of every rule (the paper's Fig. 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_fedstop.records.replay import Stop
from lightning_fedstop.records.report.markup import Content, table
from lightning_fedstop.records.report.numbers import is_value, number, percent
from lightning_fedstop.records.report.numbers import rounds as rounds_text
from lightning_fedstop.records.report.picture import NARROW, Picture
from lightning_fedstop.records.report.runs import RULE_NAMES, Group, Run
from lightning_fedstop.records.report.style import RULE_STYLE, light

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MANY_RUNS = 6
_SPARSE = 0.5  # below this share of rounds with a value, each value is a point of its own


@dataclass(frozen=True)
class Curve:
    """A column drawn over rounds."""

    column: str
    name: str
    colour: str
    dash: Any
    is_accuracy: bool = False

    def text(self, value: float | None) -> str | None:
        """A value as it is written."""
        return percent(value) if self.is_accuracy else number(value)


_TEST = Curve("test_acc", "test accuracy", "ink", "-", True)
_VALIDATION = Curve("val_acc", "validation accuracy", "ochre", (0, (4, 1.5)), True)
_GROWTH = Curve("growth_rate", "growth rate", "ink", "-")
_LOSSES = (
    Curve("test_loss", "test loss", "ink", "-"),
    Curve("val_loss", "validation loss", "ochre", (0, (4, 1.5))),
    Curve("train_loss", "training loss", "sky", (0, (1, 1))),
)


def curves_picture(group: Group, threshold: float, patience: int, name: str) -> Picture:
    """The two-panel figure of one configuration, a thin line a run and their mean.

    Args:
        group: the runs.
        threshold: tau of the rules whose stops are marked.
        patience: rho.
        name: of the picture.
    """
    runs = group.runs
    upper, unit = _upper_curves(runs)
    stops = {rule: group.stops(rule, threshold, patience) for rule in group.rules()}
    title = f"{unit.partition(' (')[0].capitalize()} and growth rate over rounds: {group.label}"

    def draw(width: float) -> Figure:
        return _draw(width, runs, upper, unit, stops, threshold)

    return Picture(
        name,
        title,
        _description(runs, upper, stops, threshold, patience),
        draw,
        _numbers(runs, upper, title),
        _caption(runs, upper, threshold, patience, group.label),
    )


def _upper_curves(runs: Sequence[Run]) -> tuple[list[Curve], str]:
    """Accuracies, or losses where no accuracy was recorded."""
    known = [curve for curve in (_TEST, _VALIDATION) if any(run.series(curve.column) for run in runs)]
    if known:
        return known, "accuracy (%)"
    return [curve for curve in _LOSSES if any(run.series(curve.column) for run in runs)], "loss"


def _draw(
    width: float,
    runs: Sequence[Run],
    upper: Sequence[Curve],
    unit: str,
    stops: dict[str, list[Stop]],
    threshold: float,
) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    narrow = width <= NARROW
    figure = Figure(figsize=(width, 5.4 if narrow else 5.3), layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.25, 1])
    for curve in upper:
        _draw_curve(top, runs, curve)
    _draw_curve(below, runs, _GROWTH)
    below.set_yscale("log")
    below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    below.yaxis.set_minor_formatter("")
    if not any(run.series("growth_rate") for run in runs):
        below.set_ylim(threshold / 10, threshold * 10)
    below.axhline(threshold, color=light("vermilion"), linewidth=1.1, linestyle=(0, (6, 2)))
    below.annotate(
        is_value("τ", threshold),
        (1, threshold),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 3),
        textcoords="offset points",
        ha="right",
        color=light("vermilion"),
        fontsize=8.5,
    )
    for rule, found in stops.items():
        _mark(top, below, runs, upper, rule, found)
    top.set_ylabel(unit)
    below.set_ylabel("growth rate of the distance")
    below.set_xlabel("round")
    last = max(run.last_round for run in runs)
    below.set_xlim(1 - 0.02 * last, last * 1.02 + (last == 1))
    below.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, upper, runs, stops, columns=1 if narrow else 3)
    return figure


def _draw_curve(axes: Axes, runs: Sequence[Run], curve: Curve) -> None:
    """A line a run, thin under their mean where there are several."""
    several = len(runs) > 1
    for run in runs:
        values = run.series(curve.column)
        sparse = len(values) < max(2, _SPARSE * len(run.record.rounds))
        axes.plot(
            list(values),
            list(values.values()),
            color=light(curve.colour),
            linestyle=curve.dash,
            linewidth=0.8 if several else 1.4,
            alpha=0.35 if several else 1.0,
            marker="." if sparse else None,
            markersize=5,
        )
    if several:
        means = mean_curve(runs, curve.column)
        axes.plot(list(means), list(means.values()), color=light(curve.colour), linestyle=curve.dash, linewidth=1.8)


def mean_curve(runs: Sequence[Run], column: str) -> dict[int, float]:
    """The mean over those runs that have the column, in the rounds for which all of them have a value."""
    known = [values for run in runs if (values := run.series(column))]
    shared = sorted(set.intersection(*(set(values) for values in known))) if known else []
    return {r: math.fsum(values[r] for values in known) / len(known) for r in shared}


def _mark(
    top: Axes, below: Axes, runs: Sequence[Run], upper: Sequence[Curve], rule: str, stops: Sequence[Stop]
) -> None:
    """A marker on the curves of each run at the round in which a rule stops, and a line at their mean."""
    colour, marker = RULE_STYLE[rule]
    by_name = {run.name: run for run in runs}
    looks: dict[str, Any] = {"color": light(colour), "marker": marker, "linestyle": "none", "zorder": 5}
    looks |= {"markeredgecolor": light("page"), "markeredgewidth": 0.7, "markersize": 7.5}
    rounds = []
    for stop in stops:
        run = by_name.get(stop.run)
        if run is None or stop.stop_round is None:
            continue
        rounds.append(stop.stop_round)
        for axes, choices in ((top, upper), (below, [_GROWTH])):
            value = _value_at(run, choices, stop.stop_round)
            if value is not None:
                axes.plot([stop.stop_round], [value], **looks)
    if len(rounds) == 1 or (rounds and len(runs) > 1):
        for axes in (top, below):
            axes.axvline(
                sum(rounds) / len(rounds), color=light(colour), linewidth=1.0, linestyle=(0, (2, 2)), zorder=1.5
            )


def _value_at(run: Run, curves: Sequence[Curve], stop_round: int) -> float | None:
    """The value of the first column that has one in that round."""
    for curve in curves:
        if (found := run.series(curve.column).get(stop_round)) is not None:
            return found
    return None


def _legend(
    figure: Figure, upper: Sequence[Curve], runs: Sequence[Run], stops: dict[str, list[Stop]], columns: int
) -> None:
    from matplotlib.lines import Line2D

    suffix = f" (mean of {len(runs)} runs, thin: each)" if len(runs) > 1 and columns == 1 else ""
    handles = [
        Line2D([], [], color=light(curve.colour), linestyle=curve.dash, label=curve.name + suffix) for curve in upper
    ]
    for rule, found in stops.items():
        colour, marker = RULE_STYLE[rule]
        label = f"{RULE_NAMES[rule]}: {stop_words(found)}"
        handles.append(
            Line2D([], [], color=light(colour), marker=marker, linestyle=(0, (2, 2)), linewidth=1, label=label)
        )
    figure.legend(handles=handles, loc="outside lower left", ncols=columns)


def stop_words(stops: Sequence[Stop]) -> str:
    """Where a rule stops, in a few words.

    >>> stop_words([])
    'nothing recorded'
    """
    if not stops:
        return "nothing recorded"
    rounds = [stop.stop_round for stop in stops if stop.stop_round is not None]
    if not rounds:
        return "does not stop"
    if len(stops) == 1:
        return f"round {rounds[0]}"
    words = f"round {rounds_text(rounds)}"
    return words if len(rounds) == len(stops) else f"{words} ({len(rounds)} of {len(stops)} runs)"


def _description(
    runs: Sequence[Run], upper: Sequence[Curve], stops: dict[str, list[Stop]], threshold: float, patience: int
) -> str:
    last = max(run.last_round for run in runs)
    parts = [f"Two panels over {last} rounds" + (f", {len(runs)} runs" if len(runs) > 1 else "") + "."]
    for curve in upper:
        if values := mean_curve(runs, curve.column):
            first, last, best = (
                min(values),
                max(values),
                (max if curve.is_accuracy else min)(values, key=values.__getitem__),
            )
            parts.append(
                f"Above, {curve.name} goes from {curve.text(values[first])} in round {first} to "
                f"{curve.text(values[last])} in round {last}; its best is {curve.text(values[best])} in round {best}."
            )
    if values := mean_curve(runs, "growth_rate"):
        first, last = min(values), max(values)
        parts.append(
            f"Below, on a logarithmic scale, the growth rate goes from {number(values[first])} in round {first} to "
            f"{number(values[last])} in round {last}; the threshold is {threshold:g}, the patience {patience}."
        )
    parts += [f"{RULE_NAMES[rule]}: {stop_words(found)}." for rule, found in stops.items()]
    return " ".join(parts)


def _caption(runs: Sequence[Run], upper: Sequence[Curve], threshold: float, patience: int, label: str) -> Content:
    many = f" Thin lines are the {len(runs)} runs, thick ones their mean." if len(runs) > 1 else ""
    marks = (
        " Markers stand where a rule stops, dotted lines at the mean of these rounds."
        if many
        else (" Markers and dotted lines stand where a rule stops.")
    )
    above = " and ".join(curve.name for curve in upper) or "nothing recorded"
    return (
        f"{label}. Above: {above}. Below: growth rate of the distance from the start, and the threshold "
        f"{is_value('τ', threshold)} under which it must stay for {is_value('ρ', patience)} rounds.{marks}{many}"
    )


def _numbers(runs: Sequence[Run], upper: Sequence[Curve], title: str) -> Content:
    """Every value drawn; of many runs their means."""
    curves = [*upper, _GROWTH]
    if len(runs) > _MANY_RUNS:
        columns = [(curve, mean_curve(runs, curve.column)) for curve in curves]
        groups = [("", 1), (f"mean of {len(runs)} runs", len(curves))]
    else:
        columns = [(curve, run.series(curve.column)) for run in runs for curve in curves]
        groups = [("", 1), *((run.name, len(curves)) for run in runs)] if len(runs) > 1 else []
    rounds = sorted({r for _, values in columns for r in values})
    rows = [[r, *(curve.text(values.get(r)) for curve, values in columns)] for r in rounds]
    header = ["round", *(curve.name for curve, _ in columns)]
    return table(title, header, rows, align="r" * len(header), groups=groups)
