"""The clients-by-classes picture of a partition, of cells that follow the reader's colour scheme."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_fedstop.records.partition_record import PartitionCounts
from lightning_fedstop.records.report.numbers import number
from lightning_fedstop.records.report.picture import WIDTHS, Picture
from lightning_fedstop.records.report.style import light
from lightning_fedstop.records.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_COLUMNS = 400
_FEW_COLUMNS = 60
_MOST_ROWS = 200
_SHADES = 5


def clients_picture(partition: PartitionCounts, name: str, label: str) -> Picture:
    """Samples of each client above, its classes below.

    Args:
        partition: what each client has.
        name: of the picture.
        label: whose partition it is.
    """
    order = _order(partition)
    skew = f"{partition.skew}, seed {partition.seed}" if partition.skew else "skew not recorded"
    sorted_by = (
        "ordered by main class and size" if len(partition.sizes) > _FEW_COLUMNS and partition.counts else "in order"
    )
    sampled = f"; {len(order)} of them are drawn" if len(order) < len(partition.sizes) else ""
    title = f"Samples of each class at each client: {label}"
    caption = f"{label}: {len(partition.sizes)} clients, {sorted_by}{sampled} ({skew})."

    def draw(width: float) -> Figure:
        return _draw(width, partition, order, sorted_by)

    return Picture(name, title, _description(partition), draw, _numbers(partition, title), caption)


def _order(partition: PartitionCounts) -> list[int]:
    """Clients as they are drawn: thin columns are read as areas, so that clients of one main class stand together."""
    clients = list(range(len(partition.sizes)))
    if len(clients) > _FEW_COLUMNS and partition.counts:
        main = [max(range(len(row)), key=row.__getitem__) for row in partition.counts]
        clients.sort(key=lambda m: (main[m], -partition.sizes[m]))
    if len(clients) > _MOST_COLUMNS:
        clients = [clients[i * len(clients) // _MOST_COLUMNS] for i in range(_MOST_COLUMNS)]
    return clients


def _draw(width: float, partition: PartitionCounts, order: Sequence[int], sorted_by: str) -> Figure:
    from matplotlib.figure import Figure

    classes = len(partition.class_names) if partition.counts else 0
    rows = min(max(0.24 * classes, 0.8), 7.0)
    figure = Figure(figsize=(width, 1.9 + (rows + 0.6 if classes else 0.0)), layout="constrained")
    if classes:
        top, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.1, rows])
        _draw_classes(figure, below, partition, order, narrow=width <= WIDTHS["narrow"])
    else:
        top = below = figure.subplots()
    sizes = [partition.sizes[m] for m in order]
    wide = max(sizes) > 50 * max(1.0, statistics.median(sizes))
    edges = [i - 0.5 for i in range(len(sizes) + 1)]
    top.stairs(sizes, edges, fill=True, color=light("blue"), baseline=0.5 if wide else 0)
    if wide:
        top.set_yscale("log")
        top.set_ylim(bottom=0.5)
    top.set_ylabel("samples")
    top.grid(visible=False, axis="x")
    top.set_xlim(-0.5, len(sizes) - 0.5)
    below.set_xlabel("clients, by main class and size" if "ordered" in sorted_by else "client")
    if "ordered" in sorted_by:
        below.set_xticks([])
    else:
        below.xaxis.get_major_locator().set_params(integer=True)
    return figure


def _draw_classes(figure: Figure, axes: Axes, partition: PartitionCounts, order: Sequence[int], narrow: bool) -> None:
    from matplotlib.patches import Patch, PathPatch
    from matplotlib.path import Path

    bins = shades(max(max(row) for row in partition.counts))
    handles = []
    for (low, high), strength in zip(bins, _strengths(len(bins)), strict=True):
        cells = [
            Path(
                [(i - 0.5, k - 0.5), (i + 0.5, k - 0.5), (i + 0.5, k + 0.5), (i - 0.5, k + 0.5), (i - 0.5, k - 0.5)],
                [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY],
            )
            for i, m in enumerate(order)
            for k, count in enumerate(partition.counts[m])
            if low <= count <= high
        ]
        looks: dict[str, Any] = {"facecolor": light("blue"), "edgecolor": "none", "linewidth": 0, "alpha": strength}
        if cells:
            axes.add_patch(PathPatch(Path.make_compound_path(*cells), **looks))
        handles.append(Patch(label=f"{low}" if low == high else f"{low}\N{EN DASH}{high}", **looks))
    names = [_short(name, 11 if narrow else 26) for name in partition.class_names]
    step = -(-len(names) // 40)
    axes.set_yticks(range(0, len(names), step), names[::step])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    for k in range(1, len(names)):
        axes.axhline(k - 0.5, color=light("grid"), linewidth=0.6)
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=3 if narrow else len(handles),
        title="samples of the class",
        title_fontsize=8.5,
        alignment="left",
        handlelength=1.4,
    )


def shades(largest: int) -> list[tuple[int, int]]:
    """Ranges of counts of about equal ratio, from 1 to the largest count.

    >>> shades(300)
    [(1, 3), (4, 10), (11, 31), (32, 96), (97, 300)]
    """
    edges = sorted({round(largest ** (step / _SHADES)) for step in range(1, _SHADES + 1)} | {max(1, largest)})
    lows = [1, *(edge + 1 for edge in edges[:-1])]
    return [(low, high) for low, high in zip(lows, edges, strict=True) if low <= high]


def _strengths(count: int) -> list[float]:
    return [1.0 if count == 1 else 0.16 + 0.84 * step / (count - 1) for step in range(count)]


def _short(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 1] + "\N{HORIZONTAL ELLIPSIS}"


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
