"""``python -m experiments.paper``: the runs behind a table of the paper, and our figures beside its own."""

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, get_args

from experiments.paper.commands import command_line, fit_arguments
from experiments.paper.compare import compare
from experiments.paper.launch import Job, run_jobs
from experiments.paper.prepare import prepare
from experiments.paper.published import paper_results
from experiments.paper.render import Format, agreement, render
from experiments.paper.results import Accuracy, Results
from experiments.paper.runs import COEFFICIENTS, DATASETS, FORMS, PHI, ROUNDS, SCALES, SEEDS, Run
from experiments.paper.slurm import array_script
from experiments.paper.status import State, state_of
from experiments.paper.tables import TABLES, Choice, runs_of
from lightning_fedstop.loop.signals import Terminated

PROGRAM = "python -m experiments.paper"
_GO_ON = "the same command goes on from the last checkpoints."
_SCALE_NOTES = {
    "full": "",
    "small": "Scale small, not the paper's: ConvNeXtV2-atto instead of nano, 28 px instead of 64, 20 clients instead "
    "of 100, 5 instead of 10 a round, 100 rounds instead of 500.",
    "tiny": "Scale tiny, to see that it works: scikit-learn's digits stand in for every data set, so the figures have "
    "nothing to do with the paper's.",
}
_FORM_NOTES = {
    "published": "Form published: the published methods and the partitions of the paper's text.",
    "released_code": "Form released_code: methods, partitions, pixel scale and counting as in the authors' code.",
}


class _Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: error: {message[:1].lower()}{message[1:]}.\n")
        raise SystemExit(2)


def main(argv: list[str] | None = None) -> None:
    """List, run or submit the runs of a table, and print it beside the paper's.

    Args:
        argv: the arguments; those of the process by default.

    Raises:
        SystemExit: with code 2 after one sentence on what is wrong with the arguments or the files, with 1 where runs
            failed, with 130 or 143 after Ctrl-C or a termination signal.
    """
    try:
        _main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt as error:
        sys.stderr.write(f"{PROGRAM}: interrupted; {_GO_ON}\n")
        raise SystemExit(130) from error
    except Terminated:
        sys.stderr.write(f"{PROGRAM}: terminated; {_GO_ON}\n")
        raise
    except (ValueError, OSError, RuntimeError) as error:
        sys.stderr.write(f"{PROGRAM}: error: {error}\n")
        raise SystemExit(2) from error


def _main(argv: Sequence[str]) -> None:
    # What follows a lone `--` is for `fedstop fit`.
    at = argv.index("--") if "--" in argv else len(argv)
    given, extra = _parser().parse_args(argv[:at]), argv[at + 1 :]
    # A value that is given twice counts once.
    parts = (list(dict.fromkeys(part)) for part in (given.datasets, given.methods, given.skews, given.seeds))
    choice = Choice(given.form, given.scale, *parts)
    runs = runs_of(given.table, choice)
    if not runs:
        raise ValueError(f"Nothing of {given.table} is left by --datasets, --methods and --skews.")
    states = {run: state_of(run, given.root) for run in runs}
    failed: list[str] = []
    try:
        if given.dry_run:
            _list(given, runs, states, extra)
        elif given.prepare:
            print("\n".join(prepare(runs, given.data_dir, weights=True)) or "There is nothing to fetch.")
        elif given.emit:
            _emit(given, runs, states, extra)
        else:
            failed = _run(given, states, extra) if given.jobs else []
            _print(given, choice)
        sys.stdout.flush()
    except BrokenPipeError:  # of `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if failed:
        sys.stderr.write(f"{PROGRAM}: {len(failed)} of {len(runs)} runs failed: {', '.join(failed)}.\n")
        raise SystemExit(1)


def _parser() -> _Parser:
    counts = ", ".join(f"{table} {len(runs_of(table))}" for table in TABLES)
    parser = _Parser(
        PROGRAM,
        usage=f"{PROGRAM} TABLE --root RUNS [options] [-- arguments of `fedstop fit`]",
        description="The runs behind a table or figure of arXiv 2601.22669, and our figures beside its own. Without "
        "--dry-run, --prepare, --jobs or --emit it prints the table from the runs that are finished.",
        epilog=f"Runs: {counts}; all {len(runs_of('all'))}, since one run serves several tables. What follows `--`, "
        "such as `--trainer.accelerator cpu`, is added to each command but not to the name of a run: give such runs a "
        "--root of their own.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("table", metavar="TABLE", choices=[*TABLES, "all"], help=f"One of {', '.join(TABLES)}, or all.")
    add("--root", metavar="RUNS", required=True, help="Folder of all runs, one folder each.")
    add("--dry-run", "--dry_run", action="store_true", help="List the runs and how far each is, as commands.")
    add("--prepare", action="store_true", help="Fetch the data sets and the starting weights, and train nothing.")
    add("--jobs", type=_positive, metavar="K", help="Train what is missing, K runs at a time, and go on with the rest.")
    add("--gpus", nargs="+", default=[], metavar="N", help="Accelerators dealt to the runs of --jobs in turn.")
    add("--form", choices=FORMS, default="published", help="The published methods (default), or the released code.")
    add("--scale", choices=SCALES, default="full", help="The paper's size (default), a laptop's, or a test's.")
    add("--seeds", type=_seed, nargs="+", default=SEEDS, metavar="SEED", help="Seeds, 0 1 2 by default.")
    add("--datasets", nargs="+", choices=DATASETS, default=DATASETS, help="Only these data sets.")
    add("--methods", nargs="+", choices=list(PHI), default=list(PHI), help="Only these methods.")
    add("--skews", nargs="+", choices=list(COEFFICIENTS), default=list(COEFFICIENTS), help="Only these skews.")
    add("--data_dir", "--data-dir", help="Folder of MedMNIST's files; without it they are downloaded once.")
    add("--format", choices=get_args(Format), default="table", help="Of the table.")
    add("--accuracy", choices=get_args(Accuracy), default="last", help="Which stands for a run in Tables I and II.")
    add("--emit", choices=["slurm"], help="Write an array job of the runs that are not finished.")
    add("--out", metavar="FILE", help="File for --emit; the terminal by default.")
    add("--slurm", nargs="+", default=[], metavar="KEY=VALUE", help="Options of sbatch, such as partition=gpu.")
    add("--slurm_setup", "--slurm-setup", help="Line of shell that makes `fedstop` available to the job.")
    return parser


def _positive(text: str) -> int:
    return _whole(text, 1)


def _seed(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got '{text}'")
    return int(text)


def _arguments(given: argparse.Namespace, run: Run, state: State, extra: Sequence[str]) -> list[str]:
    return fit_arguments(run, given.root, given.data_dir, extra, resume=state.status == "unfinished")


def _counts(states: dict[Run, State]) -> str:
    counts = Counter(state.status for state in states.values())
    parts = [f"{counts[status]} {status}" for status in ("done", "unfinished", "missing")]
    return f"{len(states)} runs: {', '.join(parts)}."


def _list(given: argparse.Namespace, runs: Sequence[Run], states: dict[Run, State], extra: Sequence[str]) -> None:
    """A command a line, with how far the run is as a comment in front, so that the list is a script too."""
    for run in runs:
        command = command_line(_arguments(given, run, states[run], extra))
        done = states[run].status == "done"
        print(f"# {states[run].status}: {run.name}" if done else f"# {states[run].status}\n{command}")
    print(f"# {given.table}: {_counts(states)}")


def _emit(given: argparse.Namespace, runs: Sequence[Run], states: dict[Run, State], extra: Sequence[str]) -> None:
    options = dict(_option(text) for text in given.slurm)
    jobs = [
        (str(Path(given.root) / run.name), fit_arguments(run, given.root, given.data_dir, extra))
        for run in runs
        if states[run].status != "done"
    ]
    script = array_script(f"fedstop-{given.table}", jobs, options, given.slurm_setup, _notes(given))
    if given.out is None:
        print(script, end="")
    else:
        Path(given.out).write_text(script, encoding="utf-8")
        print(f"{given.out}: {_counts(states)} Submit it from this folder: sbatch {given.out}")


def _notes(given: argparse.Namespace) -> list[str]:
    fetch = [*PROGRAM.split(), given.table, "--root", given.root, "--scale", given.scale, "--prepare"]
    fetch += ["--data_dir", given.data_dir] if given.data_dir else []
    return [f"Before it, where there is network: {shlex.join(fetch)}"]


def _option(text: str) -> tuple[str, str]:
    key, equals, value = text.lstrip("-").partition("=")
    if not (key and equals) or "\n" in text:
        raise ValueError(f"--slurm: options are KEY=VALUE, such as partition=gpu, got '{text}'.")
    return key, value


def _run(given: argparse.Namespace, states: dict[Run, State], extra: Sequence[str]) -> list[str]:
    todo = {run: state for run, state in states.items() if state.status != "done"}
    jobs = [
        Job(run.name, _arguments(given, run, state, extra), Path(given.root) / run.name) for run, state in todo.items()
    ]
    sys.stderr.write(f"{given.table}: {_counts(states)}\n")
    if jobs:
        prepare(list(todo), given.data_dir)
    return run_jobs(jobs, given.jobs, given.gpus, lambda line: sys.stderr.write(f"{line}\n"))


def _print(given: argparse.Namespace, choice: Choice) -> None:
    results = Results(given.root, given.accuracy)
    tables = list(TABLES) if given.table == "all" else [given.table]
    for number, table in enumerate(tables):
        rows = compare(table, results, choice)
        done, runs = results.done(runs_of(table, choice)), runs_of(table, choice)
        print(
            ("\n" if number else "")
            + render(rows, given.format, _heading(table, given, choice, results, len(done), len(runs)))
        )
        if given.format == "table":
            print("\n".join(["", *agreement(rows)]).rstrip("\n"))


def _heading(
    table: str, given: argparse.Namespace, choice: Choice, results: Results, done: int, needed: int
) -> list[str]:
    source = paper_results()["source"]
    lines = [f"{TABLES[table].title} (arXiv {source['arxiv']}v{source['version']})", _SCALE_NOTES[given.scale]]
    lines.append(
        f"{_FORM_NOTES[given.form]} {done} of {needed} runs are finished; means over seeds {_words(choice.seeds)}."
    )
    if table in ("table1", "table2"):
        kind = "after the last round" if given.accuracy == "last" else "of the best round"
        lines.append(f"Test accuracy {kind}; the paper does not say which it prints.")
    if odd := results.budgets() - {ROUNDS[given.scale]}:
        lines.append(f"Some runs have a budget of {_words(sorted(odd))} rounds instead of {ROUNDS[given.scale]}.")
    return [line for line in lines if line]


def _words(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


if __name__ == "__main__":
    main()
