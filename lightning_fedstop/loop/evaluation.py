"""Evaluation of the global model during a fit, after it, and on its own."""

import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fedstop.core.processes import gather, reduce
from lightning_fedstop.module.evaluator import Evaluation, Evaluator, as_loaders, given_loaders
from lightning_fedstop.module.logged import Results

if TYPE_CHECKING:
    from lightning_fedstop.loop.federated_loop import FederatedLoop

Metrics = dict[str, float]


class LoopEvaluation:
    """Validation and test of the model that a loop's module holds.

    Args:
        loop: the loop, whose data, hooks and stage are used.
    """

    def __init__(self, loop: "FederatedLoop") -> None:
        self.loop = loop
        self._in_fit: list[Evaluation] = []

    def begin_fit(self) -> None:
        """Prepare the evaluations that come between rounds."""
        validation = self._prepare(RunningStage.VALIDATING, self.loop.check_val_every_n_round)
        self._in_fit = [self._prepare(RunningStage.TESTING, self.loop.check_test_every_n_round), validation]

    def run_due(self, round: int) -> None:
        """Run the evaluations that are due after a round, and record their time."""
        loop, began = self.loop, time.perf_counter()
        for evaluation in self._in_fit:
            if evaluation.is_due(round):
                # A checkpoint written by a callback during the evaluation lacks the rest of the round.
                loop.pending = True
                if evaluation.stage == RunningStage.VALIDATING:
                    loop.hooks("on_validation_model_zero_grad")
                self._run(evaluation)
        if loop.pending:
            loop.reporter.row["seconds_eval"] = time.perf_counter() - began

    def after_fit(self) -> tuple[Metrics, dict[str, Metrics]]:
        """Test the last model and the averages that stopping rules offer beside it.

        Returns:
            The figures of the last model, and those of each average by the ``state_key`` of its rule.
        """
        loop, evaluation = self.loop, self._prepare(RunningStage.TESTING)
        if not evaluation.loaders:
            return {}, {}
        loop.enter(TrainerFn.TESTING, RunningStage.TESTING)
        test = self._run(evaluation)
        loop.reporter.log_metrics(test)
        averages = {}
        for callback in loop.callbacks:
            average = getattr(callback, "saturation_average", None)
            if average is not None and average.rounds and callback.stopped:  # type: ignore[attr-defined]
                with average.held_by(loop.module):
                    averages[callback.state_key] = self._run(evaluation)
        loop.enter(TrainerFn.FITTING, None)
        return test, averages

    def alone(self, stage: RunningStage) -> Metrics:
        """Evaluate outside a fit.

        Raises:
            MisconfigurationException: if there is no data or no step to evaluate.
        """
        loop = self.loop
        loop.num_val_batches, loop.num_test_batches = [], []
        loop.val_dataloaders = loop.test_dataloaders = None
        evaluation = self._prepare(stage)
        if not evaluation.loaders:
            raise MisconfigurationException(
                f"There is nothing to evaluate: {type(loop.module).__name__} needs a"
                f" `{evaluation.evaluator.stage}_step` of its own, and `{stage.dataloader_prefix}_dataloader` must"
                " give batches."
            )
        metrics = self._run(evaluation)
        loop.reporter.log_metrics(metrics)
        return metrics

    def _prepare(self, stage: RunningStage, every: int | None = 1) -> Evaluation:
        """Prepare an evaluation, which has no loaders where there is nothing to evaluate."""
        loop, is_test = self.loop, stage == RunningStage.TESTING
        name, limit = ("test", loop.limit_test_batches) if is_test else ("validation", loop.limit_val_batches)
        evaluator = Evaluator(loop.module, loop.fabric, loop.transfer, loop.collector, loop.hooks, name, limit)
        given = None
        if evaluator.is_wanted and every is not None:
            if is_test and loop.state.fn == TrainerFn.FITTING:
                loop.datamodule.setup("test")
            given = given_loaders(f"{stage.dataloader_prefix}_dataloader", loop.datamodule, loop.module)
        loaders = as_loaders(given)
        counts = evaluator.num_batches(loaders)
        if is_test:
            loop.num_test_batches, loop.test_dataloaders = counts, given
        else:
            loop.num_val_batches, loop.val_dataloaders = counts, given
        return Evaluation(stage, evaluator, loaders, every)

    def _run(self, evaluation: Evaluation) -> Metrics:
        """Evaluate what the module holds; gives the metrics logged."""
        loop = self.loop
        before, loop.state.stage = loop.state.stage, evaluation.stage
        metrics: dict[str, torch.Tensor] = {}

        def publish(results: Results) -> None:
            metrics.update(results.callback)
            loop.reporter.publish(results)

        processes = partial(reduce, loop.fabric), partial(gather, loop.fabric)
        evaluation.evaluator.run(evaluation.loaders, *processes, publish)
        loop.state.stage = before
        return {name: float(value) for name, value in metrics.items()}
