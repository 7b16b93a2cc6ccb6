"""The ways of training a process's clients, and the choice among them."""

from typing import Any, Literal

from lightning.fabric import Fabric

from lightning_fedstop.federation.backends.stacked import StackedTrainer
from lightning_fedstop.federation.backends.threads import ThreadedTrainer
from lightning_fedstop.federation.local_training import LocalTrainer

ClientBackend = Literal["auto", "sequential", "threads", "stacked"]


def make_trainer(
    client_backend: ClientBackend, stack_chunk_size: int | None, devices: Any, *arguments: Any
) -> LocalTrainer:
    """Make the local training loop of a back end.

    Args:
        client_backend: ``"auto"`` may train in threads with ``devices="auto"`` on a CPU.
        stack_chunk_size: clients in a stack at most.
        devices: the user's choice.
        arguments: those of :class:`LocalTrainer`.

    Raises:
        MisconfigurationException: for threads that are asked for and cannot be had.
    """
    fabric: Fabric = arguments[4]
    if client_backend == "stacked":
        return StackedTrainer(stack_chunk_size, *arguments)
    is_free = devices == "auto" and fabric.device.type == "cpu" and fabric.world_size == 1
    if client_backend == "threads" or (client_backend == "auto" and is_free):
        return ThreadedTrainer(client_backend == "threads", *arguments)
    return LocalTrainer(*arguments)
