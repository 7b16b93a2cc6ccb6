"""Figures over the degree of skew, the threshold and the patience (the paper's Figs. 6 to 8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_fedstop.records.report import configuration
from lightning_fedstop.records.report.numbers import finite, is_value, mean, mean_and_spread, percent, spread
from lightning_fedstop.records.report.picture import WIDTHS, Picture, described
from lightning_fedstop.records.report.runs import Group, Run
from lightning_fedstop.records.report.style import DASHES, MARKERS, SERIES, light
from lightning_fedstop.records.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_PANELS = 6
_FEW_METHODS = 4
_BASELINE = ", better of the validation rules"

Series: TypeAlias = "dict[float, list[float | None]]"
"""For each place of the horizontal axis, a value for each run."""
Panels: TypeAlias = "dict[str, dict[str, Series]]"
"""For each title of a panel, its lines by label."""


def share_against_degree(groups: Sequence[Group], threshold: float, patience: int) -> Picture | str:
    """Draw the share of the budget against c, or return why there is none.

    Configurations alike in all else share a line.
    """
    alike: dict[str, list[tuple[float, Group]]] = {}
    for group in groups:
        _, degree = configuration.skew(group.config) or ("", None)
        if degree is not None:
            key = repr(sorted(configuration.without_degree(group.settings).items()))
            alike.setdefault(key, []).append((degree, group))
    panels: Panels = {}
    for members in alike.values():
        kind, _ = configuration.skew(members[0][1].config) or ("", None)
        series: Series = {}
        for degree, group in members:
            series.setdefault(degree, []).extend(run.share_of("task_vector", threshold, patience) for run in group.runs)
        panels.setdefault(f"Skew: {kind}", {})[_name_without_skew(members[0][1])] = series
    return _picture(
        "share-against-c",
        f"Share of the budget against the degree of skew c ({is_value('τ', threshold)}, {is_value('ρ', patience)})",
        panels,
        ("c", "share of the budget used (%)"),
        "no runs are given that differ only in their skew's c, and whose records decide the task-vector rule.",
    )


def accuracy_against_threshold(groups: Sequence[Group], thresholds: Sequence[float], patience: int) -> Picture | str:
    """Draw test accuracy at the stop against tau, or return why there is none."""

    def own(run: Run, threshold: float) -> float | None:
        return run.accuracy_of("task_vector", threshold, patience)

    def baseline(run: Run, threshold: float) -> float | None:
        return max(
            finite([run.accuracy_of(rule, threshold, patience) for rule in ("val_loss", "val_acc")]), default=None
        )

    return _picture(
        "accuracy-against-threshold",
        f"Test accuracy at the stop against the threshold τ ({is_value('ρ', patience)})",
        _by_method(groups, thresholds, own, baseline),
        ("threshold τ", "test accuracy at the stop (%)"),
        "no run recorded its test accuracy in two of the rounds where the thresholds stop it.",
    )


def share_against_patience(groups: Sequence[Group], threshold: float, patiences: Sequence[int]) -> Picture | str:
    """Draw the share of the budget against rho, or return why there is none."""

    def share(run: Run, patience: float) -> float | None:
        return run.share_of("task_vector", threshold, int(patience))

    return _picture(
        "share-against-patience",
        f"Share of the budget against the patience ρ ({is_value('τ', threshold)})",
        _by_method(groups, patiences, share),
        ("patience ρ", "share of the budget used (%)"),
        "no record is long enough for two of the patiences.",
    )


def _by_method(
    groups: Sequence[Group],
    places: Sequence[float],
    value: Callable[[Run, float], float | None],
    baseline: Callable[[Run, float], float | None] | None = None,
) -> Panels:
    """Collect a panel for each data set and skew, a line for each method."""
    members: dict[str, dict[str, list[Run]]] = {}
    for group in groups:
        where = [configuration.data_set(group.config), configuration.skew_text(group.config)]
        title = ", ".join(part for part in where if part) or "No configuration"
        method = configuration.method(group.config) or group.label
        members.setdefault(title, {}).setdefault(method, []).extend(group.runs)
    panels: Panels = {}
    for title, methods in members.items():
        wanted = {"": value} | ({_BASELINE: baseline} if baseline and len(methods) <= _FEW_METHODS else {})
        panels[title] = {
            method + suffix: {place: [function(run, place) for run in runs] for place in sorted(set(places))}
            for method, runs in methods.items()
            for suffix, function in wanted.items()
        }
    return panels


def _name_without_skew(group: Group) -> str:
    """Name a configuration without its skew, which the horizontal axis shows."""
    words = [configuration.method(group.config), configuration.data_set(group.config)]
    text = configuration.skew_text(group.config)
    words.append(group.label.partition(text)[2].strip(", ") if text and text in group.label else "")
    return ", ".join(word for word in words if word)


def _picture(name: str, title: str, panels: Panels, axes: tuple[str, str], reason: str) -> Picture | str:
    """Draw the lines that have values at two places, or return the reason."""
    missing = sum(value is None for lines in panels.values() for s in lines.values() for v in s.values() for value in v)
    known = {
        panel: {label: values for label, series in lines.items() if len(values := _known(series)) > 1}
        for panel, lines in panels.items()
    }
    known = {panel: lines for panel, lines in known.items() if any(_BASELINE not in label for label in lines)}
    if not known:
        return reason
    shown = dict(list(known.items())[:_MOST_PANELS])
    caption = f"{title}."
    if any(len(values) > 1 for lines in shown.values() for series in lines.values() for values in series.values()):
        caption += " Points are means over runs, bars their standard deviation."
    if missing:
        caption += f" {missing} values are missing: the record ends before the stop, or lacks them."
    if len(shown) < len(known):
        caption += f" The first {len(shown)} of {len(known)} settings are drawn."
    means = {
        f"{panel}, {label}": {x: mean(values) or 0.0 for x, values in series.items()}
        for panel, lines in shown.items()
        for label, series in lines.items()
    }

    def draw(width: float) -> Figure:
        return _draw(width, shown, *axes)

    return Picture(name, title, described(means, percent), draw, _numbers(known, title, axes[0]), caption)


def _known(series: Series) -> dict[float, list[float]]:
    return {place: known for place in sorted(series) if (known := finite(series[place]))}


def _draw(
    width: float, panels: Mapping[str, Mapping[str, Mapping[float, list[float]]]], xlabel: str, ylabel: str
) -> Figure:
    from matplotlib.figure import Figure

    narrow = width <= WIDTHS["narrow"]
    columns = 1 if narrow else min(3, len(panels))
    rows = -(-len(panels) // columns)
    methods = list(dict.fromkeys(label.removesuffix(_BASELINE) for lines in panels.values() for label in lines))
    labels = {label for lines in panels.values() for label in lines}
    height = 2.5 * rows + 0.19 * -(-len(labels) // (1 if narrow else 3)) + 0.4
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    handles: dict[str, Any] = {}
    for axes, (title, lines) in zip(grid.flat, panels.items(), strict=False):
        _draw_panel(axes, lines, methods)
        axes.set_title(title if len(panels) > 1 else "")
        axes.set_xlabel(xlabel)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    figure.supylabel(ylabel, fontsize=9)
    figure.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=1 if narrow else 3)
    return figure


def _draw_panel(axes: Axes, lines: Mapping[str, Mapping[float, list[float]]], methods: Sequence[str]) -> None:
    places = sorted({x for series in lines.values() for x in series})
    for number, (label, series) in enumerate(lines.items()):
        index, is_baseline = methods.index(label.removesuffix(_BASELINE)), label.endswith(_BASELINE)
        colour = light(SERIES[index % len(SERIES)])
        # Side by side, so that bars of the same place can be told apart.
        shift = 0.05 * (number - (len(lines) - 1) / 2) if len(lines) <= 8 else 0.0
        several = any(len(values) > 1 for values in series.values())
        axes.errorbar(
            [places.index(x) + shift for x in series],
            [mean(values) or 0.0 for values in series.values()],
            yerr=[spread(values) or 0.0 for values in series.values()] if several else None,
            color=colour,
            marker=MARKERS[index % len(MARKERS)],
            markerfacecolor="none" if is_baseline else colour,
            linestyle=(0, (4, 2)) if is_baseline else DASHES[index // len(SERIES) % len(DASHES)],
            linewidth=1.0 if is_baseline else 1.5,
            elinewidth=1.0,
            capsize=2.5,
            label=label,
        )
    axes.set_xticks(range(len(places)), [f"{x:g}" for x in places])
    axes.set_xlim(-0.35, len(places) - 0.65)
    if max(value for series in lines.values() for values in series.values() for value in values) < 60:
        axes.set_ylim(bottom=0)


def _numbers(panels: Mapping[str, Mapping[str, Mapping[float, list[float]]]], title: str, xlabel: str) -> Table:
    places = sorted({x for lines in panels.values() for series in lines.values() for x in series})
    rows = [
        [panel, label, *(mean_and_spread(series.get(x, []), unit="%") for x in places)]
        for panel, lines in panels.items()
        for label, series in lines.items()
    ]
    header = ["Setting", "Line", *(f"{x:g}" for x in places)]
    return Table(title, header, rows, "ll" + "r" * len(places), [("", 2), (xlabel, len(places))])
