"""What happens around the rounds: launch, set-up, checkpoints, evaluation on its own, the end."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fedstop.arguments import check_callbacks, check_federation, check_module, reorder_callbacks
from lightning_fedstop.client_state import ClientStates
from lightning_fedstop.cohort import Cohort
from lightning_fedstop.evaluation import Evaluator, loaders_of
from lightning_fedstop.hooks import Hooks
from lightning_fedstop.local import LocalTrainer
from lightning_fedstop.methods import FederatedMethod
from lightning_fedstop.parameters import FlatParameters
from lightning_fedstop.progress import RoundProgressBar, wants_progress_bar
from lightning_fedstop.records.run_record import RunRecord
from lightning_fedstop.records.summary import print_metrics
from lightning_fedstop.results import ResultCollector, Results
from lightning_fedstop.saving import Saving
from lightning_fedstop.seeding import resolve_seed
from lightning_fedstop.server import OnNonfinite, Server, Weighting, gather, reduce
from lightning_fedstop.solver import LocalSolver
from lightning_fedstop.transfer import BatchTransfer


class Lifecycle(Saving):
    """The frame of :class:`~lightning_fedstop.loop.FederatedLoop`, which fills in the rounds.

    Args:
        callbacks: the user's.
        logger: the user's choice.
        enable_progress_bar: the user's choice.
        enable_checkpointing: the user's choice.
    """

    method: FederatedMethod
    cohort: Cohort
    clients_per_round: int | float
    local_epochs: int
    weighting: Weighting
    on_nonfinite: OnNonfinite
    drop_single_sample_batches: bool
    client_states: ClientStates
    limit_train_batches: int | float | None
    limit_val_batches: int | float | None
    limit_test_batches: int | float | None
    seed: int | None

    def __init__(
        self,
        callbacks: list[Callback],
        logger: Logger | list[Logger] | bool | None,
        enable_progress_bar: bool | None,
        enable_checkpointing: bool | None,
    ) -> None:
        super().__init__()
        self.record: RunRecord | None = None
        self._logger = logger
        self._prints = enable_progress_bar is not False
        self._default_checkpoint: ModelCheckpoint | None = None
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if not has_bar and wants_progress_bar(enable_progress_bar):
            callbacks = [*callbacks, RoundProgressBar()]
        saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
        if enable_checkpointing is not False and not saves and not self.fast_dev_run:
            self._default_checkpoint = ModelCheckpoint(
                filename="last", enable_version_counter=False, save_on_train_epoch_end=True
            )
            callbacks = [*callbacks, self._default_checkpoint]
        self._callbacks = callbacks
        self._fresh_callbacks: dict[Callback, dict[str, Any]] = {}
        self.callbacks = reorder_callbacks(callbacks)
        self.loggers = self._user_loggers()

    def _user_loggers(self) -> list[Logger]:
        if self.fast_dev_run:
            return [DummyLogger()]
        if isinstance(self._logger, Logger):
            return [self._logger]
        return list(self._logger) if isinstance(self._logger, list | tuple) else []

    @property
    def log_dir(self) -> str | None:
        """The run's version folder, the same on every process; ``None`` where nothing is written."""
        return None if self.record is None else self.record.log_dir

    @contextmanager
    def _running(
        self, fn: TrainerFn, stage: RunningStage, name: str, model: object, datamodule: Any, ckpt_path: Any
    ) -> Iterator[None]:
        """Launch and set up before the block, report an exception inside it, tear down after it."""
        self._began = time.perf_counter()
        module = check_module(model, trains=fn == TrainerFn.FITTING)
        if not self.fabric._launched:
            self.fabric.launch()
        self._enter(fn, stage)
        self.lightning_module = self.module = module
        self.datamodule = datamodule
        module.trainer = self  # type: ignore[assignment]
        self.callbacks = self._with_callbacks_of(module)
        self.hooks = Hooks(self, module)
        self.collector = ResultCollector(module)
        self.parameters: FlatParameters | None = None
        self.callback_metrics, self.progress_bar_metrics = {}, {}
        self._start_row({})
        try:
            self._loaded = self._read(ckpt_path)
            self._setup(name)
            yield
            self._teardown(name)
            self.state.status = TrainerStatus.FINISHED
        except BaseException as exception:
            self._on_exception(exception)
            raise
        finally:
            self._release()

    def _with_callbacks_of(self, module: LightningModule) -> list[Callback]:
        """The loop's callbacks and those the module configures, which replace the loop's of the same class."""
        configured = module.configure_callbacks()
        own = [configured] if isinstance(configured, Callback) else list(configured)
        check_callbacks(own)
        replaced = {type(callback) for callback in own} - {Callback}
        return reorder_callbacks([callback for callback in self._callbacks if type(callback) not in replaced] + own)

    def _reset_callbacks(self) -> None:
        """Let a second fit start clean: Lightning's own monitors keep what they saw in the first."""
        for callback in self.callbacks:
            if type(callback) in (EarlyStopping, ModelCheckpoint):
                fresh = self._fresh_callbacks.setdefault(callback, deepcopy(vars(callback)))
                vars(callback).clear()
                vars(callback).update(deepcopy(fresh))

    def _setup(self, stage: str) -> None:
        """Data, module and callbacks, in a ``Trainer``'s order."""
        data, module, hooks = self.datamodule, self.module, self.hooks
        if stage == "fit":
            self._reset_callbacks()
        for callback in self.callbacks:
            if isinstance(callback, ProgressBar) and not self.is_global_zero:
                callback.disable()
        if self.local_rank == 0:
            if data is not None:
                data.prepare_data()
            module.prepare_data()
        self.fabric.barrier()
        if data is not None:
            data.trainer = self
            data.setup(stage)
        if stage == "fit":
            check_federation(self.clients_per_round, self.cohort, data, module, self.drop_single_sample_batches)
        self._open_record()
        hooks("setup", stage)
        module.configure_model()
        self.fabric.strategy.precision.convert_module(module)
        self.fabric.to_device(module)
        if data is not None and hasattr(data, "to"):
            data.to(self.fabric.device)
        self.transfer = BatchTransfer(module, data, self.fabric.strategy)

    def _open_record(self) -> None:
        """Take a version folder; what is written before it is known to be needed would litter."""
        if self.state.fn != TrainerFn.FITTING or self.fast_dev_run:
            return
        version = RunRecord(self.default_root_dir).version if self.is_global_zero else None
        self.record = RunRecord(self.default_root_dir, version=self.strategy.broadcast(version))
        if self._default_checkpoint is not None:
            self._default_checkpoint.dirpath = os.path.join(self.record.log_dir, "checkpoints")
        self.loggers = [self.record] if self._logger is True or self._logger is None else self._user_loggers()

    def _setup_fit(self) -> None:
        """Everything a round needs, with the checkpoint's state if there is one."""
        module, data = self.module, self.datamodule
        self.should_stop = False
        self.current_epoch = self.global_step = 0
        self.nonfinite_reason: str | None = None
        self.pending = False
        self.row: dict[str, Any] = {}
        self._load(self._loaded)
        parameters = FlatParameters(module)
        solver = LocalSolver(module)
        self.optimizers = [solver.optimizer]
        self.lr_scheduler_configs = [solver.scheduler_config] if solver.scheduler_config else []
        trainer = LocalTrainer(
            module,
            self.method,
            parameters,
            solver,
            self.fabric,
            self.transfer,
            self.collector,
            self.hooks,
            self.local_epochs,
            self.gradient_clip_val,
            self.limit_train_batches,
            self.drop_single_sample_batches,
        )
        self.server = Server(
            trainer,
            self.method,
            data,
            self.cohort,
            self.clients_per_round,
            self.weighting,
            self.on_nonfinite,
            self.client_states,
            self.log_dir,
            self.fabric,
            resolve_seed(self.seed),
            self.hooks,
        )
        self.parameters = parameters
        if self._loaded is not None:
            self._restore(self._loaded)
            self._loaded = None

    def _evaluator(self, stage: str, limit: int | float | None) -> Evaluator:
        return Evaluator(self.module, self.fabric, self.transfer, self.collector, self.hooks, stage, limit)

    def _evaluate(
        self, evaluator: Evaluator, loaders: Sequence[Iterable[Any]], stage: RunningStage
    ) -> dict[str, float]:
        """Evaluate what the module holds; gives the metrics logged."""
        before, self.state.stage = self.state.stage, stage
        reported: dict[str, torch.Tensor] = {}

        def report(results: Results) -> None:
            reported.update(results.callback)
            self._take(results)

        evaluator.run(loaders, partial(reduce, self.fabric), partial(gather, self.fabric), report)
        self.state.stage = before
        return {name: float(value) for name, value in reported.items()}

    def _evaluate_alone(
        self, fn: TrainerFn, model: LightningModule | None, datamodule: Any, ckpt_path: Any, verbose: bool
    ) -> list[dict[str, float]]:
        name, stage, limit = {
            TrainerFn.VALIDATING: ("validation", RunningStage.VALIDATING, self.limit_val_batches),
            TrainerFn.TESTING: ("test", RunningStage.TESTING, self.limit_test_batches),
        }[fn]
        if model is None:
            model, datamodule = self.lightning_module, datamodule or self.datamodule
        with self._running(fn, stage, stage.value, model, datamodule, ckpt_path):
            self._load(self._loaded)
            loader = f"{stage.dataloader_prefix}_dataloader"
            loaders = loaders_of(loader, datamodule, self.module)
            evaluator = self._evaluator(name, limit)
            counts = evaluator.num_batches(loaders)
            self.num_val_batches, self.num_test_batches = (counts, []) if name == "validation" else ([], counts)
            if not loaders or not evaluator.is_wanted:
                raise MisconfigurationException(
                    f"There is nothing to evaluate: {type(self.module).__name__} needs a `{name}_step` of its own,"
                    f" and `{loader}` must give batches."
                )
            metrics = self._evaluate(evaluator, loaders, stage)
            self._report_to_loggers(metrics)
        if verbose and self.is_global_zero:
            print_metrics(metrics)
        return [metrics]

    def _on_exception(self, exception: BaseException) -> None:
        interrupted = isinstance(exception, KeyboardInterrupt)
        self.state.status = TrainerStatus.INTERRUPTED
        self.hooks("on_exception", exception)
        if isinstance(self.datamodule, LightningDataModule):
            self.datamodule.on_exception(exception)
        if self.is_global_zero:
            for logger in self.loggers:
                logger.finalize("interrupted" if interrupted else "failed")

    def _teardown(self, stage: str) -> None:
        """Call the hooks, which a ``Trainer`` leaves out after an exception."""
        if self.datamodule is not None:
            self.datamodule.teardown(stage)
        self.hooks("teardown", stage)

    def _release(self) -> None:
        """Give the module back as an ordinary one that holds the global model."""
        if self.parameters is not None:
            self.server.abandon_round()
            self.parameters.release()
            self.client_states.close()
            self.parameters = None
        self.state.stage = None
