"""Evaluation of the global model on validation or test data."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_fedstop.module.batches import BatchTransfer, length_of, limited
from lightning_fedstop.module.hooks import Hooks
from lightning_fedstop.module.logged import Reduce, ResultCollector, Results


def as_loaders(loaders: Any) -> list[Iterable[Any]]:
    """List the loaders in what ``val_dataloader`` or ``test_dataloader`` may return; none of them if ``None``."""
    if loaders is None:
        return []
    if isinstance(loaders, dict):
        return list(loaders.values())
    if isinstance(loaders, Sequence):
        return list(loaders)
    return [loaders]


def given_loaders(name: str, *owners: Any) -> Any:
    """Get loaders of the first owner, data module or module, that defines ``name``; ``None`` if no one does."""
    for owner in owners:
        parent = LightningModule if isinstance(owner, LightningModule) else LightningDataModule
        if owner is not None and is_overridden(name, owner, parent=parent):
            return getattr(owner, name)()
    return None


class Evaluator:
    """Runs ``validation_step`` or ``test_step`` over loaders, with the hooks of a ``Trainer``.

    The batches are dealt to the processes in turn.

    Args:
        module: the module, which holds the global model.
        fabric: precision and processes.
        transfer: brings a batch to the device.
        collector: takes what the module logs.
        hooks: calls the hooks of callbacks and module.
        stage: ``"validation"`` or ``"test"``.
        limit: at most this many batches of a loader (int), or this share of them (float).
    """

    def __init__(
        self,
        module: LightningModule,
        fabric: Fabric,
        transfer: BatchTransfer,
        collector: ResultCollector,
        hooks: Hooks,
        stage: str,
        limit: int | float | None,
    ) -> None:
        self.module = module
        self.fabric = fabric
        self.transfer = transfer
        self.collector = collector
        self.hooks = hooks
        self.stage = stage
        self.limit = limit
        self.step = getattr(module, f"{stage}_step")

    @property
    def is_wanted(self) -> bool:
        """True if data would be evaluated: the module has a step of its own, and the limit is above 0."""
        return self.limit != 0 and is_overridden(f"{self.stage}_step", self.module)

    def num_batches(self, loaders: Sequence[Iterable[Any]]) -> list[int | float]:
        """Batches per loader; infinite where a loader does not know."""
        counts: list[int | float] = []
        for loader in loaders:
            total = math.inf if (length := length_of(loader)) is None else length
            if isinstance(self.limit, float) and total < math.inf:
                total = max(1, int(self.limit * total))
            elif isinstance(self.limit, int):
                total = min(self.limit, total)
            counts.append(total)
        return counts

    def run(
        self,
        loaders: Sequence[Iterable[Any]],
        reduce: Reduce,
        gather: Callable[[list[Any]], Iterable[Any]],
        report: Callable[[Results], None],
    ) -> None:
        """Evaluate; ``report`` takes the metrics before the last hook, whose callbacks may monitor them."""
        stage, hooks = self.stage, self.hooks
        with self.collector.attached(), torch.no_grad():
            hooks(f"on_{stage}_model_eval")
            was_training = [module for module in self.module.modules() if module.training]
            self.module.eval()
            hooks(f"on_{stage}_start")
            hooks(f"on_{stage}_epoch_start")
            for index, loader in enumerate(loaders):
                self.collector.dataloader_suffix = f"/dataloader_idx_{index}" if len(loaders) > 1 else ""
                self._run_loader(index if len(loaders) > 1 else None, loader)
            self.collector.dataloader_suffix = ""
            hooks(f"on_{stage}_epoch_end")
            report(self.collector.compute(reduce, gather))
            hooks(f"on_{stage}_end")
            for module in was_training:
                module.training = True
            hooks(f"on_{stage}_model_train")

    def _run_loader(self, index: int | None, loader: Iterable[Any]) -> None:
        takes_batch_idx = is_param_in_hook_signature(self.step, "batch_idx", min_args=2)
        takes_loader_idx = is_param_in_hook_signature(self.step, "dataloader_idx", min_args=3)
        # As in a `Trainer`, a loader has an index only among several: hooks may leave the argument out otherwise.
        number = () if index is None else (index,)
        for batch_idx, batch in enumerate(limited(loader, self.limit)):
            if batch_idx % self.fabric.world_size != self.fabric.global_rank:
                continue
            batch = self.transfer(batch, index or 0)
            self.collector.start_batch(batch)
            self.hooks(f"on_{self.stage}_batch_start", batch, batch_idx, *number)
            arguments = [batch, *[batch_idx] * takes_batch_idx, *number * takes_loader_idx]
            with self.fabric.autocast(), self.hooks.naming(f"{self.stage}_step"):
                outputs = self.step(*arguments)
            self.hooks(f"on_{self.stage}_batch_end", outputs, batch, batch_idx, *number)
        self.collector.start_batch(None)


@dataclass
class Evaluation:
    """One kind of evaluation of the global model.

    Attributes:
        stage: on validation or on test data.
        evaluator: runs it.
        loaders: the data; none of them where there is nothing to evaluate.
        every: rounds of a fit from one to the next; ``None`` for never.
    """

    stage: RunningStage
    evaluator: Evaluator
    loaders: list[Iterable[Any]]
    every: int | None

    def is_due(self, round: int) -> bool:
        """Check whether it is due after this round, counted from 1."""
        return bool(self.loaders) and self.every is not None and round % self.every == 0
