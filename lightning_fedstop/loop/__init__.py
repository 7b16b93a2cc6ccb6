"""The loop over rounds: set-up, rounds, callbacks, checkpoints, the record."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fedstop.loop.federated_loop import FederatedLoop

__all__ = ["FederatedLoop"]


def __getattr__(name: str) -> Any:
    # Lazily, because `loop.signals` serves commands that import neither torch nor Lightning.
    if name == "FederatedLoop":
        from lightning_fedstop.loop.federated_loop import FederatedLoop

        return FederatedLoop
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
