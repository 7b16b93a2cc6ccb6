"""Runs of a report: their ends, their groups, and the stops that replay finds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lightning_fedstop.records.reader import Record
from lightning_fedstop.records.replay import RULES, Stop, available_rules, in_percent, replay
from lightning_fedstop.records.report import configuration, numbers
from lightning_fedstop.stopping.criteria.decision import criteria_of_rules
from lightning_fedstop.stopping.criteria.task_vector import growth_rate

RULE_NAMES = {rule: criterion.rules[rule] for rule, criterion in criteria_of_rules().items()}
_ACCURACIES = ("val_acc", "test_acc")


@dataclass
class Run:
    """Record of a run with its configuration, summary and replayed stops."""

    record: Record
    settings: dict[str, Any] = field(init=False)
    notes: list[str] = field(init=False)
    _series: dict[str, dict[int, float]] = field(init=False, default_factory=dict)
    _stops: dict[tuple[str, float, int], Stop | None] = field(init=False, default_factory=dict)
    _rules: list[str] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.settings = configuration.training(self.config) if self.config else {"run": self.name}
        self.notes = [f"{note}." for note in self.record.notes]

    @property
    def name(self) -> str:
        """Name shown."""
        return self.record.name

    @property
    def config(self) -> Mapping[str, Any]:
        """Parsed ``config.yaml``; empty without one."""
        return self.record.config

    @property
    def last_round(self) -> int:
        """Last round recorded."""
        return self.record.rounds[-1]

    @property
    def is_over(self) -> bool:
        """Whether the run wrote its summary."""
        return bool(self.record.summary)

    @property
    def stop_round(self) -> int:
        """Round in which the run itself ended, or to which it has come."""
        found = self.record.summary.get("stop_round")
        return found if isinstance(found, int) else self.last_round

    @property
    def reason(self) -> str:
        """Reason why it ended."""
        if self.is_over:
            return str(self.record.summary.get("stop_reason", ""))
        return "No summary: still running, or interrupted."

    @property
    def share_used(self) -> float:
        """Percent of the budget used."""
        return 100 * self.stop_round / self.record.budget

    @property
    def test_accuracy(self) -> float | None:
        """Test accuracy in percent, of the summary, else of the last tested round."""
        tested = self.record.summary.get("test")
        value = tested.get("test_acc") if isinstance(tested, Mapping) else None
        if isinstance(value, int | float) and math.isfinite(value):
            return in_percent([float(value)])[0]
        known = list(self.series("test_acc").values())
        return known[-1] if known else None

    def series(self, column: str) -> dict[int, float]:
        """Return the finite values of a column by round.

        Accuracies are in percent; growth rates come from distances if need be.
        """
        if column not in self._series:
            values = self.record.columns.get(column, [])
            known = {r: v for r, v in zip(self.record.rounds, values, strict=False) if math.isfinite(v)}
            if column in _ACCURACIES:
                known = dict(zip(known, in_percent(list(known.values())), strict=True))
            if column == "growth_rate":
                known = {r: v for r, v in (known or self._growth()).items() if 0 < v < math.inf}
            self._series[column] = known
        return self._series[column]

    def _growth(self) -> dict[int, float]:
        distances = list(self.series("distance").items())
        return {r: growth_rate(now, then) for (_, then), (r, now) in pairwise(distances)}

    def total(self, *columns: str) -> float | None:
        """Sum the first of some columns that has values, ``None`` without any."""
        known = next((values for column in columns if (values := self.series(column))), {})
        return math.fsum(known.values()) if known else None

    @property
    def rules(self) -> list[str]:
        """Rules whose columns the record has."""
        if self._rules is None:
            self._rules = [rule for rule in available_rules(self.record) if self._can_be_replayed(rule)]
        return self._rules

    def _can_be_replayed(self, rule: str) -> bool:
        try:
            replay(self.record, rule, 1.0, 1)
        except ValueError as error:
            self.notes.append(f"{RULE_NAMES[rule]}: {error}")
            return False
        return True

    def stop(self, rule: str, threshold: float, patience: int) -> Stop | None:
        """Return the stop of a rule, ``None`` if the record lacks what it needs."""
        key = (rule, threshold, patience)
        if key not in self._stops:
            self._stops[key] = replay(self.record, rule, threshold, patience) if rule in self.rules else None
        return self._stops[key]

    def share_of(self, rule: str, threshold: float, patience: int) -> float | None:
        """Return percent of the budget at a stop.

        It is 100 without a stop in a whole record, ``None`` in one that ends earlier.
        """
        stop = self.stop(rule, threshold, patience)
        return None if stop is None or math.isnan(stop.share_used) else 100 * stop.share_used

    def accuracy_of(self, rule: str, threshold: float, patience: int) -> float | None:
        """Return test accuracy in percent at a stop.

        It is that of the summary where the run itself ended there.
        """
        stop = self.stop(rule, threshold, patience)
        if stop is not None and stop.accuracy is None and self.is_over and self.stop_round == stop.stop_round:
            return self.test_accuracy
        return None if stop is None else stop.accuracy

    def is_beginning_of(self, other: Run) -> bool:
        """Whether the other run's first rows are this one's, so that it continues it."""
        mine, theirs = (
            list(zip(run.record.rounds, run.record.columns.get("distance", []), strict=False)) for run in (self, other)
        )
        return not self.is_over and 0 < len(mine) <= len(theirs) and theirs[: len(mine)] == mine


@dataclass
class Group:
    """Runs that differ in nothing but their seed."""

    runs: list[Run]
    label: str = ""

    @property
    def config(self) -> Mapping[str, Any]:
        """Configuration of the first run."""
        return self.runs[0].config

    @property
    def settings(self) -> Mapping[str, Any]:
        """Flat keys that the runs share."""
        return self.runs[0].settings

    def rules(self) -> list[str]:
        """List the rules that can be replayed on at least one run."""
        return [rule for rule in RULES if any(rule in run.rules for run in self.runs)]

    def stops(self, rule: str, threshold: float, patience: int) -> list[Stop]:
        """List a stop for each run that holds what the rule needs."""
        found = [run.stop(rule, threshold, patience) for run in self.runs]
        return [stop for stop in found if stop is not None]

    def rounds_text(self, rule: str, threshold: float, patience: int) -> str | None:
        """Format the stop rounds of a rule: mean and deviation, or the last round recorded."""
        stops = self.stops(rule, threshold, patience)
        rounds = [stop.stop_round for stop in stops if stop.stop_round is not None]
        if not stops:
            return None
        if not rounds:
            return f"not by round {max(run.last_round for run in self.runs)}"
        text = str(numbers.rounds(rounds))
        return text if len(rounds) == len(stops) else f"{text} ({len(rounds)} of {len(stops)} runs)"

    def repeated_seeds(self) -> list[str]:
        """Warn of each seed that several runs have: their spread says nothing about chance."""
        by_seed: dict[int, list[str]] = {}
        for run in self.runs:
            if (seed := configuration.seed(run.config)) is not None:
                by_seed.setdefault(seed, []).append(run.name)
        return [
            f"{', '.join(names)} have one configuration and the same seed {seed}: they are no independent repetitions."
            for seed, names in by_seed.items()
            if len(names) > 1
        ]


def without_beginnings(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Leave out runs that others continue, with a sentence on each."""
    continued = {
        run.name: other.name
        for run in runs
        for other in runs
        if other is not run and other.last_round > run.last_round and run.is_beginning_of(other)
    }
    kept = [run for run in runs if run.name not in continued]
    return kept, [f"{name} is left out: {other} is its continuation." for name, other in continued.items()]


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Group runs of one configuration, each group with a label."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(repr(sorted(run.settings.items(), key=lambda item: item[0])), []).append(run)
    found = sorted((Group(members) for members in groups.values()), key=_place)
    labels = _labels(found)
    for group, label in zip(found, labels, strict=True):
        group.label = label
    return found


def _place(group: Group) -> tuple[str, str, str, float]:
    """Sort by method, data and skew, with c as a number."""
    kind, degree = configuration.skew(group.config) or ("", None)
    method, data = configuration.method(group.config) or "", configuration.data_set(group.config) or ""
    return method, data, kind, degree or 0.0


def _labels(groups: Sequence[Group]) -> list[str]:
    """Name groups by method, data and skew where they differ, and further keys."""
    words = [_words(group) for group in groups]
    differing = [index for index in range(3) if len({parts[index] for parts in words}) > 1] or [0, 1, 2]
    named = [[part for index in differing if (part := parts[index])] for parts in words]
    for key in _further(groups):
        for group, parts in zip(groups, named, strict=True):
            if key in group.settings:
                parts.append(
                    f"{key.rpartition('.')[2]}\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{_value(group.settings[key])}"
                )
    return [", ".join(parts) or group.runs[0].name for parts, group in zip(named, groups, strict=True)]


def _words(group: Group) -> tuple[str, str, str]:
    config = group.config
    return (
        configuration.method(config) or group.runs[0].name,
        configuration.data_set(config) or "",
        configuration.skew_text(config) or "",
    )


def _further(groups: Sequence[Group]) -> list[str]:
    """Find keys that tell apart groups of the same method, data and skew."""
    alike: dict[tuple[str, str, str], list[Group]] = {}
    for group in groups:
        alike.setdefault(_words(group), []).append(group)
    keys: dict[str, None] = {}
    for members in alike.values():
        for key in dict.fromkeys(key for group in members for key in group.settings):
            if len({repr(group.settings.get(key)) for group in members}) > 1:
                keys[key] = None
    return list(keys)


def _value(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
