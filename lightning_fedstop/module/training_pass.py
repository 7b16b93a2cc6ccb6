"""A pass over a batch: the module's ``training_step``, and the gradient of its loss."""

from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedstop.core.parameters import FlatParameters
from lightning_fedstop.module.hooks import Hooks
from lightning_fedstop.module.logged import ResultCollector
from lightning_fedstop.module.statistics import frozen_statistics


class TrainingPass:
    """Fills the vector of gradients from a batch, with a ``Trainer``'s hooks.

    Args:
        module: the module.
        parameters: its trainable parameters as a vector.
        optimizer: its optimizer, which hooks are given.
        fabric: precision, and the loss scale of ``16-mixed``.
        collector: takes what the module logs.
        hooks: calls the hooks of callbacks and module.
    """

    def __init__(
        self,
        module: LightningModule,
        parameters: FlatParameters,
        optimizer: Optimizer,
        fabric: Fabric,
        collector: ResultCollector,
        hooks: Hooks,
    ) -> None:
        self.module = module
        self.parameters = parameters
        self.optimizer = optimizer
        self.autocast = fabric.autocast
        self.precision = fabric.strategy.precision
        self.scaler = getattr(self.precision, "scaler", None)
        self.collector = collector
        self.hooks = hooks
        self.takes_batch_idx = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._owns_backward = is_overridden("backward", module)
        self._owns_zero_grad = is_overridden("optimizer_zero_grad", module)
        self._has_warned = False

    def arguments(self, batch: Any, batch_idx: int) -> tuple[Any, ...]:
        """Arguments that ``training_step`` takes of the two."""
        return (batch, batch_idx) if self.takes_batch_idx else (batch,)

    def __call__(self, batch: Any, batch_idx: int, first: bool = True) -> Any:
        """Fill the gradient at the module's present parameters.

        Args:
            batch: a batch on the device.
            batch_idx: its number in the epoch.
            first: the pass is the first of a step; others count for no running statistic, metric or logged value.

        Returns:
            What ``training_step`` returned; ``None`` for a batch to skip.
        """
        if first:
            return self._run(batch, batch_idx)
        with frozen_statistics(self.module, self.parameters.parameters), self.collector.muted():
            return self._run(batch, batch_idx)

    def _run(self, batch: Any, batch_idx: int) -> Any:
        with torch.enable_grad(), self.autocast():
            outputs = self.module.training_step(*self.arguments(batch, batch_idx))
        self.hooks("on_before_zero_grad", self.optimizer)
        self.hooks("optimizer_zero_grad", self.module.current_epoch, batch_idx, self.optimizer)
        if self._owns_zero_grad and self.parameters.has_grad and self.parameters.grad.any():
            raise MisconfigurationException(
                f"{type(self.module).__name__}.optimizer_zero_grad leaves gradients for the next batch to add to, but a"
                " local step takes the gradient of one batch: use a larger batch size."
            )
        self.parameters.zero_grad()
        loss = loss_of(outputs)
        if loss is None:
            self.warn_of_none()
            return None
        self.hooks("on_before_backward", loss)
        if self._owns_backward:
            self.module.backward(self.scaler.scale(loss) if self.scaler else loss)
        else:
            self.precision.backward(loss, self.module)
        self.hooks("on_after_backward")
        self.parameters.gather_grad()
        if self.scaler:
            self.parameters.grad.div_(self.scaler.get_scale())
        return outputs

    def warn_of_none(self) -> None:
        """Warn once that a ``training_step`` returned ``None``."""
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn("`training_step` returned None, which skips the batch; that is fine if it is on purpose.")


class BatchPasses:
    """The passes of one local step over its batch.

    Args:
        run: takes a pass.
        batch: the batch on the device.
        batch_idx: its number in the epoch.

    Attributes:
        outputs: what ``training_step`` returned in the first pass; ``None`` for a batch to skip.
        overflowed: the gradient is not finite at the loss scale, so that the step is skipped.
    """

    def __init__(self, run: TrainingPass, batch: Any, batch_idx: int) -> None:
        self.run = run
        self.batch = batch
        self.batch_idx = batch_idx
        self.outputs: Any = None
        self.overflowed = False

    def backward(self, first: bool) -> None:
        """Take a pass at the module's present parameters."""
        outputs = self.run(self.batch, self.batch_idx, first)
        if first:
            self.outputs, self.overflowed = outputs, False


def loss_of(outputs: Any) -> Tensor | None:
    """Loss in what ``training_step`` returned.

    Raises:
        TypeError: if there is none.
    """
    if isinstance(outputs, dict) and "loss" not in outputs:
        raise TypeError(
            f"`training_step` must return a dict with 'loss', got one with {', '.join(map(repr, outputs))}."
        )
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs
    if loss is None or isinstance(loss, Tensor):
        return loss
    raise TypeError(
        f"`training_step` must return a loss tensor, a dict with 'loss', or None, got {type(loss).__name__}."
    )


def batch_end_outputs(outputs: Any) -> dict[str, Any]:
    """Outputs that ``on_train_batch_end`` is given: ``loss`` and what else was returned; empty for a skipped batch."""
    extra = outputs if isinstance(outputs, dict) else {}
    loss = loss_of(outputs)
    return {} if loss is None else {**extra, "loss": loss.detach()}
