"""Batches of several clients as one, in groups of equal shape or padded to one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Drawn = tuple[int, Any]
"""A batch with its number in its epoch."""


@dataclass
class Group:
    """Clients of a stack whose batches are of one shape.

    Attributes:
        rows: their places in the stack, ascending.
        batch_idx: the number of the batch in its epoch; that of the first client, if ``training_step`` ignores it.
        tensors: the tensors of the batches, each of shape ``(len(rows), n, ...)``.
        rest: what else a batch holds, the same for all, ``None`` in the places of the tensors.
        spec: how they make up a batch.
        sizes: shape ``(len(rows),)``, float64; the samples of each batch.
        padded_size: n, the samples of each stacked batch, if they were padded.
        weights: shape ``(len(rows), n)``; n / n_m for the samples of client m and 0 for padding, if they were padded.
    """

    rows: list[int]
    batch_idx: int
    tensors: list[Tensor]
    rest: list[Any]
    spec: TreeSpec
    sizes: Tensor
    padded_size: int | None = None
    weights: Tensor | None = None

    def batch(self, tensors: Sequence[Tensor]) -> Any:
        """The batch of one client, given its tensors."""
        given = iter(tensors)
        leaves = [next(given) if value is _TENSOR else value for value in self.rest]
        return tree_unflatten(leaves, self.spec)


class _Tensor:
    """Stands for a tensor among the other values of a batch."""


_TENSOR = _Tensor()


@dataclass
class _Row:
    """A client's batch, taken apart; ``size`` is the samples of all its tensors, if they agree."""

    row: int
    batch_idx: int
    batch: Any
    leaves: list[Any]
    spec: TreeSpec
    size: int | None


def group_batches(drawn: Sequence[Drawn], pads: bool, by_index: bool, extra: bool = False) -> list[Group]:
    """Put the batches of a stack's clients together.

    Args:
        drawn: the batch of each client.
        pads: pad batches to the size of the largest, with copies of their first sample, as long as that at most doubles
            them; otherwise only batches of equal shape go together.
        by_index: keep batches of different numbers in their epochs apart.
        extra: pad each batch to twice its size, to see what that changes.
    """
    alike: dict[Any, list[_Row]] = {}
    for row, (batch_idx, batch) in enumerate(drawn):
        leaves, spec = tree_flatten(batch)
        taken = _Row(row, batch_idx, batch, leaves, spec, _size_of(leaves))
        alike.setdefault((batch_idx if by_index else None, spec, *_shapes(taken, pads)), []).append(taken)
    groups = []
    for rows in alike.values():
        if not pads or rows[0].size is None:
            groups.append(_stacked(rows))
            continue
        rows.sort(key=lambda row: -(row.size or 0))
        while rows:
            largest = rows[0].size or 0
            together = [row for row in rows if 2 * (row.size or 0) >= largest]
            rows = rows[len(together) :]
            together.sort(key=lambda row: row.row)
            groups.append(_padded(together, largest * (1 + extra)))
    return groups


def _size_of(leaves: list[Any]) -> int | None:
    sizes = {leaf.shape[0] if leaf.dim() else None for leaf in leaves if isinstance(leaf, Tensor)}
    size = sizes.pop() if len(sizes) == 1 else None
    return size or None


def _shapes(row: _Row, pads: bool) -> list[Any]:
    """List all that must agree for two batches to be stacked."""
    start = 1 if pads and row.size else 0
    return [
        (leaf.dtype, leaf.device, leaf.shape[start:]) if isinstance(leaf, Tensor) else _plain(leaf)
        for leaf in row.leaves
    ]


def _plain(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _group(rows: list[_Row], tensors: list[Tensor], sizes: list[int]) -> Group:
    first = rows[0]
    rest = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in first.leaves]
    weighing = torch.tensor(sizes, dtype=torch.float64)
    if tensors:
        weighing = weighing.to(tensors[0].device)
    return Group([row.row for row in rows], first.batch_idx, tensors, rest, first.spec, weighing)


def _columns(rows: list[_Row]) -> list[tuple[Any, ...]]:
    """The tensors at the same place of all batches, for each place."""
    return [leaves for leaves in zip(*(row.leaves for row in rows), strict=True) if isinstance(leaves[0], Tensor)]


def _stacked(rows: list[_Row]) -> Group:
    tensors = [torch.stack(column) for column in _columns(rows)]
    return _group(rows, tensors, [row.size or extract_batch_size(row.batch) for row in rows])


def _padded(rows: list[_Row], length: int) -> Group:
    sizes = [row.size or 0 for row in rows]
    if all(size == length for size in sizes):
        return _stacked(rows)
    tensors = []
    for column in _columns(rows):
        padded = column[0].new_empty((len(rows), length, *column[0].shape[1:]))
        for target, leaf in zip(padded, column, strict=True):
            target[: len(leaf)] = leaf
            # A copy of a real sample: a made-up one might have no finite gradient, which a weight of 0 would keep.
            target[len(leaf) :] = leaf[0]
        tensors.append(padded)
    group = _group(rows, tensors, sizes)
    group.padded_size = length
    real = torch.arange(length, device=group.sizes.device) < group.sizes.unsqueeze(1)
    group.weights = real * (length / group.sizes).unsqueeze(1)
    return group
