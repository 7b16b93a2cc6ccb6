"""The tables of a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from lightning_fedstop.records.replay import Stop
from lightning_fedstop.records.report import configuration, numbers
from lightning_fedstop.records.report.markup import Content, Html, details, table, tag
from lightning_fedstop.records.report.numbers import finite, mean, mean_and_spread, percent, seconds, signed, size
from lightning_fedstop.records.report.runs import RULE_NAMES, Group, Run
from lightning_fedstop.records.report.sweeps import accuracy_of, share_of

Column = tuple[str, str, Callable[[Run], Content]]


def rounds_text(stops: Sequence[Stop], last: int) -> str | None:
    """The stop rounds of a rule over runs: the mean and standard deviation, or that it does not stop.

    Args:
        stops: one a run.
        last: the last round recorded.
    """
    if not stops:
        return None
    rounds = [stop.stop_round for stop in stops if stop.stop_round is not None]
    if not rounds:
        return f"not by round {last}"
    text = str(numbers.rounds(rounds))
    return text if len(rounds) == len(stops) else f"{text} ({len(rounds)} of {len(stops)} runs)"


def runs_table(runs: Sequence[Run]) -> Html:
    """What each run is and how it ended; what all runs share is left out."""
    described: list[Column] = [
        ("Method", "l", lambda run: configuration.method(run.config)),
        ("Data", "l", lambda run: configuration.data_set(run.config)),
        ("Skew", "l", lambda run: configuration.skew_text(run.config)),
        ("Seed", "r", lambda run: configuration.seed(run.config)),
    ]
    ended: list[Column] = [
        ("Rule in force", "l", lambda run: _in_force(run)),
        ("Last round", "r", lambda run: run.stop_round),
        ("Budget", "r", lambda run: run.record.budget),
        ("Share used", "r", lambda run: percent(run.share_used)),
        ("Test accuracy", "r", lambda run: percent(run.test_accuracy)),
        ("Why it ended", "w", lambda run: run.reason),
    ]
    differing = [column for column in described if len({column[2](run) for run in runs}) > 1]
    columns = [*differing, *ended]
    rows = [[run.name, *(value(run) for _, _, value in columns)] for run in runs]
    return table(
        "The runs and how they ended", ["Run", *(c[0] for c in columns)], rows, "l" + "".join(c[1] for c in columns)
    )


def _in_force(run: Run) -> str | None:
    if not run.config:
        return None
    rules = configuration.rules(run.config)
    stopping = [str(rule) for rule in rules if not rule.observes]
    if stopping:
        return "; ".join(stopping)
    return "none, observing" if rules else "none"


def rules_table(groups: Sequence[Group], threshold: float, patience: int) -> Html:
    """Where every rule stops: a row a rule for one configuration, a row a configuration for several."""
    settings = f"{numbers.is_value('τ', threshold)} and {numbers.is_value('ρ', patience)}"
    caption = f"Where each rule stops with {settings}, from the records"
    if len(groups) > 1:
        return _rules_across(groups, threshold, patience, caption)
    group = groups[0]
    rows = [
        [
            RULE_NAMES[rule],
            *_stop_cells(group, rule, threshold, patience),
            *_differences(group.runs, rule, threshold, patience),
        ]
        for rule in group.rules()
    ]
    header = ["Rule", "Stop round", "Share used", "Test accuracy", "Rounds later", "Accuracy higher"]
    return table(caption, header, rows, "lrrrrr", [("", 4), ("task vector against this rule", 2)])


def _rules_across(groups: Sequence[Group], threshold: float, patience: int, caption: str) -> Html:
    rules = [rule for rule in RULE_NAMES if any(rule in group.rules() for group in groups)]
    rows = [
        [group.label, *(cell for rule in rules for cell in _stop_cells(group, rule, threshold, patience))]
        for group in groups
    ]
    header = ["Configuration", *(["Round", "Used", "Accuracy"] * len(rules))]
    return table(caption, header, rows, groups=[("", 1), *((RULE_NAMES[rule], 3) for rule in rules)])


def _stop_cells(group: Group, rule: str, threshold: float, patience: int) -> list[str | None]:
    """Stop round, share of the budget and test accuracy there."""
    return [
        rounds_text(group.stops(rule, threshold, patience), _last(group)),
        mean_and_spread([share_of(run, rule, threshold, patience) for run in group.runs], unit="%"),
        mean_and_spread([accuracy_of(run, rule, threshold, patience) for run in group.runs], unit="%"),
    ]


def _differences(runs: Sequence[Run], rule: str, threshold: float, patience: int) -> list[str | None]:
    """Rounds and percentage points by which the task-vector rule exceeds another, as text."""
    if rule == "task_vector":
        return [None, None]
    rounds, points = differences(runs, rule, threshold, patience)
    return [signed(mean(rounds), 0 if len(rounds) < 2 else 1), in_points(mean(points))]


def differences(runs: Sequence[Run], rule: str, threshold: float, patience: int) -> tuple[list[float], list[float]]:
    """Rounds and percentage points by which the task-vector rule exceeds another, one for each run where both stop."""
    rounds, points = [], []
    for run in runs:
        own, other = run.stop("task_vector", threshold, patience), run.stop(rule, threshold, patience)
        if own is None or other is None or own.stop_round is None or other.stop_round is None:
            continue
        rounds.append(float(own.stop_round - other.stop_round))
        accuracies = [accuracy_of(run, name, threshold, patience) for name in ("task_vector", rule)]
        if accuracies[0] is not None and accuracies[1] is not None:
            points.append(accuracies[0] - accuracies[1])
    return rounds, points


def in_points(value: float | None) -> str | None:
    """A difference in percentage points."""
    text = signed(value)
    return None if text is None else f"{text}\N{NO-BREAK SPACE}pp"


def _last(group: Group) -> int:
    return max(run.last_round for run in group.runs)


def settings_tables(group: Group, thresholds: Sequence[float], patiences: Sequence[int]) -> list[Html]:
    """For each rule, stop round and accuracy over tau and rho; the first open, the others folded."""
    tables = []
    for rule in group.rules():
        rows = []
        for threshold in thresholds:
            cells: list[Content] = [f"{threshold:g}"]
            for patience in patiences:
                stops = group.stops(rule, threshold, patience)
                accuracies = [accuracy_of(run, rule, threshold, patience) for run in group.runs]
                cells += [rounds_text(stops, _last(group)), mean_and_spread(accuracies, unit="%")]
            rows.append(cells)
        caption = f"{RULE_NAMES[rule]}: stop round and test accuracy there over τ and ρ. {group.label}"
        header = ["τ", *(["Round", "Accuracy"] * len(patiences))]
        groups = [("", 1), *((numbers.is_value("ρ", patience), 2) for patience in patiences)]
        tables.append(table(caption, header, rows, "r" * len(header), groups))
    folded = [details(RULE_NAMES[rule], part) for rule, part in zip(group.rules()[1:], tables[1:], strict=True)]
    return [*tables[:1], *folded]


def comparison_table(groups: Sequence[Group]) -> Html:
    """One row a configuration: means and standard deviations over its runs."""
    rows: list[Sequence[Content]] = []
    for group in groups:
        best = [max(values) for run in group.runs if (values := run.series("test_acc").values())]
        seconds_a_round = [_seconds_a_round(run) for run in group.runs]
        rows.append(
            [
                group.label,
                len(group.runs),
                numbers.rounds([run.stop_round for run in group.runs]),
                mean_and_spread([run.share_used for run in group.runs], unit="%"),
                mean_and_spread([run.test_accuracy for run in group.runs], unit="%"),
                mean_and_spread(best, unit="%"),
                seconds(mean(seconds_a_round)),
            ]
        )
    header = [
        "Configuration",
        "Runs",
        "Last round",
        "Share used",
        "Test accuracy",
        "Best test accuracy",
        "Time a round",
    ]
    return table("Configurations: mean ± standard deviation over their runs, as they ended", header, rows)


def _seconds_a_round(run: Run) -> float | None:
    parts = finite([run.total(*names) for names in (("seconds_train",), ("seconds_eval",), _CRITERION)])
    return sum(parts) / len(run.record.rounds) if parts else None


_CRITERION = ("seconds_criterion", "seconds_callbacks")


def costs_table(runs: Sequence[Run]) -> list[Content]:
    """Time and bytes of each run, and where they ran."""
    rows: list[Sequence[Content]] = []
    for run in runs:
        peak = run.record.summary.get("peak_memory_bytes")
        memory = finite([v for v in peak.values() if isinstance(v, int | float)]) if isinstance(peak, dict) else []
        whole = run.record.summary.get("seconds")
        rows.append(
            [
                run.name,
                len(run.record.rounds),
                seconds(whole if isinstance(whole, int | float) else None),
                seconds(run.total("seconds_train")),
                seconds(run.total("seconds_eval")),
                seconds(run.total(*_CRITERION)),
                size(run.total("bytes_down")),
                size(run.total("bytes_up")),
                size(max(memory, default=None)),
            ]
        )
    header = [
        "Run",
        "Rounds",
        "Wall time",
        "Training",
        "Evaluation",
        "Criterion",
        "Sent down",
        "Sent up",
        "Peak memory",
    ]
    costs = table("What the runs cost, all rounds together", header, rows)
    devices = dict.fromkeys(str(run.record.summary["device"]) for run in runs if "device" in run.record.summary)
    return [costs, tag("p", "Run on ", ", ".join(devices), ".", class_="note") if devices else None]


def configuration_tables(runs: Sequence[Run]) -> list[Content]:
    """What all runs share, folded, and before it what differs between them."""
    flats = {run.name: configuration.flat(run.config) for run in runs if run.config}
    if not flats:
        return [tag("p", "No run has a saved configuration.")]
    keys = list(dict.fromkeys(key for flat in flats.values() for key in flat))
    shared = [key for key in keys if len({repr(flat.get(key, ...)) for flat in flats.values()}) == 1]
    differing = [key for key in keys if key not in shared]
    parts: list[Content] = []
    if differing:
        rows = [[name, *(_text(flat.get(key, "")) for key in differing)] for name, flat in flats.items()]
        parts.append(
            table(
                "Keys in which the runs differ", ["Run", *map(_breakable, differing)], rows, "l" * (1 + len(differing))
            )
        )
    first = next(iter(flats.values()))
    rows = [[_breakable(key), _text(first[key])] for key in shared]
    heading = "The whole configuration" if len(flats) == 1 else f"What the {len(flats)} configurations share"
    parts.append(
        details(
            f"{heading} ({len(shared)} keys)", tag("div", table(heading, ["Key", "Value"], rows, "ll"), class_="config")
        )
    )
    missing = [run.name for run in runs if not run.config]
    if missing:
        parts.append(tag("p", "Without a saved configuration: ", ", ".join(missing), ".", class_="note"))
    return parts


def _breakable(key: str) -> Content:
    """A key that may be broken after its points."""
    parts = key.split(".")
    return [[f"{part}.", Html("<wbr>")] for part in parts[:-1]] + [parts[-1]]


def _text(value: Any) -> Content:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    return str(value)
