"""CSV files cut short by a kill, exported by a spreadsheet, or no tables."""

import codecs
import csv
import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

# The first columns of this package's own records, whose rows always end in a newline.
OWN_HEADER = ("round", "distance", "growth_rate", "wait_count")
DELIMITERS = (",", ";", "\t")
# What tools write for "nothing was measured". "nan" is not among them: it is a measurement that went wrong.
NOTHING = frozenset({"", "na", "n/a", "#n/a", "null", "none", "-"})
Row: TypeAlias = tuple[int, list[str]]
"""Line a row ends on, counted from 1, and its fields, one a column."""
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass
class Table:
    """Text of a table.

    Attributes:
        header: The names of the columns.
        rows: The rows below.
        decimal_comma: Whether ``0,5`` is a half, as in spreadsheets that part fields by semicolons.
        notes: Rows left out, one sentence each.
    """

    header: list[str]
    rows: list[Row]
    decimal_comma: bool = False
    notes: list[str] = field(default_factory=list)


def read_table(path: Path) -> Table:
    """Read a CSV file.

    Fields are parted by commas, semicolons or tabs, whichever the header has most of; the text is UTF-8 or Latin-1, or
    UTF-16 with a byte order mark. Blank lines are skipped. A last row that a kill cut short is left out: one without
    the newline at its end that has too few fields, or that stands in one of this package's own records.

    Raises:
        ValueError: If it is no table, with the line of the fault.
    """
    text = _decoded(path.read_bytes()).rstrip("\0")  # a disk that lost power keeps zeros for what was never written
    if "\0" in text:
        raise ValueError(f"{path} is not a text file.")
    first = next((line for line in text.splitlines() if line.strip()), "")
    named = re.fullmatch(r"sep=(.)\s*", first, re.IGNORECASE)  # how spreadsheets name the delimiter
    delimiter = named[1] if named else _delimiter(first)
    end = max(text.rfind("\n"), text.rfind("\r")) + 1
    whole, rest = (text[:end], text[end:]) if end else (text, "")
    rows = _rows(path, whole, delimiter)
    rows = rows[1:] if named else rows
    if not rows and rest.strip():
        rows, rest = _rows(path, rest, delimiter), ""
    if not rows:
        raise ValueError(f"{path} is empty; a run killed in its first round leaves nothing to read.")
    table = Table([name.strip() for name in rows[0][1]], rows[1:], decimal_comma=delimiter == ";")
    if rest.strip():
        _add_last(path, table, rest, delimiter, line=len(whole.splitlines()) + 1)
    table.rows = [(line, _fitted(path, line, fields, len(table.header))) for line, fields in table.rows]
    return table


def number(text: str, decimal_comma: bool = False) -> float | None:
    """Return the number that a field holds, or None if it is empty.

    Raises:
        ValueError: If it holds anything else.

    >>> number(" 1e-3"), number("0,5", decimal_comma=True), number(""), number("NaN")
    (0.001, 0.5, None, nan)
    """
    text = text.strip()
    if text.lower() in NOTHING:
        return None
    if decimal_comma and "." not in text:
        text = text.replace(",", ".", 1)
    if "_" in text or not text.isascii():  # which Python would take
        raise ValueError(f"{shown(text)} is not a number")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{shown(text)} is not a number") from None


def shown(text: str) -> str:
    """Quote a text, printable and short enough for a sentence."""
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def listed(names: list[str]) -> str:
    """Join names for a sentence, the first dozen of them."""
    some = ", ".join(shown(name)[1:-1] for name in names[:12])
    return f"{some}, ..." if len(names) > 12 else some or "none"


def _decoded(data: bytes) -> str:
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return data.decode(encoding, errors="replace")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _delimiter(header: str) -> str:
    bare = re.sub(r'"[^"]*"', "", header)
    return max(DELIMITERS, key=bare.count)


def _rows(path: Path, text: str, delimiter: str) -> list[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        return [(reader.line_num, fields) for fields in reader if any(field.strip() for field in fields)]
    except csv.Error as error:
        raise ValueError(f"{path}, line {max(reader.line_num, 1)}: {error}.") from None


def _add_last(path: Path, table: Table, rest: str, delimiter: str, line: int) -> None:
    """Add the row after the last newline, if it is whole."""
    try:
        rows = _rows(path, rest, delimiter)
    except ValueError:
        rows = []
    is_own = tuple(table.header[: len(OWN_HEADER)]) == OWN_HEADER
    if is_own or not rows or len(rows[0][1]) < len(table.header):
        table.notes.append(f"line {line}, the last one, is cut short and was left out")
    else:
        table.rows.append((line, rows[0][1]))


def _fitted(path: Path, line: int, fields: list[str], width: int) -> list[str]:
    if any(field.strip() for field in fields[width:]):
        raise ValueError(f"{path}, line {line}: there are {len(fields)} fields under a header of {width}.")
    return fields[:width] + [""] * (width - len(fields))


def rows_by_round(file: Path, table: Table, place: int, zero_based: bool, notes: list[str]) -> dict[int, list[Row]]:
    """Map each round to its rows, in order of the rounds.

    Args:
        file: Where the table comes from.
        table: The table.
        place: Of the round in a row.
        zero_based: Rounds are counted from 0.
        notes: Takes what is odd about them.

    Raises:
        ValueError: If there is no round, or something else in its place.
    """
    found: dict[int, list[Row]] = {}
    for line, fields in table.rows:
        round_ = _round(file, line, fields[place], table.decimal_comma, zero_based)
        found.setdefault(round_, []).append((line, fields))
    if not found:
        raise ValueError(f"{file} has a header but no round; the run may have been killed in its first.")
    rounds = sorted(found)
    if twice := [round_ for round_ in rounds if len(found[round_]) > 1]:
        lines = " and ".join(str(line) for line, _ in found[twice[0]][:2])
        notes.append(f"round {twice[0]} has more than one row (lines {lines}): such rows were put together")
    if rounds != list(found):
        notes.append("the rounds were not in order and have been sorted")
    if (missing := rounds[-1] - len(rounds)) > 0:
        notes.append(f"{missing} of the rounds up to {rounds[-1]} have no row; only the others can be decided on")
    return {round_: found[round_] for round_ in rounds}


def _round(file: Path, line: int, text: str, decimal_comma: bool, zero_based: bool) -> int:
    where = f"{file}, line {line}"
    try:
        value = number(text, decimal_comma)
    except ValueError as error:
        raise ValueError(f"{where}: the round {error}.") from None
    if value is None or not value.is_integer() or not 0 <= value < 1e9:
        raise ValueError(f"{where}: the round must be a whole number, got {shown(text)}.")
    if value == 0 and not zero_based:
        raise ValueError(
            f"{where}: rounds are counted from 1; say `zero_based` if the file counts from 0, or remove a row that "
            "holds the state before training."
        )
    return int(value) + zero_based


class UnreadableError(Exception):
    """Reason why a column cannot be read, as the end of a sentence."""


def value_of(rows: list[Row], place: int, decimal_comma: bool) -> float | None:
    """Return the value that the rows of a round share, or None.

    Place -1 stands for a name that the header has twice.

    Raises:
        UnreadableError: If it is no number, or not one number.
    """
    if place < 0:
        raise UnreadableError("the name stands more than once in the header")
    value: float | None = None
    for line, fields in rows:
        try:
            other = number(fields[place], decimal_comma)
        except ValueError as error:
            raise UnreadableError(f"line {line}, {error}") from None
        if other is None:
            continue
        if value is not None and value != other and (value == value or other == other):
            raise UnreadableError(f"lines {rows[0][0]} and {line} give different values for one round")
        value = other
    return value
