"""Mean over clients of what a module holds beside its trainable parameters."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lightning_fedstop.core.aggregation import Reduce, RunningMaximum, RunningMean, reduce_alone
from lightning_fedstop.core.module_state import ModuleState, difference, is_averageable


class StateMean:
    """Buffers and frozen parameters over the clients of a round: means, and maxima of integers.

    Whatever training changes of them belongs to the client, as a running statistic or the target network of BYOL does:
    each client starts from the round's start, and the server averages. Integers are counters and pointers, whose mean
    would be none. Memory: one copy of all these tensors, and a float64 sum of each that training changes.

    Args:
        module: the module, which holds the round's start now.
        trained: its trainable parameters, which are no part of this.
    """

    def __init__(self, module: nn.Module, trained: Iterable[Tensor] = ()) -> None:
        self._module = module
        self.start = ModuleState(module, trained)
        self._sums: dict[str, RunningMean | RunningMaximum] = {}
        self._weight = 0.0

    def reset(self) -> None:
        """Put the round's start back into the module, for the next client."""
        self.start.restore()

    def holding_start(self) -> AbstractContextManager[None]:
        """Let the module hold the round's start inside the block."""
        return self.start.restored()

    def add(self, changed: Mapping[str, Tensor], weight: float) -> None:
        """Add the tensors that a client's training has changed.

        Args:
            changed: by name, as :meth:`ModuleState.changed` gives them.
            weight: the client's.

        Raises:
            ValueError: naming a tensor that changed in a way that has no mean.
        """
        for name, tensor in changed.items():
            self._check(name, tensor)
            self._sum(name)
        for name, total in self._sums.items():
            total.add(_numbers(changed.get(name, self.start.values[name])), weight)
        self._weight += weight

    def write(self, reduce: Reduce = reduce_alone) -> list[str]:
        """Write the mean over the clients of all processes into the module.

        Returns:
            The names of the tensors that have changed.

        Raises:
            ValueError: naming a tensor that training has added to the module.
        """
        self.start.check_names()
        self.reset()
        moved = list(self._moved(reduce))
        for name in moved:
            mean = self._sum(name).compute(reduce)
            self.start.put(name, torch.view_as_complex(mean) if self.start.values[name].is_complex() else mean)
        return moved

    def _moved(self, reduce: Reduce) -> Iterator[str]:
        """The tensors that a client of any process has changed."""
        names = list(self.start.values)
        if not names:
            return
        device = self.start.values[names[0]].device
        flags = reduce(torch.tensor([name in self._sums for name in names], dtype=torch.int64, device=device), "max")
        yield from (name for name, flag in zip(names, flags.tolist(), strict=True) if flag)

    def _sum(self, name: str) -> RunningMean | RunningMaximum:
        """The sum of one tensor; at first what the clients so far have left it at, its start."""
        if name not in self._sums:
            start = _numbers(self.start.values[name])
            total = RunningMean(start) if start.is_floating_point() else RunningMaximum(start)
            if self._weight:
                total.add(start, self._weight)
            self._sums[name] = total
        return self._sums[name]

    def _check(self, name: str, tensor: Tensor) -> None:
        start, where = self.start.values[name], f"{name!r} of {type(self._module).__name__}"
        if (what := difference(start, tensor)) is not None:
            raise ValueError(
                f"A client's training changed {where}, {what}, and what clients send back is averaged: give it its last"
                " shape and dtype before `fit`, or keep it in a plain attribute if it is only a cache."
            )
        if not is_averageable(tensor):
            raise ValueError(
                f"A client's training changed {where}, a tensor of the layout {tensor.layout} and dtype {tensor.dtype},"
                " which has no mean over clients: keep it dense and of plain numbers."
            )


def _numbers(tensor: Tensor) -> Tensor:
    """A tensor as real numbers that can be added up."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().resolve_neg())
    # Floats of a byte know no arithmetic.
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
