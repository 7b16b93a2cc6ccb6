"""Accuracy and growth rate over rounds, with the stops of every rule (the paper's Fig. 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_fedstop.records.report.numbers import is_value, mean, number, percent
from lightning_fedstop.records.report.picture import WIDTHS, Picture, described
from lightning_fedstop.records.report.runs import RULE_NAMES, Group, Run
from lightning_fedstop.records.report.style import DASHES, RULE_STYLE, SERIES, light
from lightning_fedstop.records.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MANY_RUNS = 6
_SPARSE = 0.5  # below this share of rounds with a value, each value is a point of its own


@dataclass(frozen=True)
class Curve:
    """Column drawn over rounds."""

    column: str
    name: str
    colour: str = "ink"
    dash: Any = "-"

    def text(self, value: float | None) -> str | None:
        """Format a value."""
        return percent(value) if self.column.endswith("_acc") else number(value)


_ACCURACIES = (Curve("test_acc", "test accuracy"), Curve("val_acc", "validation accuracy", "ochre", (0, (4, 1.5))))
_LOSSES = (
    Curve("test_loss", "test loss"),
    Curve("val_loss", "validation loss", "ochre", (0, (4, 1.5))),
    Curve("train_loss", "training loss", "sky", (0, (1, 1))),
)
_GROWTH = Curve("growth_rate", "growth rate")


def curves_picture(group: Group, threshold: float, patience: int, name: str) -> Picture:
    """Draw two panels on one configuration, with a line for each run and their mean.

    Args:
        group: The runs.
        threshold: tau of the rules whose stops are marked.
        patience: rho.
        name: Of the picture.
    """
    runs = group.runs
    upper, unit = _upper(runs)
    words = {rule: _stop_words(group, rule, threshold, patience) for rule in group.rules()}

    def draw(width: float) -> Figure:
        figure, top, below = _panels(width, unit, max(run.last_round for run in runs), threshold)
        for axes, curve in [*((top, curve) for curve in upper), (below, _GROWTH)]:
            _draw_runs(axes, runs, curve)
        for rule in words:
            _mark(top, below, group, upper, rule, threshold, patience)
        _legend(figure, upper, words, narrow=width <= WIDTHS["narrow"])
        return figure

    lines = {curve.name: mean_curve(runs, curve.column) for curve in upper}
    ends = f"{described(lines, upper[0].text if upper else str)} {described(_mean_growth(runs), number)}"
    tau, rho = is_value("τ", threshold), is_value("ρ", patience)
    many = f" Thin lines are the {len(runs)} runs, thick ones their mean." if len(runs) > 1 else ""
    caption = (
        f"{group.label}. Above: {' and '.join(lines) or 'nothing recorded'}. Below: growth rate of the distance from "
        f"the start, and the threshold {tau} under which it must stay for {rho} rounds. Markers stand where a rule "
        f"stops, dotted lines at the mean of these rounds.{many}"
    )
    title = f"{unit.partition(' (')[0].capitalize()} and growth rate over rounds: {group.label}"
    stops = " ".join(f"{RULE_NAMES[rule]}: {text}." for rule, text in words.items())
    return Picture(name, title, f"{ends} {stops}", draw, _numbers(runs, upper, title), caption)


def overview_picture(groups: Sequence[Group], threshold: float, name: str) -> Picture:
    """Draw the same two panels with the mean over runs of each configuration."""
    every = [run for group in groups for run in group.runs]
    upper, unit = _upper(every)

    def draw(width: float) -> Figure:
        figure, top, below = _panels(width, unit, max(run.last_round for run in every), threshold)
        for axes, curve in ((top, upper[0] if upper else None), (below, _GROWTH)):
            for number_, group in enumerate(groups if curve else ()):
                values = mean_curve(group.runs, curve.column)  # type: ignore[union-attr]
                looks = {"color": light(SERIES[number_ % len(SERIES)]), "linestyle": DASHES[number_ % len(DASHES)]}
                axes.plot(list(values), list(values.values()), label=group.label if axes is below else None, **looks)
        figure.legend(loc="outside lower left", ncols=1 if width <= WIDTHS["narrow"] else 2)
        return figure

    column = upper[0] if upper else _GROWTH
    lines = {group.label: mean_curve(group.runs, column.column) for group in groups}
    rounds = sorted({r for values in lines.values() for r in values})
    rows = [[r, *(column.text(values.get(r)) for values in lines.values())] for r in rounds]
    title = f"{column.name.capitalize()} over rounds, all configurations"
    caption = (
        f"Means over each configuration's runs. Above: {column.name}. Below: growth rate; {is_value('τ', threshold)}."
    )
    table = Table(title, ["round", *lines], rows, "r" * (1 + len(lines)))
    return Picture(name, title, described(lines, column.text), draw, table, caption)


def mean_curve(runs: Sequence[Run], column: str) -> dict[float, float]:
    """Average a column over the runs that have it, in rounds where all do."""
    known = [values for run in runs if (values := run.series(column))]
    shared = sorted(set.intersection(*(set(values) for values in known))) if known else []
    return {r: mean([values[r] for values in known]) or 0.0 for r in shared}


def _mean_growth(runs: Sequence[Run]) -> dict[str, dict[float, float]]:
    return {"growth rate": mean_curve(runs, "growth_rate")}


def _upper(runs: Sequence[Run]) -> tuple[list[Curve], str]:
    """Choose accuracies, or losses where no accuracy was recorded."""
    for curves, unit in ((_ACCURACIES, "accuracy (%)"), (_LOSSES, "loss")):
        if known := [curve for curve in curves if any(run.series(curve.column) for run in runs)]:
            return known, unit
    return [], "loss"


def _stop_words(group: Group, rule: str, threshold: float, patience: int) -> str:
    text = group.rounds_text(rule, threshold, patience) or "nothing recorded"
    return text if text.startswith("not") else f"round {text}"


def _panels(width: float, unit: str, last: int, threshold: float) -> tuple[Figure, Axes, Axes]:
    """Create a panel for accuracies or losses above one for growth rates."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(width, 5.4), layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.25, 1])
    below.set_yscale("log")
    below.set_ylim(threshold / 10, None)
    below.set_ylim(auto=True)
    below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    below.yaxis.set_minor_formatter("")
    below.axhline(threshold, color=light("vermilion"), linewidth=1.1, linestyle=(0, (6, 2)))
    where: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    looks: dict[str, Any] = {"ha": "right", "color": light("vermilion"), "fontsize": 8.5}
    below.annotate(is_value("τ", threshold), (1, threshold), xytext=(-2, 3), **where, **looks)
    top.set_ylabel(unit)
    below.set_ylabel("growth rate of the distance")
    below.set_xlabel("round")
    below.set_xlim(1 - 0.02 * last, last * 1.02 + (last == 1))
    below.xaxis.get_major_locator().set_params(integer=True)
    return figure, top, below


def _draw_runs(axes: Axes, runs: Sequence[Run], curve: Curve) -> None:
    """Draw a line for each run, thin under their mean where there are several."""
    several = len(runs) > 1
    looks: dict[str, Any] = {"color": light(curve.colour), "linestyle": curve.dash}
    for run in runs:
        values = run.series(curve.column)
        marker = "." if len(values) < max(2, _SPARSE * len(run.record.rounds)) else None
        width, alpha = (0.8, 0.35) if several else (1.4, 1.0)
        axes.plot(
            list(values), list(values.values()), linewidth=width, alpha=alpha, marker=marker, markersize=5, **looks
        )
    if several:
        means = mean_curve(runs, curve.column)
        axes.plot(list(means), list(means.values()), linewidth=1.8, **looks)


def _mark(
    top: Axes, below: Axes, group: Group, upper: Sequence[Curve], rule: str, threshold: float, patience: int
) -> None:
    """Mark the round in which a rule stops on each curve, and their mean."""
    colour, marker = RULE_STYLE[rule]
    looks: dict[str, Any] = {"color": light(colour), "marker": marker, "linestyle": "none", "zorder": 5}
    looks |= {"markeredgecolor": light("page"), "markeredgewidth": 0.7, "markersize": 7.5}
    rounds = []
    for run in group.runs:
        stop = run.stop(rule, threshold, patience)
        if stop is None or stop.stop_round is None:
            continue
        rounds.append(stop.stop_round)
        for axes, curves in ((top, upper), (below, [_GROWTH])):
            values = [run.series(curve.column).get(stop.stop_round) for curve in curves]
            if value := next((value for value in values if value is not None), None):
                axes.plot([stop.stop_round], [value], **looks)
    for axes in (top, below) if rounds else ():
        axes.axvline(mean(rounds) or 0.0, color=light(colour), linewidth=1.0, linestyle=(0, (2, 2)), zorder=1.5)


def _legend(figure: Figure, upper: Sequence[Curve], words: dict[str, str], narrow: bool) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=light(curve.colour), linestyle=curve.dash, label=curve.name) for curve in upper]
    for rule, text in words.items():
        colour, marker = RULE_STYLE[rule]
        looks: dict[str, Any] = {"color": light(colour), "marker": marker, "linestyle": (0, (2, 2)), "linewidth": 1}
        handles.append(Line2D([], [], label=f"{RULE_NAMES[rule]}: {text}", **looks))
    figure.legend(handles=handles, loc="outside lower left", ncols=1 if narrow else 3)


def _numbers(runs: Sequence[Run], upper: Sequence[Curve], title: str) -> Table:
    """Tabulate every value drawn; of many runs their means."""
    curves = [*upper, _GROWTH]
    if len(runs) > _MANY_RUNS:
        columns = [(curve, mean_curve(runs, curve.column)) for curve in curves]
        groups = [("", 1), (f"mean of {len(runs)} runs", len(curves))]
    else:
        columns = [(curve, dict(run.series(curve.column).items())) for run in runs for curve in curves]
        groups = [("", 1), *((run.name, len(curves)) for run in runs)] if len(runs) > 1 else []
    rounds = sorted({r for _, values in columns for r in values})
    rows = [[int(r), *(curve.text(values.get(r)) for curve, values in columns)] for r in rounds]
    return Table(title, ["round", *(curve.name for curve, _ in columns)], rows, "r" * (1 + len(columns)), groups)
