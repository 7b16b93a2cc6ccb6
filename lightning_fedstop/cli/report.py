"""``fedstop report``: a page on what runs have recorded."""

import sys

from lightning_fedstop.cli.parser import SentenceParser, add_table_options, column_names
from lightning_fedstop.records.reader import read_records
from lightning_fedstop.records.report import PATIENCES, THRESHOLDS, write_report


def _parser() -> SentenceParser:
    parser = SentenceParser(
        prog="fedstop report",
        description="Write one HTML page on runs: what stopped when and why, with figures and tables. It loads nothing "
        "from the network; the figures are also written as SVG and PDF files.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a version folder, a CSV file, or a folder above version folders")
    add("--out", default="report.html", help="the page to write; one that exists is replaced (default: %(default)s)")
    add("--threshold", type=float, help="tau of the stops told and marked (default: the runs' own, else 0.01)")
    add("--patience", type=int, help="rho (default: the runs' own, else 10)")
    add("--thresholds", type=float, nargs="+", default=THRESHOLDS, metavar="TAU", help=_listed("tau", THRESHOLDS))
    add("--patiences", type=int, nargs="+", default=PATIENCES, metavar="RHO", help=_listed("rho", PATIENCES))
    add(
        "--figures", metavar="DIR", help="folder of the SVG and PDF files (default: OUT without its ending, `_figures`)"
    )
    add("--title", help="title of the page")
    add_table_options(parser)
    return parser


def _listed(name: str, values: tuple[float, ...]) -> str:
    return f"{name} of the tables (default: {' '.join(f'{value:g}' for value in values)})"


def main(argv: list[str]) -> None:
    """Read the runs, write the page with its figures, and print their paths."""
    args = _parser().parse_args(argv)
    notes: list[str] = []
    records = read_records(args.runs, column_names(args.column), args.zero_based, say=notes.append)
    report = write_report(
        records,
        args.out,
        args.threshold,
        args.patience,
        args.thresholds,
        args.patiences,
        args.figures,
        args.title,
        notes,
    )
    for note in notes:
        sys.stderr.write(f"fedstop report: {note}\n")
    print(f"Report: {report.page}")
    if report.figures:
        print(f"Figures: {report.figures[0].parent} ({len(report.figures)} files)")
