"""The consensus criterion: stop when the clients' local task vectors agree and no longer change.

A second data-free rule, of the same authors. It looks at local models before aggregation, v_m = theta_m - theta_0,
instead of at the global one. Nothing here needs Lightning or torch: a round comes as two numbers, how far the clients
went together and how far apart they are.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lightning_fedstop.stopping.criteria.decision import Criterion, StoppingReason
from lightning_fedstop.utilities.validate import flag, one_of, positive, whole_number

Shift: TypeAlias = Literal["mean_vector", "mean_norm"]
SHIFTS = ("mean_vector", "mean_norm")
_COLUMNS = {"mean_vector": "consensus/shift", "mean_norm": "consensus/mean_norm"}

_EPSILON = 1e-12
_FIRST_COUNTED_ROUND = 2


@dataclass(frozen=True)
class ConsensusDecision:
    """Answer of the consensus criterion after a round.

    Attributes:
        round: The round, counted from 1.
        potential: phi_r, see :func:`consensus_potential`.
        smoothed: Its exponential moving average.
        change: Delta_r, the average's relative change; None in round 1.
        count: Rounds in a row whose change lay under the threshold.
        should_stop: True if the rule is met.
        reason: Why, if it is met.
    """

    round: int
    potential: float
    smoothed: float
    change: float | None
    count: int
    should_stop: bool
    reason: StoppingReason


def consensus_potential(shift: float, dispersion: float) -> float:
    """Return phi = shift (1 + dispersion / (shift + eps)).

    Args:
        shift: The norm of the mean local task vector (or, in the authors' code, the mean of the norms).
        dispersion: The mean distance of the local task vectors from their mean.

    >>> round(consensus_potential(3.0, 1.0), 9)
    4.0
    """
    return shift * (1 + dispersion / (shift + _EPSILON))


def consensus_stopping_round(
    shifts: Iterable[float], dispersions: Iterable[float], threshold: float, patience: int, min_rounds: int = 0
) -> int | None:
    """Find the round, counted from 1, in which :class:`ConsensusCriterion` stops a run.

    Args:
        shifts: Of each round.
        dispersions: Of each round.
        threshold: This and all that follow as for :class:`ConsensusCriterion`.
        patience: rho.
        min_rounds: No stop before.

    Returns:
        The round, or None if the run ends before.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If an argument is out of its range, or the two differ in length.

    >>> consensus_stopping_round([1.0, 1.2, 1.25, 1.26], [1.0, 1.2, 1.25, 1.26], threshold=0.1, patience=2)
    4
    """
    criterion = ConsensusCriterion(threshold, patience, min_rounds)
    rounds = zip(shifts, dispersions, strict=True)
    return next((d.round for d in map(criterion.update, rounds) if d.should_stop), None)


class ConsensusCriterion(Criterion):
    """Stop when the smoothed consensus potential hardly changes for ``patience`` rounds in a row.

    The rule, per round with potential phi_r and alpha = 2 / (patience + 1)::

        s_1 = phi_1;  s_r = alpha phi_r + (1 - alpha) s_{r-1}
        Delta_r = |s_r - s_{r-1}| / (|s_{r-1}| + eps),  from r = 2
        count = count + 1 if Delta_r < threshold, else 0;  stop in the first round with count >= patience

    Args:
        threshold: tau, above 0; the authors' default is 0.1.
        patience: rho, at least 1; with 1 nothing is smoothed.
        min_rounds: No stop before this round.
        check_finite: Stop at once when the potential is not finite. If False, such a round resets the count, and the
            average starts again after it.
        shift: ``"mean_vector"``, the norm of the mean task vector, as the authors describe it, or ``"mean_norm"``, the
            mean of the norms, as their code computes it: the column of a record that is read.

    Attributes:
        round: Rounds seen.
        count: Rounds in a row under the threshold.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If an argument is out of its range.

    >>> criterion = ConsensusCriterion(threshold=0.1, patience=2)
    >>> [criterion.update((x, x)).count for x in (1.0, 1.2, 1.25, 1.26)]
    [0, 0, 1, 2]
    """

    rules = {"consensus": "Consensus"}
    options = ("shift",)
    place = 2
    state_names = ("round", "count", "smoothed")

    def __init__(
        self,
        threshold: float = 0.1,
        patience: int = 10,
        min_rounds: int = 0,
        check_finite: bool = True,
        shift: Shift = "mean_vector",
    ) -> None:
        self.threshold = positive("threshold", threshold)
        self.patience = whole_number("patience", patience, least=1)
        self.min_rounds = whole_number("min_rounds", min_rounds, least=0)
        self.check_finite = flag("check_finite", check_finite)
        self.shift: Shift = one_of("shift", shift, SHIFTS)
        self.start()

    @property
    def columns(self) -> tuple[str, ...]:
        """The shift's column, and that of the dispersion."""
        return _COLUMNS[self.shift], "consensus/dispersion"

    def start(self, parameters: Any = None) -> None:
        """Forget the run before; the local task vectors come in with each round."""
        self.round = 0
        self.count = 0
        self.smoothed: float | None = None

    def update(self, observation: tuple[float, float]) -> ConsensusDecision:
        """Decide after a round.

        Args:
            observation: Its shift and its dispersion.

        Raises:
            ValueError: If one of them is negative.
        """
        shift, dispersion = map(float, observation)
        if shift < 0 or dispersion < 0:
            raise ValueError(f"Shift and dispersion must be at least 0, got {shift!r} and {dispersion!r}.")
        self.round += 1
        potential = consensus_potential(shift, dispersion)
        if not math.isfinite(potential):
            return self._not_finite(potential)
        before = self.smoothed
        weight = 2 / (self.patience + 1)
        smoothed = potential if before is None else weight * potential + (1 - weight) * before
        self.smoothed = smoothed
        change = None if before is None else abs(smoothed - before) / (abs(before) + _EPSILON)
        if change is not None and self.round >= _FIRST_COUNTED_ROUND:
            self.count = self.count + 1 if change < self.threshold else 0
        should_stop = self.count >= self.patience and self.round >= self.min_rounds
        reason = StoppingReason.SATURATED if should_stop else StoppingReason.NOT_STOPPED
        return ConsensusDecision(self.round, potential, smoothed, change, self.count, should_stop, reason)

    def _not_finite(self, potential: float) -> ConsensusDecision:
        self.count, self.smoothed = 0, None
        reason = StoppingReason.DIVERGED if self.check_finite else StoppingReason.NOT_STOPPED
        return ConsensusDecision(self.round, potential, math.nan, math.nan, 0, self.check_finite, reason)
