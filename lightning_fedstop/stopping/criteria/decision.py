"""The seam of stopping rules: criteria, their decisions and names."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, Protocol


class StoppingReason(Enum):
    """Reason for a stop.

    >>> StoppingReason("saturated")
    <StoppingReason.SATURATED: 'saturated'>
    """

    NOT_STOPPED = "not_stopped"
    SATURATED = "saturated"  # the growth rate stayed under the threshold
    NOT_MOVING = "not_moving"  # the parameters never left their start
    NOT_IMPROVING = "not_improving"  # a validation figure ceased to improve
    DIVERGED = "diverged"  # the parameters are not finite


class StopDecision(Protocol):
    """Answer of any criterion after a round."""

    @property
    def round(self) -> int:
        """The round, counted from 1."""

    @property
    def count(self) -> int:
        """Number that is compared with the patience."""

    @property
    def should_stop(self) -> bool:
        """True if the rule is met in this round."""

    @property
    def reason(self) -> StoppingReason:
        """Reason, if it is met."""


class Criterion(ABC):
    """Rule that looks at a run once a round and may stop it.

    It knows nothing of Lightning or torch: live, a callback hands it what a round gave; replayed, it decides on the
    row of a record. A subclass that fills ``rules`` is known by these names to :mod:`lightning_fedstop.records.replay`,
    to reports and to the contract tests, with no other list to be kept.
    """

    rules: ClassVar[Mapping[str, str]] = {}
    """Names of the rule in records, each with its title in reports."""

    options: ClassVar[tuple[str, ...]] = ()
    """Arguments of a replay, beside threshold, patience and ``min_rounds``, that the rule takes."""

    has_interval: ClassVar[bool] = False
    """True if the live rule can check every n-th round only."""

    place: ClassVar[int] = 100
    """Place in tables: lower comes first."""

    state_names: ClassVar[tuple[str, ...]] = ("round", "count")
    """Attributes that a checkpoint keeps: numbers, strings, tensors, None."""

    _named: ClassVar[dict[str, "type[Criterion]"]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Criterion._named |= dict.fromkeys(vars(cls).get("rules", ()), cls)

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Columns of a record that it decides on."""

    @abstractmethod
    def start(self, parameters: Any = None, /) -> None:
        """Begin a run with these parameters and forget the one before."""

    @abstractmethod
    def update(self, observation: Any, /) -> StopDecision:
        """Decide after a round, on its column's value or a tuple of several."""

    def decide(self, row: Mapping[str, float]) -> StopDecision:
        """Decide after a round, on its row of a record."""
        values = tuple(row[column] for column in self.columns)
        return self.update(values[0] if len(values) == 1 else values)

    @classmethod
    def for_rule(cls, rule: str, threshold: float, patience: int, min_rounds: int = 0, **options: Any) -> "Criterion":
        """Build the criterion of one of its ``rules``; options of other rules are left out."""
        own = {name: value for name, value in options.items() if name in cls.options}
        arguments: dict[str, Any] = {"threshold": threshold, "patience": patience, "min_rounds": min_rounds, **own}
        return cls(**arguments)

    def state_dict(self) -> dict[str, Any]:
        """Values of ``state_names``, which ``torch.load(weights_only=True)`` reads."""
        return {name: getattr(self, name) for name in self.state_names}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Count on from a state; that of a new criterion starts clean.

        Raises:
            KeyError: If the state lacks an entry.
        """
        for name in self.state_names:
            setattr(self, name, state_dict[name])


@cache
def _import_criteria() -> None:
    for module in iter_modules(import_module(__package__).__path__):
        import_module(f"{__package__}.{module.name}")


def criteria_of_rules() -> dict[str, type[Criterion]]:
    """Map the name of every rule imported so far to its criterion.

    >>> list(criteria_of_rules())[:4]
    ['task_vector', 'val_loss', 'val_acc', 'consensus']
    """
    _import_criteria()
    return dict(sorted(Criterion._named.items(), key=lambda item: item[1].place))


@dataclass(frozen=True)
class Decision:
    """Answer of the growth-rate criterion after a round.

    Attributes:
        round: The round, counted from 1.
        distance: delta_r, the distance from the start.
        growth_rate: g_r; None in round 1, NaN where a distance is not finite.
        count: kappa_r, the rounds in a row whose growth rate lay under the threshold.
        should_stop: True if the rule is met in this round. Every round is decided for itself.
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
