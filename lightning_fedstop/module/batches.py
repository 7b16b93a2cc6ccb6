"""Brings a batch to the device through the hooks of the data module or the module, as a ``Trainer`` does."""

from typing import Any

import torch
from lightning.fabric.strategies import Strategy
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class BatchTransfer:
    """Calls the three transfer hooks; a hook that the data module overrides wins over the module's.

    Args:
        module: the module that will see the batch.
        datamodule: the data module that made it, if any.
        strategy: gives the device, and the input dtype of a "true" precision.
    """

    def __init__(self, module: LightningModule, datamodule: LightningDataModule | None, strategy: Strategy) -> None:
        self._arguments = (datamodule, strategy)
        owners = [
            datamodule if datamodule is not None and is_overridden(hook, datamodule) else module for hook in HOOKS
        ]
        self._before, self._move, self._after = (getattr(o, hook) for o, hook in zip(owners, HOOKS, strict=True))
        self._is_users_move = is_overridden(HOOKS[1], owners[1])
        self.device: torch.device = strategy.root_device
        # As in a `Trainer`: autocast takes care of a mixed precision, and "32-true" leaves the data's dtype alone.
        converts = strategy.precision.precision in ("16-true", "bf16-true", "64-true")
        self._convert = strategy.precision.convert_input if converts else (lambda batch: batch)

    def of_copy(self, module: LightningModule) -> "BatchTransfer":
        """The same for a copy of the module."""
        return BatchTransfer(module, *self._arguments)

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """The batch as ``training_step`` sees it."""
        batch = self._before(batch, dataloader_idx)
        if self._is_users_move or not self._is_there(batch):
            batch = self._move(batch, self.device, dataloader_idx)
        return self._convert(self._after(batch, dataloader_idx))

    def _is_there(self, batch: Any) -> bool:
        """Whether a batch of the usual form is on the device; to look for tensors in any form takes much longer."""
        return type(batch) in (tuple, list) and all(type(x) is Tensor and x.device == self.device for x in batch)
