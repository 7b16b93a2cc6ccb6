"""Progress of a run: a bar over rounds, or a line now and then."""

import os
import sys
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

_LINES = 10


def wants_progress_bar(enable: bool | None) -> bool:
    """Decide on a bar: as asked, else in a terminal outside CI."""
    if enable is not None:
        return enable
    return sys.stderr.isatty() and not os.environ.get("CI")


class RoundLines(Callback):
    """A line in the log every tenth of the rounds, where no bar is drawn."""

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Log the round, the counts of stopping rules, and the metrics."""
        done, budget = trainer.current_round + 1, trainer.max_rounds
        if done * _LINES // budget > (done - 1) * _LINES // budget:
            parts = [f"Round {done} of {budget}", rule_counts(trainer), shown_metrics(trainer)]
            rank_zero_info("  ".join(part for part in parts if part))


class _Tail(TimeRemainingColumn):
    """End of the line, cut in narrow terminals: time left to the budget, metrics."""

    def render(self, task: Task) -> Text:
        left = super().render(task)
        line = Text.assemble(left, " left to the budget  ", task.fields["status"])
        line.no_wrap, line.overflow = True, "ellipsis"
        return line


class RoundProgressBar(ProgressBar):
    """Progress bar over rounds, with the rule's count, times, growth rate and metrics.

    Args:
        console: where to draw; standard error by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console
        self._progress: Progress | None = None
        self._enabled = True

    @property
    def is_enabled(self) -> bool:
        """True if the bar draws."""
        return self._enabled

    def enable(self) -> None:
        """Let the bar draw."""
        self._enabled = True

    def disable(self) -> None:
        """Keep the bar silent, as on all processes but the first."""
        self._enabled = False

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        (self._progress.console if self._progress else Console(stderr=True)).print(*args, **kwargs)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Draw the bar."""
        if not self._enabled or not trainer.is_global_zero:
            return
        fixed = Column(no_wrap=True)  # which keeps its width where the line is cut
        self._progress = Progress(
            TextColumn("round", table_column=fixed),
            MofNCompleteColumn(table_column=fixed),
            BarColumn(12, table_column=fixed),
            TextColumn("{task.fields[count]}", table_column=fixed),
            TextColumn("elapsed", table_column=fixed),
            TimeElapsedColumn(table_column=fixed),
            _Tail(),
            console=self._console or Console(stderr=True),
        )
        self._task = self._progress.add_task(
            "", total=trainer.max_rounds, completed=trainer.current_round, count=rule_counts(trainer), status=""
        )
        self._progress.start()

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Show the values that callbacks logged at the last round's end."""
        self._show(trainer, trainer.current_round)

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Move the bar one round on."""
        self._show(trainer, trainer.current_round + 1)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Leave the finished bar standing."""
        self.on_train_epoch_start(trainer, pl_module)
        self._stop()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the terminal back."""
        self._stop()

    def _show(self, trainer: Any, done: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=done, count=rule_counts(trainer), status=shown_metrics(trainer))

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def rule_counts(trainer: Any) -> str:
    """Counts of the stopping rules."""
    rules = [c for c in trainer.callbacks if hasattr(c, "wait_count") and hasattr(c, "criterion")]
    return "  ".join(f"saturated {rule.wait_count} of {rule.criterion.patience}" for rule in rules)


def shown_metrics(trainer: Any) -> str:
    """Growth rate and the values that the module logs with ``prog_bar=True``."""
    metrics = trainer.callback_metrics
    growth = metrics.get("growth_rate")
    parts = [] if growth is None else [f"growth {float(growth):.2%}"]
    shown = {name: float(metrics[name]) for name in ("train_loss",) if name in metrics} | trainer.progress_bar_metrics
    parts += [f"{name} {value:.4g}" for name, value in shown.items() if not name.startswith("task_vector/")]
    return "  ".join(parts)
