"""Page of a report: the values that fill its template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lightning_fedstop.__about__ import __version__
from lightning_fedstop.records.partition_record import PartitionCounts, deal_again, read_partition
from lightning_fedstop.records.report import answer, style, sweeps, tables
from lightning_fedstop.records.report.clients import clients_picture
from lightning_fedstop.records.report.curves import curves_picture, overview_picture
from lightning_fedstop.records.report.picture import Picture
from lightning_fedstop.records.report.runs import Group, Run, grouped, without_beginnings

_MOST_CURVES = 6
_MOST_LINES = 10
_MOST_PARTITIONS = 4
_MOST_SETTINGS = 50
_MOST_SENTENCES = 4


@dataclass(frozen=True)
class Settings:
    """tau and rho of the rules: those the report is about, and those of its tables."""

    threshold: float
    patience: int
    thresholds: tuple[float, ...]
    patiences: tuple[int, ...]


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        html: The whole file.
        pictures: Those in it.
    """

    html: str
    pictures: list[Picture]


def build_page(runs: Sequence[Run], settings: Settings, title: str | None, notes: Sequence[str] = ()) -> Page:
    """Put a report together.

    Args:
        runs: At least one.
        settings: Of the rules.
        title: The page's; by default it names the runs.
        notes: Sentences on what could not be read.
    """
    kept, left_out = without_beginnings(runs)
    groups = grouped(kept)
    runs = [run for group in groups for run in group.runs]
    curves, curve_notes = _curves(groups, settings)
    swept, sweep_notes = _sweeps(groups, settings)
    partitions, partition_notes = _partitions(groups)
    differing, shared = tables.configuration_tables(runs)
    devices = dict.fromkeys(str(run.record.summary["device"]) for run in runs if "device" in run.record.summary)
    unsaved = [run.name for run in runs if not run.config]
    label = groups[0].label if len(groups) == 1 else f"{len(runs)} runs compared"
    context = {
        "title": title or f"When to stop: {label}",
        "lead": _lead(runs, groups),
        "version": __version__,
        "style": Markup(style.sheet()),
        **_answer(groups, settings),
        "rules": tables.rules_table(groups, settings.threshold, settings.patience),
        "runs": tables.runs_table(runs),
        "remarks": [
            *notes,
            *left_out,
            *(sentence for group in groups for sentence in group.repeated_seeds()),
            *(f"{run.name}: {note}" for run in runs for note in run.notes),
        ],
        "curves": curves,
        "curve_notes": curve_notes,
        "settings": [
            (
                group.label if len(groups) > 1 else "",
                tables.settings_tables(group, settings.thresholds, settings.patiences),
            )
            for group in groups[:_MOST_SETTINGS]
        ],
        "setting_notes": _limited("shown", len(groups), _MOST_SETTINGS),
        "sweeps": swept,
        "sweep_notes": sweep_notes,
        "partitions": partitions,
        "partition_notes": partition_notes,
        "comparison": tables.comparison_table(groups) if len(runs) > 1 else None,
        "costs": tables.costs_table(runs),
        "cost_notes": [f"Run on {', '.join(devices)}."] if devices else [],
        "differing": differing,
        "shared": shared,
        "configuration_notes": [f"Without a saved configuration: {', '.join(unsaved)}."] if unsaved else [],
    }
    loader = PackageLoader("lightning_fedstop.records", "report")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    html = environment.get_template("page.html.j2").render(context)
    pictures = [picture for _, picture in (*curves, *swept)] + partitions
    return Page(f"{html.strip()}\n", pictures)


def _lead(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    if len(runs) == 1:
        return f"One run: {runs[0].name}"
    if len(groups) == 1:
        return f"{len(runs)} runs that differ in their seed alone"
    return f"{len(runs)} runs of {len(groups)} configurations"


def _answer(groups: Sequence[Group], settings: Settings) -> dict[str, Any]:
    """Answer in sentences, with key figures of one configuration or averages of many."""
    chosen = settings.threshold, settings.patience
    if len(groups) == 1:
        return {"answer": answer.on_one(groups[0], *chosen), "tiles": answer.tiles(groups[0], *chosen), "answers": []}
    few = groups if len(groups) <= _MOST_SENTENCES else []
    answers = [(group.label, answer.on_one(group, *chosen)) for group in few]
    return {"answer": answer.on_average(groups, *chosen), "tiles": [], "answers": answers}


def _limited(done: str, count: int, most: int) -> list[str]:
    return [f"The first {most} of {count} are {done}; name fewer runs for the others."] if count > most else []


def _curves(groups: Sequence[Group], settings: Settings) -> tuple[list[tuple[str, Picture]], list[str]]:
    if len(groups) == 1:
        return [("", curves_picture(groups[0], settings.threshold, settings.patience, "curves"))], []
    pictures = [("All configurations", overview_picture(groups[:_MOST_LINES], settings.threshold, "curves"))]
    pictures += [
        (group.label, curves_picture(group, settings.threshold, settings.patience, f"curves-{number}"))
        for number, group in enumerate(groups[:_MOST_CURVES], 1)
    ]
    return pictures, _limited("drawn", len(groups), _MOST_CURVES)


def _sweeps(groups: Sequence[Group], settings: Settings) -> tuple[list[tuple[str, Picture]], list[str]]:
    threshold, patience = settings.threshold, settings.patience
    made = {
        "Share of the budget against c": sweeps.share_against_degree(groups, threshold, patience),
        "Accuracy against τ": sweeps.accuracy_against_threshold(groups, settings.thresholds, patience),
        "Share of the budget against ρ": sweeps.share_against_patience(groups, threshold, settings.patiences),
    }
    pictures = [(heading, picture) for heading, picture in made.items() if isinstance(picture, Picture)]
    return pictures, [f"{heading} is left out: {why}" for heading, why in made.items() if isinstance(why, str)]


def _partitions(groups: Sequence[Group]) -> tuple[list[Picture], list[str]]:
    """Draw each federation once; configurations that differ in the method share it."""
    known: list[tuple[PartitionCounts, list[str]]] = []
    notes: dict[str, None] = {}
    for group in groups:
        try:
            partition = _partition(group.runs[0], len(known))
        except ValueError as error:
            notes[f"The picture of {group.label} is left out: {str(error).rstrip('.')}."] = None
            continue
        if partition is None:
            continue
        labels = next((labels for other, labels in known if other == partition), None)
        if labels is None:
            known.append((partition, [group.label]))
        else:
            labels.append(group.label)
    pictures = []
    for number, (partition, labels) in enumerate(known[:_MOST_PARTITIONS], 1):
        label = labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
        pictures.append(clients_picture(partition, f"clients-{number}" if len(known) > 1 else "clients", label))
    return pictures, [*_limited("drawn", len(known), _MOST_PARTITIONS), *list(notes)[:_MOST_PARTITIONS]]


def _partition(run: Run, dealt: int) -> PartitionCounts | None:
    """Read the counts that the run wrote, else deal them from its configuration.

    Returns ``None`` where enough were dealt.
    """
    written = read_partition(run.record.folder)
    if written is not None or dealt >= _MOST_PARTITIONS:
        return written
    if not run.config:
        raise ValueError("the run has neither a partition.json nor a configuration")
    return deal_again(run.config)
