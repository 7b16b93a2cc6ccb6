"""The clients of a round trained as one stack: the local loop on vectors of shape ``(M, d)``."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fedstop.core.seeding import RandomStream, seeded
from lightning_fedstop.federation.backends.client_stack import Stack
from lightning_fedstop.federation.backends.copies import arguments_of_copy
from lightning_fedstop.federation.backends.stacked_batches import Drawn, Group, group_batches
from lightning_fedstop.federation.backends.stacked_check import check_stack
from lightning_fedstop.federation.backends.stacked_pass import Passed, StackedPass
from lightning_fedstop.federation.local_training import ClientResult, Job, LocalTrainer, LocalUpdate
from lightning_fedstop.methods.base import Client, LocalStep
from lightning_fedstop.module.flat_optimizer import FlatSolver
from lightning_fedstop.module.hooks import BATCH_HOOKS, CLIENT_HOOKS, GRADIENT_HOOKS, Hooks, is_users

OWN_STEPS = ("backward", "optimizer_step", "configure_gradient_clipping", "optimizer_zero_grad")


class StackedTrainer(LocalTrainer):
    """Trains the clients of a process at once; the step is :class:`LocalTrainer`'s, on vectors with a row for each.

    All take their k-th step together. A client that has run out of batches leaves the stack. Batches of equal shape go
    through the module in one pass, see :func:`~lightning_fedstop.federation.backends.stacked_batches.group_batches`.

    Args:
        chunk_size: clients in a stack at most; ``None`` for all.
        arguments: those of :class:`LocalTrainer`.
        named: likewise.

    Attributes:
        is_checked: whether a stacked step has been compared with single ones.
        refusal: why clients are trained one after the other, ``None`` if they are not.
    """

    def __init__(self, chunk_size: int | None, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.chunk_size = chunk_size
        self.pads = False
        self.moving: list[str] = []
        self.is_checked = False
        self.refusal: str | None = None
        self._tells = False
        self.by_index = self._takes_batch_idx

    def run(self, jobs: Sequence[Job], load_global: Callable[[], None]) -> Iterator[tuple[Client, LocalUpdate]]:
        """Train the clients of a round on this process; see :meth:`LocalTrainer.run`."""
        size = self.chunk_size or max(1, len(jobs))
        for start in range(0, len(jobs), size):
            yield from self._run_chunk(jobs[start : start + size], load_global)
        self.finished = [time.perf_counter()]

    def _run_chunk(self, jobs: Sequence[Job], load_global: Callable[[], None]) -> Iterator[tuple[Client, LocalUpdate]]:
        if len(jobs) == 1 or not self.suits(jobs):
            yield from super().run(jobs, load_global)
            return
        load_global()
        for job in jobs:
            self.call_hook("on_client_start", job.client.index)
        logged = self.collector.snapshot()
        self.start_client(jobs[0].client)
        try:
            trained = self._train_stack(jobs)
        except MisconfigurationException as reason:
            self._give_up(str(reason))
            self.collector.restore(logged)
            yield from self._train_in_turn(jobs, load_global)
            return
        for job, local in zip(jobs, trained, strict=True):
            yield job.client, self.update_of(job.client, self.load_result(job.client, local, load_global))
            job.client.vectors = {}

    def suits(self, jobs: Sequence[Job]) -> bool:
        """Check whether these clients can be stacked, by a step of two of them the first time."""
        if not self.is_checked:
            try:
                if reason := self.known_refusal():
                    raise MisconfigurationException(reason)
                self._compare(jobs[:2])
            except MisconfigurationException as reason:
                self._give_up(str(reason))
        return self.is_checked and self.refusal is None

    def _compare(self, jobs: Sequence[Job]) -> None:
        arguments = arguments_of_copy(self)
        hooks = Hooks(cast(Hooks, self.call_hook).loop, arguments["module"])
        twin = StackedTrainer(self.chunk_size, **arguments, call_hook=hooks)
        self.is_checked, draws = check_stack(twin, jobs)
        self.moving, self.pads = twin.moving, twin.pads
        if not self.is_checked:
            return
        if draws:
            rank_zero_warn(
                f"`client_backend='stacked'`: the `training_step` of {type(self.module).__name__} draws random numbers"
                " (dropout, say), and a stack of clients draws others than one client after the other."
            )
        self._warn_of_batch_hooks()

    def _give_up(self, reason: str) -> None:
        """Train one client after the other from now on, with a warning to the user, who has asked for stacks."""
        self.is_checked, self.refusal = True, reason.rstrip(".")
        rank_zero_warn(f"`client_backend='stacked'` trains one client after the other instead, because {self.refusal}.")

    def _train_in_turn(
        self, jobs: Sequence[Job], load_global: Callable[[], None]
    ) -> Iterator[tuple[Client, LocalUpdate]]:
        """Train clients one after the other that have been started but whose training as a stack was broken off."""
        for job in jobs:
            batches = job.make_batches()
            load_global()
            job.client.vectors = {}
            self.start_client(job.client)
            yield job.client, self._train(job, batches)
            job.client.vectors = {}

    def first_batch(self, job: Job) -> Drawn | None:
        """A client's first batch, with its number; ``None`` if it has none."""
        batches = job.make_batches()
        with RandomStream(job.seed).resumed():
            return next(self.epoch(batches), None)

    def prepared(self, job: Job) -> Client:
        """A client before its first step, for a step that nothing is left of."""
        client = replace(job.client, vectors={})
        if self.method.needs_full_gradient:
            client.vectors["full_gradient"] = torch.zeros_like(self.parameters.grad)
        client.motion = self.new_motion()
        self.method.start(client)
        return client

    def known_refusal(self) -> str | None:
        """Name what is known not to be stacked before anything is tried, ``None`` if nothing is."""
        hooks, name = cast(Hooks, self.call_hook), type(self.module).__name__
        for own in (*OWN_STEPS, *BATCH_HOOKS):
            if self.module in hooks.owners(own):
                return f"{name} has its own `{own}`, which would see the global model and no single client"
        for hook in CLIENT_HOOKS:
            # A module at a client's end holds that client's model, but at its start all clients are about to train.
            for owner in hooks.owners(hook):
                if owner is self.module or (hook == "on_client_start" and is_users(owner)):
                    return f"{type(owner).__name__} has `{hook}`, which sees a single client"
        for hook in GRADIENT_HOOKS:
            for owner in hooks.owners(hook):
                return f"{type(owner).__name__} has `{hook}`, which sees the gradients of a single client"
        return FlatSolver.refusal(self.solver, self.precision)

    def _warn_of_batch_hooks(self) -> None:
        hooks = cast(Hooks, self.call_hook)
        owners = {type(o).__name__: o for hook in BATCH_HOOKS for o in hooks.owners(hook)}
        own = [
            name
            for name, owner in owners.items()
            if is_users(owner) or any(hook in vars(owner) for hook in BATCH_HOOKS)
        ]
        self._tells = bool(hooks.owners("on_train_batch_end"))
        if own:
            rank_zero_warn(
                f"`client_backend='stacked'` calls the batch hooks of {', '.join(own)} for each client's batch, but"
                " the module holds the global model in them, not the client's."
            )

    def _train_stack(self, jobs: Sequence[Job]) -> list[ClientResult]:
        """All local steps of the clients, together."""
        streams = [RandomStream(job.seed) for job in jobs]
        drawers = []
        for job, stream in zip(jobs, streams, strict=True):
            batches = job.make_batches()
            with stream.resumed():
                self._prepare(job.client, batches)
            drawers.append(self._epochs(batches))
        stack = self.make_stack([job.client for job in jobs])
        passes = self.make_pass()
        with seeded(jobs[0].seed):
            while stack.members:
                drawn: list[Drawn | None] = []
                for member in stack.members:
                    with streams[member].resumed():
                        drawn.append(next(drawers[member], None))
                going = [row for row, item in enumerate(drawn) if item is not None]
                if len(going) < len(drawn):
                    stack.keep(going)
                if going:
                    self._take_stacked_step(stack, passes, [item for item in drawn if item is not None])
        self.collector.start_batch(None)
        return [stack.left[number] for number in range(len(jobs))]

    def make_stack(self, clients: Sequence[Client]) -> Stack:
        """The clients, each at the global model."""
        return Stack(self.module, self.parameters, self.solver, clients, self.moving)

    def make_pass(self) -> StackedPass:
        """What takes a group of clients through the module."""
        return StackedPass(self.module, self.parameters, self.moving, self.collector, self.autocast, self._arguments)

    def _take_stacked_step(self, stack: Stack, passes: StackedPass, drawn: list[Drawn]) -> None:
        groups = group_batches(drawn, self.pads, self.by_index)
        outputs = self.step_stack(stack, passes, groups)
        if not self._tells:
            return
        told = {row: one.told_of(n) for group, one in outputs for n, row in enumerate(group.rows)}
        for row, (batch_idx, batch) in enumerate(drawn):
            self.collector.start_batch(batch)
            self.call_hook("on_train_batch_end", told.get(row, {}), batch, batch_idx)

    def step_stack(self, stack: Stack, passes: StackedPass, groups: list[Group]) -> list[tuple[Group, Passed]]:
        """One local step of all clients of a stack; gives what each group's first pass came to, none if skipped.

        Raises:
            MisconfigurationException: if anything in it fails for a stack, or some clients alone skip their batches.
        """
        outputs: list[list[tuple[Group, Passed]] | None] = []

        def backward(first: bool) -> None:
            with self.collector.muted(not first):
                outputs.append(self._pass_stack(stack, passes, groups, first))

        motion = stack.clients.motion
        motion.see(self.solver.rates)
        step = LocalStep(cast(Client, stack.clients), motion.steps, stack.x, stack.grad, backward)
        try:
            with self.solver.withheld():
                if not self._find_direction(step, outputs):
                    self._warn_of_none()
                    return []
                stack.solver.step()
        except MisconfigurationException:
            raise
        except Exception as error:
            what = str(error).strip().partition("\n")[0].rstrip(".")
            if isinstance(error, torch.cuda.OutOfMemoryError):
                what = f"`stack_chunk_size` must be below {len(stack.members)} here"
            raise MisconfigurationException(f"a step of a stack fails with {type(error).__name__}: {what}") from error
        motion.add_step()
        return outputs[0] or []

    def _pass_stack(
        self, stack: Stack, passes: StackedPass, groups: list[Group], first: bool
    ) -> list[tuple[Group, Passed]] | None:
        """Fill the gradients of all clients; ``None`` if the batches are skipped."""
        given: list[tuple[Group, Passed]] = []
        for group in groups:
            if len(group.rows) == len(stack.members):
                buffers = stack.buffers if first else [buffer.clone() for buffer in stack.buffers]
                passed = passes(stack.x, buffers, group)
                stack.grad.copy_(passed.grad)
            else:
                rows = torch.tensor(group.rows, device=stack.x.device)
                passed = passes(stack.x[rows], [buffer[rows] for buffer in stack.buffers], group)
                stack.grad[rows] = passed.grad
            if first:
                self._take_buffers(stack, group.rows, passed.buffers)
            given.append((group, passed))
        skipped = {passed.skipped for _, passed in given}
        if len(skipped) > 1:
            raise MisconfigurationException(
                "`training_step` returns None for the batches of some clients and not of others"
            )
        return None if skipped == {True} else given

    @staticmethod
    def _take_buffers(stack: Stack, rows: list[int], buffers: list[Tensor]) -> None:
        for number, after in enumerate(buffers):
            if len(rows) == len(stack.members):
                stack.buffers[number] = after
            else:
                stack.buffers[number][torch.tensor(rows, device=after.device)] = after
