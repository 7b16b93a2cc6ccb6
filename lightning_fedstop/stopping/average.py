"""The mean of the global models of the rounds in which training hardly moves.

Near the stop the model still swings from round to round around a place it no longer leaves, so the model of the last
round is one draw of many. Their mean needs no data to choose from them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_MEANS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_MAXIMA = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class SaturationAverage:
    """Running mean of a module's trainable parameters and buffers over successive rounds.

    Floating and complex tensors are averaged; of integers (counters) and masks the largest is taken. Others (sparse,
    quantised, float8), and those that change their shape or are there in some rounds only, keep their last value. Sums
    are float64 and complex128, so the memory is that of two copies of a float32 model.

    Attributes:
        rounds: Rounds in the mean.
        left_out: Names of the tensors that keep their last value, with the reason.

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
        self.left_out: dict[str, str] = {}
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
        present = dict(_watched(module))
        for name in [*present, *(name for name in self._sums if name not in present)]:
            if name in self.left_out:
                continue
            if reason := self._reason_against(name, present.get(name)):
                self.left_out[name] = reason
                self._sums.pop(name, None)
            else:
                self._add(name, present[name].detach())
        self.rounds += 1

    def _reason_against(self, name: str, tensor: Tensor | None) -> str | None:
        """Name the reason that a tensor cannot be averaged, ``None`` without one."""
        total = self._sums.get(name)
        if tensor is None or (total is None and self.rounds):
            return "not in all of the rounds"
        if tensor.is_nested or tensor.layout is not torch.strided:
            return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        if tensor.dtype not in (*_MEANS, *_MAXIMA):
            return str(tensor.dtype).removeprefix("torch.")
        if total is not None and (total.shape != tensor.shape or self._types[name] != tensor.dtype):
            return "another shape or type"
        return None

    def _add(self, name: str, tensor: Tensor) -> None:
        total = self._sums.get(name)
        self._types[name] = tensor.dtype
        if total is None:
            self._sums[name] = tensor.to(_type_of_sum(tensor), copy=True)
            return
        total = total.to(tensor.device)
        self._sums[name] = torch.maximum(total, tensor) if tensor.dtype in _MAXIMA else total.add_(tensor)

    def mean(self) -> dict[str, Tensor]:
        """Mean of each parameter and buffer by name, in the module's own types.

        Raises:
            RuntimeError: If there is no round to average.
        """
        if not self.rounds:
            raise RuntimeError("There is no round in the saturation average yet.")
        return {
            name: total.clone() if self._types[name] in _MAXIMA else (total / self.rounds).to(self._types[name])
            for name, total in self._sums.items()
        }

    @contextmanager
    def held_by(self, module: nn.Module) -> Iterator[None]:
        """Let the module hold the mean inside the block, and its own values after it."""
        held = dict(_watched(module))
        mean = {name: value for name, value in self.mean().items() if _fits(held.get(name), value)}
        before = {name: held[name].detach().clone() for name in mean}
        _write(held, mean)
        try:
            yield
        finally:
            _write(held, before)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers, so that ``torch.load(weights_only=True)`` reads it."""
        types = {name: str(kind).removeprefix("torch.") for name, kind in self._types.items()}
        return {"rounds": self.rounds, "sums": dict(self._sums), "types": types, "left_out": dict(self.left_out)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from a state."""
        self.rounds = state_dict["rounds"]
        self._sums = {name: total.clone() for name, total in state_dict["sums"].items()}
        self._types = {name: getattr(torch, kind) for name, kind in state_dict["types"].items()}
        self.left_out = dict(state_dict["left_out"])


def _watched(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
    yield from module.named_buffers()


def _type_of_sum(tensor: Tensor) -> torch.dtype:
    # Apple's GPUs have no float64.
    if tensor.dtype in _MAXIMA or tensor.device.type == "mps":
        return tensor.dtype
    return torch.complex128 if tensor.is_complex() else torch.float64


def _fits(tensor: Tensor | None, value: Tensor) -> bool:
    """Check that a tensor can hold a value; a module may have changed since."""
    return tensor is not None and tensor.shape == value.shape and tensor.dtype == value.dtype


@torch.no_grad()
def _write(tensors: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        tensors[name].copy_(value)
