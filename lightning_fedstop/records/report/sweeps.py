"""What changes with the degree of skew, the threshold and the patience (the paper's Figs. 6, 7 and 8)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_fedstop.records.report import configuration
from lightning_fedstop.records.report.markup import Content, table
from lightning_fedstop.records.report.numbers import finite, is_value, mean, mean_and_spread, percent, spread
from lightning_fedstop.records.report.picture import NARROW, Picture
from lightning_fedstop.records.report.runs import Group, Run
from lightning_fedstop.records.report.style import DASHES, MARKERS, SERIES, light

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PANELS = 6
_FEW_METHODS = 4


@dataclass
class Series:
    """The values of several runs at each place of the horizontal axis."""

    label: str
    values: dict[float, list[float]] = field(default_factory=dict)
    baseline: bool = False
    missing: int = 0

    def add(self, x: float, value: float | None) -> None:
        """Take one run's value, if there is one, and count it as missing if not."""
        if value is not None and math.isfinite(value):
            self.values.setdefault(x, []).append(value)
        else:
            self.missing += 1


@dataclass
class Panel:
    """Axes of their own for one data set and skew."""

    title: str
    series: list[Series]


def share_against_degree(groups: Sequence[Group], threshold: float, patience: int) -> Picture | str:
    """Share of the budget against c, a line for configurations alike in all else; or why there is nothing to show."""
    lines: dict[str, tuple[str, list[tuple[float, Group]]]] = {}
    for group in groups:
        kind, degree = configuration.skew(group.config) or ("", None)
        if degree is not None:
            alike = repr(sorted(configuration.without_degree(group.settings).items()))
            lines.setdefault(alike, (kind, []))[1].append((degree, group))
    panels: dict[str, Panel] = {}
    for kind, members in lines.values():
        if len({degree for degree, _ in members}) < 2:
            continue
        series = Series(_name_without_skew(members[0][1], groups))
        for degree, group in members:
            for run in group.runs:
                series.add(degree, share_of(run, "task_vector", threshold, patience))
        if len(series.values) > 1:
            panels.setdefault(kind, Panel(f"Skew: {kind}", [])).series.append(series)
    if not panels:
        return "no runs are given that differ only in their skew's c, and whose records decide the task-vector rule."
    return _picture(
        "share-against-c",
        f"Share of the budget against the degree of skew c ({is_value('τ', threshold)}, {is_value('ρ', patience)})",
        list(panels.values()),
        "c",
        "share of the budget used (%)",
    )


def accuracy_against_threshold(groups: Sequence[Group], thresholds: Sequence[float], patience: int) -> Picture | str:
    """Test accuracy at the stop against tau, a line a method; or why there is nothing to show."""
    if len(set(thresholds)) < 2:
        return "one threshold alone makes no curve."

    def own(run: Run, threshold: float) -> float | None:
        return accuracy_of(run, "task_vector", threshold, patience)

    def baseline(run: Run, threshold: float) -> float | None:
        rules = ("val_loss", "val_acc")
        return max(finite([accuracy_of(run, rule, threshold, patience) for rule in rules]), default=None)

    panels = _panels(groups, thresholds, own, baseline)
    if not panels:
        return "no run recorded its test accuracy in two of the rounds where the thresholds stop it."
    return _picture(
        "accuracy-against-threshold",
        f"Test accuracy at the stop against the threshold τ ({is_value('ρ', patience)})",
        panels,
        "threshold τ",
        "test accuracy at the stop (%)",
    )


def share_against_patience(groups: Sequence[Group], threshold: float, patiences: Sequence[int]) -> Picture | str:
    """Share of the budget against rho, a line a method; or why there is nothing to show."""
    if len(set(patiences)) < 2:
        return "one patience alone makes no curve."

    def share(run: Run, patience: float) -> float | None:
        return share_of(run, "task_vector", threshold, int(patience))

    panels = _panels(groups, patiences, share, None)
    if not panels:
        return "no record is long enough for two of the patiences."
    return _picture(
        "share-against-patience",
        f"Share of the budget against the patience ρ ({is_value('τ', threshold)})",
        panels,
        "patience ρ",
        "share of the budget used (%)",
    )


def share_of(run: Run, rule: str, threshold: float, patience: int) -> float | None:
    """Percent of the budget at the stop; 100 without a stop in a whole record, ``None`` in one that ends earlier."""
    stop = run.stop(rule, threshold, patience)
    return None if stop is None or math.isnan(stop.share_used) else 100 * stop.share_used


def accuracy_of(run: Run, rule: str, threshold: float, patience: int) -> float | None:
    """Test accuracy in percent at the stop; that of the summary where the run itself ended there."""
    stop = run.stop(rule, threshold, patience)
    if stop is None:
        return None
    if stop.accuracy is None and run.is_over and run.stop_round == stop.stop_round:
        return run.test_accuracy
    return stop.accuracy


def _panels(
    groups: Sequence[Group],
    places: Sequence[float],
    value: Callable[[Run, float], float | None],
    baseline: Callable[[Run, float], float | None] | None,
) -> list[Panel]:
    """A panel a data set and skew, a line a method: the mean over all runs of that method there."""
    members: dict[str, dict[str, list[Run]]] = {}
    for group in groups:
        where = [configuration.data_set(group.config), configuration.skew_text(group.config)]
        title = ", ".join(part for part in where if part) or "No configuration"
        method = configuration.method(group.config) or group.label
        members.setdefault(title, {}).setdefault(method, []).extend(group.runs)
    panels = []
    for title, methods in members.items():
        wanted = [(value, "", False)]
        if baseline is not None and len(methods) <= _FEW_METHODS:
            wanted.append((baseline, ", better of the validation rules", True))
        lines = []
        for method, runs in methods.items():
            for function, suffix, is_baseline in wanted:
                series = Series(method + suffix, baseline=is_baseline)
                for place in sorted(set(places)):
                    for run in runs:
                        series.add(place, function(run, place))
                lines.append(series)
        lines = [series for series in lines if len(series.values) > 1]
        if any(not series.baseline for series in lines):
            panels.append(Panel(title, lines))
    return panels


def _name_without_skew(group: Group, groups: Sequence[Group]) -> str:
    parts = [configuration.method(group.config), configuration.data_set(group.config)]
    words = ", ".join(part for part in parts if part)
    # What else tells configurations apart stands behind the skew in their labels.
    text = configuration.skew_text(group.config)
    rest = group.label.partition(text)[2].strip(", ") if text and text in group.label else ""
    return words + (f", {rest}" if rest else "")


def _picture(name: str, title: str, panels: list[Panel], xlabel: str, ylabel: str) -> Picture:
    shown = panels[:_MOST_PANELS]
    left_out = f" The first {len(shown)} of {len(panels)} settings are drawn." if len(panels) > len(shown) else ""
    several = any(len(values) > 1 for panel in shown for series in panel.series for values in series.values.values())
    spread_note = " Points are means over runs, bars their standard deviation." if several else ""
    missing = sum(series.missing for panel in shown for series in panel.series)
    missing_note = f" {missing} values are missing: the record ends before the stop, or lacks them." if missing else ""

    def draw(width: float) -> Figure:
        return _draw(width, shown, xlabel, ylabel)

    return Picture(
        name,
        title,
        _description(shown, xlabel),
        draw,
        _numbers(panels, title, xlabel),
        f"{title}.{spread_note}{missing_note}{left_out}",
    )


def _draw(width: float, panels: Sequence[Panel], xlabel: str, ylabel: str) -> Figure:
    from matplotlib.figure import Figure

    columns = 1 if width <= NARROW else min(3, len(panels))
    rows = -(-len(panels) // columns)
    looks = _looks(panels)
    legend_columns = 1 if width <= NARROW else 3
    entries = {series.label for panel in panels for series in panel.series}
    figure = Figure(figsize=(width, 2.5 * rows + 0.19 * -(-len(entries) // legend_columns) + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel, looks)
        if len(panels) > 1:
            axes.set_title(panel.title)
    for index, axes in enumerate(grid.flat):
        if index >= len(panels):
            axes.set_axis_off()
        elif index + columns >= len(panels):
            axes.set_xlabel(xlabel)
    figure.supylabel(ylabel, fontsize=9)
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=legend_columns)
    return figure


def _looks(panels: Sequence[Panel]) -> dict[str, int]:
    """A number a method, the same in every panel; a baseline shares that of its method."""
    names = dict.fromkeys(series.label.partition(", better")[0] for panel in panels for series in panel.series)
    return {name: index for index, name in enumerate(names)}


def _draw_panel(axes: Axes, panel: Panel, looks: Mapping[str, int]) -> None:
    places = sorted({x for series in panel.series for x in series.values})
    for number, series in enumerate(panel.series):
        index = looks[series.label.partition(", better")[0]]
        colour = light(SERIES[index % len(SERIES)])
        # Side by side, so that bars of the same place can be told apart.
        shift = 0.05 * (number - (len(panel.series) - 1) / 2) if len(panel.series) <= 8 else 0.0
        known = [x for x in places if x in series.values]
        axes.errorbar(
            [places.index(x) + shift for x in known],
            [mean(series.values[x]) or 0.0 for x in known],
            yerr=[spread(series.values[x]) or 0.0 for x in known]
            if any(len(series.values[x]) > 1 for x in known)
            else None,
            color=colour,
            marker=MARKERS[index % len(MARKERS)],
            markerfacecolor="none" if series.baseline else colour,
            linestyle=(0, (4, 2)) if series.baseline else DASHES[index // len(SERIES) % len(DASHES)],
            linewidth=1.0 if series.baseline else 1.5,
            elinewidth=1.0,
            capsize=2.5,
            label=series.label,
        )
    axes.set_xticks(range(len(places)), [f"{x:g}" for x in places])
    axes.set_xlim(-0.35, len(places) - 0.65)
    axes.set_ylim(bottom=0) if max(_tops(panel)) < 60 else None


def _tops(panel: Panel) -> list[float]:
    return [value for series in panel.series for values in series.values.values() for value in values]


def _description(panels: Sequence[Panel], xlabel: str) -> str:
    parts = []
    for panel in panels:
        for series in panel.series:
            known = sorted(series.values)
            ends = [(f"{x:g}", percent(mean(series.values[x]))) for x in (known[0], known[-1])]
            parts.append(f"{panel.title}, {series.label}: {ends[0][1]} at {ends[0][0]}, {ends[1][1]} at {ends[1][0]}.")
    return f"Lines over {xlabel}. " + " ".join(parts)


def _numbers(panels: Sequence[Panel], title: str, xlabel: str) -> Content:
    places = sorted({x for panel in panels for series in panel.series for x in series.values})
    rows = [
        [panel.title, series.label, *(mean_and_spread(series.values.get(x, []), unit="%") for x in places)]
        for panel in panels
        for series in panel.series
    ]
    header = ["Setting", "Line", *(f"{x:g}" for x in places)]
    return table(title, header, rows, align="ll" + "r" * len(places), groups=[("", 2), (xlabel, len(places))])
