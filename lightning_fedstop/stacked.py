"""The clients of a round trained as one stack: the local loop on vectors of shape ``(M, d)``."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fedstop.client_stack import Finished, Stack
from lightning_fedstop.flat_solver import FlatSolver
from lightning_fedstop.hooks import BATCH_HOOKS, GRADIENT_HOOKS, Hooks, is_users
from lightning_fedstop.job import Job, LocalUpdate
from lightning_fedstop.methods.base import Client, LocalStep
from lightning_fedstop.seeding import RandomStream, seeded
from lightning_fedstop.stacked_batches import Drawn, Group, group_batches
from lightning_fedstop.stacked_check import check_stack
from lightning_fedstop.stacked_pass import Passed, StackedPass, uses_batch_idx
from lightning_fedstop.together import TogetherTrainer, Unsuitable, first_line

OWN_STEPS = ("backward", "optimizer_step", "configure_gradient_clipping", "optimizer_zero_grad")


class StackedTrainer(TogetherTrainer):
    """Trains the clients of a process at once; the step is :class:`LocalTrainer`'s, on vectors with a row for each.

    All take their k-th step together. A client that has run out of batches leaves the stack. Batches of equal shape go
    through the module in one pass, see :func:`~lightning_fedstop.stacked_batches.group_batches`.

    Args:
        chunk_size: clients in a stack at most; ``None`` for all.
        arguments: those of :class:`LocalTrainer`.
        named: likewise.
    """

    def __init__(self, chunk_size: int | None, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.chunk_size = chunk_size
        self.pads = False
        self.moving: list[str] = []
        self._tells = False
        self.by_index = self._takes_batch_idx and uses_batch_idx(self.module.training_step)

    def run(self, jobs: Sequence[Job], load_global: Callable[[], None]) -> Iterator[tuple[Client, LocalUpdate]]:
        """Train the clients of a round on this process; see :meth:`LocalTrainer.run`."""
        size = self.chunk_size or max(1, len(jobs))
        for start in range(0, len(jobs), size):
            yield from self._run_chunk(jobs[start : start + size], load_global)
        self.finished = [time.perf_counter()]

    def _run_chunk(self, jobs: Sequence[Job], load_global: Callable[[], None]) -> Iterator[tuple[Client, LocalUpdate]]:
        if len(jobs) == 1 or not self.suits(jobs, load_global):
            yield from super().run(jobs, load_global)
            return
        load_global()
        for job in jobs:
            self.call_hook("on_client_start", job.client.index)
        logged = self.collector.snapshot()
        self.start_client(jobs[0].client)
        try:
            trained = self._train_stack(jobs)
        except Unsuitable as reason:
            self.fall_back(str(reason))
            self.collector.restore(logged)
            yield from self.train_in_turn(jobs, load_global)
            return
        for job, local in zip(jobs, trained, strict=True):
            load_global()
            self._load_local(job.client, local)
            yield job.client, self.update_of(job.client, local.steps)
            job.client.vectors = {}

    def _load_local(self, client: Client, local: Finished) -> None:
        """Put a client's local model and its buffers into the module, and its vectors where the method looks."""
        client.vectors = local.vectors
        self.parameters.vector.copy_(local.x)
        held = dict(self.module.named_buffers())
        for name, buffer in zip(self.moving, local.buffers, strict=True):
            held[name].copy_(buffer)

    def check(self, jobs: Sequence[Job], load_global: Callable[[], None]) -> bool:
        """Take the first step of two clients one by one and stacked, and compare."""
        is_checked = check_stack(self, jobs[:2], load_global)
        if is_checked:
            self._warn_of_batch_hooks()
        return is_checked

    def announce(self, reason: str) -> None:
        """Warn the user, who has asked for stacks."""
        rank_zero_warn(f"`client_backend='stacked'` trains one client after the other instead, because {reason}.")

    def known_refusal(self, jobs: Sequence[Job]) -> str | None:
        """What speaks against a stack before anything is tried."""
        hooks, name = cast(Hooks, self.call_hook), type(self.module).__name__
        for own in (*OWN_STEPS, *BATCH_HOOKS):
            if self.module in hooks.owners(own):
                return f"{name} has its own `{own}`, which would see the global model and no single client"
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

    def _train_stack(self, jobs: Sequence[Job]) -> list[Finished]:
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
            Unsuitable: if anything in it fails for a stack, or some clients alone skip their batches.
        """
        outputs: list[list[tuple[Group, Passed]] | None] = []

        def backward(first: bool) -> None:
            with self.collector.muted(not first):
                outputs.append(self._pass_stack(stack, passes, groups, first))

        step = LocalStep(cast(Client, stack.clients), stack.steps, stack.x, stack.grad, backward)
        try:
            with self.not_asking():
                if not self._find_direction(step, outputs):
                    self._warn_of_none()
                    return []
                stack.solver.step()
        except Unsuitable:
            raise
        except Exception as error:
            what = first_line(error)
            if isinstance(error, torch.cuda.OutOfMemoryError):
                what = f"`stack_chunk_size` must be below {len(stack.members)} here"
            raise Unsuitable(f"a step of a stack fails with {type(error).__name__}: {what}") from error
        stack.steps += 1
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
            raise Unsuitable("`training_step` returns None for the batches of some clients and not of others")
        return None if skipped == {True} else given

    @staticmethod
    def _take_buffers(stack: Stack, rows: list[int], buffers: list[Tensor]) -> None:
        for number, after in enumerate(buffers):
            if len(rows) == len(stack.members):
                stack.buffers[number] = after
            else:
                stack.buffers[number][torch.tensor(rows, device=after.device)] = after
