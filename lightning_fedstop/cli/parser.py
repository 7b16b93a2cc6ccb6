"""The parser of commands that do not train, with the options some share."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

# What a file of another tool may have under names of its own.
NAMED_COLUMNS = (
    "round",
    "distance",
    "val_loss",
    "val_acc",
    "test_acc",
    "consensus/shift",
    "consensus/mean_norm",
    "consensus/dispersion",
)


class SentenceParser(argparse.ArgumentParser):
    """Parser that says in one sentence what is wrong, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 after one sentence."""
        sys.stderr.write(f"{self.prog}: error: {message.rstrip('.')}; see `{self.prog} --help`.\n")
        raise SystemExit(2)


def print_note(prog: str, text: str) -> None:
    """Print a note on stderr, after the name of the command."""
    sys.stderr.write(f"{prog}: note: {text.removesuffix('.')}.\n")


def add_table_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how another tool's files are read."""
    parser.add_argument(
        "--column",
        nargs="+",
        action="extend",
        default=[],
        metavar="OURS=THEIRS",
        help=f"names of columns in files of other tools; ours are {', '.join(NAMED_COLUMNS)}",
    )
    parser.add_argument("--zero_based", action="store_true", help="the files count rounds from 0")


def column_names(pairs: Sequence[str]) -> dict[str, str]:
    """Map our names of columns to those in the files, from ``OURS=THEIRS``.

    Raises:
        ValueError: If a pair is none, or names a column that is not ours or was named before.
    """
    names: dict[str, str] = {}
    for pair in pairs:
        ours, _, theirs = pair.partition("=")
        if not theirs:
            raise ValueError(f"--column takes OURS=THEIRS, as in `--column round=t`, got {pair!r}.")
        if ours not in NAMED_COLUMNS:
            raise ValueError(f"--column {pair}: there is no column {ours!r} here; ours are {', '.join(NAMED_COLUMNS)}.")
        if ours in names:
            raise ValueError(f"--column names {ours!r} twice, {names[ours]!r} and {theirs!r}.")
        names[ours] = theirs
    return names
