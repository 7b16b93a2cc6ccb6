"""Replay of stopping rules on recorded runs, from the records alone.

The decisions are those of the criteria that the callbacks ask too, so a replay stops where a live run does. Neither
torch nor Lightning nor NumPy is imported here.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_fedstop.records.reader import Record
from lightning_fedstop.stopping.criteria.consensus import SHIFTS
from lightning_fedstop.stopping.criteria.decision import Criterion, StoppingReason, criteria_of_rules
from lightning_fedstop.stopping.criteria.task_vector import VARIANTS
from lightning_fedstop.utilities.validate import one_of, positive, whole_number

__all__ = ["RULES", "SHIFTS", "VARIANTS", "Stop", "available_rules", "in_percent", "replay", "replay_table"]

RULES = tuple(criteria_of_rules())
"""Names of the rules that the package has."""
_TEST_ACCURACY = "test_acc"
_TRAINED = "trained"
# Between a fraction of 1 with rounding error and the least percentage that is of any interest.
_LARGEST_FRACTION = 1.01


@dataclass(frozen=True)
class Stop:
    """Round in which a rule ends a run.

    Attributes:
        run: The record's name.
        rule: One of ``RULES``.
        threshold: tau.
        patience: rho.
        stop_round: The round, counted from 1; None if the record ends before.
        share_used: Rounds trained over the budget; 1 for a record of the whole budget without a stop, and NaN for one
            that ends earlier, since a stop may have followed.
        accuracy: Test accuracy in percent after the stop round, or after the last round of a whole record without a
            stop; None if it was not recorded there.
        reason: Why the rule stopped, a value of :class:`StoppingReason`.
    """

    run: str
    rule: str
    threshold: float
    patience: int
    stop_round: int | None
    share_used: float
    accuracy: float | None
    reason: str = StoppingReason.NOT_STOPPED.value


def replay(
    record: Record,
    rule: str,
    threshold: float,
    patience: int,
    min_rounds: int = 0,
    variant: str = "paper",
    shift: str = "mean_vector",
    check_every_n_rounds: int = 1,
) -> Stop:
    """Find where a rule ends a run, from its record.

    A rule decides on the rounds in which what it looks at was measured: if validation ran every fifth round, patience
    counts those evaluations, as a live rule does. A round in which no client trained is no check, and is not counted
    among the ``min_rounds`` either; the column ``trained`` tells, where there is one.

    Args:
        record: The run.
        rule: ``"task_vector"`` needs the column ``distance``; ``"val_loss"`` and ``"val_acc"`` the columns of these
            names; ``"consensus"`` needs ``consensus/shift`` and ``consensus/dispersion``.
        threshold: tau, above 0: relative growth, nats for ``"val_loss"``, percentage points for ``"val_acc"``.
        patience: rho, at least 1.
        min_rounds: No stop before this round, but for a divergence.
        variant: ``"released_code"`` for the task-vector rule as the authors' code decides it.
        shift: ``"mean_norm"`` for the consensus rule on ``consensus/mean_norm`` instead of ``consensus/shift``.
        check_every_n_rounds: Rounds from one check of the task-vector rule to the next, as the live rule's
            ``check_every_n_epochs``.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If an argument is out of its range, or the record lacks a column that the rule needs.

    >>> from pathlib import Path
    >>> distances = [1, 1.5, 1.6, 1.605, 1.609, 1.612, 1.614]
    >>> record = Record("run", Path(), list(range(1, 8)), {"distance": distances}, {}, {}, budget=10)
    >>> stop = replay(record, "task_vector", threshold=0.01, patience=3)
    >>> stop.stop_round, stop.share_used, stop.accuracy
    (6, 0.6, None)
    """
    _check(threshold, patience, min_rounds, variant, shift, check_every_n_rounds)
    criterion = _criterion(rule, threshold, patience, 0, variant, shift)
    rows = _rows(record, rule, criterion, check_every_n_rounds if criterion.has_interval else 1)
    rounds = list(rows)
    idle = sorted(_idle_rounds(record))
    least = bisect_left([round_ - bisect_left(idle, round_) for round_ in rounds], min_rounds) + 1 if min_rounds else 0
    criterion = _criterion(rule, threshold, patience, least, variant, shift)
    try:
        decision = next((d for d in map(criterion.decide, rows.values()) if d.should_stop), None)
    except ValueError as error:  # a negative distance
        raise ValueError(f"{record.name}: {error}") from None
    stop_round = None if decision is None else rounds[decision.round - 1]
    last = record.rounds[-1]
    end = stop_round if stop_round is not None else last if last >= record.budget else None
    return Stop(
        run=record.name,
        rule=rule,
        threshold=float(threshold),
        patience=patience,
        stop_round=stop_round,
        share_used=math.nan if end is None else 1.0 if stop_round is None else end / record.budget,
        accuracy=None if end is None else _accuracy(record, end),
        reason=(StoppingReason.NOT_STOPPED if decision is None else decision.reason).value,
    )


def replay_table(
    records: Iterable[Record],
    rules: Sequence[str] | None = None,
    thresholds: Iterable[float] = (0.01,),
    patiences: Iterable[int] = (10,),
    min_rounds: int = 0,
    variant: str = "paper",
    shift: str = "mean_vector",
    check_every_n_rounds: int = 1,
) -> list[Stop]:
    """Find where each rule ends each run, for every threshold with every patience.

    Args:
        records: The runs.
        rules: The rules; by default, for each run, all that its record allows.
        thresholds: This and all that follow as for :func:`replay`.
        patiences: rho.
        min_rounds: No stop before.
        variant: Of the task-vector rule.
        shift: Of the consensus rule.
        check_every_n_rounds: Of the task-vector rule.

    Returns:
        By run, rule, threshold and patience, in the orders given.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If an argument is out of its range, or a record lacks a column of a rule asked for, or of all rules.
    """
    thresholds, patiences = list(thresholds), list(patiences)
    for threshold in thresholds:
        for patience in patiences:
            _check(threshold, patience, min_rounds, variant, shift, check_every_n_rounds)
    for rule in rules or ():
        one_of("rule", rule, list(criteria_of_rules()))
    stops = []
    for record in records:
        allowed = list(rules) if rules else available_rules(record, shift)
        if not allowed:
            columns = ", ".join(column for rule in criteria_of_rules() for column in _columns(rule, shift))
            raise ValueError(f"{record.name} allows no rule: it has values in none of the columns {columns}.")
        settings = (
            (rule, threshold, patience) for rule in allowed for threshold in thresholds for patience in patiences
        )
        stops += [replay(record, *setting, min_rounds, variant, shift, check_every_n_rounds) for setting in settings]
    return stops


def available_rules(record: Record, shift: str = "mean_vector") -> list[str]:
    """List the rules whose columns a record has, with at least one value in them.

    A column that cannot be read as numbers counts as there, so that it is complained about and not passed over.

    >>> from pathlib import Path
    >>> available_rules(Record("run", Path(), [1], {"distance": [1.0], "val_loss": [math.nan]}, {}, {}, budget=1))
    ['task_vector']
    """
    return [
        rule for rule in criteria_of_rules() if all(_has_values(record, column) for column in _columns(rule, shift))
    ]


def in_percent(values: Sequence[float]) -> list[float]:
    """Give accuracies in percent; those that never exceed 1 are fractions.

    >>> in_percent([0.5, 0.75]), in_percent([12.5, 75.0])
    ([50.0, 75.0], [12.5, 75.0])
    """
    is_fraction = not any(value > _LARGEST_FRACTION for value in values)
    return [100 * value for value in values] if is_fraction else list(values)


def _check(threshold: float, patience: int, min_rounds: int, variant: str, shift: str, every: int) -> None:
    whole_number("check_every_n_rounds", every, least=1)
    positive("threshold", threshold)
    whole_number("patience", patience, least=1)
    whole_number("min_rounds", min_rounds, least=0)
    one_of("variant", variant, VARIANTS)
    one_of("shift", shift, SHIFTS)


def _criterion(rule: str, threshold: float, patience: int, min_rounds: int, variant: str, shift: str) -> Criterion:
    criteria = criteria_of_rules()
    kind = criteria[one_of("rule", rule, list(criteria))]
    return kind.for_rule(rule, threshold, patience, min_rounds, variant=variant, shift=shift)


def _columns(rule: str, shift: str) -> tuple[str, ...]:
    return _criterion(rule, 1.0, 1, 0, VARIANTS[0], shift).columns


def _has_values(record: Record, column: str) -> bool:
    return column in record.unreadable or (column in record.columns and bool(record.measured(column)[0]))


def _rows(record: Record, rule: str, criterion: Criterion, every: int) -> dict[int, dict[str, float]]:
    """The rounds that a rule decides in, and its columns in each."""
    found = {}
    for column in criterion.columns:
        try:
            rounds, values = record.measured(column)
        except ValueError as error:
            raise ValueError(f"The rule '{rule}' needs the column '{column}': {error}") from None
        if not rounds:
            raise ValueError(f"The rule '{rule}' needs the column '{column}', which is empty in {record.name}.")
        found[column] = dict(zip(rounds, in_percent(values) if column == "val_acc" else values, strict=True))
    idle = {round_ for round_ in record.rounds if round_ % every} | _idle_rounds(record)
    common = [round_ for round_ in record.rounds if round_ not in idle and all(round_ in one for one in found.values())]
    return {round_: {column: values[round_] for column, values in found.items()} for round_ in common}


def _idle_rounds(record: Record) -> set[int]:
    """The rounds in which no client's update went into the model."""
    if _TRAINED not in record.columns:
        return set()  # a record of before, or of another tool
    return {round_ for round_, trained in zip(*record.measured(_TRAINED), strict=True) if trained == 0}


def _accuracy(record: Record, round_: int) -> float | None:
    if not _has_values(record, _TEST_ACCURACY):
        return None
    rounds, values = record.measured(_TEST_ACCURACY)
    return dict(zip(rounds, in_percent(values), strict=True)).get(round_)
