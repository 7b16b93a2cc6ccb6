"""A partition as a table for the terminal."""

from collections.abc import Sequence
from io import StringIO

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_fedstop.data.classes import IntArray

_MANY_CLIENTS = 20
_MANY_CLASSES = 12


def clients_table(title: str, sizes: IntArray, counts: IntArray, class_names: Sequence[str]) -> Table:
    """List sizes and classes of clients; above 20 clients the range and the first 10.

    Args:
        title: the title.
        sizes: samples of each of the N clients.
        counts: shape ``(N, C)``; samples of each class at each client, with C = 0 where classes are unknown.
        class_names: C names.
    """
    held = (counts > 0).sum(1, keepdims=True)[:, : len(class_names)]
    if len(class_names) > _MANY_CLASSES:
        counts, class_names = counts[:, :0], []
    rows = np.concatenate([sizes[:, None], held, counts], axis=1)
    table = Table(title=title, title_justify="left")
    for column in ["client", "samples", *(["classes"] if held.size else []), *class_names]:
        table.add_column(column, justify="right", overflow="fold")
    shown = len(sizes)
    if shown > _MANY_CLIENTS:
        shown = 10
        for name, row in (("min", rows.min(0)), ("median", np.median(rows, axis=0)), ("max", rows.max(0))):
            table.add_row(name, *(f"{value:g}" for value in row), end_section=name == "max")
    for client, row in enumerate(rows[:shown].tolist()):
        table.add_row(str(client), *map(str, row))
    if shown < len(sizes):
        table.add_row("...", *["" for _ in rows[0]])
    return table


def as_text(table: Table) -> str:
    """Render a table without colours, as wide as it needs."""
    console = Console(file=StringIO(), width=200, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
