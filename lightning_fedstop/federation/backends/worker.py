"""Local training on a copy of the module, which leaves the module as it is."""

import threading
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fedstop.core.module_state import ModuleState
from lightning_fedstop.core.parameters import FlatParameters
from lightning_fedstop.federation.local_training import ClientResult, Job, LocalProgress, LocalTrainer, local_progress
from lightning_fedstop.module.hooks import Hooks

MakeHooks = Callable[[Hooks, LightningModule], Hooks]
"""Makes the hooks of a copy of the module, given those of the module itself and the copy."""


def trainer_on_copy(source: LocalTrainer, make_hooks: MakeHooks) -> LocalTrainer:
    """Make the same local training loop on a copy of its module.

    Args:
        source: the loop; the data module, the method and the Trainer of its module are shared.
        make_hooks: makes the copy's hooks.

    Raises:
        MisconfigurationException: if the module cannot be copied.
    """
    module = source.module
    loop: Any = module.trainer
    memo: dict[int, Any] = {id(item): item for item in (loop, loop.datamodule) if item is not None}
    try:
        copied, optimizer, collector = deepcopy((module, source.solver.optimizer, source.collector), memo)
    except Exception as error:
        what = str(error).strip().partition("\n")[0].rstrip(".")
        raise MisconfigurationException(
            f"{type(module).__name__} cannot be copied, as training of several clients at once needs it"
            f" ({type(error).__name__}: {what})."
        ) from error
    copied.trainer = loop
    collector.take()
    return LocalTrainer(
        copied,
        source.method,
        FlatParameters(copied),
        source.solver.with_copies(copied, optimizer),
        source.fabric,
        source.transfer.of_copy(copied),
        collector,
        make_hooks(source.hooks, copied),
        source.settings,
    )


class Cancelled(Exception):
    """The round has been broken off."""


class Worker:
    """A copy of the module in which one thread trains clients.

    Args:
        source: the local training loop whose module, as it is now, is copied.
        lock: held while a callback runs.
        cancelled: set where the round is broken off.

    Raises:
        MisconfigurationException: if the module cannot be copied.
    """

    def __init__(self, source: LocalTrainer, lock: threading.Lock, cancelled: threading.Event) -> None:
        self.trainer = trainer_on_copy(source, lambda hooks, copied: _WorkerHooks(hooks, copied, lock, cancelled))
        self.start = ModuleState(self.trainer.module, self.trainer.parameters.parameters)

    def train(self, job: Job) -> ClientResult:
        """Train one client; its result holds copies, for the next one trains in the same module.

        Raises:
            Cancelled: if the round has been broken off.
            MisconfigurationException: if the module asks for the optimizer.
        """
        trainer = self.trainer
        trainer.load_global(job.client, self.start)
        with trainer.solver.withheld():
            batches = job.make_batches()
            local_progress.set(LocalProgress(batches, trainer.settings.limit_train_batches))
            result = trainer.run_local_steps(job.client, batches, self.start)
        self.start.check_names()
        result.state = {name: tensor.clone() for name, tensor in result.state.items()}
        result.model, result.logged = trainer.parameters.vector.clone(), trainer.collector.take()
        return result


class _WorkerHooks(Hooks):
    """Calls the copy's own hooks on it; callbacks see the module itself, one call at a time.

    Args:
        hooks: those of the module itself.
        module: the copy.
        lock: held while a callback runs.
        cancelled: set where the round is broken off.
    """

    def __init__(self, hooks: Hooks, module: LightningModule, lock: threading.Lock, cancelled: threading.Event) -> None:
        super().__init__(hooks.loop, module)
        self.original = hooks.module
        self.lock = lock
        self.cancelled = cancelled

    def __call__(self, name: str, *args: Any) -> list[Any]:
        """Call one hook, unless the round is broken off."""
        if self.cancelled.is_set():
            raise Cancelled
        return super().__call__(name, *args)

    def _with_module(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self.lock:
                return hook(self.loop, self.original, *args)

        return call
