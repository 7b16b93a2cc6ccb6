"""Our figures beside the paper's, row by row."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.paper.published import by_lr, by_skew, find
from experiments.paper.results import BASELINES, Results, mean_of
from experiments.paper.runs import DATASETS, LOG_PHIS, Run, power
from experiments.paper.tables import TABLES, Choice, seeds_of

THRESHOLDS = (0.005, 0.01, 0.05, 0.1)
PATIENCES = (1, 5, 10)

Figures = Mapping[str, tuple[Callable[[Run], float], float | None]]


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Args:
        labels: what the row is of.
        figures: for each quantity our figure and the paper's, ``None`` where there is none.
        done: finished runs that the row rests on.
        needed: runs that it needs.
    """

    labels: Mapping[str, str]
    figures: Mapping[str, tuple[float | None, float | None]]
    done: int
    needed: int


def compare(table: str, results: Results, choice: Choice) -> list[Row]:
    """The rows of a table, with blanks where runs are missing.

    Args:
        table: a name of ``TABLES``.
        results: of the runs.
        choice: which rows.

    Raises:
        ValueError: if a record lacks what the table needs.
    """
    return list(_ROWS[table](_Source(table, results, choice)))


class _Source:
    """What the rows of a table are made from."""

    def __init__(self, table: str, results: Results, choice: Choice) -> None:
        self.results = results
        self.choice = choice
        self.groups = list(TABLES[table].groups(choice))

    def runs(self, group: Run) -> list[Run]:
        return seeds_of(group, self.choice)

    def row(self, labels: Mapping[str, str], groups: Sequence[Run], figures: Figures) -> Row:
        """A row of means over the finished runs of some settings."""
        runs = [run for group in groups for run in self.runs(group)]
        done = self.results.done(runs)
        means = {name: (mean_of(done, ours), paper) for name, (ours, paper) in figures.items()}
        return Row(labels, means, len(done), len(runs))


def _skew(run: Run) -> str:
    return f"{run.skew} {run.c:g}"


def _best_phi(
    source: _Source, label: Callable[[Run], tuple[str, str]], paper: Callable[[Run], tuple[float, int | None]]
) -> Iterator[Row]:
    """Per data set, method and what ``label`` tells: the best over Phi of the mean over seeds."""
    results = source.results
    settings: dict[Run, list[Run]] = {}
    for group in source.groups:
        key = group if group.log_phi is None else replace(group, log_phi=LOG_PHIS[0])
        settings.setdefault(key, []).append(group)
    for first, groups in settings.items():
        done = {group: results.done(source.runs(group)) for group in groups}
        means = {group: mean_of(runs, results.accuracy) for group, runs in done.items()}
        known = {group: mean for group, mean in means.items() if mean is not None}
        best = max(known, key=known.__getitem__) if known else None
        accuracy, log_phi = paper(first)
        name, value = label(first)
        labels = {
            "dataset": first.dataset,
            name: value,
            "method": first.method,
            "log Phi": "" if best is None or best.log_phi is None else str(best.log_phi),
            "paper's": "" if log_phi is None else str(log_phi),
        }
        figures = {"accuracy": (None if best is None else known[best], accuracy)}
        yield Row(labels, figures, sum(map(len, done.values())), sum(len(source.runs(group)) for group in groups))


def _table1(source: _Source) -> Iterator[Row]:
    return _best_phi(source, lambda run: ("skew", _skew(run)), lambda run: by_skew(run.dataset, run.skew, run.method))


def _table2(source: _Source) -> Iterator[Row]:
    return _best_phi(
        source, lambda run: ("eta", power(run.log_lr)), lambda run: by_lr(run.dataset, run.log_lr, run.method)
    )


def _table3(source: _Source) -> Iterator[Row]:
    results = source.results

    def delta(run: Run) -> float:
        return results.stop(run, "task_vector", 0.01, 10).accuracy - results.baseline(run, 0.01, 10).accuracy

    for group in source.groups:
        where = {"dataset": group.dataset, "method": group.method, "skew": group.skew, "c": group.c}
        paper = find("table3_delta_accuracy", "delta_accuracy", **where)
        labels = {"dataset": group.dataset, "method": group.method, "skew": _skew(group)}
        yield source.row(labels, [group], {"delta accuracy": (delta, paper)})


def _table4(source: _Source) -> Iterator[Row]:
    """Rounds are counted from 0 here, as in the paper."""
    results = source.results

    def stop(run: Run) -> tuple[int, float]:
        point = results.stop(run, "task_vector", 0.1, 10)
        return point.round - 1, point.accuracy

    def baseline(run: Run) -> tuple[int, float]:
        point = results.baseline(run, 0.1, 10)
        return point.round - 1, point.accuracy

    def alone(rule: str) -> Callable[[Run], float]:
        return lambda run: results.stop(run, rule, 0.1, 10).round - 1

    figures: dict[str, tuple[str, Callable[[Run], float]]] = {
        "accuracy": ("accuracy", lambda run: stop(run)[1]),
        "r*": ("stop_round", lambda run: stop(run)[0]),
        "delta acc": ("delta_accuracy", lambda run: stop(run)[1] - baseline(run)[1]),
        "delta r": ("delta_rounds", lambda run: stop(run)[0] - baseline(run)[0]),
        "r*/R %": ("budget_percent", lambda run: results.share(run, stop(run)[0])),
    }
    for group in source.groups:
        where = {"dataset": group.dataset, "method": group.method}
        cells: dict[str, tuple[Callable[[Run], float], float | None]] = {
            name: (ours, find("table4_bad_configurations", key, **where)) for name, (key, ours) in figures.items()
        }
        cells |= {f"{rule} r": (alone(rule), None) for rule in BASELINES}
        yield source.row(where, [group], cells)


def _figure5(source: _Source) -> Iterator[Row]:
    """Rounds are counted from 1 here, as in the paper."""
    results = source.results
    quoted = "figure5_fedavg_dirichlet_0.1_tau_0.01_rho_10"
    for group in source.groups:
        for rule in ("task_vector", *BASELINES):

            def at(name: str, rule: str = rule) -> Callable[[Run], float]:
                return lambda run: float(getattr(results.stop(run, rule, 0.01, 10), name))

            papers = {name: find(quoted, name, group.dataset, rule) for name in ("round", "accuracy")}
            figures = {name: (at(name), paper) for name, paper in papers.items()}
            yield source.row({"dataset": group.dataset, "rule": rule}, [group], figures)


def _figure6(source: _Source) -> Iterator[Row]:
    results, key = source.results, "figure6_used_ratio_fedavg_tau_0.01_rho_10"

    def used(run: Run) -> float:
        return results.share(run, results.stop(run, "task_vector", 0.01, 10).round)

    for group in source.groups:
        paper = find(key, "percent", "cells", dataset=group.dataset, skew=group.skew, c=group.c)
        yield source.row({"dataset": group.dataset, "skew": _skew(group)}, [group], {"r*/R %": (used, paper)})
    for dataset in source.choice.datasets:
        groups = [group for group in source.groups if group.dataset == dataset]
        paper = find(key, "percent", "averages", dataset=dataset)
        yield source.row({"dataset": dataset, "skew": "mean"}, groups, {"r*/R %": (used, paper)})


def _figure7(source: _Source) -> Iterator[Row]:
    results, key = source.results, "figure7_accuracy_by_threshold_dirichlet_0.1"
    for group in source.groups:
        for threshold in THRESHOLDS:

            def proposed(run: Run, threshold: float = threshold) -> float:
                return results.stop(run, "task_vector", threshold, 10).accuracy

            def validation(run: Run, threshold: float = threshold) -> float:
                return results.baseline(run, threshold, 10).accuracy

            where = {"dataset": group.dataset, "method": group.method}
            figures = {
                name: (ours, find(key, name, "cells", **where, threshold=threshold))
                for name, ours in (("task_vector", proposed), ("validation", validation))
            }
            yield source.row({**where, "tau": f"{threshold:g}"}, [group], figures)


def _figure8(source: _Source) -> Iterator[Row]:
    """Shares of rounds counted from 0, as in Table IV, a part of it."""
    results, key = source.results, "figure8_used_ratio_bad_configurations_tau_0.1"

    def used(patience: int) -> Callable[[Run], float]:
        return lambda run: results.share(run, results.stop(run, "task_vector", 0.1, patience).round - 1)

    def row(labels: Mapping[str, str], groups: Sequence[Run], cells: str, **where: Any) -> Row:
        figures = {
            f"rho {patience}": (used(patience), _exactly(key, cells, patience=patience, **where))
            for patience in PATIENCES
        }
        return source.row(labels, groups, figures)

    for group in source.groups:
        where = {"dataset": group.dataset, "method": group.method}
        yield row({**where, "skew": _skew(group)}, [group], "cells", **where, skew=group.skew, c=group.c)
    for name, values in (("dataset", DATASETS), ("skew", source.choice.skews)):
        for value in values:
            groups = [group for group in source.groups if getattr(group, name) == value]
            labels = {"dataset": "mean", "method": "mean", "skew": "mean", name: value}
            if groups:
                yield row(labels, groups, "averages", **{name: value})
    if source.groups:
        yield row({"dataset": "mean", "method": "mean", "skew": "mean"}, source.groups, "averages")


def _exactly(key: str, cells: str, **where: Any) -> float | None:
    """The paper's number of exactly these conditions: an average over all data sets names none."""
    return find(key, "percent", cells, **{"dataset": None, "method": None, "skew": None, "c": None} | where)


_ROWS: dict[str, Callable[[_Source], Iterator[Row]]] = {
    "table1": _table1,
    "table2": _table2,
    "table3": _table3,
    "table4": _table4,
    "figure5": _figure5,
    "figure6": _figure6,
    "figure7": _figure7,
    "figure8": _figure8,
}
