"""What happens around the rounds: launch, set-up, checkpoints, evaluation on its own, the end."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus

from lightning_fedstop.core.client_states import ClientStates
from lightning_fedstop.core.parameters import FlatParameters, check_tensors
from lightning_fedstop.core.processes import launch, shared_failure, watched_parent
from lightning_fedstop.core.seeding import resolve_seed
from lightning_fedstop.federation.backends.choice import ClientBackend, make_trainer
from lightning_fedstop.federation.cohort import Cohort
from lightning_fedstop.federation.local_training import LocalSettings
from lightning_fedstop.federation.server import OnNonfinite, Server, Weighting
from lightning_fedstop.loop.arguments import check_callbacks, check_federation, check_module, reorder_callbacks
from lightning_fedstop.loop.evaluating import Evaluating
from lightning_fedstop.loop.progress import RoundLines, RoundProgressBar, wants_progress_bar
from lightning_fedstop.loop.resume import clients_known, run_settings
from lightning_fedstop.loop.signals import SignalGuard, Terminated
from lightning_fedstop.methods import FederatedMethod
from lightning_fedstop.module.batches import BatchTransfer
from lightning_fedstop.module.hooks import Hooks
from lightning_fedstop.module.logged import ResultCollector
from lightning_fedstop.module.optimizer import LocalSolver
from lightning_fedstop.stopping.callbacks.task_vector import TaskVectorEarlyStopping


class Lifecycle(Evaluating):
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
    client_backend: ClientBackend
    stack_chunk_size: int | None
    seed: int | None

    def __init__(
        self,
        callbacks: list[Callback],
        logger: Logger | list[Logger] | bool | None,
        enable_progress_bar: bool | None,
        enable_checkpointing: bool | None,
    ) -> None:
        super().__init__()
        self.record = None
        self._first_scale: dict[str, Any] = {}
        self.signals = SignalGuard()
        self._logger = logger
        self._default_checkpoint: ModelCheckpoint | None = None
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if not has_bar and wants_progress_bar(enable_progress_bar):
            callbacks = [*callbacks, RoundProgressBar()]
        elif not has_bar and enable_progress_bar is None:
            callbacks = [*callbacks, RoundLines()]
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

    @contextmanager
    def _running(
        self, fn: TrainerFn, stage: RunningStage, name: str, model: object, datamodule: Any, ckpt_path: Any
    ) -> Iterator[None]:
        """Launch and set up before the block, report an exception inside it, tear down after it."""
        self._began = time.perf_counter()
        module = check_module(model, trains=fn == TrainerFn.FITTING)
        if not self.fabric._launched:
            launch(self.fabric)
        self._enter(fn, stage)
        self.lightning_module = self.module = module
        self.datamodule = datamodule
        module.trainer = self  # type: ignore[assignment]
        self.callbacks = self._with_callbacks_of(module)
        self.hooks = Hooks(self, module)
        self.collector = ResultCollector(module)
        self.parameters: FlatParameters | None = None
        self.callback_metrics, self.progress_bar_metrics = {}, {}
        self._train_dataloader = None
        self._start_row({})
        try:
            with self.signals, watched_parent():
                self._loaded = self._read(ckpt_path)
                self._setup(name)
                yield
                self._teardown(name)
                self.state.status = TrainerStatus.FINISHED
        except BaseException as exception:
            self._on_exception(exception)
            if self.parameters is None or self._loaded is not None:
                self._discard_record()
            if (reason := shared_failure(self.fabric, exception)) is not None:
                raise RuntimeError(f"The run ended because {reason}") from exception
            raise
        finally:
            self._release()

    def _with_callbacks_of(self, module: LightningModule) -> list[Callback]:
        """The loop's callbacks and those the module configures, which replace the loop's of the same class."""
        configured = module.configure_callbacks()
        own = [configured] if isinstance(configured, Callback) else list(configured)
        check_callbacks(own, self.max_rounds)
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
        if stage == "fit":
            check_tensors(module)
        self.fabric.strategy.precision.convert_module(module)
        self.fabric.to_device(module)
        if data is not None and hasattr(data, "to"):
            data.to(self.fabric.device)
        self.transfer = BatchTransfer(module, data, self.fabric.strategy)

    def _setup_fit(self) -> None:
        """Everything a round needs, with the checkpoint's state if there is one."""
        module, data = self.module, self.datamodule
        self.should_stop = False
        self._criterion_total = 0.0
        self._state_file = None
        self._write_config()
        precision = self.fabric.strategy.precision
        self._first_scale = self._first_scale or precision.state_dict()
        precision.load_state_dict(self._first_scale)
        self._has_told_of_skips = self._skipped_all = False
        self._renamed = set()
        self.current_epoch = self.global_step = 0
        self.nonfinite_reason: str | None = None
        self.pending = False
        self.row: dict[str, Any] = {}
        self._load(self._loaded)
        parameters = FlatParameters(module)
        solver = LocalSolver(module)
        self._settings = run_settings(self, solver)
        # The digest of a partition tells more, and a list of very many clients would be most of a checkpoint.
        self._clients = {} if self._partition_digest() else clients_known(data)
        self._solver = solver
        self.lr_scheduler_configs = [solver.scheduler_config] if solver.scheduler_config else []
        trainer = make_trainer(
            self.client_backend,
            self.stack_chunk_size,
            self._arguments["devices"],
            module,
            self.method,
            parameters,
            solver,
            self.fabric,
            self.transfer,
            self.collector,
            self.hooks,
            LocalSettings(
                self.local_epochs, self.gradient_clip_val, self.limit_train_batches, self.drop_single_sample_batches
            ),
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
            self._start_device(),
        )
        self.parameters = parameters
        if self._loaded is not None:
            self._restore(self._loaded)
            self._loaded = None

    def _start_device(self) -> str | None:
        """Where a rule wants the weights that the run began with to be held."""
        rules = [callback for callback in self.callbacks if isinstance(callback, TaskVectorEarlyStopping)]
        return next((device for rule in rules if (device := rule.criterion.start_device)), None)

    def _on_exception(self, exception: BaseException) -> None:
        interrupted = isinstance(exception, KeyboardInterrupt | Terminated)
        self.state.status = TrainerStatus.INTERRUPTED
        self.hooks("on_exception", exception)
        if isinstance(self.datamodule, LightningDataModule):
            self.datamodule.on_exception(exception)
        if self.is_global_zero:
            for logger in self.loggers:
                with suppress(OSError):  # on a full disk, what has been said of it stays the last word
                    logger.finalize("interrupted" if interrupted else "failed")
            if interrupted and self.state.fn == TrainerFn.FITTING:
                print(f"\n{self._where_to_resume()}", file=sys.stderr, flush=True)

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
        self._unlock()
        self.state.stage = None
