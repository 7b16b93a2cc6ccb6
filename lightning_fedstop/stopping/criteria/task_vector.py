"""The growth-rate criterion: stop when the distance of the parameters from their start stops growing.

Lee et al., "Data-free early stopping for federated learning", equations (10) and (11), over the distances of equation
(7). Nothing here needs Lightning or ``torch.nn``, and torch only where tensors come in. Rounds are counted from 1;
:func:`zero_based_round` gives the numbers of the paper's tables.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

from lightning_fedstop.stopping.criteria.decision import Criterion, Decision, StopDecision, StoppingReason
from lightning_fedstop.stopping.criteria.distance import (
    Parameters,
    as_list,
    beside,
    copied,
    storable,
    task_vector,
    task_vector_distance,
)
from lightning_fedstop.utilities.validate import flag, one_of, positive, whole_number

__all__ = [
    "Criterion",
    "Decision",
    "StopDecision",
    "StoppingReason",
    "TaskVectorCriterion",
    "growth_rate",
    "saturation_count",
    "stopping_round",
    "task_vector",
    "task_vector_distance",
    "zero_based_round",
]

Variant: TypeAlias = Literal["paper", "released_code"]
VARIANTS = ("paper", "released_code")
_FIRST_COUNTED_ROUND = {"paper": 2, "released_code": 3}
_RELEASED_CODE_SMALLEST_DISTANCE = 1e-6


def growth_rate(distance: float, previous: float, variant: Variant = "paper") -> float:
    """Return equation (10): g_r = |delta_r - delta_{r-1}| / delta_{r-1}.

    From a distance of exactly 0 the growth is 0 if the parameters still stand there, else infinite. With
    ``variant="released_code"`` it is signed, and 1 from a distance of at most 1e-6 or NaN. Otherwise it is NaN if a
    distance is not finite.

    >>> growth_rate(1.5, 2.0), growth_rate(1.5, 2.0, "released_code"), growth_rate(0.0, 0.0), growth_rate(1e-9, 0.0)
    (0.25, -0.25, 0.0, inf)
    """
    if variant == "released_code" and not previous > _RELEASED_CODE_SMALLEST_DISTANCE:
        return 1.0  # after NaN too
    if not (math.isfinite(distance) and math.isfinite(previous)):
        return math.nan
    if previous == 0:
        return 0.0 if distance == 0 else math.inf
    growth = (distance - previous) / previous
    return growth if variant == "released_code" else abs(growth)


def saturation_count(count: int, growth: float, threshold: float, variant: Variant = "paper") -> int:
    """Return equation (11): kappa_r = kappa_{r-1} + 1 if g_r < tau, else 0.

    A growth that is NaN is not below the threshold. With ``variant="released_code"`` a growth of exactly 0 leaves the
    count as it is.

    >>> saturation_count(3, 0.005, 0.01), saturation_count(3, 0.02, 0.01), saturation_count(3, 0.0, 0.01)
    (4, 0, 4)
    """
    if variant == "released_code" and growth == 0:
        return count
    return count + 1 if growth < threshold else 0


def stopping_round(
    distances: Iterable[float],
    threshold: float,
    patience: int,
    min_rounds: int = 0,
    variant: Variant = "paper",
    check_finite: bool = True,
) -> int | None:
    """Find the round, counted from 1, in which :class:`TaskVectorCriterion` stops a run.

    Args:
        distances: delta_1, delta_2, ...
        threshold: This and all that follow as for :class:`TaskVectorCriterion`.
        patience: rho.
        min_rounds: No stop before.
        variant: Whose rule.
        check_finite: Stop on divergence.

    Returns:
        The round, or None if the run ends before the criterion stops it.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If an argument is out of its range, or a distance is negative.

    >>> stopping_round([1, 1.5, 1.6, 1.605, 1.609, 1.612, 1.614], threshold=0.01, patience=3)
    6
    """
    criterion = TaskVectorCriterion(threshold, patience, min_rounds, check_finite, variant)
    return next((d.round for d in map(criterion.update_distance, distances) if d.should_stop), None)


def zero_based_round(stop_round: int | None) -> int | None:
    """Return a round counted from 0, as in the paper's Table IV.

    >>> zero_based_round(12)
    11
    """
    return None if stop_round is None else stop_round - 1


class TaskVectorCriterion(Criterion):
    """Stop when the distance from the start hardly grows for ``patience`` rounds in a row.

    The rule, per round r with distance delta_r, and kappa_1 = 0::

        g_r = |delta_r - delta_{r-1}| / delta_{r-1}
        kappa_r = kappa_{r-1} + 1  if g_r < threshold, else 0
        stop in the first round with kappa_r >= patience

    A model that never moves is stopped too, with a reason of its own. One copy of the start is held.

    Args:
        threshold: tau, above 0; relative growth a round.
        patience: rho, at least 1. The earliest stop is in round ``patience + 1``.
        min_rounds: No saturation stops a run before this round. The rule is met or not met in that round: a stop that
            was due earlier is not kept.
        check_finite: Stop at once, ``min_rounds`` or not, when the distance is not finite. If False, such a round
            resets the count.
        variant: ``"paper"``, or ``"released_code"`` as the authors' code decides: growth is signed (shrinking counts),
            counts begin with round 3, growth is 1 from a distance of at most 1e-6, a growth of exactly 0 neither counts
            nor resets, and a distance that is not finite never stops (``check_finite`` has no say).
        start_device: The device for the copy of the start, such as ``"cpu"``; beside the parameters by default.

    Attributes:
        round: Rounds seen.
        distance: The last distance, None before round 1.
        count: kappa_r.
        stop_round: The first round in which the rule was met, None before; later rounds do not change it.
        stop_reason: Why it was.

    Raises:
        TypeError: If an argument is not of its type.
        ValueError: If an argument is out of its range.

    >>> criterion = TaskVectorCriterion(threshold=0.1, patience=2)
    >>> criterion.start([0.0, 0.0])
    >>> for x in (1.0, 2.0, 2.1, 2.15):
    ...     decision = criterion.update([x, 0.0])
    >>> decision.round, decision.count, decision.should_stop, criterion.stop_round
    (4, 2, True, 4)
    """

    rules = {"task_vector": "Task vector"}
    options = ("variant",)
    has_interval = True
    place = 0

    def __init__(
        self,
        threshold: float = 0.01,
        patience: int = 10,
        min_rounds: int = 0,
        check_finite: bool = True,
        variant: Variant = "paper",
        start_device: str | None = None,
    ) -> None:
        self.threshold = positive("threshold", threshold)
        self.patience = whole_number("patience", patience, least=1)
        self.min_rounds = whole_number("min_rounds", min_rounds, least=0)
        self.check_finite = flag("check_finite", check_finite)
        self.variant: Variant = one_of("variant", variant, VARIANTS)
        self.start_device = start_device
        self._start: list[Any] | None = None
        self._reset()

    def _reset(self) -> None:
        self.round = 0
        self.count = 0
        self.distance: float | None = None
        self.stop_round: int | None = None
        self.stop_reason = StoppingReason.NOT_STOPPED
        self._has_moved = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The distance."""
        return ("distance",)

    @property
    def theta_0(self) -> list[Any] | None:
        """Copy of the start, a tensor or array per parameter; None before ``start``."""
        return self._start

    def start(self, parameters: Parameters, /) -> None:  # type: ignore[override]
        """Take a copy of theta_0 and forget the run before.

        Args:
            parameters: One tensor or array, or an iterable of them.

        Raises:
            TypeError: If it is something else.
            ValueError: If it is empty.
        """
        self._start = copied(parameters, self.start_device)
        self._reset()

    def extend(self, parameters: Parameters) -> None:
        """Watch more parameters from here on; their present values are their start."""
        if self._start is None:
            raise RuntimeError("Call `start` before `extend`.")
        self._start = [*self._start, *copied(parameters, self.start_device)]

    def update(self, parameters: Parameters, /) -> Decision:
        """Decide after a round.

        Args:
            parameters: theta_r, in the form and shapes ``start`` was given.

        Raises:
            RuntimeError: If ``start`` was not called.
            ValueError: If number or shapes of the parameters have changed.
        """
        if self._start is None:
            raise RuntimeError("Call `start` with the initial parameters before `update`.")
        listed = as_list(parameters)
        if self.start_device is None and len(listed) == len(self._start):
            self._start = beside(self._start, listed)  # a loaded start comes on the CPU: move it once
        return self.update_distance(task_vector_distance(listed, self._start))

    def decide(self, row: Mapping[str, float]) -> Decision:
        """Decide after a round, on the distance in its row of a record."""
        return self.update_distance(row["distance"])

    def update_distance(self, distance: float) -> Decision:
        """Decide after a round from the distance delta_r alone.

        Raises:
            ValueError: If it is negative.
        """
        distance = float(distance)
        if distance < 0:
            raise ValueError(f"`distance` must be at least 0, got {distance!r}.")
        previous, self.distance = self.distance, distance
        self.round += 1
        growth = None if previous is None else growth_rate(distance, previous, self.variant)
        if growth is not None and self.round >= _FIRST_COUNTED_ROUND[self.variant]:
            self.count = saturation_count(self.count, growth, self.threshold, self.variant)
        self._has_moved |= distance != 0
        reason = self._reason(distance)
        should_stop = reason is not StoppingReason.NOT_STOPPED
        if should_stop and self.stop_round is None:
            self.stop_round, self.stop_reason = self.round, reason
        return Decision(self.round, distance, growth, self.count, should_stop, reason)

    def _reason(self, distance: float) -> StoppingReason:
        if self.variant == "paper" and self.check_finite and not math.isfinite(distance):
            return StoppingReason.DIVERGED
        if self.count < self.patience or self.round < self.min_rounds:
            return StoppingReason.NOT_STOPPED
        return StoppingReason.SATURATED if self._has_moved else StoppingReason.NOT_MOVING

    def state_dict(self) -> dict[str, Any]:
        """All it needs to count on, the start included (not copied).

        >>> criterion = TaskVectorCriterion()
        >>> _ = criterion.update_distance(2.0)
        >>> criterion.state_dict()["round"], criterion.state_dict()["distance"]
        (1, 2.0)
        """
        return {
            "threshold": self.threshold,
            "variant": self.variant,
            "round": self.round,
            "count": self.count,
            "distance": self.distance,
            "has_moved": self._has_moved,
            "stop_round": self.stop_round,
            "stop_reason": self.stop_reason.value,
            "start": None if self._start is None else storable(self._start),
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Count on from a state.

        Raises:
            KeyError: If the state lacks an entry.
            ValueError: If it was counted under another threshold or variant.
        """
        for name in ("threshold", "variant"):
            if state_dict[name] != getattr(self, name):
                raise ValueError(
                    f"The state was counted with {name}={state_dict[name]!r}, so it does not fit a criterion "
                    f"with {name}={getattr(self, name)!r}."
                )
        start = state_dict["start"]
        self.round = state_dict["round"]
        self.count = state_dict["count"]
        self.distance = state_dict["distance"]
        self.stop_round = state_dict["stop_round"]
        self.stop_reason = StoppingReason(state_dict["stop_reason"])
        self._has_moved = state_dict["has_moved"]
        self._start = None if start is None else list(start)
