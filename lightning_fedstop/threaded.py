"""The clients of a round trained by several threads of one process, which on a CPU beats one client on all cores."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fedstop.attributes import Attributes
from lightning_fedstop.hooks import BATCH_HOOKS, GRADIENT_HOOKS, Hooks, is_users
from lightning_fedstop.job import Job, LocalUpdate
from lightning_fedstop.local import LocalTrainer
from lightning_fedstop.memory import ALONE, TOGETHER, release_memory, return_large_blocks
from lightning_fedstop.methods.base import Client
from lightning_fedstop.parameters import is_finite
from lightning_fedstop.seeding import drawn_from, global_state, restore_state, seeded
from lightning_fedstop.together import TogetherTrainer, Unsuitable, first_line
from lightning_fedstop.worker import Shared, Trained, Worker

TOLERANCE = 1e-5
"""Largest distance between a step on the module and on a copy, in units of its length: rounding at most."""


class ThreadedTrainer(TogetherTrainer):
    """Trains several clients at once, each in a thread with a copy of the module and its share of torch's threads.

    Clients are handed out as threads become free and come back in the order of the jobs, so that a round gives the same
    bits as one client after the other on that many torch threads. A module that cannot be trained so, because it draws
    random numbers or changes its own attributes, say, is trained one client after the other; nothing is lost then.

    Args:
        num_threads: threads of torch to use together.
        module: see :class:`LocalTrainer`, as for all further arguments.
        arguments: likewise.
    """

    def __init__(self, num_threads: int, module: LightningModule, *arguments: Any) -> None:
        super().__init__(module, *arguments)
        self.num_threads = num_threads
        self._returns_blocks = return_large_blocks(TOGETHER)
        self._released = 0.0
        self._options = arguments[7:]

    def run(self, jobs: Sequence[Job], load_global: Callable[[], None]) -> Iterator[tuple[Client, LocalUpdate]]:
        """Train the clients of a round; see :meth:`LocalTrainer.run`."""
        if len(jobs) < 2 or not self.suits(jobs, load_global):
            yield from super().run(jobs, load_global)
            return
        load_global()
        self._released = release_memory(self._released)
        for job in jobs:
            self.call_hook("on_client_start", job.client.index)
        done = 0
        try:
            with self._results(jobs) as results:
                for job in jobs:
                    steps = self._load_local(results.popleft().result(), load_global)
                    yield job.client, self.update_of(job.client, steps)
                    job.client.vectors = {}
                    done += 1
        except Unsuitable as reason:
            self.fall_back(str(reason))
            yield from self.train_in_turn(jobs[done:], load_global)

    @contextmanager
    def _results(self, jobs: Sequence[Job]) -> Iterator[deque["Future[Trained]"]]:
        """What each client's training comes to, while it goes on; what is taken out is kept no longer."""
        count = min(self.num_threads, len(jobs))
        shared = Shared.now(self.module.trainer.datamodule)  # type: ignore[attr-defined]
        idle: SimpleQueue[Worker] = SimpleQueue()
        workers = [Worker(self, shared, self._options) for _ in range(count)]
        for worker in workers:
            worker.finished = [time.perf_counter()]
            idle.put(worker)

        def train(job: Job) -> Trained:
            worker = idle.get()
            try:
                with self.not_asking():
                    return worker.train(job.client, job.make_batches)
            finally:
                if not self._returns_blocks:
                    self._released = release_memory(self._released)
                worker.finished = [time.perf_counter()]
                idle.put(worker)

        with self._pool(count) as pool:
            results = deque(pool.submit(train, job) for job in jobs)
            try:
                yield results
            except Unsuitable:
                _end(pool, shared)
                restore_state(shared.state)
                raise
            finally:
                _end(pool, shared)
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

    def _load_local(self, trained: Trained, load_global: Callable[[], None]) -> int:
        """Put a client's local model and its buffers into the module, and take what it logged; gives its steps."""
        load_global()
        self.parameters.vector.copy_(trained.x)
        for name, buffer in self.module.named_buffers():
            buffer.copy_(trained.buffers[name])
        self.collector.merge(trained.logged)
        return trained.steps

    def announce(self, reason: str) -> None:
        """Tell the user, who has not asked for threads by name."""
        rank_zero_info(f"`devices='auto'` trains one client after the other, because {reason}.")

    def fall_back(self, reason: str) -> None:
        """Train one client after the other from now on."""
        return_large_blocks(ALONE)
        super().fall_back(reason)

    def known_refusal(self, jobs: Sequence[Job]) -> str | None:
        """What speaks against threads before anything is tried."""
        hooks = cast(Hooks, self.call_hook)
        for hook in (*BATCH_HOOKS, *GRADIENT_HOOKS):
            for owner in hooks.owners(hook):
                if owner is not self.module and is_users(owner):
                    return f"{type(owner).__name__} has `{hook}`, which sees a single client"
        for callback in hooks.loop.callbacks:
            if isinstance(callback, ModelCheckpoint) and (
                callback._every_n_train_steps or callback._train_time_interval is not None
            ):
                return "ModelCheckpoint saves within rounds"
        batches = jobs[0].make_batches()
        if isinstance(batches, DataLoader) and batches.num_workers:
            return f"the loaders of the clients start {batches.num_workers} processes each"
        if self.scaler:
            return f"the precision {self.precision.precision!r} scales the loss of one client after the other"
        for name, module in self.module.named_modules():
            own = vars(module).get("forward")
            if module._compiled_call_impl is not None or hasattr(module, "_orig_mod") or hasattr(own, "is_compiled"):
                return f"{name or type(self.module).__name__} is compiled"
        for name, parameter in self.parameters.named:
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                return f"the parameter {name} has a gradient hook"
        return None

    def check(self, jobs: Sequence[Job], load_global: Callable[[], None]) -> bool:
        """Take a client's first step on the module and, in a thread as in a round, on a copy, and compare.

        Nothing of it stays but what a module sets once and for all in its first step.

        Returns:
            False if the client had no batch to try.

        Raises:
            Unsuitable: saying why.
        """
        attributes = Attributes(self.module, restorable=True)
        is_same = False
        try:
            with self.collector.muted(), self._pool(min(self.num_threads, len(jobs))) as pool:
                is_same = pool.submit(self._compare, jobs[0], load_global).result()
                return is_same
        finally:
            # What the first step alone has set is a cache, which the copies would fill anew.
            if not is_same:
                attributes.restore()
            load_global()

    def _compare(self, job: Job, load_global: Callable[[], None]) -> bool:
        name = type(self.module).__name__
        load_global()
        drawn = self.first_batch(job)
        if drawn is None:
            return False
        with seeded(job.seed):
            state = global_state()
            with self.not_asking():
                after = self._stepped(self, job, drawn)
            if drawn_from(state, global_state()):
                raise Unsuitable(f"the `training_step` of {name} draws from the global random generators")
        load_global()
        worker = Worker(self, Shared.now(), self._options)
        method = _held(self.method)
        try:
            copied = self._stepped(worker, job, drawn)
        except Exception as error:
            what = first_line(error)
            raise Unsuitable(f"a step of a copy of {name} fails with {type(error).__name__}: {what}") from error
        if changed := worker.attributes.changed():
            raise Unsuitable(f"the `training_step` of {name} changes `{changed[0]}`")
        if _held(self.method) != method:
            raise Unsuitable(f"{type(self.method).__name__} changes what it holds during a client's steps")
        for one, other in zip(after, copied, strict=True):
            distance, length = torch.linalg.vector_norm(one - other), torch.linalg.vector_norm(one)
            if is_finite(one) and not distance <= TOLERANCE * length:
                raise Unsuitable(f"a step of a copy of {name} is off by {float(distance / length):.2g} of its length")
        return True

    def _stepped(self, trainer: LocalTrainer, job: Job, drawn: tuple[int, Any]) -> tuple[Tensor, Tensor]:
        """The direction of a client's first step, and where it leads."""
        client = self.prepared(job)
        trainer.start_client(client)
        trainer.step(client, 0, drawn[1], drawn[0])
        return trainer.parameters.grad.clone(), trainer.parameters.vector.clone()


def _end(pool: ThreadPoolExecutor, shared: Shared) -> None:
    """Wait until no client is trained any more."""
    shared.cancelled.set()
    pool.shutdown(cancel_futures=True)


def _held(owner: object) -> list[tuple[str, int, int]]:
    """Which objects an object holds, and how often its tensors have changed."""
    return [(name, id(value), getattr(value, "_version", 0)) for name, value in vars(owner).items()]
