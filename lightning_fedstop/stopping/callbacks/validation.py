"""The validation-based early stopping that the paper compares with, as a callback."""

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fedstop.stopping.callbacks.base import CriterionCallback, is_dry_run
from lightning_fedstop.stopping.callbacks.federated_trainer import has_trained
from lightning_fedstop.stopping.criteria.validation import Mode, ValidationCriterion, ValidationDecision, better_of


class ValidationEarlyStopping(CriterionCallback):
    """Stop a fit when a validation figure has ceased to improve.

    It is the baseline of Lee et al., "Data-free early stopping for federated learning": after every evaluation, a loss
    must fall below its best by more than the threshold, or an accuracy rise above it by more than the threshold in
    percentage points (:class:`ValidationCriterion` gives the rule). It differs from Lightning's ``EarlyStopping`` in
    that accuracies are compared in percent, that a figure that is not a number is counted as no improvement, and that
    it can watch without stopping. Evaluations are counted, not epochs; the sanity check is none.

    Args:
        monitor: The logged figure.
        threshold: tau, above 0: nats for a loss, percentage points for an accuracy.
        patience: rho: evaluations in a row without improvement. At least 1.
        mode: ``"min"`` or ``"max"``; by default by the figure's last word (``val_loss`` ``"min"``, ``val_acc``
            ``"max"``).
        percent: Multiply the figure by 100 before it is compared; by default with ``mode="max"``, since accuracies are
            logged as fractions.
        min_rounds: No stop before this evaluation.
        verbose: Print a line at every evaluation, not only at the stop.
        log_rank_zero_only: Print on the first process only.
        observe_only: Record when the run would be stopped, and let it go on.

    Attributes:
        wait_count: Evaluations in a row without improvement.
        best: The best figure, in the unit compared.
        stop_round: The evaluation, counted from 1, the fit was stopped at, or None.
        stopping_reason: A :class:`StoppingReason`.
        stopping_reason_message: The same in a sentence, or None.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If an argument is out of its range, or the mode cannot be told from the figure's name.
        MisconfigurationException: When an evaluation has not logged the figure.

    >>> early_stopping = ValidationEarlyStopping("val_acc", threshold=0.01, patience=10)
    >>> early_stopping.mode, early_stopping.percent
    ('max', True)
    """

    log_prefix = "validation"
    criterion: ValidationCriterion

    def __init__(
        self,
        monitor: str = "val_loss",
        threshold: float = 0.01,
        patience: int = 10,
        mode: Mode | None = None,
        percent: bool | None = None,
        min_rounds: int = 0,
        verbose: bool = False,
        log_rank_zero_only: bool = False,
        observe_only: bool = False,
    ) -> None:
        if not isinstance(monitor, str) or not monitor:
            raise TypeError(f"`monitor` must be the name of a logged figure, got {monitor!r}.")
        self.monitor = monitor
        self.mode: Mode = _mode_of(monitor) if mode is None else mode
        self.percent = self.mode == "max" if percent is None else percent
        criterion = ValidationCriterion(threshold, patience, self.mode, min_rounds)
        super().__init__(criterion, None, verbose, log_rank_zero_only, observe_only)

    @property
    def threshold(self) -> float:
        """Tau."""
        return self.criterion.threshold

    @property
    def patience(self) -> int:
        """Rho."""
        return self.criterion.patience

    @property
    def min_rounds(self) -> int:
        """The first check that may stop the fit."""
        return self.criterion.min_rounds

    @property
    def best(self) -> float:
        """The best figure so far, in the unit compared."""
        return self.criterion.best

    @property
    def state_key(self) -> str:
        """Name of the state: the arguments that a decision depends on."""
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            percent=self.percent,
            threshold=self.criterion.threshold,
            patience=self.criterion.patience,
            min_rounds=self.criterion.min_rounds,
            observe_only=self.observe_only,
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Train nothing more in a run that was stopped before its checkpoint was written."""
        super().on_train_start(trainer, pl_module)
        self._stay_stopped(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decide on the figure of this evaluation."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or is_dry_run(trainer) or not has_trained(trainer):
            return
        with self._timed():
            if self.monitor not in trainer.callback_metrics:
                raise MisconfigurationException(
                    f"`ValidationEarlyStopping` monitors {self.monitor!r}, which was not logged; there are "
                    f"{', '.join(sorted(trainer.callback_metrics)) or 'no metrics'}."
                )
            value = float(trainer.callback_metrics[self.monitor])
            decision = self.criterion.update(100 * value if self.percent else value)
            self._act(trainer, trainer.current_epoch, decision, self._explain(decision))

    def _explain(self, decision: ValidationDecision) -> str:
        unit = " %" if self.percent else ""
        if decision.should_stop:
            return (
                f"{self.monitor} has not improved on {decision.best:.4g}{unit} by more than "
                f"{self.criterion.threshold:g}{unit} for {decision.count} evaluations in a row."
            )
        return (
            f"{self.monitor} {decision.value:.4g}{unit}, best {decision.best:.4g}{unit}, not improved "
            f"{decision.count} of {self.criterion.patience}."
        )


def _mode_of(monitor: str) -> Mode:
    mode = better_of(monitor)
    if mode is not None:
        return mode
    raise ValueError(
        f"`mode` must be 'min' or 'max' for `monitor={monitor!r}`, whose name does not tell which is better."
    )
