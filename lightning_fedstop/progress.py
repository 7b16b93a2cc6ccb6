"""The rich progress bar over rounds."""

import os
import sys
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def wants_progress_bar(enable: bool | None) -> bool:
    """Whether to draw a bar: as asked, else in a terminal but not under a CI."""
    if enable is not None:
        return enable
    return sys.stderr.isatty() and not os.environ.get("CI")


class RoundProgressBar(ProgressBar):
    """One line over the rounds: loss, growth rate, "saturated k of rho", time left to the budget.

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
        """Whether the bar draws."""
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
        self._progress = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("left to the budget"),
            TimeRemainingColumn(),
            console=self._console or Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=trainer.max_rounds, completed=trainer.current_round, status="")
        self._progress.start()

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Show what callbacks have logged at the last round's end."""
        if self._progress is not None:
            self._progress.update(self._task, status=status_of(trainer))

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Move the bar one round on."""
        if self._progress is not None:
            self._progress.update(self._task, completed=trainer.current_round + 1, status=status_of(trainer))

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Leave the finished bar standing."""
        self.on_train_epoch_start(trainer, pl_module)
        self._stop()

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the terminal back."""
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def status_of(trainer: Any) -> str:
    """The middle of the bar: what the module logs with ``prog_bar=True`` and where the stop rule stands."""
    metrics = trainer.callback_metrics
    shown = {name: float(metrics[name]) for name in ("train_loss",) if name in metrics} | trainer.progress_bar_metrics
    parts = [f"{name} {value:.4g}" for name, value in shown.items() if not name.startswith("task_vector/")]
    growth = metrics.get("growth_rate")
    if growth is not None:
        parts.append(f"growth {float(growth):.2%}")
    rules = [c for c in trainer.callbacks if hasattr(c, "wait_count") and hasattr(c, "criterion")]
    parts.extend(f"saturated {rule.wait_count} of {rule.criterion.patience}" for rule in rules)
    return "  ".join(parts)
