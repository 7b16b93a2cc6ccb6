"""The callback that stops a fit by any criterion over logged figures."""

import inspect

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fedstop.stopping.callbacks.base import CriterionCallback, is_dry_run
from lightning_fedstop.stopping.criteria.decision import Criterion


class CriterionEarlyStopping(CriterionCallback):
    """Stop a fit by any criterion over figures that are logged.

    After every training epoch, or round of a ``FederatedLoop``, it hands the criterion the figures of its ``columns``,
    so a rule decides as ``fedstop replay`` does on the record. They must be logged in every epoch that is checked.

    Args:
        criterion: The criterion.
        check_every_n_epochs: Epochs, or rounds, from one check to the next. 1 by default.
        verbose: Print a line at every check, not only at the stop.
        log_rank_zero_only: Print on the first process only.
        observe_only: Record when the run would be stopped, and let it go on.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If an argument is out of its range.
        MisconfigurationException: When a figure was not logged.

    >>> from lightning_fedstop.stopping import ValidationCriterion
    >>> CriterionEarlyStopping(ValidationCriterion(0.01, 5, column="train_loss")).stopped
    False
    """

    def __init__(
        self,
        criterion: Criterion,
        check_every_n_epochs: int | None = None,
        verbose: bool = False,
        log_rank_zero_only: bool = False,
        observe_only: bool = False,
    ) -> None:
        super().__init__(criterion, check_every_n_epochs, verbose, log_rank_zero_only, observe_only)

    @property
    def state_key(self) -> str:
        """Name of the state: the criterion and the arguments that a decision depends on."""
        arguments = {
            name: getattr(self.criterion, name, None) for name in inspect.signature(type(self.criterion)).parameters
        }
        return self._generate_state_key(
            criterion=type(self.criterion).__name__,
            **arguments,
            check_every_n_epochs=self.check_every_n_epochs,
            observe_only=self.observe_only,
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Train nothing more in a run that was stopped before its checkpoint was written."""
        super().on_train_start(trainer, pl_module)
        self._stay_stopped(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decide, if a check is due after this epoch."""
        epoch = trainer.current_epoch
        if is_dry_run(trainer) or not self._is_due(epoch) or not self._has_stepped(trainer, pl_module):
            return
        logged = trainer.callback_metrics
        if missing := [name for name in self.criterion.columns if name not in logged]:
            raise MisconfigurationException(
                f"`{type(self).__name__}` needs {', '.join(missing)}, which was not logged; there are "
                f"{', '.join(sorted(logged)) or 'no metrics'}."
            )
        with self._timed():
            row = {name: float(logged[name]) for name in self.criterion.columns}
            decision = self.criterion.decide(row)
            figures = ", ".join(f"{name} {value:.4g}" for name, value in row.items())
            self._act(trainer, epoch, decision, f"{figures}, count {decision.count} ({decision.reason.value}).")
        self._log(pl_module, {"wait_count": decision.count})
