"""``fedstop replay``: where every stopping rule would have ended runs that are recorded.

It imports neither torch nor Lightning nor NumPy, and parses its arguments without jsonargparse, to be done in the time
that those take to load.
"""

import argparse
import csv
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lightning_fedstop.cli.parser import SentenceParser, add_table_options, column_names, print_note
from lightning_fedstop.records.reader import ROUNDS_FILE, Record, read_records
from lightning_fedstop.records.replay import RULES, SHIFTS, VARIANTS, Stop, replay_table
from lightning_fedstop.utilities.paths import local_path

COLUMNS = ("run", "rule", "threshold", "patience", "stop_round", "share_used", "accuracy")
_FORMAT_OF_SUFFIX = {".csv": "csv", ".md": "markdown", ".tex": "latex"}
_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {"~": r"\textasciitilde{}", "^": r"\^{}", "\\": r"\textbackslash{}"}
_PROG = "fedstop replay"
_DESCRIPTION = """\
Print in which round each stopping rule would have ended recorded runs, for every threshold with every patience, the
share of the budget used until then, and the test accuracy (%) there."""
_EPILOG = """\
examples:
  fedstop replay runs/ --threshold 0.005 0.01 0.05 0.1 --patience 1 5 10
  fedstop replay runs/seed0 --rule task_vector val_loss --format latex --out table.tex
  fedstop replay log.csv --column round=t distance=dist --budget 500

A stop_round of "-" says that the rule does not end the run within its record; share_used is then 1, or "-" too if the
record ends before the budget does."""


def main(argv: list[str]) -> None:
    """Replay records and print the table.

    Args:
        argv: The arguments after ``fedstop replay``.

    Raises:
        SystemExit: With code 2, after one sentence on stderr, for an error in the arguments.
        ValueError, OSError: For an error in the records, or a file that cannot be written.
    """
    args = _parser().parse_args(argv)
    note = partial(print_note, _PROG)
    records = read_records(args.run, column_names(args.column), args.zero_based, args.budget, say=note)
    for record in records:
        for text in record.notes:
            note(f"{record.name}: {text}")
    rules = (args.rule, args.threshold, args.patience, args.min_rounds, args.variant, args.shift)
    stops = replay_table(records, *rules, args.check_every_n_rounds)
    for record in records:
        own = [stop for stop in stops if stop.run == record.name]
        if record.config and own and all(stop.accuracy is None for stop in own):
            note(f"{record.name}: no test accuracy in it; `check_test_every_n_round: 1` records it in each round")
    out = None if args.out is None else local_path(args.out, "--out")
    chosen = args.format or ("table" if out is None else _FORMAT_OF_SUFFIX.get(out.suffix.lower(), "table"))
    text = FORMATS[chosen](stops)
    if out is None:
        _print(text)
    else:
        _write(out, text, args.run, records)


def as_csv(stops: Sequence[Stop]) -> str:
    """Write comma-separated values with all digits; unknown fields are empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for stop in stops:
        values = (stop.threshold, stop.patience, stop.stop_round, stop.share_used, stop.accuracy)
        writer.writerow([stop.run, stop.rule, *("" if _is_unknown(value) else repr(value) for value in values)])
    return file.getvalue()


def as_table(stops: Sequence[Stop]) -> str:
    """Write aligned columns, rounded."""
    rows = [list(COLUMNS), *_rounded(stops)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(COLUMNS))]
    aligned = [
        [_align(text, width, n) for n, (text, width) in enumerate(zip(row, widths, strict=True))] for row in rows
    ]
    return "".join("  ".join(row).rstrip() + "\n" for row in aligned)


def as_markdown(stops: Sequence[Stop]) -> str:
    """Write a table of GitHub's Markdown, rounded."""
    rules = ["---", "---", *["---:"] * (len(COLUMNS) - 2)]
    rows = [list(COLUMNS), rules, *([text.replace("|", "\\|") for text in row] for row in _rounded(stops))]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def as_latex(stops: Sequence[Stop]) -> str:
    """Write a ``tabular`` with the rules of booktabs, rounded."""
    rows = [" & ".join("".join(_LATEX.get(c, c) for c in text) for text in row) for row in _rounded(stops)]
    header = " & ".join(name.replace("_", " ") for name in COLUMNS)
    lines = [
        rf"\begin{{tabular}}{{ll{'r' * (len(COLUMNS) - 2)}}}",
        r"\toprule",
        rf"{header} \\",
        r"\midrule",
        *(rf"{row} \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


FORMATS: dict[str, Callable[[Sequence[Stop]], str]] = {
    "table": as_table,
    "csv": as_csv,
    "markdown": as_markdown,
    "latex": as_latex,
}


def _rounded(stops: Sequence[Stop]) -> list[list[str]]:
    return [
        [
            stop.run,
            stop.rule,
            f"{stop.threshold:g}",
            str(stop.patience),
            "-" if stop.stop_round is None else str(stop.stop_round),
            "-" if math.isnan(stop.share_used) else f"{stop.share_used:.3f}",
            "-" if stop.accuracy is None else f"{stop.accuracy:.1f}",
        ]
        for stop in stops
    ]


def _align(text: str, width: int, column: int) -> str:
    return text.ljust(width) if column < 2 else text.rjust(width)


def _is_unknown(value: float | None) -> bool:
    return value is None or math.isnan(value)


def _parser() -> argparse.ArgumentParser:
    parser = SentenceParser(
        prog=_PROG,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    number, count = _numeric(float, "a number"), _numeric(int, "a whole number")
    add("run", nargs="+", metavar="RUN", help="version folders, folders above some, or CSV files; before the options")
    add("--threshold", type=number, nargs="+", default=[0.01], metavar="TAU", help="thresholds (default 0.01)")
    add("--patience", type=count, nargs="+", default=[10], metavar="RHO", help="patiences (default 10)")
    add("--rule", nargs="+", choices=RULES, metavar="RULE", help=f"{', '.join(RULES)} (default: all that are recorded)")
    add("--format", choices=FORMATS, help="by default by the name of --out (.csv, .md, .tex), else a table")
    add("--out", metavar="FILE", help="write to a file instead of the screen")
    add("--budget", type=count, metavar="R", help="rounds allowed, instead of those of the run's configuration")
    add("--min_rounds", type=count, default=0, metavar="R", help="no stop before this round (default 0)")
    every = "rounds between checks of the rule task_vector (default 1)"
    add("--check_every_n_rounds", type=count, default=1, metavar="N", help=every)
    add("--variant", choices=VARIANTS, default="paper", help="of the rule task_vector (default paper)")
    add("--shift", choices=SHIFTS, default="mean_vector", help="of the rule consensus (default mean_vector)")
    add_table_options(parser)
    return parser


def _numeric(kind: Callable[[str], float], words: str) -> Callable[[str], float]:
    def parsed(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            hint = "; runs come before the options" if os.path.exists(text) else ""
            raise argparse.ArgumentTypeError(f"must be {words}, got {text!r}{hint}") from None

    return parsed


def _write(path: Path, text: str, given: Sequence[str], records: Sequence[Record]) -> None:
    sources = {Path(run).resolve() for run in given} | {(record.folder / ROUNDS_FILE).resolve() for record in records}
    if path.resolve() in sources:
        raise ValueError(f"--out {path}: this is a record that was read; choose another name.")
    path.write_text(text, encoding="utf-8")


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
