"""What finished runs say: accuracies, and where a rule would have stopped them."""

import os
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from experiments.paper.runs import Run
from experiments.paper.status import state_of
from lightning_fedstop.records.reader import Record, read_record
from lightning_fedstop.records.replay import in_percent, replay

Accuracy = Literal["last", "best"]
BASELINES = ("val_loss", "val_acc")


class Point(NamedTuple):
    """A round, counted from 1, and the test accuracy after it in percent."""

    round: int
    accuracy: float


class Results:
    """Reads the records of finished runs, each once.

    Args:
        root: the folder of all runs.
        accuracy: which one stands for a whole run, that of the last round or the best of all.
    """

    def __init__(self, root: str | os.PathLike[str], accuracy: Accuracy = "last") -> None:
        self.root = root
        self._accuracy = accuracy
        self._records: dict[str, Record | None] = {}
        self._curves: dict[str, dict[int, float]] = {}

    def record(self, run: Run) -> Record | None:
        """The record of a run, or ``None`` if the run is not finished."""
        if run.name not in self._records:
            state = state_of(run, self.root)
            done = state.status == "done" and state.folder is not None
            self._records[run.name] = read_record(state.folder) if done and state.folder else None
        return self._records[run.name]

    def done(self, runs: Iterable[Run]) -> list[Run]:
        """Those of the runs that are finished."""
        return [run for run in runs if self.record(run) is not None]

    def budgets(self) -> set[int]:
        """The budgets of rounds of the records read so far."""
        return {record.budget for record in self._records.values() if record is not None}

    def accuracy(self, run: Run) -> float:
        """The accuracy of a finished run, in percent."""
        accuracies = self._accuracies(run)
        return max(accuracies.values()) if self._accuracy == "best" else accuracies[max(accuracies)]

    def stop(self, run: Run, rule: str, threshold: float, patience: int) -> Point:
        """Where a rule ends a finished run; at its last round if the rule never does, or the run diverged before."""
        record = self._finished(run)
        variant = "released_code" if run.form == "released_code" else "paper"
        found = replay(record, rule, threshold, patience, variant=variant)
        stop_round = record.rounds[-1] if found.stop_round is None else found.stop_round
        return Point(stop_round, self._accuracies(run)[stop_round])

    def baseline(self, run: Run, threshold: float, patience: int) -> Point:
        """The better accuracy and the earlier round of the two validation rules, as the paper compares with."""
        stops = [self.stop(run, rule, threshold, patience) for rule in BASELINES]
        return Point(min(stop.round for stop in stops), max(stop.accuracy for stop in stops))

    def share(self, run: Run, stop_round: float) -> float:
        """A round's share of the run's budget, in percent."""
        return 100 * stop_round / self._finished(run).budget

    def _accuracies(self, run: Run) -> dict[int, float]:
        if run.name not in self._curves:
            self._curves[run.name] = _test_accuracies(self._finished(run))
        return self._curves[run.name]

    def _finished(self, run: Run) -> Record:
        record = self.record(run)
        if record is None:
            raise ValueError(f"The run {run.name} is not finished.")
        return record


def mean_of(runs: Sequence[Run], figure: Callable[[Run], float]) -> float | None:
    """The mean of a figure over runs; ``None`` over none."""
    return fmean(figure(run) for run in runs) if runs else None


def _test_accuracies(record: Record) -> dict[int, float]:
    """The test accuracy in percent of each round."""
    rounds, values = record.measured("test_acc")
    missing = set(record.rounds) - set(rounds)
    if missing:
        raise ValueError(
            f"{record.name} has no test accuracy in round {min(missing)}: it must be trained with "
            "`--trainer.check_test_every_n_round 1`."
        )
    return dict(zip(rounds, in_percent(values), strict=True))
