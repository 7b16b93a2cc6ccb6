"""Communication between the processes of a run: sums, lists, why one of them has failed, and that it has gone."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import Tensor

_FAILURE_KEY = "lightning_fedstop/failure"
_SECONDS_TO_WAIT = 3.0
_PARENT = "LIGHTNING_FEDSTOP_PARENT"
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_END = 5.0


def launch(fabric: Fabric) -> None:
    """Start the other processes where there are to be several, and let all meet."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if is_first:
        os.environ[_PARENT] = str(os.getpid())  # which the others inherit
    try:
        with watched_parent():
            fabric.launch()
    finally:
        if is_first:
            del os.environ[_PARENT]


@contextmanager
def watched_parent() -> Iterator[None]:
    """End this process if the first one, which started it, has gone.

    One that was killed can tell nobody. The others would train on for nothing, or wait for it for torch's half an hour.
    It has no effect where something else starts the processes, such as SLURM or ``torchrun``, which end them all.
    """
    parent = os.environ.get(_PARENT)
    if parent is None or os.environ.get("LOCAL_RANK", "0") == "0" or os.name != "posix":
        yield
        return
    over = threading.Event()
    threading.Thread(target=_watch, args=(int(parent), over), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(parent: int, over: threading.Event) -> None:
    while os.getppid() == parent:
        if over.wait(_SECONDS_BETWEEN_LOOKS):
            return
    # Where it waits for the first process it learns of the end by itself, and can end in good order.
    if not over.wait(_SECONDS_TO_END):
        sys.stderr.write(f"Process {os.getpid()} ends: process {parent}, which started it, has gone.\n")
        sys.stderr.flush()
        os._exit(1)


def reduce(fabric: Fabric, tensor: Tensor, op: str) -> Tensor:
    """Reduce a tensor over the processes, by ``"sum"``, ``"min"`` or ``"max"``."""
    if fabric.world_size == 1:
        return tensor
    return cast(Tensor, fabric.all_reduce(tensor.clone(), reduce_op=op))


def gather(fabric: Fabric, items: list[Any]) -> list[list[Any]]:
    """Gather the lists of all processes, in order of rank."""
    if fabric.world_size == 1:
        return [items]
    gathered: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(gathered, items)
    return gathered


def shared_failure(fabric: Fabric, exception: BaseException) -> str | None:
    """Tell the other processes why this one ends, or learn why one of them has.

    A process whose peer has gone sees only that a connection was closed. The first to fail for a reason of its own
    leaves that reason where the others find it.

    Args:
        fabric: the processes.
        exception: what this process ends with.

    Returns:
        A sentence on the process that failed first, if it is another one; ``None`` otherwise.
    """
    if fabric.world_size == 1 or not torch.distributed.is_initialized():
        return None
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        if not _is_a_lost_connection(exception):
            store.set(_FAILURE_KEY, f"process {fabric.global_rank} failed: {type(exception).__name__}: {exception}")
            return None
        deadline = time.monotonic() + _SECONDS_TO_WAIT
        while not store.check([_FAILURE_KEY]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        return str(store.get(_FAILURE_KEY).decode())
    except (RuntimeError, OSError):
        return None  # the store went with the first process


def _is_a_lost_connection(exception: BaseException) -> bool:
    text = str(exception).lower()
    lost = ("connection closed", "connection reset", "broken pipe", "nccl", "socket", "timed out")
    return isinstance(exception, RuntimeError) and any(word in text for word in lost)
