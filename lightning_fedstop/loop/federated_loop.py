"""The federated training loop, built on Lightning Fabric."""

import math
import os
import time

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from lightning_fedstop.core.client_states import ClientStates
from lightning_fedstop.federation.backends.choice import ClientBackend
from lightning_fedstop.federation.cohort import Cohort, UniformCohort
from lightning_fedstop.federation.server import OnNonfinite, RoundReport, Weighting
from lightning_fedstop.loop.arguments import check_arguments, check_datamodule, make_fabric
from lightning_fedstop.loop.lifecycle import Lifecycle
from lightning_fedstop.methods import FedAvg, FederatedMethod
from lightning_fedstop.records.config import described
from lightning_fedstop.utilities.paths import local_path


class FederatedLoop(Lifecycle):
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
        min_rounds: rounds before which nothing stops the run; a stop wished earlier is decided anew each round.
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
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        check_arguments(self._arguments)
        # Before a fit, in which callbacks replace some of theirs by what they find there.
        self._described = {name: described(value) for name, value in self._arguments.items()}
        self.fast_dev_run = fast_dev_run
        if fast_dev_run:
            max_rounds = int(fast_dev_run)
            min_rounds = 0
            limit_train_batches = limit_val_batches = limit_test_batches = int(fast_dev_run)
        self.method = method
        self.max_rounds = max_rounds
        self.clients_per_round = clients_per_round
        self.local_epochs = local_epochs
        self.min_rounds = min_rounds
        self.gradient_clip_val = gradient_clip_val
        self.cohort = cohort
        self.weighting: Weighting = weighting
        self.on_nonfinite: OnNonfinite = on_nonfinite
        self.client_states = client_states
        self.drop_single_sample_batches = drop_single_sample_batches
        self.client_backend: ClientBackend = client_backend
        self.stack_chunk_size = stack_chunk_size
        self.check_val_every_n_round = check_val_every_n_round
        self.check_test_every_n_round = check_test_every_n_round
        self.limit_train_batches = limit_train_batches
        self.limit_val_batches = limit_val_batches
        self.limit_test_batches = limit_test_batches
        self.default_root_dir = os.path.abspath(local_path(default_root_dir or os.getcwd(), "default_root_dir"))
        self.seed = seed
        self.fabric = make_fabric(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
        )
        super().__init__(callbacks, logger, enable_progress_bar, enable_checkpointing)

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
        with self._running(TrainerFn.FITTING, RunningStage.TRAINING, "fit", model, data, ckpt_path):
            self._setup_fit()
            self._run_rounds()
            self._finish_fit()

    def _run_rounds(self) -> None:
        """Algorithm 1 of the paper: rounds until the stop rule, or the budget, ends them."""
        hooks = self.hooks
        hooks("on_fit_start")
        self._log_hyperparameters()
        validation = self._evaluation(RunningStage.VALIDATING, self.check_val_every_n_round)
        self.evaluations = [self._evaluation(RunningStage.TESTING, self.check_test_every_n_round), validation]
        with self.collector.attached():
            hooks("on_train_start")
            if self.pending:
                with self.signals.shielded():
                    self._end_round()
            while not self._is_done():
                self._run_round(self.current_epoch + 1)
        hooks("on_train_end")
        hooks("on_fit_end")
        self.server.adopt()

    def _is_done(self) -> bool:
        if self.nonfinite_reason is not None or self.current_epoch >= self.max_rounds:
            return True
        if self.should_stop and self.current_epoch < self.min_rounds:
            # Decided anew each round, never saved up: a rule that has recovered by `min_rounds` does not stop the run.
            self.should_stop = False
        return self.should_stop

    def _run_round(self, round: int) -> None:
        """One round: the cohort trains, the server aggregates, the new global model is evaluated, callbacks decide."""
        self.server.settle()
        self.hooks("on_train_epoch_start")
        self.module.train()
        report = self.server.run_round(round)
        logged = self.collector.compute(self.server.reduce, self.server.gather)
        self.global_step = round
        self._check_finite(round, report)
        self._tell_of_skips(round, report)
        self._start_row({"round": round, "seconds_eval": 0.0, **report.row()})
        self._take(logged)
        began = time.perf_counter()
        for evaluation in (evaluation for evaluation in self.evaluations if evaluation.is_due(round)):
            # A checkpoint written by a callback during the evaluation lacks the rest of the round: see `_restore`.
            self.pending = True
            if evaluation.stage == RunningStage.VALIDATING:
                self.hooks("on_validation_model_zero_grad")
            self._evaluate(evaluation)
        self.row["seconds_eval"] = time.perf_counter() - began if self.pending else 0.0
        with self.signals.shielded():
            self._end_round()

    def _check_finite(self, round: int, report: RoundReport) -> None:
        """Say which clients sent an update that is not finite, and end the run if that was asked for."""
        if not report.nonfinite:
            return
        who = f"client{'s' * (len(report.nonfinite) > 1)} {', '.join(map(str, report.nonfinite))}"
        if self.on_nonfinite == "stop":
            self.nonfinite_reason = (
                f"The update of {who} in round {round} is not finite; the global model before it is kept."
            )
        else:
            what = "left out" if self.on_nonfinite == "drop" else "kept"
            self._warn(f"The update of {who} in round {round} is not finite and was {what}.")

    def _tell_of_skips(self, round: int, report: RoundReport) -> None:
        """Warn once a fit that the loss scale skips steps."""
        self._skipped_all = bool(report.skipped_steps) and not report.steps
        if report.skipped_steps and not self._has_told_of_skips:
            self._has_told_of_skips = True
            total = report.skipped_steps + report.steps
            self._warn(
                f"Round {round} skipped {report.skipped_steps} of {total} local steps: their gradients overflow at the"
                " loss scale of '16-mixed', which is lowered each time. `skipped_steps` in the record counts them."
            )

    def _end_round(self) -> None:
        """The next round's learning rate, the callbacks' decisions, and the record."""
        round = self.row["round"]
        self.pending = False
        self._report("lr", self.row["lr"])
        self.server.trainer.solver.end_round(self.callback_metrics, round)
        self.hooks("on_train_epoch_end")
        self._measure()
        self.hooks.deciding("on_train_epoch_end")
        self._take(self.collector.compute(self.server.reduce, self.server.gather))
        self.row["seconds_criterion"] = self._criterion_seconds()
        self.hooks.monitoring("on_train_epoch_end")
        self.current_epoch = round
        self._log_round()

    def _measure(self) -> None:
        """Put the distance of the global model, as hooks have left it, into the row, and report it."""
        if self.server.adopt():
            self.server.distance.measure(self.server.theta)
        figures = self.server.distance.row()
        self.row.update(figures)
        for name, value in figures.items():
            if not math.isnan(value):
                self._report(name, value)

    def _finish_fit(self) -> None:
        """Test figures if there is test data, and the summary."""
        if self.fast_dev_run:
            return
        test: dict[str, float] = {}
        averages: dict[str, dict[str, float]] = {}
        evaluation = self._evaluation(RunningStage.TESTING)
        if evaluation.loaders:
            self._enter(TrainerFn.TESTING, RunningStage.TESTING)
            test = self._evaluate(evaluation)
            self._report_to_loggers(test)
            averages = self._evaluate_averages(evaluation)
            self._enter(TrainerFn.FITTING, None)
        self._write_summary(test, averages)

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
        """Evaluate a model on the test data; the arguments are those of :meth:`validate`, with ``test_step``."""
        return self._evaluate_alone(TrainerFn.TESTING, model, datamodule, ckpt_path, verbose)
