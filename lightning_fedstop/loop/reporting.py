"""What a run tells while it goes on and when it ends: rows of the record, reports to loggers, the summary."""

import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fedstop.core.seeding import resolve_seed
from lightning_fedstop.federation.server import Server
from lightning_fedstop.loop.hyperparameters import logged_hyperparameters
from lightning_fedstop.loop.trainer_interface import TrainerInterface
from lightning_fedstop.module.logged import Results
from lightning_fedstop.records.config import write_config
from lightning_fedstop.records.partition_record import PARTITION_FILE, write_partition
from lightning_fedstop.records.run_record import RESERVED, ROUNDS_FILE, RunRecord
from lightning_fedstop.records.summary import describe, describe_rules, extremes, summarize
from lightning_fedstop.stopping.callbacks.base import CriterionCallback
from lightning_fedstop.utilities.lock import LOCK_FILE, RunLock


class Recording(TrainerInterface):
    """The part of :class:`~lightning_fedstop.loop.FederatedLoop` that others read.

    Attributes:
        row: the present round's row, as far as the loop itself fills it.
    """

    module: LightningModule
    server: Server
    record: RunRecord | None
    row: dict[str, Any]
    nonfinite_reason: str | None
    _arguments: dict[str, Any]
    _described: dict[str, Any]
    seed: int | None
    _began: float
    _criterion_total = 0.0
    _renamed: set[str]
    _skipped_all: bool
    _config_of_command: Path | None = None
    _lock: RunLock | None = None
    _logger: Logger | list[Logger] | bool | None
    _default_checkpoint: ModelCheckpoint | None

    @property
    def log_dir(self) -> str | None:
        """The run's version folder, the same on every process; ``None`` where nothing is written."""
        return None if self.record is None else self.record.log_dir

    @property
    def start_weights(self) -> Tensor | None:
        """Shape ``(d,)``; the trainable parameters as round 1 began to train, ``None`` before."""
        return self.server.distance.start

    @property
    def task_vector_distance(self) -> float | None:
        """The distance of the server's global model from ``start_weights``; ``None`` before the end of round 1."""
        return self.server.distance.now

    @property
    def trained_clients(self) -> int:
        """How many clients' updates went into the present round, or into the last one before it is trained."""
        return int(self.row.get("trained", 1))

    @property
    def takes_update(self) -> bool:
        """Whether the update of the client that has just ended goes into the round."""
        return self.server.has_taken

    def _user_loggers(self) -> list[Logger]:
        if self.fast_dev_run:
            return [DummyLogger()]
        if isinstance(self._logger, Logger):
            return [self._logger]
        return list(self._logger) if isinstance(self._logger, list | tuple) else []

    def _open_record(self) -> None:
        """Take a version folder; what is written before it is known to be needed would litter."""
        if self.state.fn != TrainerFn.FITTING or self.fast_dev_run:
            return
        version = RunRecord(self.default_root_dir).version if self.is_global_zero else None
        self.record = RunRecord(self.default_root_dir, version=self.strategy.broadcast(version))
        if self._default_checkpoint is not None:
            self._default_checkpoint.dirpath = os.path.join(self.record.log_dir, "checkpoints")
        self.loggers = [self.record] if self._logger is True or self._logger is None else self._user_loggers()
        self.current_epoch = 0
        if self.is_global_zero:
            folder = self.record.log_dir
            self._lock = RunLock(folder)
            with self._writing(os.path.join(folder, LOCK_FILE)):
                self._lock.acquire()
            with self._writing(os.path.join(folder, PARTITION_FILE)):
                write_partition(folder, self.datamodule)

    def _discard_record(self) -> None:
        """Give back the version folder of a fit that was refused before it began."""
        self._unlock()
        if self.record is not None and self.is_global_zero:
            self.record.discard()

    def _unlock(self) -> None:
        """Say that the version folder is no longer written to."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _take(self, results: Results) -> None:
        """Make reported metrics visible to callbacks, loggers, the progress bar and the round's row."""
        if self.state.fn == TrainerFn.FITTING and (names := results.callback.keys() & RESERVED - self._renamed):
            self._renamed |= names
            self._warn(
                f"The loop itself fills the record's {', '.join(sorted(names))}: what the module logs of such a name is"
                " in a column `logged/<name>`; callbacks and loggers see it under its own name."
            )
        self.callback_metrics.update(results.callback)
        self.logged_metrics.update(results.logged)
        self.progress_bar_metrics.update(results.prog_bar)
        self._reported.update(results.callback)

    def _report(self, name: str, value: float) -> None:
        """Report a figure of the loop itself to callbacks and loggers, unless the module logs one of that name."""
        if name not in self._reported:
            self.callback_metrics[name] = self.logged_metrics[name] = torch.tensor(value)

    def _start_row(self, row: dict[str, Any]) -> None:
        """Begin a round's row; until its training is done, the row of the round before stays for checkpoints."""
        self.row = row
        self.logged_metrics = {}
        self._reported: dict[str, Tensor] = {}

    def _full_row(self) -> dict[str, Any]:
        """The present round's row with what was reported in this round; the one place that waits for the device."""
        columns = {f"logged/{name}" if name in RESERVED else name: value for name, value in self._reported.items()}
        return {**{name: float(value) for name, value in columns.items()}, **self.row}

    @contextmanager
    def _writing(
        self, path: str | os.PathLike[str], errors: tuple[type[Exception], ...] = (OSError,)
    ) -> Iterator[None]:
        """Say which file could not be written, and what is safe.

        Args:
            path: the file.
            errors: what its writer raises.

        Raises:
            OSError: in place of any other one.
        """
        try:
            yield
        except errors as error:
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            kept = f"the run is kept up to round {self.current_epoch}, as far as it was saved"
            safe = kept if self.current_epoch else "nothing has been trained yet, and former runs are as they were"
            raise OSError(f"{os.fspath(path)!r} could not be written ({reason}): {safe}.") from error

    def _log_round(self) -> None:
        """One row in the record, one report to each logger; a logger's step is the round."""
        if not self.is_global_zero:
            return
        if self.record is not None:
            row = self._full_row()
            with self._writing(os.path.join(self.record.log_dir, ROUNDS_FILE)):
                self.record.write_round(row)
        metrics = {name: float(value) for name, value in self.logged_metrics.items()}
        self._report_to_loggers({"epoch": self.current_epoch - 1, **metrics})

    def _log_hyperparameters(self) -> None:
        """Give the loggers the hyperparameters of the run, its module and its data module, as a ``Trainer`` does."""
        hparams = logged_hyperparameters(self)
        for logger in self.loggers if self.is_global_zero else []:
            with self._writing(logger.log_dir or logger.save_dir or type(logger).__name__):
                logger.log_hyperparams(hparams)
                logger.log_graph(self.module)
                logger.save()

    def _report_to_loggers(self, metrics: dict[str, float]) -> None:
        for logger in self.loggers if self.is_global_zero else []:
            with self._writing(logger.log_dir or logger.save_dir or type(logger).__name__):
                logger.log_metrics(metrics, step=self.current_epoch)
                logger.save()

    def _where_to_resume(self) -> str:
        """A sentence for a run that a signal has ended."""
        saver = next((callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)), None)
        path = saver is not None and (saver.last_model_path or saver.best_model_path)
        after = f"Interrupted after round {self.current_epoch} of {self.max_rounds}"
        if not path:
            return f"{after}, with no checkpoint to go on from."
        if self._config_of_command is not None:
            words = ("fedstop", "fit", "--config", str(self._config_of_command), "--ckpt_path", path)
            return f"{after}: go on with `{shlex.join(words)}`."
        return f"{after}: go on with `ckpt_path={path}`."

    def _criterion_seconds(self) -> float:
        """What the stopping rules have taken since this was asked for last."""
        total = sum(callback.seconds for callback in self.callbacks if isinstance(callback, CriterionCallback))
        before, self._criterion_total = self._criterion_total, total
        return total - before

    def _write_config(self) -> None:
        """Leave ``config.yaml`` in the record, where the command line has not."""
        if self.record is not None and self.is_global_zero:
            path = Path(self.record.log_dir) / "config.yaml"
            self._config_of_command = path if path.exists() else None
            with self._writing(path):
                trainer = self._described | {"seed": resolve_seed(self.seed)}
                write_config(path, trainer, self.module, self.datamodule, os.environ.get("PL_GLOBAL_SEED"))

    def _write_summary(self, test: dict[str, float], averages: dict[str, dict[str, float]]) -> None:
        """Write ``summary.json`` and print it in short.

        Args:
            test: the test figures of the last model.
            averages: those of the average of each rule that keeps one, by the callback's ``state_key``.
        """
        saver = next((c for c in self.callbacks if isinstance(c, ModelCheckpoint)), None)
        # A resumed run that had nothing left to train has saved nothing.
        written = saver is not None and (saver.best_model_path or saver.last_model_path or self.ckpt_path)
        rows = self.record.rows() if self.record is not None and self.is_global_zero else []
        rules = [callback.log_name for callback in self.callbacks if isinstance(callback, CriterionCallback)]
        summary = summarize(
            stop_round=self.current_epoch,
            stop_reason=self._stop_reason(),
            budget=self.max_rounds,
            test=test,
            checkpoint=written or None,
            log_dir=self.log_dir,
            device=self.fabric.device,
            seconds=time.perf_counter() - self._began,
            theta=self.server.theta,
            rules=describe_rules(self.callbacks, averages),
            **extremes(rows, rules),
        )
        self.summary = summary
        if self.record is not None and self.is_global_zero:
            self.record.write_summary(summary)
        for logger in self.loggers if self.is_global_zero else []:
            logger.finalize("success")
        if self.is_global_zero:
            print(describe(summary), flush=True)

    def _stop_reason(self) -> str:
        """Why the run ended, in a sentence: a callback's own where one stopped it."""
        if self.nonfinite_reason is not None:
            return self.nonfinite_reason
        if not self.should_stop:
            skipped = " The last one skipped all its local steps: no gradient is finite." if self._skipped_all else ""
            return f"The budget of {self.max_rounds} rounds is used up.{skipped}"
        # A rule that only observes says when it would have stopped, which ended nothing.
        rules = [callback for callback in self.callbacks if not getattr(callback, "observe_only", False)]
        reasons = [getattr(callback, "stopping_reason_message", None) for callback in rules]
        return next((reason for reason in reasons if reason), "A callback set `should_stop`.")

    def _warn(self, message: str) -> None:
        rank_zero_warn(message)
