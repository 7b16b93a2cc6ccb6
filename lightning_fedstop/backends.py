"""The ways of training a process's clients, and which one a run takes."""

from typing import Any, Literal

import torch
from lightning.fabric import Fabric

from lightning_fedstop.local import LocalTrainer
from lightning_fedstop.memory import ALONE, return_large_blocks
from lightning_fedstop.stacked import StackedTrainer
from lightning_fedstop.threaded import ThreadedTrainer

ClientBackend = Literal["sequential", "stacked"]


def make_trainer(
    client_backend: ClientBackend, stack_chunk_size: int | None, num_threads: int, *arguments: Any
) -> LocalTrainer:
    """The local training loop of a back end; ``arguments`` are those of :class:`LocalTrainer`."""
    fabric: Fabric = arguments[4]
    if fabric.device.type == "cpu":
        return_large_blocks(ALONE)
    if client_backend == "stacked":
        return StackedTrainer(stack_chunk_size, *arguments)
    return ThreadedTrainer(num_threads, *arguments) if num_threads > 1 else LocalTrainer(*arguments)


def client_threads(devices: Any, fabric: Fabric) -> int:
    """How many of torch's threads clients are dealt to: with ``devices="auto"`` on a CPU all of them, else one."""
    is_free = devices == "auto" and fabric.device.type == "cpu" and fabric.world_size == 1
    return torch.get_num_threads() if is_free else 1
