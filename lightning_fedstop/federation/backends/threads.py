"""Several clients at once, in threads of one process.

On a CPU this beats one client on all cores.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fedstop.core.module_state import ModuleState, differ, untrained_tensors
from lightning_fedstop.federation.backends.sequential import Sequential
from lightning_fedstop.federation.backends.worker import Worker
from lightning_fedstop.federation.local_training import ClientResult, Job, LocalTrainer, naming_client
from lightning_fedstop.methods.base import Client
from lightning_fedstop.module.hooks import BATCH_HOOKS, CLIENT_HOOKS, GRADIENT_HOOKS, is_users
from lightning_fedstop.utilities.thread_safety import declares_thread_safety


class Threads:
    """Back end that trains each client in a thread, on a copy of the module.

    Each thread has its share of torch's threads.

    Clients are handed out as threads become free and come back in the order of the jobs, so that a round gives the same
    bits as one client after the other on that many torch threads. The contract for module, data and method stands in
    ``docs/speed.md``, section "Clients in threads".

    Args:
        sequential: trains the clients where threads cannot.
        is_asked_for: train in threads on the user's word. Otherwise module, data and method have to declare that they
            keep the contract, and clients are trained one after the other where one does not.

    Attributes:
        trainer: the local training loop.
        num_threads: threads of torch to use together.
        finished: when each thread had no client left, by ``time.perf_counter``.

    Raises:
        MisconfigurationException: if the user has asked for threads, for what is known to need one client at a time.
    """

    def __init__(self, sequential: Sequential, is_asked_for: bool) -> None:
        self.sequential = sequential
        self.trainer = sequential.trainer
        self.is_asked_for = is_asked_for
        self.num_threads = torch.get_num_threads()
        self.finished: list[float] = []
        if is_asked_for:
            self.suits()

    def suits(self) -> bool:
        """Check for all that is known, without trying, to need one client after the other.

        Raises:
            MisconfigurationException: for that, if the user has asked for threads.
        """
        if not self.is_asked_for:
            return self._is_declared() and self.refusal() is None
        if reason := self.refusal():
            raise MisconfigurationException(f"`client_backend='threads'` cannot be used: {reason}.")
        return True

    def run(self, jobs: Sequence[Job], start: ModuleState) -> Iterator[ClientResult]:
        """Train the clients of a round; see :meth:`Sequential.run`."""
        cancelled = threading.Event()
        workers = self._workers(jobs, start, cancelled)
        if not workers:
            yield from self.sequential.run(jobs, start)
            self.finished = self.sequential.finished
            return
        for job in jobs:
            self.trainer.hooks("on_client_start", job.client.index)
        self._check_start(jobs[0].client, start.values)
        with self._results(workers, jobs, cancelled) as results:
            for job in jobs:
                with naming_client(job.client):
                    result = results.popleft().result()
                    self.trainer.publish(result, start)
                yield result
                del result  # one model less while the next client trains
                job.client.vectors = {}

    def _check_start(self, client: Client, state: Mapping[str, Tensor]) -> None:
        """Refuse what hooks have changed for one client alone, after the workers were made."""
        trainer = self.trainer
        trainer.parameters.check_unchanged()
        vector = trainer.parameters.vector
        held = untrained_tensors(trainer.module, trainer.parameters.parameters)
        pairs = [(tensor, state[name]) for name, *_, tensor in held if name in state]
        if trainer.solver.has_changed or any(differ([(vector, client.theta.to(vector.dtype)), *pairs])):
            raise MisconfigurationException(
                "`on_client_start` has changed weights, buffers or rates for one client, which others that train at the"
                " same time cannot tell from theirs: train with `client_backend='sequential'`."
            )

    def _workers(self, jobs: Sequence[Job], start: ModuleState, cancelled: threading.Event) -> list[Worker]:
        """Make copies of the module at the round's start; none where clients are trained one after the other."""
        count = min(self.num_threads, len(jobs))
        if count < 2 or not self.suits():
            return []
        self.trainer.load_global(jobs[0].client, start)
        lock = threading.Lock()
        try:
            return [Worker(self.trainer, lock, cancelled) for _ in range(count)]
        except MisconfigurationException:
            if self.is_asked_for:
                raise
            return []

    @contextmanager
    def _results(
        self, workers: Sequence[Worker], jobs: Sequence[Job], cancelled: threading.Event
    ) -> Iterator[deque["Future[ClientResult]"]]:
        """Results of the clients while others train; one that is taken out is kept no longer."""
        idle: SimpleQueue[Worker] = SimpleQueue()
        finished = {worker: time.perf_counter() for worker in workers}
        for worker in workers:
            idle.put(worker)

        def train(job: Job) -> ClientResult:
            worker = idle.get()
            try:
                return worker.train(job)
            finally:
                finished[worker] = time.perf_counter()
                idle.put(worker)

        with self._pool(len(workers)) as pool:
            results = deque(pool.submit(train, job) for job in jobs)
            try:
                yield results
            finally:
                cancelled.set()
                pool.shutdown(cancel_futures=True)
                self.finished = list(finished.values())

    @contextmanager
    def _pool(self, count: int) -> Iterator[ThreadPoolExecutor]:
        """Start threads that share torch's; a thread that starts later has as many of torch's as before."""
        threads, each = torch.get_num_threads(), max(1, self.num_threads // count)
        try:
            with ThreadPoolExecutor(count, "client", torch.set_num_threads, (each,)) as pool:
                yield pool
        finally:
            torch.set_num_threads(threads)

    def _is_declared(self) -> bool:
        """Check the declarations of module, data and method, and for callbacks of the user that see single clients."""
        hooks, method = self.trainer.hooks, self.trainer.method
        owners = [self.trainer.module, hooks.loop.datamodule, *[method] * is_users(method)]
        watching = [owner for hook in CLIENT_HOOKS for owner in hooks.owners(hook) if is_users(owner)]
        return all(map(declares_thread_safety, owners)) and all(owner is self.trainer.module for owner in watching)

    def refusal(self) -> str | None:
        """Name what cannot work in threads, ``None`` if nothing is known of that kind."""
        hooks, fabric = self.trainer.hooks, self.trainer.fabric
        if fabric.device.type != "cpu" or fabric.world_size > 1:
            return f"it needs one process on a CPU, not {fabric.world_size} on {fabric.device.type!r}"
        if self.trainer.scaler:
            return f"the precision {self.trainer.precision.precision!r} scales the loss of one client after the other"
        for hook in (*BATCH_HOOKS, *GRADIENT_HOOKS):
            for owner in hooks.owners(hook):
                if owner is not self.trainer.module and is_users(owner):
                    return f"{type(owner).__name__} has `{hook}`, which sees a single client"
        for callback in hooks.loop.callbacks:
            if isinstance(callback, ModelCheckpoint) and (
                callback._every_n_train_steps or callback._train_time_interval is not None
            ):
                return "ModelCheckpoint saves within rounds"
        return _refusal_of_module(self.trainer) or _refusal_of_loaders(hooks.loop.datamodule)


def _refusal_of_module(trainer: LocalTrainer) -> str | None:
    for name, module in trainer.module.named_modules():
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            return f"{name or type(module).__name__} is compiled"
    for name, parameter in trainer.parameters.named:
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"the parameter {name} has a gradient hook, which a copy has not"
    return None


def _refusal_of_loaders(datamodule: Any) -> str | None:
    client = next(client for client, size in enumerate(datamodule.client_sizes) if size)
    batches = datamodule.client_dataloader(client, torch.Generator())
    if isinstance(batches, DataLoader) and batches.num_workers:
        return f"the loaders of the clients start {batches.num_workers} processes each"
    return None
