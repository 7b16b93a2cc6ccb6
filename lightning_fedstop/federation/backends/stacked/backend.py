"""The clients of a round trained as one stack; experimental until measured on an accelerator."""

import time
from collections.abc import Iterator, Sequence

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fedstop.core.module_state import ModuleState
from lightning_fedstop.core.seeding import seeded
from lightning_fedstop.federation.backends.sequential import Sequential
from lightning_fedstop.federation.backends.stacked.steps import StackSteps
from lightning_fedstop.federation.backends.stacked.trial import try_stack
from lightning_fedstop.federation.backends.worker import trainer_on_copy
from lightning_fedstop.federation.local_training import ClientResult, Job, naming_client
from lightning_fedstop.module.flat_optimizer import FlatSolver
from lightning_fedstop.module.hooks import BATCH_HOOKS, CLIENT_HOOKS, GRADIENT_HOOKS, Hooks, is_users

OWN_STEPS = ("backward", "optimizer_step", "configure_gradient_clipping", "optimizer_zero_grad")


class Stacked:
    """Back end that trains the clients of a process as one stack.

    Experimental until measured on an accelerator. Vectors have the shape ``(M, d)``, and all clients take their k-th
    step together. A client that has run out
    of batches leaves the stack. Batches of equal shape go through the module in one pass, see
    :func:`~lightning_fedstop.federation.backends.stacked.batches.group_batches`.

    Args:
        sequential: trains the clients that cannot be stacked.
        chunk_size: clients in a stack at most; ``None`` for all.

    Attributes:
        trainer: the local training loop.
        steps: takes the steps, once a stacked step has been compared with single ones.
        refusal: why clients are trained one after the other, ``None`` if they are not.
        finished: the moment when the last client was done, by ``time.perf_counter``.
    """

    def __init__(self, sequential: Sequential, chunk_size: int | None) -> None:
        self.sequential = sequential
        self.trainer = sequential.trainer
        self.chunk_size = chunk_size
        self.steps: StackSteps | None = None
        self.refusal: str | None = None
        self.finished: list[float] = []

    def run(self, jobs: Sequence[Job], start: ModuleState) -> Iterator[ClientResult]:
        """Train the clients of a round on this process; see :meth:`Sequential.run`."""
        size = self.chunk_size or max(1, len(jobs))
        for first in range(0, len(jobs), size):
            yield from self._run_chunk(jobs[first : first + size], start)
        self.finished = [time.perf_counter()]

    def _run_chunk(self, jobs: Sequence[Job], start: ModuleState) -> Iterator[ClientResult]:
        trainer = self.trainer
        if len(jobs) == 1 or not self.suits(jobs):
            yield from self.sequential.run(jobs, start)
            return
        assert self.steps is not None
        trainer.load_global(jobs[0].client, start)
        for job in jobs:
            trainer.hooks("on_client_start", job.client.index)
        logged = trainer.collector.snapshot()
        trainer.load_global(jobs[0].client, start)
        try:
            trained = self.steps.train(jobs)
        except MisconfigurationException as reason:
            self._give_up(str(reason))
            trainer.collector.restore(logged)
            yield from self._train_in_turn(jobs, start)
            return
        for job, (model, buffers) in zip(jobs, trained, strict=True):
            start.restore()
            start.overwrite(buffers)
            trainer.parameters.vector.copy_(model)
            yield trainer.result(job.client, start)
            job.client.vectors = {}

    def suits(self, jobs: Sequence[Job]) -> bool:
        """Check that these clients can be stacked, at first by a step of two."""
        if self.steps is None and self.refusal is None:
            try:
                if reason := self.known_refusal():
                    raise MisconfigurationException(reason)
                self._compare(jobs[:2])
            except MisconfigurationException as reason:
                self._give_up(str(reason))
        return self.steps is not None and self.refusal is None

    def _compare(self, jobs: Sequence[Job]) -> None:
        trainer = self.trainer
        trial = try_stack(trainer_on_copy(trainer, lambda hooks, copied: Hooks(hooks.loop, copied)), jobs)
        if trial is None:
            return
        calls_batch_end = bool(trainer.hooks.owners("on_train_batch_end"))
        self.steps = StackSteps(trainer, trial.moving, trial.pads, calls_batch_end)
        if trial.draws:
            rank_zero_warn(
                f"`client_backend='stacked'`: the `training_step` of {type(trainer.module).__name__} draws random"
                " numbers (dropout, say), and a stack of clients draws others than one client after the other."
            )
        self._warn_of_batch_hooks()

    def _give_up(self, reason: str) -> None:
        """Train one client after the other from now on, with a warning to the user, who has asked for stacks."""
        self.refusal = reason.rstrip(".")
        rank_zero_warn(f"`client_backend='stacked'` trains one client after the other instead, because {self.refusal}.")

    def _train_in_turn(self, jobs: Sequence[Job], start: ModuleState) -> Iterator[ClientResult]:
        """Train clients one after the other that have been started but whose training as a stack was broken off."""
        for job in jobs:
            batches = job.make_batches()
            job.client.vectors = {}
            self.trainer.load_global(job.client, start)
            with naming_client(job.client), seeded(job.seed):
                result = self.trainer.run_local_steps(job.client, batches, start)
            yield result
            job.client.vectors = {}

    def known_refusal(self) -> str | None:
        """Name what is known not to be stacked, ``None`` if nothing is."""
        trainer, hooks = self.trainer, self.trainer.hooks
        name = type(trainer.module).__name__
        for own in (*OWN_STEPS, *BATCH_HOOKS):
            if trainer.module in hooks.owners(own):
                return f"{name} has its own `{own}`, which would see the global model and no single client"
        for hook in CLIENT_HOOKS:
            # A module at a client's end holds that client's model, but at its start all clients are about to train.
            for owner in hooks.owners(hook):
                if owner is trainer.module or (hook == "on_client_start" and is_users(owner)):
                    return f"{type(owner).__name__} has `{hook}`, which sees a single client"
        for hook in GRADIENT_HOOKS:
            for owner in hooks.owners(hook):
                return f"{type(owner).__name__} has `{hook}`, which sees the gradients of a single client"
        return FlatSolver.refusal(trainer.solver.optimizer, trainer.module, trainer.precision)

    def _warn_of_batch_hooks(self) -> None:
        owners = {type(o).__name__: o for hook in BATCH_HOOKS for o in self.trainer.hooks.owners(hook)}
        if users := [name for name, owner in owners.items() if is_users(owner)]:
            rank_zero_warn(
                f"`client_backend='stacked'` calls the batch hooks of {', '.join(users)} for each client's batch, but"
                " the module holds the global model in them, not the client's."
            )
