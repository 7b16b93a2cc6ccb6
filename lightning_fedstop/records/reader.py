"""Reader of records of runs and of CSV files of other tools.

Neither torch nor Lightning nor NumPy is imported here, so that reading takes no longer than the files do.
"""

import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from lightning_fedstop.records.table import UnreadableError, listed, read_table, rows_by_round, shown, value_of
from lightning_fedstop.utilities.paths import local_path, walk
from lightning_fedstop.utilities.validate import whole_number

__all__ = ["Record", "find_records", "read_record", "read_records"]

PathLike: TypeAlias = str | os.PathLike[str]
ROUNDS_FILE = "metrics.csv"
SUMMARY_FILE = "summary.json"
CONFIG_FILE = "config.yaml"


@dataclass(frozen=True)
class Record:
    """Record of one run.

    Attributes:
        name: What the run is called in tables.
        folder: The folder its files lie in.
        rounds: The rounds there are rows of, counted from 1, in order.
        columns: The values of each column, one a round; NaN where a field is empty.
        summary: ``summary.json``; empty if there is none, as while a run goes on or after it was killed.
        config: ``config.yaml``; empty if there is none.
        budget: The rounds the run was allowed: those of the summary, else the configuration's ``trainer.max_rounds``,
            else the last round there is.
        notes: What was odd about the files and how it was read, one sentence each.
        unreadable: Columns that cannot be used, and why; they are not among ``columns``.
        nan_rounds: For a column, the rounds whose field holds ``nan``, which is not the same as an empty one.
    """

    name: str
    folder: Path
    rounds: list[int]
    columns: dict[str, list[float]]
    summary: dict[str, Any]
    config: dict[str, Any]
    budget: int
    notes: tuple[str, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    nan_rounds: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def measured(self, column: str) -> tuple[list[int], list[float]]:
        """Return the rounds in which a column has a value, and the values.

        A ``nan`` in the file is a value.

        Raises:
            ValueError: If there is no such column, or it cannot be read as numbers.
        """
        if column in self.unreadable:
            raise ValueError(f"{self.unreadable[column]}.")
        if column not in self.columns:
            raise ValueError(f"{self.name} has no column '{column}'; it has {listed(['round', *self.columns])}.")
        nans = self.nan_rounds.get(column, frozenset())
        pairs = zip(self.rounds, self.columns[column], strict=True)
        kept = [(round_, value) for round_, value in pairs if value == value or round_ in nans]
        return [round_ for round_, _ in kept], [value for _, value in kept]


def find_records(paths: PathLike | Sequence[PathLike]) -> list[Path]:
    """Find the records in and under some paths.

    Args:
        paths: Version folders, CSV files, or folders above version folders, at any depth.

    Returns:
        A version folder or CSV file a record, sorted (``version_2`` before ``version_10``), none of them twice.

    Raises:
        FileNotFoundError: If a path does not exist, or holds no record.
    """
    return list(_found(paths))


def read_record(
    path: PathLike,
    columns: Mapping[str, str] | None = None,
    zero_based: bool = False,
    budget: int | None = None,
    name: str | None = None,
) -> Record:
    r"""Read one record.

    A summary or configuration that cannot be read is left out, with a note. Rows of the same round are put together;
    a column that has different values for one round, or a text that is no number, is ``unreadable`` and matters only
    to who asks for it.

    Args:
        path: A version folder or a CSV file.
        columns: For files of other tools: our name of a column -> its name in the file, such as
            ``{"round": "t", "distance": "dist"}``.
        zero_based: The file counts rounds from 0.
        budget: Rounds allowed, instead of what summary or configuration say; later rows are left out.
        name: What to call the run; the path by default.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no table, has no round, or a column that ``columns`` names is missing.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "log.csv"
    >>> _ = file.write_text("t;dist\n0;1,5\n1;1,75\n")
    >>> record = read_record(file, {"round": "t", "distance": "dist"}, zero_based=True)
    >>> record.rounds, record.columns, record.budget
    ([1, 2], {'distance': [1.5, 1.75]}, 2)
    """
    if budget is not None:
        whole_number("budget", budget, least=1)
    file = _file_of(local_path(path, "path"))
    table = read_table(file)
    notes = list(table.notes)
    places = _places(file, table.header, columns or {})
    lines = rows_by_round(file, table, places.pop("round"), zero_based, notes)
    summary: dict[str, Any] = {}
    config: dict[str, Any] = {}
    if file.name == ROUNDS_FILE:  # beside a file of another name they may belong to another run
        summary = _parsed(file.with_name(SUMMARY_FILE), json.loads, notes)
        config = _parsed(file.with_name(CONFIG_FILE), _parse_yaml, notes)
    allowed = budget or _budget(summary, config, last=max(lines))
    lines = {round_: rows for round_, rows in lines.items() if budget is None or round_ <= budget}
    if not lines:
        raise ValueError(f"{file} has no row of the first {budget} rounds.")
    record = Record(str(path) if name is None else name, file.parent, list(lines), {}, summary, config, allowed)
    unreadable: dict[str, str] = {}
    nan_rounds: dict[str, frozenset[int]] = {}
    for column, place in places.items():
        try:
            values = [value_of(rows, place, table.decimal_comma) for rows in lines.values()]
        except UnreadableError as error:
            unreadable[column] = f"{file}, column '{column}': {error}"
            continue
        record.columns[column] = [float("nan") if value is None else value for value in values]
        nans = frozenset(r for r, v in zip(lines, values, strict=True) if v is not None and v != v)
        if nans:
            nan_rounds[column] = nans
    return Record(**{**vars(record), "notes": tuple(notes), "unreadable": unreadable, "nan_rounds": nan_rounds})


def read_records(
    paths: PathLike | Sequence[PathLike],
    columns: Mapping[str, str] | None = None,
    zero_based: bool = False,
    budget: int | None = None,
    say: Callable[[str], None] = warnings.warn,
) -> list[Record]:
    """Find and read records, named by what of their paths tells them apart.

    Args:
        paths: As for :func:`find_records`.
        columns: This and all that follow as for :func:`read_record`.
        zero_based: Rounds are counted from 0.
        budget: Rounds allowed.
        say: Told, in a sentence, of a record that cannot be read and is left out, being one of several in a folder.

    Raises:
        FileNotFoundError: If a path does not exist, or holds no record.
        ValueError: If a record that was named itself cannot be read, or none that was found.
    """
    if budget is not None:
        whole_number("budget", budget, least=1)
    found = _found(paths)
    records: list[Record] = []
    refusals: list[ValueError] = []
    for path, name in zip(found, _short_names([given or path for path, given in found.items()]), strict=True):
        record = _read_or_refuse(path, columns, zero_based, budget, name)
        if isinstance(record, Record):
            records.append(record)
        elif found[path] is not None:
            raise record
        else:
            refusals.append(record)
            say(f"{path} is left out: {record}")
    if not records:
        raise refusals[0]
    return records


def _read_or_refuse(path: Path, *arguments: Any) -> Record | ValueError:
    try:
        return read_record(path, *arguments)
    except ValueError as error:
        return error


def _as_paths(paths: PathLike | Sequence[PathLike]) -> list[Path]:
    return [local_path(path, "path") for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


def _found(paths: PathLike | Sequence[PathLike]) -> dict[Path, Path | None]:
    """Map each record, in order, to the path the user gave, or ``None``.

    A folder that holds a single record names it too.
    """
    found: dict[Path, tuple[Path, Path | None]] = {}
    for path in _as_paths(paths):
        records = list(_records_of(path))
        for record in records:
            first, given = found.get(record.resolve(), (record, None))
            found[record.resolve()] = (first, given or (path if len(records) == 1 else None))
    if not found:
        raise FileNotFoundError("No run is given.")
    return dict(sorted(found.values(), key=lambda pair: _natural(pair[0])))


def _folder_of(path: Path) -> Path:
    return path.parent if path.name == ROUNDS_FILE and path.is_file() else path


def _records_of(path: Path) -> Iterable[Path]:
    if not path.exists():
        raise FileNotFoundError(f"There is no file or folder {str(path)!r}.")
    if path.is_file():
        return [_folder_of(path)]
    found = [folder for folder, files in walk(path) if ROUNDS_FILE in files]
    if not found:
        hint = "; name the CSV files in it themselves" if any(path.glob("*.csv")) else ""
        raise FileNotFoundError(f"There is no {ROUNDS_FILE} in {str(path)!r} or below{hint}.")
    return found


def _file_of(path: Path) -> Path:
    file = path / ROUNDS_FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {str(file)!r}; a record is a version folder or a CSV file.")
    return file


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", str(path)) if part]


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The parts of the paths in which they differ; a single path as it is."""
    if len(paths) < 2:
        return [str(path) if path.name else path.resolve().name for path in paths]
    parts = [path.parts for path in paths]
    shortest = min(map(len, parts))
    start = next((n for n in range(shortest) if len({p[n] for p in parts}) > 1), shortest)
    end = next((n for n in range(shortest) if len({p[-1 - n] for p in parts}) > 1), shortest)
    middle = [p[start : max(len(p) - end, start + 1)] or p[-1:] for p in parts]
    names = ["/".join(m) for m in middle]
    shorter = ["/".join(part for part in m if part != "lightning_logs") for m in middle]
    candidates = (shorter, names, [str(path) for path in paths])
    return next(c for c in candidates if c is candidates[-1] or (all(c) and len(set(c)) == len(paths)))


def _places(file: Path, header: list[str], columns: Mapping[str, str]) -> dict[str, int]:
    """Map our name of each column to its place in a row."""
    for ours, theirs in columns.items():
        if theirs not in header:
            raise ValueError(f"{file} has no column {shown(theirs)}, named for '{ours}'; it has {listed(header)}.")
    theirs_of = {name: name for name in header if name and name not in columns.values()} | dict(columns)
    if "round" not in theirs_of:
        raise ValueError(f"{file} has no column 'round', nor is another named for it; it has {listed(header)}.")
    if header.count(theirs_of["round"]) > 1:
        raise ValueError(f"{file} has more than one column {shown(theirs_of['round'])}.")
    # Of two columns with the same name neither can be meant: -1 says so to who asks for them.
    return {ours: header.index(theirs) if header.count(theirs) == 1 else -1 for ours, theirs in theirs_of.items()}


def _parse_yaml(text: str) -> Any:
    import yaml  # not before it is needed: it takes longer to import than a record to read

    # Not `CSafeLoader`, whose recursion in C ends the process on a damaged file of many brackets.
    return yaml.safe_load(text)


def _parsed(path: Path, parse: Callable[[str], Any], notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = parse(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        reason = "it does not hold keys and values"
    except Exception as error:  # whatever a half-written or foreign file provokes: the rounds can be read without it
        reason = type(error).__name__
    notes.append(f"{path.name} cannot be read and was left out ({reason})")
    return {}


def _budget(summary: Mapping[str, Any], config: Mapping[str, Any], last: int) -> int:
    trainer = config.get("trainer")
    said = (summary.get("budget"), trainer.get("max_rounds") if isinstance(trainer, dict) else None)
    known = [value for value in said if isinstance(value, int) and not isinstance(value, bool) and value > 0]
    return max(known[0], last) if known else last
