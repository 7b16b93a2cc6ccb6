"""The loss scale of ``16-mixed``: small gradients survive float16, and steps whose gradients overflow are skipped."""

from typing import Any

from lightning.fabric.plugins.precision import Precision


class LossScale:
    """Loss scale that goes on from client to client, as a ``Trainer``'s does over a fit.

    Each process has its own. It starts high and halves with every step whose gradient is not finite, so the order of
    clients, and their split over processes, shows in the steps that are skipped.

    Args:
        precision: Fabric's; all but ``16-mixed`` have no scale.

    Attributes:
        scaler: torch's ``GradScaler``, or ``None``.
    """

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
        self.scaler = getattr(precision, "scaler", None)
        self._at_start: dict[str, Any] | None = None

    def begin_round(self) -> None:
        """Note the scale, for a checkpoint from within the round starts the round again."""
        self._at_start = self.precision.state_dict()

    def end_round(self) -> None:
        """End the round: a checkpoint holds the scale as it is now."""
        self._at_start = None

    def state_dict(self) -> dict[str, Any]:
        """Scale and growth tracker between two rounds; empty without a scaler."""
        return self.precision.state_dict() if self._at_start is None else self._at_start

    def load_state_dicts(self, state_dicts: list[dict[str, Any]], rank: int) -> None:
        """Take this process's state back from those of all processes; with more processes, some states serve several.

        Args:
            state_dicts: what :meth:`state_dict` gave on each process, in order of rank.
            rank: this process's.
        """
        if self.scaler is not None and state_dicts:
            self.precision.load_state_dict(state_dicts[rank % len(state_dicts)])

    def lower(self) -> bool:
        """Halve the scale outside of a step; gives whether it was above 1, so that there is a point in it."""
        if self.scaler is None or (scale := self.scaler.get_scale()) <= 1:
            return False
        self.scaler.update(scale * self.scaler.get_backoff_factor())
        return True
