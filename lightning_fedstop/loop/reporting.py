"""Reports of a run: rows of the record, loggers, the summary, lines on the screen."""

import math
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fedstop.core.seeding import resolve_seed
from lightning_fedstop.federation.server import RoundReport
from lightning_fedstop.loop.hyperparameters import logged_hyperparameters
from lightning_fedstop.module.logged import Results
from lightning_fedstop.records.config import write_config
from lightning_fedstop.records.partition_record import PARTITION_FILE, write_partition
from lightning_fedstop.records.run_record import RESERVED, ROUNDS_FILE, RunRecord
from lightning_fedstop.records.summary import describe, describe_rules, extremes, summarize
from lightning_fedstop.stopping.callbacks.base import CriterionCallback
from lightning_fedstop.utilities.lock import LOCK_FILE, RunLock

if TYPE_CHECKING:
    from lightning_fedstop.loop.federated_loop import FederatedLoop


class Reporter:
    """Rows of the record, reports to loggers and the summary of a loop's run.

    Args:
        loop: the loop, whose metrics, loggers and callbacks are read.
        logger: the user's choice.
        arguments: the loop's arguments as they are written to ``config.yaml``.

    Attributes:
        record: the run's record; ``None`` where nothing is written.
        row: the present round's row, as far as the loop itself fills it.
    """

    def __init__(
        self, loop: "FederatedLoop", logger: Logger | list[Logger] | bool | None, arguments: dict[str, Any]
    ) -> None:
        self.loop = loop
        self.record: RunRecord | None = None
        self.row: dict[str, Any] = {}
        self._logger = logger
        self._arguments = arguments
        self._lock: RunLock | None = None
        self._config_of_command: Path | None = None
        self.begin()

    def begin(self) -> None:
        """Forget the last run."""
        self._began = time.perf_counter()
        self._criterion_total = 0.0
        self._renamed: set[str] = set()
        self._has_told_of_skips = self._skipped_all = False
        self._clear({})

    @property
    def log_dir(self) -> str | None:
        """The run's version folder, the same on every process; ``None`` where nothing is written."""
        return None if self.record is None else self.record.log_dir

    def user_loggers(self) -> list[Logger]:
        """The loggers that the user gave."""
        if self.loop.fast_dev_run:
            return [DummyLogger()]
        if isinstance(self._logger, Logger):
            return [self._logger]
        return list(self._logger) if isinstance(self._logger, list | tuple) else []

    def open(self) -> None:
        """Create the version folder of a fit, once all checks have passed."""
        loop = self.loop
        version = RunRecord(loop.default_root_dir).version if loop.is_global_zero else None
        self.record = RunRecord(loop.default_root_dir, version=loop.strategy.broadcast(version))
        loop.loggers = [self.record] if self._logger is True or self._logger is None else self.user_loggers()
        if loop.is_global_zero:
            folder = self.record.log_dir
            self._lock = RunLock(folder)
            with self.writing(os.path.join(folder, LOCK_FILE)):
                self._lock.acquire()
            with self.writing(os.path.join(folder, PARTITION_FILE)):
                write_partition(folder, loop.datamodule)

    def discard(self) -> None:
        """Give back the version folder of a fit that was refused before it began."""
        self.close()
        if self.record is not None and self.loop.is_global_zero:
            self.record.discard()

    def close(self) -> None:
        """Release the version folder, which is no longer written to."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def start_round(self, round: int, report: RoundReport, logged: Results) -> None:
        """Begin a round's row with the report on its training, and warn of problems."""
        if report.nonfinite and self.loop.on_nonfinite != "stop":
            what = "left out" if self.loop.on_nonfinite == "drop" else "kept"
            rank_zero_warn(f"{nonfinite_updates(round, report)} and was {what}.")
        self._skipped_all = bool(report.skipped_steps) and not report.steps
        if report.skipped_steps and not self._has_told_of_skips:
            self._has_told_of_skips = True
            total = report.skipped_steps + report.steps
            rank_zero_warn(
                f"Round {round} skipped {report.skipped_steps} of {total} local steps: their gradients overflow at the"
                " loss scale of '16-mixed', which is lowered each time. `skipped_steps` in the record counts them."
            )
        # Until here the row of the round before stays, for checkpoints.
        self._clear({"round": round, "seconds_eval": 0.0, **report.row()})
        self.publish(logged)

    def _clear(self, row: dict[str, Any]) -> None:
        self.row = row
        self.loop.logged_metrics = {}
        self._reported: dict[str, Tensor] = {}

    def publish(self, results: Results) -> None:
        """Make logged values visible to callbacks, loggers, the progress bar and the round's row."""
        loop = self.loop
        if loop.state.fn == TrainerFn.FITTING and (names := results.callback.keys() & RESERVED - self._renamed):
            self._renamed |= names
            rank_zero_warn(
                f"The loop itself fills the record's {', '.join(sorted(names))}: what the module logs of such a name is"
                " in a column `logged/<name>`; callbacks and loggers see it under its own name."
            )
        loop.callback_metrics.update(results.callback)
        loop.logged_metrics.update(results.logged)
        loop.progress_bar_metrics.update(results.prog_bar)
        self._reported.update(results.callback)

    def report(self, name: str, value: float) -> None:
        """Report a figure of the loop, unless the module logs one of that name."""
        if name not in self._reported:
            self.loop.callback_metrics[name] = self.loop.logged_metrics[name] = torch.tensor(value)

    def report_distance(self, figures: dict[str, float]) -> None:
        """Report the distance of the global model and its derived figures."""
        self.row.update(figures)
        for name, value in figures.items():
            if not math.isnan(value):
                self.report(name, value)

    def time_criteria(self) -> None:
        """Record the time that stopping rules have taken since the last round."""
        total = sum(callback.seconds for callback in self.loop.callbacks if isinstance(callback, CriterionCallback))
        self.row["seconds_criterion"], self._criterion_total = total - self._criterion_total, total

    def full_row(self) -> dict[str, Any]:
        """The present round's row with all that was logged; this waits for the device."""
        columns = {f"logged/{name}" if name in RESERVED else name: value for name, value in self._reported.items()}
        return {**{name: float(value) for name, value in columns.items()}, **self.row}

    @contextmanager
    def writing(self, path: str | os.PathLike[str], errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
        """Name the file that could not be written, and say what is safe.

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
            rounds = self.loop.current_epoch
            kept = f"the run is kept up to round {rounds}, as far as it was saved"
            safe = kept if rounds else "nothing has been trained yet, and former runs are as they were"
            raise OSError(f"{os.fspath(path)!r} could not be written ({reason}): {safe}.") from error

    def log_round(self) -> None:
        """Write one row to the record and to each logger, whose step is the round."""
        if not self.loop.is_global_zero:
            return
        if self.record is not None:
            row = self.full_row()
            with self.writing(os.path.join(self.record.log_dir, ROUNDS_FILE)):
                self.record.write_round(row)
        metrics = {name: float(value) for name, value in self.loop.logged_metrics.items()}
        self.log_metrics({"epoch": self.loop.current_epoch - 1, **metrics})

    def log_hyperparameters(self) -> None:
        """Give the loggers the hyperparameters of the run, its module and its data."""
        hparams = logged_hyperparameters(self.loop)
        for logger in self.loop.loggers if self.loop.is_global_zero else []:
            with self.writing(logger.log_dir or logger.save_dir or type(logger).__name__):
                logger.log_hyperparams(hparams)
                logger.log_graph(self.loop.module)
                logger.save()

    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Give the loggers metrics at the present round."""
        for logger in self.loop.loggers if self.loop.is_global_zero else []:
            with self.writing(logger.log_dir or logger.save_dir or type(logger).__name__):
                logger.log_metrics(metrics, step=self.loop.current_epoch)
                logger.save()

    def write_config(self) -> None:
        """Write ``config.yaml`` to the record, where the command line has not."""
        if self.record is not None and self.loop.is_global_zero:
            loop, path = self.loop, Path(self.record.log_dir) / "config.yaml"
            self._config_of_command = path if path.exists() else None
            with self.writing(path):
                trainer = self._arguments | {"seed": resolve_seed(loop.seed)}
                write_config(path, trainer, loop.module, loop.datamodule, os.environ.get("PL_GLOBAL_SEED"))

    def write_summary(self, test: dict[str, float], averages: dict[str, dict[str, float]]) -> dict[str, Any]:
        """Write ``summary.json`` and print it in short.

        Args:
            test: the test figures of the last model.
            averages: those of the average of each rule that keeps one, by the callback's ``state_key``.

        Returns:
            The summary.
        """
        loop = self.loop
        saver = self._saver
        # A resumed run that had nothing left to train has saved nothing.
        written = saver is not None and (saver.best_model_path or saver.last_model_path or loop.ckpt_path)
        rows = self.record.rows() if self.record is not None and loop.is_global_zero else []
        rules = [callback.log_name for callback in loop.callbacks if isinstance(callback, CriterionCallback)]
        summary = summarize(
            stop_round=loop.current_epoch,
            stop_reason=self._stop_reason(),
            budget=loop.max_rounds,
            test=test,
            checkpoint=written or None,
            log_dir=self.log_dir,
            device=loop.fabric.device,
            seconds=time.perf_counter() - self._began,
            theta=loop.server.theta,
            rules=describe_rules(loop.callbacks, averages),
            **extremes(rows, rules),
        )
        if loop.is_global_zero:
            if self.record is not None:
                self.record.write_summary(summary)
            for logger in loop.loggers:
                logger.finalize("success")
            print(describe(summary), flush=True)
        return summary

    def end_early(self, interrupted: bool) -> None:
        """Finalize the loggers after an exception, and print how to continue the fit."""
        if not self.loop.is_global_zero:
            return
        for logger in self.loop.loggers:
            with suppress(OSError):  # on a full disk, what has been said of it stays the last word
                logger.finalize("interrupted" if interrupted else "failed")
        if interrupted and self.loop.state.fn == TrainerFn.FITTING:
            print(f"\n{self._where_to_resume()}", file=sys.stderr, flush=True)

    @property
    def _saver(self) -> ModelCheckpoint | None:
        return next((callback for callback in self.loop.callbacks if isinstance(callback, ModelCheckpoint)), None)

    def _where_to_resume(self) -> str:
        saver = self._saver
        path = saver is not None and (saver.last_model_path or saver.best_model_path)
        after = f"Interrupted after round {self.loop.current_epoch} of {self.loop.max_rounds}"
        if not path:
            return f"{after}, with no checkpoint to go on from."
        if self._config_of_command is not None:
            words = ("fedstop", "fit", "--config", str(self._config_of_command), "--ckpt_path", path)
            return f"{after}: go on with `{shlex.join(words)}`."
        return f"{after}: go on with `ckpt_path={path}`."

    def _stop_reason(self) -> str:
        """The reason for the run's end: a callback's own where one stopped it."""
        loop = self.loop
        if loop.nonfinite_reason is not None:
            return loop.nonfinite_reason
        if not loop.should_stop:
            skipped = " The last one skipped all its local steps: no gradient is finite." if self._skipped_all else ""
            return f"The budget of {loop.max_rounds} rounds is used up.{skipped}"
        # A rule that only observes says when it would have stopped, which ended nothing.
        rules = [callback for callback in loop.callbacks if not getattr(callback, "observe_only", False)]
        reasons = [getattr(callback, "stopping_reason_message", None) for callback in rules]
        return next((reason for reason in reasons if reason), "A callback set `should_stop`.")


def nonfinite_updates(round: int, report: RoundReport) -> str:
    """Begin a sentence on the clients whose update is not finite."""
    who = f"client{'s' * (len(report.nonfinite) > 1)} {', '.join(map(str, report.nonfinite))}"
    return f"The update of {who} in round {round} is not finite"
