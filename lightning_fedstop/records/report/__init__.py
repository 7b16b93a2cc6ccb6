"""Reports on runs: one HTML page that loads nothing, and its figures as files.

What is drawn and told is all taken from the records; :func:`write_report` is what ``fedstop report`` calls.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_fedstop.records.reader import Record
from lightning_fedstop.records.report import configuration
from lightning_fedstop.records.report.page import Settings, build_page
from lightning_fedstop.records.report.runs import Run
from lightning_fedstop.utilities.extras import require_extra
from lightning_fedstop.utilities.files import atomic_file
from lightning_fedstop.utilities.paths import local_path
from lightning_fedstop.utilities.validate import positive, whole_number

__all__ = ["Report", "write_report"]

THRESHOLDS = (0.005, 0.01, 0.05, 0.1)
PATIENCES = (1, 5, 10)
_PAPER = (0.01, 10)


@dataclass(frozen=True)
class Report:
    """Files of a report.

    Attributes:
        page: the HTML file.
        figures: the SVG and PDF files, two a figure.
    """

    page: Path
    figures: list[Path]


def write_report(
    records: Sequence[Record],
    out: str | os.PathLike[str] = "report.html",
    threshold: float | None = None,
    patience: int | None = None,
    thresholds: Sequence[float] = THRESHOLDS,
    patiences: Sequence[int] = PATIENCES,
    figures: str | os.PathLike[str] | None = None,
    title: str | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Write a report; files of the same names are replaced, each in one step.

    Args:
        records: the runs, as :func:`~lightning_fedstop.records.read_records` reads them.
        out: the page, a name that ends in ``.html``; folders are made.
        threshold: tau of the rules whose stops are told and marked; by default that of the runs' own task-vector rule
            where they agree, else the paper's 0.01.
        patience: rho; by default that of the runs, else the paper's 10.
        thresholds: tau of the tables and of the figure over tau.
        patiences: rho of the tables and of the figure over rho.
        figures: folder of the figures; ``<page>_figures`` beside the page by default.
        title: of the page.
        notes: sentences on runs that could not be read, to be told in the page.

    Raises:
        ValueError: if there is no record, a threshold or patience is out of range, or ``out`` is no HTML file.
        OSError: if a file cannot be written.
    """
    require_extra("matplotlib", "report", "A report")
    if not records:
        raise ValueError("A report needs at least one run.")
    page_path = local_path(out, "out")
    if page_path.suffix.lower() not in (".html", ".htm") or page_path.is_dir():
        raise ValueError(f"A report is written as an .html file, got '{out}'.")
    runs = [Run(record) for record in records]
    settings = _settings(runs, threshold, patience, thresholds, patiences)
    folder = local_path(figures, "figures") if figures is not None else page_path.with_name(f"{page_path.stem}_figures")
    page = build_page(runs, settings, title, notes)
    text = page.html
    try:
        page_path.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        written = [path for picture in page.pictures for path in picture.write(folder)]
        with atomic_file(page_path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(f"The report cannot be written ({error.strerror}: {error.filename!r}).") from error
    return Report(page_path, written)


def _settings(
    runs: Sequence[Run],
    threshold: float | None,
    patience: int | None,
    thresholds: Sequence[float],
    patiences: Sequence[int],
) -> Settings:
    """Choose tau and rho: those asked for, else the runs' own, else the paper's."""
    own = {
        (rule.threshold, rule.patience)
        for run in runs
        for rule in configuration.rules(run.config)
        if rule.name == "task vector" and rule.threshold and rule.patience
    }
    common = own.pop() if len(own) == 1 else _PAPER
    chosen = Settings(
        common[0] if threshold is None else threshold,
        common[1] if patience is None else patience,
        tuple(dict.fromkeys(thresholds)),
        tuple(dict.fromkeys(patiences)),
    )
    for name, values in (("thresholds", chosen.thresholds), ("patiences", chosen.patiences)):
        if not values:
            raise ValueError(f"`{name}` must hold at least one value.")
    for value in (chosen.threshold, *chosen.thresholds):
        positive("threshold", value)
    for count in (chosen.patience, *chosen.patiences):
        whole_number("patience", count, least=1)
    return chosen
