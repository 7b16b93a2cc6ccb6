"""The federated training loop, built on Lightning Fabric."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from torch import Tensor

from lightning_fedstop.core.client_states import ClientStates
from lightning_fedstop.core.parameters import FlatParameters, check_tensors
from lightning_fedstop.core.processes import launch, shared_failure, watched_parent
from lightning_fedstop.core.seeding import resolve_seed
from lightning_fedstop.federation.backends.choice import ClientBackend, make_backend
from lightning_fedstop.federation.cohort import Cohort, UniformCohort
from lightning_fedstop.federation.local_training import LocalSettings, LocalTrainer
from lightning_fedstop.federation.server import OnNonfinite, Server, Weighting
from lightning_fedstop.loop.arguments import (
    check_arguments,
    check_datamodule,
    check_federation,
    check_module,
    make_fabric,
    reorder_callbacks,
)
from lightning_fedstop.loop.callbacks import LoopCallbacks
from lightning_fedstop.loop.checkpoint import Checkpoints
from lightning_fedstop.loop.evaluation import LoopEvaluation
from lightning_fedstop.loop.reporting import Reporter, nonfinite_updates
from lightning_fedstop.loop.signals import SignalGuard, Terminated
from lightning_fedstop.loop.trainer_interface import TrainerInterface
from lightning_fedstop.methods import FedAvg, FederatedMethod
from lightning_fedstop.module.batches import BatchTransfer
from lightning_fedstop.module.hooks import Hooks
from lightning_fedstop.module.logged import ResultCollector
from lightning_fedstop.module.optimizer import LocalSolver
from lightning_fedstop.records.config import described
from lightning_fedstop.records.run_record import RunRecord
from lightning_fedstop.records.summary import print_metrics
from lightning_fedstop.stopping.callbacks.task_vector import TaskVectorEarlyStopping
from lightning_fedstop.utilities.paths import local_path


class FederatedLoop(TrainerInterface):
    """Trains a ``LightningModule`` over the clients of a federation; looks like a ``Trainer`` from outside.

    One round is one training epoch: callbacks see ``current_epoch`` rounds finished, evaluation comes before
    ``on_train_epoch_end``, and two more hooks, ``on_client_start(loop, module, client)`` and ``on_client_end``, frame
    each client's training. Between rounds the module holds the global model, in a client's training the local one.
    Weights, rates and buffers that hooks change between rounds are those that the next round starts from, as in a
    ``Trainer``; those changed in ``on_client_start`` hold for this client alone, whose update is measured from the
    global model. On several processes the first one's weights count.

    Args:
        method: the federated method; :class:`~lightning_fedstop.methods.FedAvg` by default.
        max_rounds: R, the budget of rounds.
        clients_per_round: M, the clients in a round: an integer, or a fraction of all clients as a float.
        local_epochs: E, a client's passes over its data in a round.
        min_rounds: rounds before which nothing stops the run; an earlier stop is decided again each round.
        gradient_clip_val: C, the largest norm of a corrected gradient over the whole trainable vector.
        cohort: who takes part; :class:`~lightning_fedstop.federation.cohort.UniformCohort` by default.
        weighting: ``"uniform"``, each client of the cohort counts the same (equation (1) of the paper), or
            ``"samples"``, each counts by its samples (McMahan et al. 2017).
        on_nonfinite: when a client's update is not finite, ``"stop"`` ends the run with the last finite global model,
            ``"drop"`` leaves the update out, ``"keep"`` lets it in.
        client_states: where a method's vectors of clients are kept, in memory by default.
        drop_single_sample_batches: leave out training batches of one sample, on which BatchNorm has no statistics;
            otherwise a federation of such a module that has one is refused.
        client_backend: the way in which a process trains its clients. ``"sequential"``: one after the other.
            ``"threads"``: several at once on a CPU, each in a thread with a copy of the module, to the same bits; on
            your word that a step draws no random numbers and changes nothing but parameters and buffers, and that the
            data may be read by several threads at once (``docs/speed.md``, "Clients in threads").
            ``"auto"`` (default): with ``devices="auto"`` on a CPU threads if module and data declare
            ``is_thread_safe = True`` in their own class, as :class:`~lightning_fedstop.models.ImageClassifier` and the
            image sets of this package do; otherwise one after the other. ``"stacked"``: all at once, as one stack of
            models, equal up to rounding and meant for accelerators; what cannot be stacked is trained one after the
            other, with a warning that says why.
        stack_chunk_size: clients in a stack at most, which bounds memory; by default all of a process.
        accelerator: as in ``Trainer``, with ``strategy``, ``devices``, ``num_nodes`` and ``precision``. The processes
            train different clients; gradients are never synchronised.
        strategy: see ``accelerator``.
        devices: see ``accelerator``. On a CPU ``"auto"`` is one process, in which ``client_backend`` may take threads;
            more than 1 are processes.
        num_nodes: see ``accelerator``.
        precision: see ``accelerator``; the global model and the updates stay at least float32. With ``"16-mixed"`` the
            loss scale goes on from client to client, in each process its own, so the order of clients and the number of
            processes show in the steps that it skips.
        callbacks: as in ``Trainer``; Lightning's own and yours run unmodified.
        logger: a Lightning logger or several. ``True`` (default) logs to the run's record alone, ``False`` to nothing;
            the record is written in any case.
        check_val_every_n_round: rounds between evaluations on the validation data; ``None`` never evaluates.
        check_test_every_n_round: the same on the test data, for the record; by default only the last model is tested.
        limit_train_batches: batches of each client in each local epoch: at most so many (int), or a share (float).
        limit_val_batches: the same of the validation data; 0 switches it off.
        limit_test_batches: the same of the test data; 0 also switches off the test at the end of ``fit``.
        enable_progress_bar: ``None`` draws it in a terminal outside CI, and elsewhere logs a line every tenth of the
            rounds. The end's summary is printed in any case.
        enable_checkpointing: keep ``checkpoints/last.ckpt`` in the version folder unless a callback saves checkpoints.
        default_root_dir: where everything is written, the present folder by default.
        fast_dev_run: one round (or so many) of one batch each, which writes nothing.
        seed: root of all random streams; by default what ``seed_everything`` set, else 0.

    Raises:
        ValueError: for an argument out of its range, with what is allowed.
        TypeError: for an argument of another class.
    """

    def __init__(
        self,
        method: FederatedMethod | None = None,
        max_rounds: int = 500,
        clients_per_round: int | float = 0.1,
        local_epochs: int = 5,
        min_rounds: int = 0,
        gradient_clip_val: float | None = None,
        cohort: Cohort | None = None,
        weighting: Weighting = "uniform",
        on_nonfinite: OnNonfinite = "stop",
        client_states: ClientStates | None = None,
        drop_single_sample_batches: bool = False,
        client_backend: ClientBackend = "auto",
        stack_chunk_size: int | None = None,
        accelerator: str = "auto",
        strategy: str = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        precision: str | int | None = None,
        callbacks: list[Callback] | Callback | None = None,
        logger: Logger | list[Logger] | bool | None = None,
        check_val_every_n_round: int | None = 1,
        check_test_every_n_round: int | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        enable_progress_bar: bool | None = None,
        enable_checkpointing: bool | None = None,
        default_root_dir: str | os.PathLike[str] | None = None,
        fast_dev_run: int | bool = False,
        seed: int | None = None,
    ) -> None:
        method = FedAvg() if method is None else method
        cohort = UniformCohort() if cohort is None else cohort
        client_states = ClientStates() if client_states is None else client_states
        callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        check_arguments(arguments)
        if fast_dev_run:
            max_rounds = int(fast_dev_run)
            min_rounds = 0
            limit_train_batches = limit_val_batches = limit_test_batches = int(fast_dev_run)
        self.method = method
        self.clients_per_round = clients_per_round
        self.local_epochs = local_epochs
        self.cohort = cohort
        self.weighting: Weighting = weighting
        self.on_nonfinite: OnNonfinite = on_nonfinite
        self.client_states = client_states
        self.drop_single_sample_batches = drop_single_sample_batches
        self.client_backend: ClientBackend = client_backend
        self.stack_chunk_size = stack_chunk_size
        self.check_test_every_n_round = check_test_every_n_round
        self.limit_train_batches = limit_train_batches
        self.limit_val_batches = limit_val_batches
        self.limit_test_batches = limit_test_batches
        self.seed = seed
        self.nonfinite_reason: str | None = None
        self.pending = False
        self.parameters: FlatParameters | None = None
        self.signals = SignalGuard()
        saves = enable_checkpointing is not False and not fast_dev_run
        self.own_callbacks = LoopCallbacks(callbacks, enable_progress_bar, saves)
        super().__init__(
            fabric=make_fabric(
                accelerator=accelerator,
                strategy=strategy,
                devices=devices,
                num_nodes=num_nodes,
                precision=precision,
            ),
            callbacks=reorder_callbacks(self.own_callbacks.given),
            loggers=[],
            default_root_dir=os.path.abspath(local_path(default_root_dir or os.getcwd(), "default_root_dir")),
            max_rounds=max_rounds,
            min_rounds=min_rounds,
            gradient_clip_val=gradient_clip_val,
            check_val_every_n_round=check_val_every_n_round,
            fast_dev_run=fast_dev_run,
        )
        self._devices = devices
        self._first_scale: dict[str, Any] = {}
        # Described before a fit, in which callbacks replace some of theirs by what they find there.
        self.reporter = Reporter(self, logger, {name: described(value) for name, value in arguments.items()})
        self.loggers = self.reporter.user_loggers()
        self.checkpoints = Checkpoints(self)
        self.evaluation = LoopEvaluation(self)

    def fit(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Train until a callback stops the run or the budget of rounds is used up.

        Args:
            model: any module with ``training_step`` and ``configure_optimizers``.
            datamodule: a :class:`~lightning_fedstop.data.FederatedDataModule`.
            ckpt_path: a checkpoint of this loop to continue from, or ``"last"``, the newest one under
                ``default_root_dir``.

        Raises:
            MisconfigurationException: if the module or the data module cannot be federated.
            ValueError: if the checkpoint belongs to another model or method.
            FileNotFoundError: if there is no such checkpoint.
        """
        data = check_datamodule(datamodule)
        with self._running(TrainerFn.FITTING, RunningStage.TRAINING, model, data, ckpt_path):
            self._setup_fit()
            self.hooks("on_fit_start")
            self.reporter.log_hyperparameters()
            self.evaluation.begin_fit()
            with self.collector.attached():
                self.hooks("on_train_start")
                if self.pending:  # the checkpoint was written in a round's evaluation
                    self._end_round()
                while not self._is_done():
                    round = self.current_epoch + 1
                    self.server.settle()
                    self.hooks("on_train_epoch_start")
                    self.module.train()
                    report = self.server.run_round(round)
                    logged = self.collector.compute(self.server.reduce, self.server.gather)
                    self.global_step = round
                    if report.nonfinite and self.on_nonfinite == "stop":
                        what = nonfinite_updates(round, report)
                        self.nonfinite_reason = f"{what}; the global model before it is kept."
                    self.reporter.start_round(round, report, logged)
                    self.evaluation.run_due(round)
                    self._end_round()
            self.hooks("on_train_end")
            self.hooks("on_fit_end")
            if not self.server.parameters.replaced():  # merged or exported weights are the user's own matter
                self.server.adopt()
            if not self.fast_dev_run:
                test, averages = self.evaluation.after_fit()
                self.summary = self.reporter.write_summary(test, averages)

    def _is_done(self) -> bool:
        if self.nonfinite_reason is not None or self.current_epoch >= self.max_rounds:
            return True
        if self.should_stop and self.current_epoch < self.min_rounds:
            # Decided again each round, never saved up: a rule that recovers by `min_rounds` does not stop the run.
            self.should_stop = False
        return self.should_stop

    def _end_round(self) -> None:
        """Set the next round's learning rate, let callbacks decide and save, and record the round."""
        server, reporter, row = self.server, self.reporter, self.row
        with self.signals.shielded():
            self.pending = False
            reporter.report("lr", row["lr"])
            server.trainer.solver.end_round(self.callback_metrics, row["round"])
            self.hooks("on_train_epoch_end")
            if server.adopt():  # hooks have changed the global model
                server.distance.measure(server.theta)
            reporter.report_distance(server.distance.row())
            self.hooks.deciding("on_train_epoch_end")
            reporter.publish(self.collector.compute(server.reduce, server.gather))
            reporter.time_criteria()
            self.hooks.monitoring("on_train_epoch_end")  # these save checkpoints
            self.current_epoch = row["round"]
            reporter.log_round()

    def validate(
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Evaluate a model on the validation data.

        Args:
            model: a module with ``validation_step``; the one fitted last by default, with its data module.
            datamodule: any data module with ``val_dataloader``.
            ckpt_path: load the weights of this checkpoint first; ``"last"`` as in :meth:`fit`, ``"best"`` as the
                first ``ModelCheckpoint`` has found it.
            verbose: print the metrics.

        Returns:
            One dict of the logged metrics, as ``Trainer.validate`` does for one loader.

        Raises:
            MisconfigurationException: if there is no data or no step to evaluate.
        """
        return self._evaluate_alone(TrainerFn.VALIDATING, model, datamodule, ckpt_path, verbose)

    def test(
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Evaluate a model on the test data, with the arguments of :meth:`validate`."""
        return self._evaluate_alone(TrainerFn.TESTING, model, datamodule, ckpt_path, verbose)

    def _evaluate_alone(
        self, fn: TrainerFn, model: LightningModule | None, datamodule: Any, ckpt_path: Any, verbose: bool
    ) -> list[dict[str, float]]:
        stage = RunningStage.TESTING if fn == TrainerFn.TESTING else RunningStage.VALIDATING
        if model is None:
            model, datamodule = self.lightning_module, datamodule or self.datamodule
        with self._running(fn, stage, model, datamodule, ckpt_path):
            self.checkpoints.load()
            metrics = self.evaluation.alone(stage)
        if verbose and self.is_global_zero:
            print_metrics(metrics)
        return [metrics]

    def save_checkpoint(
        self, filepath: str | os.PathLike[str], weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Write an ordinary Lightning checkpoint of the global model, whichever client is training.

        Once the fit is over, the methods' vectors of each client are gone, and only the weights are saved.

        Args:
            filepath: where; written aside and renamed.
            weights_only: leave out what only continuing a run needs.
            storage_options: not supported; ``None``.

        Raises:
            ValueError: if ``storage_options`` are given.
            RuntimeError: if no fit has begun.
        """
        if storage_options is not None:
            raise ValueError("`storage_options` must be None: checkpoints are written to a local file system.")
        if self.state.fn != TrainerFn.FITTING or not hasattr(self, "server"):
            raise RuntimeError("`save_checkpoint` needs a trained model: call it during `fit` or after it.")
        self.checkpoints.save(filepath, bool(weights_only))

    @property
    def record(self) -> RunRecord | None:
        """The record that a fit writes; ``None`` where nothing is written."""
        return self.reporter.record

    @property
    def log_dir(self) -> str | None:
        """The run's version folder, the same on every process; ``None`` where nothing is written."""
        return self.reporter.log_dir

    @property
    def row(self) -> dict[str, Any]:
        """The present round's row, as far as the loop itself fills it."""
        return self.reporter.row

    @property
    def start_weights(self) -> Tensor | None:
        """Trainable parameters at the start of round 1, shape ``(d,)``; ``None`` before."""
        return self.server.distance.start

    @property
    def task_vector_distance(self) -> float | None:
        """Distance of the global model from ``start_weights``; ``None`` before the end of round 1."""
        return self.server.distance.now

    @property
    def trained_clients(self) -> int:
        """Number of updates in the present round, or in the last one until it is trained."""
        return int(self.row.get("trained", 1))

    @property
    def takes_update(self) -> bool:
        """True if the update of the client that has just ended counts."""
        return self.server.has_taken

    @contextmanager
    def _running(
        self, fn: TrainerFn, stage: RunningStage, model: object, datamodule: Any, ckpt_path: Any
    ) -> Iterator[None]:
        """Set up before the block, report an exception in it, tear down after it."""
        self.reporter.begin()
        module = check_module(model, trains=fn == TrainerFn.FITTING)
        if not self.fabric._launched:  # Fabric has no public word for it
            launch(self.fabric)
        self.enter(fn, stage)
        self.lightning_module = self.module = module
        self.datamodule = datamodule
        module.trainer = self  # type: ignore[assignment]
        self.callbacks = self.own_callbacks.joined(module, self.max_rounds)
        self.hooks = Hooks(self, module)
        self.collector = ResultCollector(module)
        self.parameters = self._train_dataloader = None
        self.callback_metrics, self.progress_bar_metrics = {}, {}
        name = "fit" if fn == TrainerFn.FITTING else stage.value
        try:
            with self.signals, watched_parent():
                self.checkpoints.read(ckpt_path)
                self._setup(name)
                yield
                if datamodule is not None:
                    datamodule.teardown(name)
                self.hooks("teardown", name)
                self.state.status = TrainerStatus.FINISHED
        except BaseException as exception:
            self._report_exception(exception)
            if self.parameters is None or self.checkpoints.loaded is not None:
                self.reporter.discard()
            if (reason := shared_failure(self.fabric, exception)) is not None:
                raise RuntimeError(f"The run ended because {reason}") from exception
            raise
        finally:
            self._release()

    def _setup(self, stage: str) -> None:
        """Set up data, module and callbacks in a ``Trainer``'s order."""
        data, module, fits = self.datamodule, self.module, stage == "fit"
        if fits:
            self.own_callbacks.reset(self.callbacks)
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
        if fits:
            check_federation(self.clients_per_round, self.cohort, data, module, self.drop_single_sample_batches)
        if fits and not self.fast_dev_run:
            self.current_epoch = 0
            self.reporter.open()
            self.checkpoints.open(self.log_dir)
        self.hooks("setup", stage)
        module.configure_model()
        if fits:
            check_tensors(module)
        self.fabric.strategy.precision.convert_module(module)
        self.fabric.to_device(module)
        if data is not None and hasattr(data, "to"):
            data.to(self.fabric.device)
        self.transfer = BatchTransfer(module, data, self.fabric.strategy)

    def _setup_fit(self) -> None:
        """Build the server, and restore the checkpoint's state if there is one."""
        module = self.module
        self.should_stop = self.pending = False
        self.current_epoch = self.global_step = 0
        self.nonfinite_reason = None
        self.reporter.write_config()
        precision = self.fabric.strategy.precision
        self._first_scale = self._first_scale or precision.state_dict()
        precision.load_state_dict(self._first_scale)
        self.checkpoints.load()
        parameters = FlatParameters(module)
        self.solver = LocalSolver(module)
        self.checkpoints.begin_fit(self.solver)
        trainer = LocalTrainer(
            module,
            self.method,
            parameters,
            self.solver,
            self.fabric,
            self.transfer,
            self.collector,
            self.hooks,
            LocalSettings(
                self.local_epochs, self.gradient_clip_val, self.limit_train_batches, self.drop_single_sample_batches
            ),
        )
        self.server = Server(
            make_backend(self.client_backend, self.stack_chunk_size, self._devices, trainer),
            self.method,
            self.datamodule,
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
        self.checkpoints.restore()

    def _start_device(self) -> str | None:
        """The device that a stopping rule asks for the weights of the run's start."""
        rules = [callback for callback in self.callbacks if isinstance(callback, TaskVectorEarlyStopping)]
        return next((device for rule in rules if (device := rule.criterion.start_device)), None)

    def _report_exception(self, exception: BaseException) -> None:
        """Call the hooks of a ``Trainer`` after an exception."""
        self.state.status = TrainerStatus.INTERRUPTED
        self.hooks("on_exception", exception)
        if isinstance(self.datamodule, LightningDataModule):
            self.datamodule.on_exception(exception)
        self.reporter.end_early(isinstance(exception, KeyboardInterrupt | Terminated))

    def _release(self) -> None:
        """Give the module back as an ordinary one that holds the global model."""
        if self.parameters is not None:
            self.server.abandon_round()
            self.parameters.release()
            self.client_states.close()
            self.parameters = None
        self.reporter.close()
        self.state.stage = None
