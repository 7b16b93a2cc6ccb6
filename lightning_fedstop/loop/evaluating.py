"""Evaluation during a fit, after it, and on its own."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fedstop.core.processes import gather, reduce
from lightning_fedstop.federation.local_training import local_progress
from lightning_fedstop.loop.saving import Saving
from lightning_fedstop.module.batches import BatchTransfer
from lightning_fedstop.module.evaluator import Evaluation, Evaluator, as_loaders, given_loaders
from lightning_fedstop.module.hooks import Hooks
from lightning_fedstop.module.logged import ResultCollector, Results
from lightning_fedstop.records.summary import print_metrics


class Evaluating(Saving):
    """The part of :class:`~lightning_fedstop.loop.FederatedLoop` that looks at validation and test data."""

    hooks: Hooks
    transfer: BatchTransfer
    collector: ResultCollector
    limit_val_batches: int | float | None
    limit_test_batches: int | float | None
    _loaded: dict[str, Any] | None

    @property
    def train_dataloader(self) -> Any:
        """The loader of the client that is trained; otherwise the data module's, of all clients' data."""
        if (progress := local_progress.get()) is not None:
            return getattr(progress.batches, "given", progress.batches)
        if self.state.fn == TrainerFn.FITTING and self._train_dataloader is None:
            self._train_dataloader = given_loaders("train_dataloader", self.datamodule, self.lightning_module)
        return self._train_dataloader

    def _running(self, *arguments: Any) -> AbstractContextManager[None]:
        raise NotImplementedError

    def _evaluation(self, stage: RunningStage, every: int | None = 1) -> Evaluation:
        """The evaluation on validation or test data; it has no loaders where there is nothing to evaluate."""
        is_test = stage == RunningStage.TESTING
        name, limit = ("test", self.limit_test_batches) if is_test else ("validation", self.limit_val_batches)
        evaluator = Evaluator(self.module, self.fabric, self.transfer, self.collector, self.hooks, name, limit)
        given = None
        if evaluator.is_wanted and every is not None:
            if is_test and self.state.fn == TrainerFn.FITTING:
                self.datamodule.setup("test")
            given = given_loaders(f"{stage.dataloader_prefix}_dataloader", self.datamodule, self.module)
        loaders = as_loaders(given)
        counts = evaluator.num_batches(loaders)
        if is_test:
            self.num_test_batches, self.test_dataloaders = counts, given
        else:
            self.num_val_batches, self.val_dataloaders = counts, given
        return Evaluation(stage, evaluator, loaders, every)

    def _evaluate(self, evaluation: Evaluation) -> dict[str, float]:
        """Evaluate what the module holds; gives the metrics logged."""
        before, self.state.stage = self.state.stage, evaluation.stage
        reported: dict[str, torch.Tensor] = {}

        def report(results: Results) -> None:
            reported.update(results.callback)
            self._take(results)

        evaluation.evaluator.run(evaluation.loaders, partial(reduce, self.fabric), partial(gather, self.fabric), report)
        self.state.stage = before
        return {name: float(value) for name, value in reported.items()}

    def _evaluate_averages(self, evaluation: Evaluation) -> dict[str, dict[str, float]]:
        """The figures of the average that a stopping rule offers beside the last model, by its ``state_key``."""
        figures = {}
        for callback in self.callbacks:
            average = getattr(callback, "saturation_average", None)
            if average is not None and average.rounds and callback.stopped:  # type: ignore[attr-defined]
                with average.held_by(self.module):
                    figures[callback.state_key] = self._evaluate(evaluation)
        return figures

    def _evaluate_alone(
        self, fn: TrainerFn, model: LightningModule | None, datamodule: Any, ckpt_path: Any, verbose: bool
    ) -> list[dict[str, float]]:
        stage = RunningStage.TESTING if fn == TrainerFn.TESTING else RunningStage.VALIDATING
        if model is None:
            model, datamodule = self.lightning_module, datamodule or self.datamodule
        with self._running(fn, stage, stage.value, model, datamodule, ckpt_path):
            self._load(self._loaded)
            self.num_val_batches, self.num_test_batches = [], []
            self.val_dataloaders = self.test_dataloaders = None
            evaluation = self._evaluation(stage)
            if not evaluation.loaders:
                raise MisconfigurationException(
                    f"There is nothing to evaluate: {type(self.module).__name__} needs a"
                    f" `{evaluation.evaluator.stage}_step` of its own, and `{stage.dataloader_prefix}_dataloader` must"
                    " give batches."
                )
            metrics = self._evaluate(evaluation)
            self._report_to_loggers(metrics)
        if verbose and self.is_global_zero:
            print_metrics(metrics)
        return [metrics]
