"""Tables of a report, as data for its template."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from markupsafe import Markup, escape

from lightning_fedstop.records.report import configuration, numbers
from lightning_fedstop.records.report.numbers import finite, mean, mean_and_spread, percent, seconds, signed, size
from lightning_fedstop.records.report.runs import RULE_NAMES, Group, Run

Cell: TypeAlias = "str | float | None"

_CLASSES = {"l": "text", "w": "text sentence", "r": "number"}
_CRITERION = ("seconds_criterion", "seconds_callbacks")


@dataclass(frozen=True)
class Table:
    """Table before it is written.

    Attributes:
        caption: What it shows.
        header: A name for each column.
        rows: A cell for each column; ``None`` is shown as a dash.
        align: A letter for each column: ``l`` for text, ``w`` for sentences, ``r`` for numbers; ``l``, then ``r``s by
            default.
        groups: Names above several columns, each with its number of columns.

    Raises:
        ValueError: If a row has another length than the header.
    """

    caption: str
    header: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
    align: str = ""
    groups: Sequence[tuple[str, int]] = ()

    def __post_init__(self) -> None:
        if {len(row) for row in (self.header, *self.rows, self.classes)} != {len(self.header)}:
            raise ValueError(f"Each row of {self.caption!r} must have {len(self.header)} cells.")

    @property
    def classes(self) -> list[str]:
        """Style of each column."""
        return [_CLASSES[letter] for letter in self.align or "l" + "r" * (len(self.header) - 1)]


def runs_table(runs: Sequence[Run]) -> Table:
    """Tabulate each run and its end; columns that all runs share are left out."""
    described: dict[str, tuple[str, Sequence[Cell]]] = {
        "Method": ("l", [configuration.method(run.config) for run in runs]),
        "Data": ("l", [configuration.data_set(run.config) for run in runs]),
        "Skew": ("l", [configuration.skew_text(run.config) for run in runs]),
        "Seed": ("r", [configuration.seed(run.config) for run in runs]),
    }
    columns: dict[str, tuple[str, Sequence[Cell]]] = {"Run": ("l", [run.name for run in runs])}
    columns |= {name: column for name, column in described.items() if len(set(column[1])) > 1}
    columns |= {
        "Rule in force": ("l", [_in_force(run) for run in runs]),
        "Last round": ("r", [run.stop_round for run in runs]),
        "Budget": ("r", [run.record.budget for run in runs]),
        "Share used": ("r", [percent(run.share_used) for run in runs]),
        "Test accuracy": ("r", [percent(run.test_accuracy) for run in runs]),
        "Why it ended": ("w", [run.reason for run in runs]),
    }
    rows = list(zip(*(cells for _, cells in columns.values()), strict=True))
    return Table("The runs and how they ended", list(columns), rows, "".join(align for align, _ in columns.values()))


def _in_force(run: Run) -> str | None:
    rules = configuration.rules(run.config)
    stopping = "; ".join(str(rule) for rule in rules if not rule.observes)
    return (stopping or ("none, observing" if rules else "none")) if run.config else None


def rules_table(groups: Sequence[Group], threshold: float, patience: int) -> Table:
    """Tabulate where every rule stops.

    One configuration has a row for each rule, several have a row each.
    """
    settings = f"{numbers.is_value('τ', threshold)} and {numbers.is_value('ρ', patience)}"
    caption = f"Where each rule stops with {settings}, from the records"
    rows: list[list[Cell]]
    if len(groups) > 1:
        rules = [rule for rule in RULE_NAMES if any(rule in group.rules() for group in groups)]
        rows = [
            [g.label, *(cell for rule in rules for cell in _stop_cells(g, rule, threshold, patience))] for g in groups
        ]
        header = ["Configuration", *(["Round", "Used", "Accuracy"] * len(rules))]
        return Table(caption, header, rows, groups=[("", 1), *((RULE_NAMES[rule], 3) for rule in rules)])
    group = groups[0]
    rows = []
    for rule in group.rules():
        rounds, points = differences(group.runs, rule, threshold, patience)
        against = [signed(mean(rounds), 0 if len(rounds) < 2 else 1), in_points(mean(points))]
        own = rule == "task_vector"
        rows.append(
            [RULE_NAMES[rule], *_stop_cells(group, rule, threshold, patience), *([None, None] if own else against)]
        )
    header = ["Rule", "Stop round", "Share used", "Test accuracy", "Rounds later", "Accuracy higher"]
    return Table(caption, header, rows, groups=[("", 4), ("task vector against this rule", 2)])


def _stop_cells(group: Group, rule: str, threshold: float, patience: int) -> list[str | None]:
    """Format stop round, share of the budget and test accuracy there."""
    shares = [run.share_of(rule, threshold, patience) for run in group.runs]
    accuracies = [run.accuracy_of(rule, threshold, patience) for run in group.runs]
    return [
        group.rounds_text(rule, threshold, patience),
        mean_and_spread(shares, unit="%"),
        mean_and_spread(accuracies, unit="%"),
    ]


def differences(runs: Sequence[Run], rule: str, threshold: float, patience: int) -> tuple[list[float], list[float]]:
    """Compare the task-vector rule with another, in rounds and percentage points.

    Runs count in which both stop.
    """
    rounds, points = [], []
    for run in runs:
        own, other = run.stop("task_vector", threshold, patience), run.stop(rule, threshold, patience)
        if own is None or other is None or own.stop_round is None or other.stop_round is None:
            continue
        rounds.append(float(own.stop_round - other.stop_round))
        accuracies = [run.accuracy_of(name, threshold, patience) for name in ("task_vector", rule)]
        if accuracies[0] is not None and accuracies[1] is not None:
            points.append(accuracies[0] - accuracies[1])
    return rounds, points


def in_points(value: float | None) -> str | None:
    """Format a difference in percentage points."""
    text = signed(value)
    return None if text is None else f"{text}\N{NO-BREAK SPACE}pp"


def settings_tables(group: Group, thresholds: Sequence[float], patiences: Sequence[int]) -> list[tuple[str, Table]]:
    """Tabulate stop round and accuracy of each rule over tau and rho."""
    tables = []
    for rule in group.rules():
        rows: list[list[Cell]] = []
        for threshold in thresholds:
            cells: list[Cell] = [f"{threshold:g}"]
            for patience in patiences:
                round_, _, accuracy = _stop_cells(group, rule, threshold, patience)
                cells += [round_, accuracy]
            rows.append(cells)
        caption = f"{RULE_NAMES[rule]}: stop round and test accuracy there over τ and ρ. {group.label}"
        header = ["τ", *(["Round", "Accuracy"] * len(patiences))]
        above = [("", 1), *((numbers.is_value("ρ", patience), 2) for patience in patiences)]
        tables.append((RULE_NAMES[rule], Table(caption, header, rows, "r" * len(header), above)))
    return tables


def comparison_table(groups: Sequence[Group]) -> Table:
    """Tabulate means and standard deviations of each configuration."""
    rows: list[list[Cell]] = []
    for group in groups:
        best = [max(values) for run in group.runs if (values := run.series("test_acc").values())]
        rows.append(
            [
                group.label,
                len(group.runs),
                numbers.rounds([run.stop_round for run in group.runs]),
                mean_and_spread([run.share_used for run in group.runs], unit="%"),
                mean_and_spread([run.test_accuracy for run in group.runs], unit="%"),
                mean_and_spread(best, unit="%"),
                seconds(mean([_seconds_a_round(run) for run in group.runs])),
            ]
        )
    header = ["Configuration", "Runs", "Last round", "Share used", "Test accuracy", "Best accuracy", "Time a round"]
    caption = "Configurations: mean ± standard deviation over their runs, as they ended"
    return Table(caption, header, rows)


def _seconds_a_round(run: Run) -> float | None:
    parts = finite([run.total(*names) for names in (("seconds_train",), ("seconds_eval",), _CRITERION)])
    return sum(parts) / len(run.record.rounds) if parts else None


def costs_table(runs: Sequence[Run]) -> Table:
    """Tabulate time, bytes and memory of each run."""
    rows = [_costs(run) for run in runs]
    times, sizes = ["Wall time", "Training", "Evaluation", "Criterion"], ["Sent down", "Sent up", "Peak memory"]
    return Table("What the runs cost, all rounds together", ["Run", "Rounds", *times, *sizes], rows)


def _costs(run: Run) -> list[Cell]:
    peak, whole = (run.record.summary.get(key) for key in ("peak_memory_bytes", "seconds"))
    memory = finite([v for v in peak.values() if isinstance(v, int | float)]) if isinstance(peak, dict) else []
    parts = [run.total(*names) for names in (("seconds_train",), ("seconds_eval",), _CRITERION)]
    times = [seconds(value) for value in (whole if isinstance(whole, int | float) else None, *parts)]
    sizes = [size(value) for value in (run.total("bytes_down"), run.total("bytes_up"), max(memory, default=None))]
    return [run.name, len(run.record.rounds), *times, *sizes]


def configuration_tables(runs: Sequence[Run]) -> tuple[Table | None, Table | None]:
    """Tabulate keys in which the runs differ, and shared ones; ``None`` without any."""
    flats = {run.name: configuration.flat(run.config) for run in runs if run.config}
    if not flats:
        return None, None
    keys = list(dict.fromkeys(key for flat in flats.values() for key in flat))
    shared = [key for key in keys if len({repr(flat.get(key, ...)) for flat in flats.values()}) == 1]
    differing = [key for key in keys if key not in shared]
    heading = "The whole configuration" if len(flats) == 1 else f"What the {len(flats)} configurations share"
    first: Mapping[str, Any] = next(iter(flats.values()))
    whole = Table(heading, ["Key", "Value"], [[_breakable(key), _text(first[key])] for key in shared], "ll")
    if not differing:
        return None, whole
    rows = [[name, *(_text(flat.get(key, "")) for key in differing)] for name, flat in flats.items()]
    header = ["Run", *map(_breakable, differing)]
    return Table("Keys in which the runs differ", header, rows, "l" * len(header)), whole


def _breakable(key: str) -> str:
    """Allow line breaks in a key after its points."""
    return Markup(".<wbr>").join(escape(part) for part in key.split("."))


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)
