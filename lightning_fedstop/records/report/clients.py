"""The figure of a report that shows which client has how much of which class."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from lightning_fedstop.data.partitions.picture import draw_clients
from lightning_fedstop.records.partition_record import PartitionCounts
from lightning_fedstop.records.report.numbers import number
from lightning_fedstop.records.report.picture import Picture
from lightning_fedstop.records.report.style import light
from lightning_fedstop.records.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_ROWS = 200


def clients_picture(partition: PartitionCounts, name: str, label: str) -> Picture:
    """Build the picture of a partition.

    Args:
        partition: what each client has.
        name: name of the picture.
        label: the runs whose partition it is.
    """
    skew = f"{partition.skew}, seed {partition.seed}" if partition.skew else "skew not recorded"
    title = f"Samples of each class at each client: {label}"

    def draw(width: float) -> Figure:
        return draw_clients(
            width, partition.sizes, partition.counts, partition.class_names, light("blue"), light("grid")
        )

    caption = f"{label}: {len(partition.sizes)} clients ({skew})."
    return Picture(name, title, _description(partition), draw, _numbers(partition, title), caption)


def _description(partition: PartitionCounts) -> str:
    sizes = partition.sizes
    text = (
        f"{len(sizes)} clients with {min(sizes)} to {max(sizes)} samples each, "
        f"{number(statistics.median(sizes))} in the median, {sum(sizes)} in all."
    )
    if not partition.counts:
        return text
    held = [sum(count > 0 for count in row) for row in partition.counts]
    return text + (
        f" Of {len(partition.class_names)} classes a client holds {min(held)} to {max(held)}, "
        f"{number(statistics.median(held))} in the median."
    )


def _numbers(partition: PartitionCounts, title: str) -> Table:
    header = ["client", "samples", *(partition.class_names if partition.counts else [])]
    counts = partition.counts or [[] for _ in partition.sizes]
    rows = [[m, size, *row] for m, (size, row) in enumerate(zip(partition.sizes, counts, strict=True))]
    more = f" (the first {_MOST_ROWS} clients)" if len(rows) > _MOST_ROWS else ""
    return Table(title + more, header, rows[:_MOST_ROWS], "r" * len(header))
