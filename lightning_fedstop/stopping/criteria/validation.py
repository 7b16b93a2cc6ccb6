"""The validation-based rules that the paper compares with: stop when a figure no longer improves.

They need labelled data that a federation rarely has. The threshold is absolute, in the unit of the figure: nats for a
loss, percentage points for an accuracy. Nothing here needs Lightning or torch.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lightning_fedstop.stopping.criteria.decision import Criterion, StoppingReason
from lightning_fedstop.utilities.validate import one_of, positive, whole_number

Mode: TypeAlias = Literal["min", "max"]
_MODES = ("min", "max")
_BETTER: dict[str, Mode] = {
    **dict.fromkeys(("acc", "accuracy", "f1", "auroc", "auc", "precision", "recall", "score", "iou", "dice"), "max"),
    **dict.fromkeys(("loss", "error", "mse", "rmse", "mae", "nll", "perplexity"), "min"),
}
# A loss starts from infinity, so that round 1 always improves it; an accuracy from 0.
_FIRST_BEST = {"min": math.inf, "max": 0.0}


def better_of(name: str) -> Mode | None:
    """Guess from the last word of a figure's name which way is better, or None.

    Words are parted by any sign or by a capital letter; what Lightning appends to a name is no part of it.

    >>> better_of("val/loss"), better_of("val.MulticlassAccuracy/dataloader_idx_0"), better_of("val_temperature")
    ('min', 'max', None)
    """
    name = re.sub(r"(_epoch)?(/dataloader_idx_\d+)?$", "", name)
    words = re.findall(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*", name)
    return _BETTER.get(words[-1].lower()) if words else None


@dataclass(frozen=True)
class ValidationDecision:
    """Answer of a validation-based rule after an evaluation.

    Attributes:
        round: The evaluation, counted from 1.
        value: The figure.
        best: The best so far; an improvement of at most the threshold does not change it.
        count: Evaluations in a row without improvement.
        should_stop: True if the rule is met.
        reason: Why, if it is met.
    """

    round: int
    value: float
    best: float
    count: int
    should_stop: bool
    reason: StoppingReason


def validation_stopping_round(
    values: Iterable[float], threshold: float, patience: int, mode: Mode = "min", min_rounds: int = 0
) -> int | None:
    """Find the evaluation, counted from 1, in which :class:`ValidationCriterion` stops a run.

    Args:
        values: The figure after each round: a loss, or an accuracy in percent with ``mode="max"``.
        threshold: This and all that follow as for :class:`ValidationCriterion`.
        patience: rho.
        mode: Which way is better.
        min_rounds: No stop before.

    Returns:
        The evaluation, or None if the run ends before.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If an argument is out of its range.

    >>> validation_stopping_round([2, 1.5, 1.2, 1.195, 1.193, 1.19, 1.189], threshold=0.01, patience=3)
    6
    """
    criterion = ValidationCriterion(threshold, patience, mode, min_rounds)
    return next((d.round for d in map(criterion.update, values) if d.should_stop), None)


class ValidationCriterion(Criterion):
    """Stop when a figure has not improved enough for ``patience`` evaluations in a row.

    The rule, per evaluation with figure L::

        L < best - threshold (or L > best + threshold):  best = L, count = 0;  else count + 1
        stop in the first evaluation with count >= patience

    A figure that is not a number never improves, so it is counted.

    Args:
        threshold: tau, above 0, in the figure's unit.
        patience: rho, at least 1.
        mode: ``"min"`` for a loss, whose best starts at infinity, ``"max"`` for an accuracy, whose best starts at 0.
        min_rounds: No stop before this evaluation.
        column: The figure's column in a record.

    Attributes:
        round: Evaluations seen.
        best: The best figure.
        count: Evaluations in a row without improvement.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If an argument is out of its range.

    >>> criterion = ValidationCriterion(threshold=0.01, patience=2, mode="max")
    >>> [criterion.update(accuracy).count for accuracy in (12.5, 40.0, 40.005, 40.02)]
    [0, 0, 1, 0]
    """

    rules = {"val_loss": "Validation loss", "val_acc": "Validation accuracy"}
    place = 1
    state_names = ("round", "count", "best")

    def __init__(
        self,
        threshold: float = 0.01,
        patience: int = 10,
        mode: Mode = "min",
        min_rounds: int = 0,
        column: str = "val_loss",
    ) -> None:
        self.threshold = positive("threshold", threshold)
        self.patience = whole_number("patience", patience, least=1)
        self.mode: Mode = one_of("mode", mode, _MODES)
        self.min_rounds = whole_number("min_rounds", min_rounds, least=0)
        self.column = column
        self.start()

    @classmethod
    def for_rule(
        cls, rule: str, threshold: float, patience: int, min_rounds: int = 0, **options: Any
    ) -> "ValidationCriterion":
        """Build the criterion of ``val_loss`` or ``val_acc``."""
        return cls(threshold, patience, "max" if rule == "val_acc" else "min", min_rounds, column=rule)

    @property
    def columns(self) -> tuple[str, ...]:
        """The figure's column."""
        return (self.column,)

    def start(self, parameters: Any = None) -> None:
        """Forget the run before; parameters are not looked at."""
        self.round = 0
        self.count = 0
        self.best = _FIRST_BEST[self.mode]

    def update(self, observation: float) -> ValidationDecision:
        """Decide after an evaluation that gave this figure."""
        value = float(observation)
        self.round += 1
        bound = self.best - self.threshold if self.mode == "min" else self.best + self.threshold
        if value < bound if self.mode == "min" else value > bound:
            self.best, self.count = value, 0
        else:
            self.count += 1
        should_stop = self.count >= self.patience and self.round >= self.min_rounds
        reason = StoppingReason.NOT_IMPROVING if should_stop else StoppingReason.NOT_STOPPED
        return ValidationDecision(self.round, value, self.best, self.count, should_stop, reason)
