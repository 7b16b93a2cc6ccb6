"""A partition as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_fedstop.data.classes import are_tabulated, class_numbers
from lightning_fedstop.utilities.numbers import IntArray
from lightning_fedstop.utilities.paths import local_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_fedstop.data.partitions.partition import Partition

_MANY_CLIENTS = 20
_MANY_CLASSES = 12
_FEW_COLUMNS = 60
_MOST_COLUMNS = 1000
_BLUE = "#2f6da8"


def _counts_and_names(
    partition: Partition, labels: Any, num_classes: int | None, class_names: Sequence[str] | None
) -> tuple[IntArray, list[str]]:
    if labels is None:
        return np.zeros((len(partition), 0), np.int64), []
    numbers, found = class_numbers(labels, num_classes)
    count = num_classes or (int(numbers.max()) + 1 if found is None else len(found))
    if class_names is not None and len(class_names) != count:
        raise ValueError(f"`class_names` must name the {count} classes, got {len(class_names)}.")
    if not are_tabulated(len(partition), count):
        return np.zeros((len(partition), 0), np.int64), []
    names = class_names or (found if found and len(found) == count else range(count))
    return partition.class_counts(labels, count), [str(name) for name in names]


def _title(partition: Partition) -> str:
    return (
        f"{partition.skew or 'Partition'}: {len(partition)} clients, {len(np.unique(partition.indices))} of "
        f"{partition.num_samples} samples used, seed {partition.seed}"
    )


def partition_table(
    partition: Partition, labels: Any, num_classes: int | None, class_names: Sequence[str] | None
) -> Table:
    """Sizes and classes per client; see :meth:`Partition.table`."""
    counts, names = _counts_and_names(partition, labels, num_classes, class_names)
    held = (counts > 0).sum(1, keepdims=True) if names else np.zeros((len(partition), 0), np.int64)
    if len(names) > _MANY_CLASSES:
        counts, names = counts[:, :0], []
    rows = np.concatenate([partition.sizes[:, None], held, counts], axis=1)
    table = Table(title=_title(partition), title_justify="left")
    for column in ["client", "samples", *(["classes"] if held.size else []), *names]:
        table.add_column(column, justify="right", overflow="fold")
    shown = len(partition)
    if shown > _MANY_CLIENTS:
        shown = 10
        for name, row in (("min", rows.min(0)), ("median", np.median(rows, axis=0)), ("max", rows.max(0))):
            table.add_row(name, *(f"{value:g}" for value in row), end_section=name == "max")
    for client, row in enumerate(rows[:shown].tolist()):
        table.add_row(str(client), *map(str, row))
    if shown < len(partition):
        table.add_row("...", *["" for _ in rows[0]])
    return table


def as_text(table: Table) -> str:
    """A table without colours, as wide as it needs."""
    console = Console(file=StringIO(), width=200, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def partition_picture(
    partition: Partition, path: str | Path, labels: Any, num_classes: int | None, class_names: Sequence[str] | None
) -> Path:
    """Sizes above, classes by clients below; see :meth:`Partition.plot`."""
    from matplotlib.figure import Figure

    path = local_path(path, "path")
    counts, names = _counts_and_names(partition, labels, num_classes, class_names)
    rows = min(0.3 * len(names), 8.0)
    figure = Figure(figsize=(9, 2.6 + (0.9 + rows if names else 0.0)), layout="constrained")
    if path.suffix.lstrip(".").lower() not in figure.canvas.get_supported_filetypes():
        raise ValueError(f"A picture is written as .png, .svg or .pdf, got '{path.name}'.")
    figure.suptitle(_title(partition).replace("): ", ")\n", 1), fontsize=9)
    sizes, order_name = partition.sizes, "client"
    if names and len(partition) > _FEW_COLUMNS:
        # Thin columns are read as areas: clients of one main class stand together, the largest first.
        order = np.lexsort((-sizes, counts.argmax(1)))
        sizes, counts, order_name = sizes[order], counts[order], "clients, ordered by main class and size"
    if len(partition) > _MOST_COLUMNS:
        # More than the picture has columns of pixels would only take time.
        drawn = np.arange(_MOST_COLUMNS) * len(partition) // _MOST_COLUMNS
        sizes, counts = sizes[drawn], counts[drawn]
        order_name += f" ({_MOST_COLUMNS} of {len(partition)} are drawn)"
    if names:
        top, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.4, 0.6 + rows])
        _draw_classes(figure, below, counts, names)
    else:
        top = below = figure.subplots()
    _draw_sizes(top, sizes)
    below.set_xlabel(order_name)
    below.xaxis.get_major_locator().set_params(integer=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _draw_sizes(axes: Axes, sizes: IntArray) -> None:
    edges = np.arange(len(sizes) + 1) - 0.5
    wide = sizes.max() > 50 * max(1.0, float(np.median(sizes)))
    if len(sizes) <= _FEW_COLUMNS:
        axes.bar(np.arange(len(sizes)), sizes, width=0.85, color=_BLUE, bottom=0)
    else:
        axes.stairs(sizes, edges, fill=True, color=_BLUE, baseline=0.5 if wide else 0)
    if wide:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.5)
    axes.set_ylabel("samples")
    axes.set_xlim(edges[0], edges[-1])
    axes.spines[["top", "right"]].set_visible(False)


def _draw_classes(figure: Figure, axes: Axes, counts: IntArray, names: list[str]) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, LogNorm

    # White is "none of this class", so that the scale starts at a visible tint; one hue, from light to dark, reads the
    # same with any colour vision and in grey.
    blues = ListedColormap(colormaps["Blues"](np.linspace(0.25, 1.0, 256)))
    shown = np.ma.masked_equal(counts.T, 0)
    norm = LogNorm(1, max(2, int(counts.max())))
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=blues, norm=norm)
    axes.set_ylabel("class")
    step = -(-len(names) // 40)
    axes.set_yticks(range(0, len(names), step), names[::step], fontsize=8)
    figure.colorbar(image, ax=axes, label="samples of the class", pad=0.01, format="%d")
    axes.hlines(np.arange(1, len(names)) - 0.5, -0.5, len(counts) - 0.5, color="#cccccc", linewidth=0.5)
    if len(counts) <= _FEW_COLUMNS:
        axes.vlines(np.arange(1, len(counts)) - 0.5, -0.5, len(names) - 0.5, color="#cccccc", linewidth=0.5)
