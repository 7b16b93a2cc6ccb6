"""Which runs each table and figure of the paper needs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from experiments.paper.published import by_lr, by_skew
from experiments.paper.runs import COEFFICIENTS, DATASETS, LOG_LRS, LOG_PHIS, PHI, SEEDS, Form, Run, Scale

MIDDLE: dict[str, float] = {"dirichlet": 0.1, "pathological": 2, "quantity": 0.1}
"""c of Table I."""
BAD_LOG_LR = -1
"""log10 of the learning rate of the bad configurations, Table IV and Figure 8."""


@dataclass(frozen=True)
class Choice:
    """Which of a table's runs are wanted; all by default.

    Args:
        form: see :class:`~experiments.paper.runs.Run`.
        scale: likewise.
        datasets: of the paper's.
        methods: likewise.
        skews: likewise.
        seeds: any whole numbers.
    """

    form: Form = "published"
    scale: Scale = "full"
    datasets: Sequence[str] = DATASETS
    methods: Sequence[str] = tuple(PHI)
    skews: Sequence[str] = tuple(COEFFICIENTS)
    seeds: Sequence[int] = SEEDS

    def run(self, dataset: str, method: str, skew: str, c: float, log_phi: int | None, log_lr: int = -3) -> Run:
        """A run of this form and scale, with the first seed."""
        return Run(dataset, method, skew, c, log_phi, log_lr, self.seeds[0], self.form, self.scale)


@dataclass(frozen=True)
class Table:
    """A table or figure.

    Args:
        title: as the paper has it, with the settings.
        groups: the settings it needs, each a run with the first seed.
    """

    title: str
    groups: Callable[[Choice], Iterator[Run]]


def log_phis(method: str) -> tuple[int | None, ...]:
    """The grid of Phi of a method."""
    return (None,) if PHI[method] is None else LOG_PHIS


def table1(choice: Choice) -> Iterator[Run]:
    """Data sets x skews x (2 methods without Phi + 8 methods x 3 Phi)."""
    for dataset in choice.datasets:
        for skew in choice.skews:
            for method in choice.methods:
                for log_phi in log_phis(method):
                    yield choice.run(dataset, method, skew, MIDDLE[skew], log_phi)


def table2(choice: Choice) -> Iterator[Run]:
    """Data sets x learning rates x (2 methods without Phi + 8 methods x 3 Phi)."""
    for dataset in choice.datasets if "dirichlet" in choice.skews else ():
        for log_lr in LOG_LRS:
            for method in choice.methods:
                for log_phi in log_phis(method):
                    yield choice.run(dataset, method, "dirichlet", 0.1, log_phi, log_lr)


def table3(choice: Choice) -> Iterator[Run]:
    """Data sets x methods x skews x c, with the Phi that Table I gives for the kind of skew."""
    for dataset in choice.datasets:
        for method in choice.methods:
            for skew in choice.skews:
                for c in COEFFICIENTS[skew]:
                    yield choice.run(dataset, method, skew, c, by_skew(dataset, skew, method)[1])


def figure8(choice: Choice) -> Iterator[Run]:
    """Data sets x methods x skews x c at eta = 0.1, with the Phi that Table II gives there."""
    for dataset in choice.datasets:
        for method in choice.methods:
            for skew in choice.skews:
                for c in COEFFICIENTS[skew]:
                    log_phi = by_lr(dataset, BAD_LOG_LR, method)[1]
                    yield choice.run(dataset, method, skew, c, log_phi, BAD_LOG_LR)


def table4(choice: Choice) -> Iterator[Run]:
    """Data sets x methods at eta = 0.1, Dirichlet 0.1: a part of Figure 8."""
    yield from (run for run in figure8(choice) if (run.skew, run.c) == ("dirichlet", 0.1))


def figure6(choice: Choice) -> Iterator[Run]:
    """Data sets x skews x c for FedAvg: a part of Table III."""
    yield from (run for run in table3(choice) if run.method == "FedAvg")


def figure7(choice: Choice) -> Iterator[Run]:
    """Data sets x methods, Dirichlet 0.1: a part of Table III."""
    yield from (run for run in table3(choice) if (run.skew, run.c) == ("dirichlet", 0.1))


def figure5(choice: Choice) -> Iterator[Run]:
    """Data sets for FedAvg, Dirichlet 0.1: a part of Figures 6 and 7."""
    yield from (run for run in figure7(choice) if run.method == "FedAvg")


TABLES: dict[str, Table] = {
    "table1": Table("Table I: accuracy by skew, best Phi", table1),
    "table2": Table("Table II: accuracy by local learning rate, Dirichlet 0.1, best Phi", table2),
    "table3": Table("Table III: accuracy at the stop minus that of the validation baselines, tau 0.01, rho 10", table3),
    "table4": Table("Table IV: bad configurations, eta 0.1, Dirichlet 0.1, tau 0.1, rho 10", table4),
    "figure5": Table("Figure 5: stop rounds of FedAvg, Dirichlet 0.1, tau 0.01, rho 10", figure5),
    "figure6": Table("Figure 6: share of the budget used by FedAvg, tau 0.01, rho 10", figure6),
    "figure7": Table("Figure 7: accuracy at the stop by tau, Dirichlet 0.1, rho 10", figure7),
    "figure8": Table("Figure 8: share of the budget used by bad configurations, eta 0.1, tau 0.1", figure8),
}


def runs_of(table: str, choice: Choice | None = None) -> list[Run]:
    """The runs that a table needs, in its order.

    Args:
        table: a name of ``TABLES``, or ``"all"`` for each run of any of them, once.
        choice: a part of them; by default all, at the paper's size, in the published form.

    Raises:
        ValueError: if there is no such table.

    >>> {table: len(runs_of(table)) for table in [*TABLES, "all"]}
    {'table1': 702, 'table2': 702, 'table3': 810, 'table4': 90, 'figure5': 9, 'figure6': 81, 'figure7': 90,
     'figure8': 810, 'all': 2430}
    """
    choice = choice or Choice()
    names = list(TABLES) if table == "all" else [table]
    if unknown := [name for name in names if name not in TABLES]:
        raise ValueError(f"`table` must be one of {', '.join([*TABLES, 'all'])}, got {unknown[0]!r}.")
    groups = [run for name in names for run in TABLES[name].groups(choice)]
    return list(dict.fromkeys(run for group in groups for run in seeds_of(group, choice)))


def seeds_of(group: Run, choice: Choice) -> list[Run]:
    """A setting with each seed."""
    return [replace(group, seed=seed) for seed in choice.seeds]
