"""A table of ours beside the paper's, as text, CSV, Markdown or LaTeX."""

import csv
import io
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Literal

from experiments.paper.compare import Row

Format = Literal["table", "csv", "markdown", "latex"]


def render(rows: Sequence[Row], fmt: Format, heading: Sequence[str]) -> str:
    """The rows under a heading.

    Args:
        rows: of one table.
        fmt: ``"csv"`` gives numbers as they are; the others two digits after the point and a sign before differences.
        heading: lines above the table, as comments in CSV and LaTeX.
    """
    return _FORMATS[fmt](_cells(rows, exact=fmt == "csv"), list(heading))


def agreement(rows: Sequence[Row]) -> list[str]:
    """How far our figures are from the paper's, a line per quantity that both have."""
    lines = []
    for name in rows[0].figures if rows else ():
        pairs = [row.figures[name] for row in rows]
        gaps = [abs(ours - paper) for ours, paper in pairs if ours is not None and paper is not None]
        if gaps:
            lines.append(f"{name}: mean absolute difference {fmean(gaps):.2f} over {len(gaps)} of {len(rows)} rows.")
    return lines


def _cells(rows: Sequence[Row], exact: bool) -> list[list[str]]:
    """The header and the rows as text; a quantity that the paper never gives has one column instead of three."""
    if not rows:
        return [["no rows"]]
    compared = {name: any(row.figures[name][1] is not None for row in rows) for name in rows[0].figures}
    header = list(rows[0].labels)
    for name, has_paper in compared.items():
        header += [name, f"{name} paper" if exact else "paper", f"{name} difference" if exact else "diff"][
            : 3 if has_paper else 1
        ]
    table = [[*header, "runs"]]
    for row in rows:
        cells = list(row.labels.values())
        for name, has_paper in compared.items():
            ours, paper = row.figures[name]
            gap = None if ours is None or paper is None else ours - paper
            cells += [_number(ours, exact), _number(paper, exact), _number(gap, exact, "+")][: 3 if has_paper else 1]
        table.append([*cells, f"{row.done}/{row.needed}"])
    return table


def _number(value: float | None, exact: bool, sign: str = "") -> str:
    if value is None:
        return ""
    return repr(round(value, 10)) if exact else f"{value:{sign}.2f}"


def _is_number(text: str) -> bool:
    return text.lstrip("+-").replace(".", "", 1).replace("/", "", 1).isdigit()


def _text(cells: list[list[str]], heading: list[str]) -> str:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [all(not text or _is_number(text) for text in column[1:]) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([*heading, "", lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _csv(cells: list[list[str]], heading: list[str]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(cells)
    return "\n".join([*(f"# {line}" for line in heading), file.getvalue().rstrip("\n")])


def _markdown(cells: list[list[str]], heading: list[str]) -> str:
    rows = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in cells]
    return "\n".join([*(f"{line}  " for line in heading), "", rows[0], "|" + " --- |" * len(cells[0]), *rows[1:]])


def _latex(cells: list[list[str]], heading: list[str]) -> str:
    def escaped(text: str) -> str:
        for character in "%_&#":
            text = text.replace(character, f"\\{character}")
        return f"${text}$" if text[:1] in "+-" and _is_number(text) else text

    rows = [" & ".join(map(escaped, row)) + r" \\" for row in cells]
    right = [all(not text or _is_number(text) for text in column[1:]) for column in zip(*cells, strict=True)]
    columns = "".join("r" if to_right else "l" for to_right in right)
    return "\n".join(
        [
            *(f"% {line}" for line in heading),
            rf"\begin{{tabular}}{{{columns}}}",
            r"\hline",
            rows[0],
            r"\hline",
            *rows[1:],
            r"\hline",
            r"\end{tabular}",
        ]
    )


_FORMATS: dict[Format, Callable[[list[list[str]], list[str]], str]] = {
    "table": _text,
    "csv": _csv,
    "markdown": _markdown,
    "latex": _latex,
}
