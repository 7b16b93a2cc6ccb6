"""The page: its sections in order, as one HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_fedstop.__about__ import __version__
from lightning_fedstop.records.partition_record import PartitionCounts, deal_again, read_partition
from lightning_fedstop.records.report import style, tables
from lightning_fedstop.records.report.answer import answer
from lightning_fedstop.records.report.clients import clients_picture
from lightning_fedstop.records.report.curves import curves_picture
from lightning_fedstop.records.report.markup import Content, Html, details, tag
from lightning_fedstop.records.report.picture import Picture
from lightning_fedstop.records.report.runs import Group, Run, grouped
from lightning_fedstop.records.report.sweeps import (
    accuracy_against_threshold,
    share_against_degree,
    share_against_patience,
)

_MOST_CURVES = 6
_MOST_PARTITIONS = 4
_MOST_SETTINGS = 50


@dataclass(frozen=True)
class Settings:
    """tau and rho of the rules: those the report is about, and those of its tables."""

    threshold: float
    patience: int
    thresholds: tuple[float, ...]
    patiences: tuple[int, ...]


@dataclass
class Section:
    """A part of the page under a heading of its own."""

    id: str
    heading: str
    content: list[Content] = field(default_factory=list)

    def html(self) -> Html:
        """The section."""
        return tag("section", tag("h2", self.heading, id=self.id), self.content)


@dataclass
class Page:
    """A report: its title, its sections, and the pictures in them."""

    title: str
    sections: list[Section]
    pictures: list[Picture]
    lead: str

    def html(self) -> str:
        """The whole file."""
        links = [tag("li", tag("a", section.heading, href=f"#{section.id}")) for section in self.sections]
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            # A page without an icon of its own is asked for one; this one asks nobody for anything.
            tag("link", rel="icon", href="data:,"),
            tag("title", self.title),
            tag("style", Html(style.sheet())),
        )
        body = tag(
            "body",
            tag(
                "header",
                tag("h1", self.title),
                tag("p", self.lead, class_="lead"),
                tag("nav", tag("ul", links), aria_label="Sections"),
            ),
            tag("main", [section.html() for section in self.sections]),
            tag("footer", tag("p", f"Written by fedstop {__version__} from the runs' own records.")),
        )
        return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def build_page(runs: Sequence[Run], settings: Settings, title: str | None, notes: Sequence[str] = ()) -> Page:
    """Put a report together.

    Args:
        runs: at least one.
        settings: of the rules.
        title: the page's; by default it names the runs.
        notes: sentences on what could not be read.
    """
    groups = grouped(runs)
    runs = [run for group in groups for run in group.runs]
    pictures: list[Picture] = []
    sections = [
        _answer(runs, groups, settings, notes),
        _curves(groups, settings, pictures),
        _settings(groups, settings),
        _sweeps(groups, settings, pictures),
        _partitions(groups, pictures),
        *([Section("comparison", "Comparison", [tables.comparison_table(groups)])] if len(runs) > 1 else []),
        Section("cost", "What it cost", tables.costs_table(runs)),
        Section("configuration", "Configuration", list(tables.configuration_tables(runs))),
    ]
    return Page(title or _title(runs, groups), sections, pictures, _lead(runs, groups))


def _lead(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    if len(runs) == 1:
        return f"One run: {runs[0].name}"
    if len(groups) == 1:
        return f"{len(runs)} runs that differ in their seed alone"
    return f"{len(runs)} runs of {len(groups)} configurations"


def _title(runs: Sequence[Run], groups: Sequence[Group]) -> str:
    if len(groups) == 1:
        return f"When to stop: {groups[0].label}"
    return f"When to stop: {len(runs)} runs compared"


def _answer(runs: Sequence[Run], groups: Sequence[Group], settings: Settings, notes: Sequence[str]) -> Section:
    content = answer(groups, settings.threshold, settings.patience)
    content += [
        tables.rules_table(groups, settings.threshold, settings.patience),
        tables.runs_table(runs),
    ]
    remarks = [*notes, *(f"{run.name}: {note}" for run in runs for note in run.notes)]
    if remarks:
        content.append(tag("ul", [tag("li", remark) for remark in remarks], class_="note"))
    return Section("answer", "What stopped when, and why", content)


def _curves(groups: Sequence[Group], settings: Settings, pictures: list[Picture]) -> Section:
    section = Section("curves", "Accuracy and growth rate over rounds")
    for number, group in enumerate(groups[:_MOST_CURVES], 1):
        name = f"curves-{number}" if len(groups) > 1 else "curves"
        picture = curves_picture(group, settings.threshold, settings.patience, name)
        pictures.append(picture)
        if len(groups) > 1:
            section.content.append(tag("h3", group.label))
        section.content.append(picture.html())
    section.content.append(_limited("drawn", len(groups), _MOST_CURVES))
    return section


def _limited(done: str, count: int, most: int) -> Content:
    if count <= most:
        return None
    return tag("p", f"The first {most} of {count} are {done}; name fewer runs for the others.", class_="note")


def _settings(groups: Sequence[Group], settings: Settings) -> Section:
    section = Section("settings", "Other thresholds and patiences")
    for group in groups[:_MOST_SETTINGS]:
        parts: list[Content] = list(tables.settings_tables(group, settings.thresholds, settings.patiences))
        parts = parts or [tag("p", "No rule can be replayed on what was recorded.")]
        section.content += parts if len(groups) == 1 else [details(group.label, parts)]
    section.content.append(_limited("shown", len(groups), _MOST_SETTINGS))
    return section


def _sweeps(groups: Sequence[Group], settings: Settings, pictures: list[Picture]) -> Section:
    threshold, patience = settings.threshold, settings.patience
    made = [
        ("Share of the budget against c", share_against_degree(groups, threshold, patience)),
        ("Accuracy against τ", accuracy_against_threshold(groups, settings.thresholds, patience)),
        ("Share of the budget against ρ", share_against_patience(groups, threshold, settings.patiences)),
    ]
    section = Section("sweeps", "Skew, threshold and patience")
    for heading, picture in made:
        if isinstance(picture, Picture):
            pictures.append(picture)
            section.content += [tag("h3", heading), picture.html()]
    section.content += [
        tag("p", f"{heading} is left out: {reason}", class_="note")
        for heading, reason in made
        if isinstance(reason, str)
    ]
    return section


def _partitions(groups: Sequence[Group], pictures: list[Picture]) -> Section:
    """One picture a federation: configurations that differ in the method alone share it."""
    section = Section("clients", "How the clients share the data")
    known: list[tuple[PartitionCounts, list[str]]] = []
    reasons: dict[str, None] = {}
    for group in groups:
        try:
            partition = _partition(group.runs[0], len(known))
        except ValueError as error:
            reasons[f"The picture of {group.label} is left out: {str(error).rstrip('.')}."] = None
            continue
        if partition is None:
            continue
        labels = next((labels for other, labels in known if other == partition), None)
        if labels is None:
            known.append((partition, [group.label]))
        else:
            labels.append(group.label)
    for number, (partition, labels) in enumerate(known[:_MOST_PARTITIONS], 1):
        label = labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
        picture = clients_picture(partition, f"clients-{number}" if len(known) > 1 else "clients", label)
        pictures.append(picture)
        section.content.append(picture.html())
    section.content.append(_limited("drawn", len(known), _MOST_PARTITIONS))
    section.content += [tag("p", reason, class_="note") for reason in list(reasons)[:_MOST_PARTITIONS]]
    return section


def _partition(run: Run, dealt: int) -> PartitionCounts | None:
    """What the run wrote, else what its configuration deals; ``None`` where enough have been dealt."""
    written = read_partition(run.record.folder)
    if written is not None or dealt >= _MOST_PARTITIONS:
        return written
    if not run.config:
        raise ValueError("the run has neither a partition.json nor a configuration")
    return deal_again(run.config)
