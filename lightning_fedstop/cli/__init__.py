"""The ``fedstop`` command."""

from typing import TYPE_CHECKING, Any

from lightning_fedstop.cli.main import main

if TYPE_CHECKING:
    from lightning_fedstop.cli.fit import FedStopCLI

__all__ = ["FedStopCLI", "main"]


def __getattr__(name: str) -> Any:
    if name == "FedStopCLI":
        from lightning_fedstop.cli.fit import FedStopCLI

        return FedStopCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
