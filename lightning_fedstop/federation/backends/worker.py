"""A copy of the module in which one thread trains clients, while other threads do the same in theirs."""

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning.pytorch import LightningModule

from lightning_fedstop.core.module_state import ModuleState
from lightning_fedstop.federation.backends.copies import arguments_of_copy
from lightning_fedstop.federation.local_training import ClientResult, Job, LocalTrainer
from lightning_fedstop.module.hooks import Hooks


class Cancelled(Exception):
    """The round has been broken off."""


class Worker(LocalTrainer):
    """The local training loop on a copy of the module.

    Args:
        source: the loop whose module, as it is now, is copied. The data module and the method are shared.
        lock: held while a callback runs.
        cancelled: set where the round is broken off.

    Raises:
        MisconfigurationException: if the module cannot be copied.
    """

    def __init__(self, source: LocalTrainer, lock: threading.Lock, cancelled: threading.Event) -> None:
        assert isinstance(source.call_hook, Hooks)
        arguments = arguments_of_copy(source)
        super().__init__(**arguments, call_hook=_WorkerHooks(source.call_hook, arguments["module"], lock))
        self.withheld = source.solver.withheld
        self.cancelled = cancelled
        self.state = ModuleState(self.module, self.parameters.parameters)

    def train(self, job: Job) -> ClientResult:
        """Train one client.

        Raises:
            Cancelled: if the round has been broken off.
            MisconfigurationException: if the module asks for the optimizer.
        """
        self.state.restore()
        self.start_client(job.client)
        with self.withheld():
            steps = self.take_steps(job.client, job.make_batches())
        self.state.check_names()
        state = {name: tensor.clone() for name, tensor in self.state.changed().items()}
        return ClientResult(steps, self.parameters.vector.clone(), state, job.client.vectors, self.collector.take())

    def epoch(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """One local epoch's batches, until the round is broken off."""
        for item in super().epoch(batches):
            if self.cancelled.is_set():
                raise Cancelled
            yield item


class _WorkerHooks(Hooks):
    """Calls the copy's own hooks on it; callbacks see the module itself, one call at a time.

    Args:
        hooks: those of the module itself.
        module: the copy.
        lock: held while a callback runs.
    """

    def __init__(self, hooks: Hooks, module: LightningModule, lock: threading.Lock) -> None:
        super().__init__(hooks.loop, module)
        self.original = hooks.module
        self.lock = lock

    def _with_module(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self.lock:
                return hook(self.loop, self.original, *args)

        return call
