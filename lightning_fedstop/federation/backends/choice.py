"""The back ends, and the choice among them."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

from lightning_fedstop.core.module_state import ModuleState
from lightning_fedstop.federation.backends.sequential import Sequential
from lightning_fedstop.federation.backends.stacked.backend import Stacked
from lightning_fedstop.federation.backends.threads import Threads
from lightning_fedstop.federation.local_training import ClientResult, Job, LocalTrainer

ClientBackend = Literal["auto", "sequential", "threads", "stacked"]


class Backend(Protocol):
    """A way of training the clients of a process.

    Attributes:
        trainer: the local training loop of the process's own module.
        finished: when each of those that train at once had no client left, by ``time.perf_counter``.
    """

    trainer: LocalTrainer
    finished: list[float]

    def run(self, jobs: Sequence[Job], start: ModuleState) -> Iterator[ClientResult]:
        """Train the clients of a round; see :meth:`Sequential.run`."""


def make_backend(
    client_backend: ClientBackend, stack_chunk_size: int | None, devices: Any, trainer: LocalTrainer
) -> Backend:
    """Make a back end.

    Args:
        client_backend: ``"auto"`` may train in threads with ``devices="auto"`` on a CPU.
        stack_chunk_size: clients in a stack at most.
        devices: the user's choice.
        trainer: the local training loop.

    Raises:
        MisconfigurationException: for threads that are asked for and cannot be had.
    """
    sequential = Sequential(trainer)
    if client_backend == "stacked":
        return Stacked(sequential, stack_chunk_size)
    is_free = devices == "auto" and trainer.fabric.device.type == "cpu" and trainer.fabric.world_size == 1
    if client_backend == "threads" or (client_backend == "auto" and is_free):
        return Threads(sequential, is_asked_for=client_backend == "threads")
    return sequential
