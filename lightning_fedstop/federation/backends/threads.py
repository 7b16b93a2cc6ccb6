"""The clients of a round trained by several threads of one process, which on a CPU beats one client on all cores."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, cast

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fedstop.core.module_state import differ, untrained_tensors
from lightning_fedstop.federation.backends.worker import Worker
from lightning_fedstop.federation.local_training import ClientResult, Job, LocalTrainer, LocalUpdate, naming_client
from lightning_fedstop.methods.base import Client
from lightning_fedstop.module.hooks import BATCH_HOOKS, CLIENT_HOOKS, GRADIENT_HOOKS, Hooks, is_users
from lightning_fedstop.utilities.thread_safety import declares_thread_safety


class ThreadedTrainer(LocalTrainer):
    """Trains several clients at once, each in a thread with a copy of the module and its share of torch's threads.

    Clients are handed out as threads become free and come back in the order of the jobs, so that a round gives the same
    bits as one client after the other on that many torch threads. The contract for module, data and method stands in
    ``docs/speed.md``, section "Clients in threads".

    Args:
        is_asked_for: train in threads on the user's word. Otherwise module, data and method have to declare that they
            keep the contract, and clients are trained one after the other where one does not.
        arguments: those of :class:`LocalTrainer`.

    Attributes:
        num_threads: threads of torch to use together.

    Raises:
        MisconfigurationException: if the user has asked for threads, for what is known to need one client at a time.
    """

    def __init__(self, is_asked_for: bool, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.is_asked_for = is_asked_for
        self.num_threads = torch.get_num_threads()
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

    def run(self, jobs: Sequence[Job], load_global: Callable[[], None]) -> Iterator[tuple[Client, LocalUpdate]]:
        """Train the clients of a round; see :meth:`LocalTrainer.run`."""
        load_global()
        cancelled = threading.Event()
        workers = self._workers(min(self.num_threads, len(jobs)), cancelled)
        if not workers:
            yield from super().run(jobs, load_global)
            return
        for job in jobs:
            self.call_hook("on_client_start", job.client.index)
        self._check_start(jobs[0].client, workers[0].state.values)
        with self._results(workers, jobs, cancelled) as results:
            for job in jobs:
                with naming_client(job.client):
                    steps = self.load_result(job.client, results.popleft().result(), load_global)
                yield job.client, self.update_of(job.client, steps)
                job.client.vectors = {}

    def _check_start(self, client: Client, state: Mapping[str, Tensor]) -> None:
        """Refuse what hooks have changed for one client alone, after the workers were made."""
        self.parameters.check_unchanged()
        vector, start = self.parameters.vector, client.theta.to(self.parameters.vector.dtype)
        held = untrained_tensors(self.module, self.parameters.parameters)
        pairs = [(vector, start), *((tensor, state[name]) for name, *_, tensor in held if name in state)]
        if self.solver.has_changed or any(differ(pairs)):
            raise MisconfigurationException(
                "`on_client_start` has changed weights, buffers or rates for one client, which others that train at the"
                " same time cannot tell from theirs: train with `client_backend='sequential'`."
            )

    def _workers(self, count: int, cancelled: threading.Event) -> list[Worker]:
        """Copies of the module as it is now; none where clients are trained one after the other."""
        if count < 2 or not self.suits():
            return []
        lock = threading.Lock()
        try:
            return [Worker(self, lock, cancelled) for _ in range(count)]
        except MisconfigurationException:
            if self.is_asked_for:
                raise
            return []

    @contextmanager
    def _results(
        self, workers: Sequence[Worker], jobs: Sequence[Job], cancelled: threading.Event
    ) -> Iterator[deque["Future[ClientResult]"]]:
        """The result of each client while others train; one that is taken out is kept no longer."""
        idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in workers:
            worker.finished = [time.perf_counter()]
            idle.put(worker)

        def train(job: Job) -> ClientResult:
            worker = idle.get()
            try:
                return worker.train(job)
            finally:
                worker.finished = [time.perf_counter()]
                idle.put(worker)

        with self._pool(len(workers)) as pool:
            results = deque(pool.submit(train, job) for job in jobs)
            try:
                yield results
            finally:
                cancelled.set()
                pool.shutdown(cancel_futures=True)
                self.finished = [moment for worker in workers for moment in worker.finished]

    @contextmanager
    def _pool(self, count: int) -> Iterator[ThreadPoolExecutor]:
        """Threads that share torch's; a thread that starts later has as many of torch's as before."""
        threads, each = torch.get_num_threads(), max(1, self.num_threads // count)
        try:
            with ThreadPoolExecutor(count, "client", torch.set_num_threads, (each,)) as pool:
                yield pool
        finally:
            torch.set_num_threads(threads)

    def _is_declared(self) -> bool:
        """Check the declarations of module, data and method, and for callbacks of the user that see single clients."""
        hooks = cast(Hooks, self.call_hook)
        owners = [self.module, hooks.loop.datamodule, *[self.method] * is_users(self.method)]
        watching = [owner for hook in CLIENT_HOOKS for owner in hooks.owners(hook) if is_users(owner)]
        return all(map(declares_thread_safety, owners)) and all(owner is self.module for owner in watching)

    def refusal(self) -> str | None:
        """Name what cannot work in threads, ``None`` if nothing is known of that kind."""
        hooks = cast(Hooks, self.call_hook)
        if self.fabric.device.type != "cpu" or self.fabric.world_size > 1:
            return f"it needs one process on a CPU, not {self.fabric.world_size} on {self.fabric.device.type!r}"
        if self.scaler:
            return f"the precision {self.precision.precision!r} scales the loss of one client after the other"
        for hook in (*BATCH_HOOKS, *GRADIENT_HOOKS):
            for owner in hooks.owners(hook):
                if owner is not self.module and is_users(owner):
                    return f"{type(owner).__name__} has `{hook}`, which sees a single client"
        for callback in hooks.loop.callbacks:
            if isinstance(callback, ModelCheckpoint) and (
                callback._every_n_train_steps or callback._train_time_interval is not None
            ):
                return "ModelCheckpoint saves within rounds"
        return _refusal_of_module(self) or _refusal_of_loaders(hooks.loop.datamodule)


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
