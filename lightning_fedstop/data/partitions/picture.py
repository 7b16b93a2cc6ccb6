"""The clients-by-classes picture of a partition, for a file and for the page of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    IntArray = NDArray[np.int64]

FEW_CLIENTS = 60
"""Up to so many clients are drawn in order, one bar each."""
_MOST_CLIENTS = 400
_SHADES = 5


def draw_clients(
    width: float,
    sizes: Sequence[int] | IntArray,
    counts: Sequence[Sequence[int]] | IntArray,
    class_names: Sequence[str],
    cell_colour: str = "#0069ad",
    line_colour: str = "#dde2e8",
) -> Figure:
    """Draw the samples of each client above, its classes below.

    Thin columns are read as areas: of many clients, those of one main class stand together, the largest first. Of very
    many, some are drawn, evenly chosen.

    Args:
        width: inches; below 5 the names and the legend are kept short.
        sizes: samples of each of the N clients.
        counts: samples of each class at each client, of shape ``(N, C)``; of length 0 where classes are unknown.
        class_names: C names.
        cell_colour: colour of cells and bars; fewer samples of a class are more transparent.
        line_colour: colour of the lines between classes.
    """
    from matplotlib.figure import Figure

    shown, axis_label = _shown_clients(np.asarray(sizes), np.asarray(counts))
    rows = min(max(0.24 * len(class_names), 0.8), 7.0)
    figure = Figure(figsize=(width, 1.9 + (rows + 0.6 if len(counts) else 0.0)), layout="constrained")
    if len(counts):
        top, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.1, rows])
        _draw_cells(below, np.asarray(counts)[shown], cell_colour, legend_columns=3 if width < 5 else _SHADES)
        _name_classes(below, class_names, 11 if width < 5 else 26, line_colour)
    else:
        top = below = figure.subplots()
    _draw_sizes(top, np.asarray(sizes)[shown], cell_colour)
    below.set_xlabel(axis_label)
    if axis_label == "client":
        below.xaxis.get_major_locator().set_params(integer=True)
    else:
        below.set_xticks([])
    return figure


def _shown_clients(sizes: IntArray, counts: IntArray) -> tuple[IntArray, str]:
    """The numbers of the clients in the order in which they are drawn, and the label of their axis."""
    shown, label = np.arange(len(sizes)), "client"
    if len(sizes) > FEW_CLIENTS and len(counts):
        shown, label = np.lexsort((-sizes, counts.argmax(1))), "clients, by main class and size"
    if len(sizes) > _MOST_CLIENTS:
        shown = shown[np.arange(_MOST_CLIENTS) * len(sizes) // _MOST_CLIENTS]
        label = f"{label.replace('client,', 'clients,')}\n({_MOST_CLIENTS} of {len(sizes)} are drawn)"
    return shown, label


def _draw_sizes(axes: Axes, sizes: IntArray, colour: str) -> None:
    is_wide = sizes.max() > 50 * max(1.0, float(np.median(sizes)))
    axes.stairs(
        sizes, np.arange(len(sizes) + 1) - 0.5, fill=True, color=colour, linewidth=0, baseline=0.5 if is_wide else 0
    )
    if is_wide:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.5)
    axes.set_ylabel("samples")
    axes.grid(visible=False, axis="x")
    axes.set_xlim(-0.5, len(sizes) - 0.5)


def _draw_cells(axes: Axes, counts: IntArray, colour: str, legend_columns: int) -> None:
    """One path for each range of counts, so that the picture stays small and its colours can be exchanged."""
    from matplotlib.patches import Patch, PathPatch
    from matplotlib.path import Path

    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    corners = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5), (-0.5, -0.5)])
    bins = shades(int(counts.max(initial=1)))
    handles = []
    for step, (low, high) in enumerate(bins):
        strength = 1.0 if len(bins) == 1 else 0.16 + 0.84 * step / (len(bins) - 1)
        looks: dict[str, Any] = {"facecolor": colour, "edgecolor": "none", "linewidth": 0, "alpha": strength}
        cells = np.argwhere((counts >= low) & (counts <= high))
        if len(cells):
            path = Path((cells[:, None] + corners).reshape(-1, 2), codes * len(cells))
            axes.add_patch(PathPatch(path, **looks))
        handles.append(Patch(label=f"{low}" if low == high else f"{low}\N{EN DASH}{high}", **looks))
    figure: Any = axes.figure
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=legend_columns,
        title="samples of the class",
        title_fontsize=8.5,
        alignment="left",
        handlelength=1.4,
    )


def _name_classes(axes: Axes, names: Sequence[str], length: int, line_colour: str) -> None:
    short = [name if len(name) <= length else f"{name[: length - 1]}\N{HORIZONTAL ELLIPSIS}" for name in names]
    step = -(-len(names) // 40)
    axes.set_yticks(range(0, len(names), step), short[::step])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    for k in range(1, len(names)):
        axes.axhline(k - 0.5, color=line_colour, linewidth=0.6)


def shades(largest: int) -> list[tuple[int, int]]:
    """Divide the counts from 1 to the largest into ranges of about equal ratio.

    >>> shades(300)
    [(1, 3), (4, 10), (11, 31), (32, 96), (97, 300)]
    """
    edges = sorted({round(largest ** (step / _SHADES)) for step in range(1, _SHADES + 1)} | {max(1, largest)})
    lows = [1, *(edge + 1 for edge in edges[:-1])]
    return [(low, high) for low, high in zip(lows, edges, strict=True) if low <= high]
