"""One pass of several clients' batches through a module: losses, gradients and what was logged, with ``torch.func``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_fedstop.core.parameters import FlatParameters
from lightning_fedstop.federation.backends.stacked.batches import Group
from lightning_fedstop.module.logged import Caught, ResultCollector
from lightning_fedstop.module.training_pass import batch_end_outputs, loss_of


@dataclass
class Passed:
    """Outcome of a pass.

    Attributes:
        grad: shape ``(m, d)``.
        buffers: the buffers after the pass, each of shape ``(m, ...)``.
        skipped: whether ``training_step`` returned ``None``.
        outputs: those of ``on_train_batch_end``, with tensors of ``m`` rows.
    """

    grad: Tensor
    buffers: list[Tensor]
    skipped: bool
    outputs: dict[str, Any]

    def outputs_of(self, row: int) -> dict[str, Any]:
        """Outputs of one client."""
        leaves, spec = tree_flatten(self.outputs)
        return dict(tree_unflatten([leaf[row] if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec))


class _Step(nn.Module):
    """A module whose forward is another's ``training_step``, because ``functional_call`` calls nothing else."""

    def __init__(self, module: LightningModule, buffers: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self.names = [f"module.{name}" for name in buffers]

    def forward(self, *arguments: Any) -> tuple[Any, list[Tensor]]:
        outputs = self.module.training_step(*arguments)
        # Read here: a module may have put a new tensor in a buffer's place.
        return outputs, [self.get_buffer(name) for name in self.names]


class StackedPass:
    """Calls ``training_step`` once for a group of clients.

    Args:
        module: its trainable parameters are given to each pass; frozen ones are its own.
        parameters: the module's trainable parameters.
        buffers: the names of the buffers that training changes; each client has its own.
        collector: takes what the module logs.
        autocast: the precision's context.
        arguments: makes the arguments of ``training_step`` of a batch and its number.
    """

    def __init__(
        self,
        module: LightningModule,
        parameters: FlatParameters,
        buffers: Sequence[str],
        collector: ResultCollector,
        autocast: Callable[[], AbstractContextManager[Any]],
        arguments: Callable[[Any, int], tuple[Any, ...]],
    ) -> None:
        self.module = module
        self.parameters = parameters
        self.collector = collector
        self.autocast = autocast
        self.arguments = arguments
        self._step = _Step(module, buffers)
        self._names = [f"module.{name}" for name, _ in parameters.named]

    def __call__(self, x: Tensor, buffers: list[Tensor], group: Group) -> Passed:
        """Losses and gradients at the local models.

        Args:
            x: shape ``(m, d)``; the local models of the group's clients.
            buffers: their buffers, each of shape ``(m, ...)``; changed in place.
            group: their batches.
        """
        caught: list[Caught] = []
        notes: dict[str, Any] = {}

        def loss_at(
            x: Tensor, buffers: list[Tensor], tensors: list[Tensor], weights: Tensor | None
        ) -> tuple[Tensor, Any]:
            parts = zip(torch.split(x, self.parameters.sizes), self.parameters.parameters, strict=True)
            state = dict(zip(self._names, (part.view(p.shape) for part, p in parts), strict=True))
            state.update(zip(self._step.names, buffers, strict=True))
            arguments = self.arguments(group.batch(tensors), group.batch_idx)
            with self.collector.catching() as logged, _weighing(self.module, weights), self.autocast():
                outputs, after = functional_call(self._step, state, arguments)
            caught[:] = logged
            loss = loss_of(outputs)
            notes["skipped"] = loss is None
            leaves, notes["spec"] = tree_flatten(batch_end_outputs(outputs))
            notes["rest"] = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            tell = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
            values = [one.value.detach().reshape(()) for one in logged]
            loss = x.new_zeros(()) if loss is None else loss.reshape(())
            return loss, (after, tell, values)

        in_dims = (0, 0, 0, None if group.weights is None else 0)
        with torch.enable_grad():
            run = vmap(grad_and_value(loss_at, has_aux=True), in_dims, randomness="different")
            grad, (_, (after, tell, values)) = run(x, buffers, group.tensors, group.weights)
        for one, value in zip(caught, values, strict=True):
            one.entry.update_each(value.to(group.sizes.device), self._sizes(one.batch_size, group))
        rows = iter(tell)
        leaves = [next(rows) if rest is None else rest for rest in notes["rest"]]
        return Passed(grad.detach(), after, notes["skipped"], tree_unflatten(leaves, notes["spec"]))

    @staticmethod
    def _sizes(batch_size: int | None, group: Group) -> Tensor:
        """The weights of logged values: what the module gave, or the samples that are no padding."""
        if batch_size is None or batch_size == group.padded_size:
            return group.sizes
        return torch.full_like(group.sizes, batch_size)


@contextmanager
def _weighing(module: LightningModule, weights: Tensor | None) -> Iterator[None]:
    """Let ``per_sample_loss`` give padding no weight, so that the mean over all is the mean over the samples."""
    if weights is None:
        yield
        return
    losses: Callable[..., Tensor] = getattr(module, "per_sample_loss")  # noqa: B009 - a method that few modules have
    module.__dict__["per_sample_loss"] = lambda *arguments, **named: losses(*arguments, **named) * weights
    try:
        yield
    finally:
        del module.__dict__["per_sample_loss"]


def can_be_padded(module: LightningModule) -> bool:
    """True for a module with a ``per_sample_loss`` and no batch statistics; a trial shows whether padding is right."""
    norms = any(isinstance(layer, _BatchNorm) and layer.training for layer in module.modules())
    return callable(getattr(module, "per_sample_loss", None)) and not norms
