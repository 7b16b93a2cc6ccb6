"""The mean of the global models of the rounds in which training has all but ceased to move.

Near the stop the model still swings from round to round around a place it no longer leaves, so the model of the last
round is one draw of many. Their mean needs no data to choose from them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class SaturationAverage:
    """A running mean of a module's trainable parameters and its buffers, over a run of rounds without a break.

    Floating buffers are averaged as parameters are; of others (counters) the largest is taken. Sums are kept in
    float64, so the memory is that of two copies of a float32 model.

    Attributes:
        rounds: Rounds in the mean.

    >>> module = nn.Linear(1, 1, bias=False)
    >>> average = SaturationAverage()
    >>> for weight, count in ((9.0, 0), (1.0, 1), (2.0, 2)):
    ...     _ = nn.init.constant_(module.weight, weight)
    ...     average.update(module, count)
    >>> average.rounds, average.mean()["weight"].item()
    (2, 1.5)
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all rounds."""
        self.rounds = 0
        self._sums: dict[str, Tensor] = {}
        self._types: dict[str, torch.dtype] = {}

    @torch.no_grad()
    def update(self, module: nn.Module, count: int) -> None:
        """Take in the model of a round.

        Args:
            module: It holds the model.
            count: The criterion's count after this round; 0 restarts the mean.
        """
        if count == 0:
            self.reset()
            return
        for name, tensor in _averaged(module):
            self._types[name] = tensor.dtype
            kind = torch.float64 if tensor.is_floating_point() and tensor.device.type != "mps" else None
            value = tensor.detach().to(kind, copy=True) if kind else tensor.detach().clone()
            before = self._sums.get(name)
            if before is None:
                self._sums[name] = value
            elif tensor.is_floating_point():
                before.to(value.device).add_(value)
            else:
                self._sums[name] = torch.maximum(before.to(value.device), value)
        self.rounds += 1

    def mean(self) -> dict[str, Tensor]:
        """The mean of each parameter and buffer by name, in the module's own types.

        Raises:
            RuntimeError: If there is no round to average.
        """
        if not self.rounds:
            raise RuntimeError("There is no round in the saturation average yet.")
        return {
            name: (total / self.rounds).to(self._types[name]) if total.is_floating_point() else total.clone()
            for name, total in self._sums.items()
        }

    @contextmanager
    def held_by(self, module: nn.Module) -> Iterator[None]:
        """Let the module hold the mean inside the block, and afterwards what it held before."""
        mean = self.mean()
        before = {name: tensor.detach().clone() for name, tensor in _averaged(module)}
        _write(module, mean)
        try:
            yield
        finally:
            _write(module, before)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers, so that ``torch.load(weights_only=True)`` reads it."""
        types = {name: str(kind).removeprefix("torch.") for name, kind in self._types.items()}
        return {"rounds": self.rounds, "sums": dict(self._sums), "types": types}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from a state."""
        self.rounds = state_dict["rounds"]
        self._sums = {name: total.clone() for name, total in state_dict["sums"].items()}
        self._types = {name: getattr(torch, kind) for name, kind in state_dict["types"].items()}


def _averaged(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
    yield from module.named_buffers()


@torch.no_grad()
def _write(module: nn.Module, values: dict[str, Tensor]) -> None:
    for name, tensor in _averaged(module):
        if name in values:
            tensor.copy_(values[name])
