"""A copy of the module in which one thread trains clients, while other threads do the same in theirs."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedstop.attributes import Attributes
from lightning_fedstop.hooks import Hooks
from lightning_fedstop.local import LocalTrainer
from lightning_fedstop.methods.base import Client
from lightning_fedstop.parameters import FlatParameters
from lightning_fedstop.results import ResultCollector
from lightning_fedstop.seeding import drawn_from, global_state
from lightning_fedstop.together import Unsuitable, first_line


class Cancelled(Exception):
    """The round has been broken off."""


@dataclass
class Trained:
    """What a worker leaves of a client; the worker goes on with another.

    Attributes:
        steps: the local steps it took.
        x: shape ``(d,)``; its local model.
        buffers: those of the module after its training, by name.
        logged: what was logged, for :meth:`ResultCollector.merge`.
    """

    steps: int
    x: Tensor
    buffers: dict[str, Tensor]
    logged: dict[str, Any]


@dataclass
class Shared:
    """What the threads of a round have in common.

    Attributes:
        state: of the global random generators, which nobody may draw from: each thread would take the others' draws.
        lock: held where code of others runs that knows no threads: datasets, transfer hooks, callbacks.
        fetching: held while a batch is fetched; the lock, unless the data module says that it ``is_thread_safe``.
        cancelled: set where the round is broken off.
    """

    state: dict[str, Any]
    lock: threading.Lock
    fetching: AbstractContextManager[Any]
    cancelled: threading.Event

    @classmethod
    def now(cls, datamodule: object = None) -> "Shared":
        """For a round that begins now."""
        lock = threading.Lock()
        is_thread_safe = getattr(datamodule, "is_thread_safe", False)
        return cls(global_state(), lock, nullcontext() if is_thread_safe else lock, threading.Event())


class Worker(LocalTrainer):
    """The local training loop on a copy of the module.

    Args:
        source: the loop whose module, as it is now, and optimizer are copied. Frozen parameters and the data module are
            shared; the method is, too: it changes nothing of its own between a client's start and its end.
        shared: of all workers.
        options: the further arguments of :class:`LocalTrainer`, from ``local_epochs`` on.

    Raises:
        Unsuitable: if there can be no copy.
    """

    def __init__(self, source: LocalTrainer, shared: Shared, options: tuple[Any, ...]) -> None:
        assert isinstance(source.call_hook, Hooks)
        module, optimizer, collector = _copied(source)
        super().__init__(
            module,
            source.method,
            FlatParameters(module),
            source.solver.with_copies(module, optimizer),
            source.fabric,
            source.transfer.of_copy(module),
            collector,
            _WorkerHooks(source.call_hook, module, shared.lock, source.solver.asked_by),
            *options,
        )
        self.shared = shared
        self.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self.attributes = Attributes(module)

    def train(self, client: Client, make_batches: Callable[[], Iterable[Any]]) -> Trained:
        """One client's training.

        Raises:
            Unsuitable: if it drew random numbers, or changed the copy's attributes, which would be lost.
            Cancelled: if the round has been broken off.
        """
        self._reset_buffers()
        with self.shared.fetching:
            batches = make_batches()
        steps = self.take_steps(client, batches)
        if changed := self.attributes.changed():
            raise Unsuitable(f"the `training_step` of {type(self.module).__name__} changes `{changed[0]}`")
        if drawn_from(self.shared.state, global_state()):
            raise Unsuitable(f"the training of {type(self.module).__name__} draws from the global random generators")
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        return Trained(steps, self.parameters.vector.clone(), buffers, self.collector.take())

    def epoch(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """One local epoch's batches, which are fetched by one thread at a time unless the data allows more."""
        drawn = super().epoch(batches)
        while True:
            if self.shared.cancelled.is_set():
                raise Cancelled
            with self.shared.fetching:
                item = next(drawn, None)
            if item is None:
                return
            yield item

    def _reset_buffers(self) -> None:
        for name, buffer in self.module.named_buffers():
            buffer.copy_(self.buffers[name])


class _WorkerHooks(Hooks):
    """Calls the copy's own hooks on it; callbacks see the module itself, one call at a time.

    They may ask for its optimizer, which the module in training may not.

    Args:
        hooks: those of the module itself.
        module: the copy.
        lock: held while a callback runs.
        asked_by: see :class:`LocalSolver`.
    """

    def __init__(self, hooks: Hooks, module: LightningModule, lock: threading.Lock, asked_by: set[int]) -> None:
        super().__init__(hooks.loop, module)
        self.original = hooks.module
        self.lock = lock
        self.asked_by = asked_by

    def _with_module(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            thread = threading.get_ident()
            has_asked = thread in self.asked_by
            with self.lock:
                answer = hook(self.loop, self.original, *args)
            if not has_asked:
                self.asked_by.discard(thread)
            return answer

        return call


def _copied(source: LocalTrainer) -> tuple[LightningModule, Optimizer, ResultCollector]:
    """The module with its optimizer and what stands behind its ``log``."""
    module = source.module
    loop = module.trainer
    shared = [loop, loop.datamodule, *(p for p in module.parameters() if not p.requires_grad)]  # type: ignore[attr-defined]
    memo: dict[int, Any] = {id(item): item for item in shared if item is not None}
    try:
        copied, optimizer, collector = deepcopy((module, source.solver.optimizer, source.collector), memo)
    except Exception as error:
        what = first_line(error)
        raise Unsuitable(f"{type(module).__name__} cannot be copied ({type(error).__name__}: {what})") from error
    copied.trainer = loop
    collector.take()
    return copied, optimizer, collector
