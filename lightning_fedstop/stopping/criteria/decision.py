"""What a stopping criterion is, and what it answers: the seam on which further criteria are added."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol


class StoppingReason(Enum):
    """Why a run was stopped.

    >>> StoppingReason("saturated")
    <StoppingReason.SATURATED: 'saturated'>
    """

    NOT_STOPPED = "not_stopped"
    SATURATED = "saturated"  # the growth rate stayed under the threshold
    NOT_MOVING = "not_moving"  # the parameters never left their start
    NOT_IMPROVING = "not_improving"  # a validation figure ceased to improve
    DIVERGED = "diverged"  # the parameters are not finite


class StopDecision(Protocol):
    """What a callback needs of any criterion's decision."""

    @property
    def round(self) -> int:
        """The round, counted from 1."""

    @property
    def count(self) -> int:
        """What is compared with the patience."""

    @property
    def should_stop(self) -> bool:
        """Whether the rule is met in this round."""

    @property
    def reason(self) -> StoppingReason:
        """Why, if it is met."""


class Criterion(Protocol):
    """A rule that looks at a run once a round and says whether to stop."""

    def start(self, parameters: Any, /) -> None:
        """Begin a run with these parameters and forget the one before."""

    def update(self, observation: Any, /) -> StopDecision:
        """Decide after a round, on what this rule looks at."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers, strings and tensors only, so that ``torch.load(weights_only=True)`` reads it."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Count on from a state; that of a criterion just built makes it forget its run."""


@dataclass(frozen=True)
class Decision:
    """What the growth-rate criterion says after a round.

    Attributes:
        round: The round, counted from 1.
        distance: delta_r, the distance from the start.
        growth_rate: g_r; None in round 1, NaN where a distance is not finite.
        count: kappa_r, the rounds in a row whose growth rate lay under the threshold.
        should_stop: Whether the rule is met in this round. It is decided anew every round.
        reason: Why, if it is met.

    >>> decision = Decision(12, 1.61, 0.004, 10, True, StoppingReason.SATURATED)
    >>> decision.round, decision.reason.value
    (12, 'saturated')
    """

    round: int
    distance: float
    growth_rate: float | None
    count: int
    should_stop: bool
    reason: StoppingReason
