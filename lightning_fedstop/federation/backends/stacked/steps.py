"""The local steps of a stack of clients, on vectors with a row for each."""

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fedstop.core.seeding import RandomStream, seeded
from lightning_fedstop.federation.backends.stacked.batches import Drawn, Group, group_batches
from lightning_fedstop.federation.backends.stacked.client_stack import Stack
from lightning_fedstop.federation.backends.stacked.passes import Passed, StackedPass
from lightning_fedstop.federation.local_training import Job, LocalTrainer
from lightning_fedstop.methods.base import Client, LocalStep


class StackSteps:
    """Takes the local steps of several clients together: the k-th of all at once.

    Args:
        trainer: the local training loop.
        moving: the names of the buffers of which each client has its own.
        pads: pad batches to one shape, see :func:`group_batches`.
        calls_batch_end: call ``on_train_batch_end`` for each client's batch.
    """

    def __init__(self, trainer: LocalTrainer, moving: Sequence[str], pads: bool, calls_batch_end: bool = False) -> None:
        self.trainer = trainer
        self.moving = moving
        self.pads = pads
        self.calls_batch_end = calls_batch_end
        self._passes = StackedPass(
            trainer.module,
            trainer.parameters,
            moving,
            trainer.collector,
            trainer.training_pass.autocast,
            trainer.training_pass.arguments,
        )

    def train(self, jobs: Sequence[Job]) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Take all local steps of the clients; gives the local model and the buffers of each.

        Raises:
            MisconfigurationException: if anything in a step fails for a stack.
        """
        trainer = self.trainer
        streams = [RandomStream(job.seed) for job in jobs]
        drawers = []
        for job, stream in zip(jobs, streams, strict=True):
            batches = job.make_batches()
            with stream.resumed():
                trainer.prepare(job.client, batches)
            drawers.append(self._epochs(batches))
        stack = self.stack([job.client for job in jobs])
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
                    self._take_step(stack, [item for item in drawn if item is not None])
        trainer.collector.start_batch(None)
        return [stack.left[number] for number in range(len(jobs))]

    def stack(self, clients: Sequence[Client]) -> Stack:
        """Stack the clients, each at the global model."""
        trainer = self.trainer
        return Stack(trainer.module, trainer.parameters, trainer.solver.optimizer, clients, self.moving)

    def _epochs(self, batches: Iterable[object]) -> Iterator[Drawn]:
        for _ in range(self.trainer.settings.local_epochs):
            yield from self.trainer.epoch(batches)

    def _take_step(self, stack: Stack, drawn: list[Drawn]) -> None:
        trainer = self.trainer
        passed = self.step(stack, drawn)
        if not self.calls_batch_end:
            return
        outputs = {row: one.outputs_of(n) for group, one in passed for n, row in enumerate(group.rows)}
        for row, (batch_idx, batch) in enumerate(drawn):
            trainer.collector.start_batch(batch)
            trainer.hooks("on_train_batch_end", outputs.get(row, {}), batch, batch_idx)

    def step(self, stack: Stack, drawn: list[Drawn], extra: bool = False) -> list[tuple[Group, Passed]]:
        """Take one local step of all clients: gradient, correct, clip, the optimizer.

        Args:
            stack: the clients.
            drawn: the batch of each.
            extra: see :func:`group_batches`.

        Returns:
            What the first pass of each group of batches gave; nothing if the batches are skipped.

        Raises:
            MisconfigurationException: if anything in it fails for a stack, or some clients alone skip their batches.
        """
        trainer, method, motion = self.trainer, self.trainer.method, stack.clients.motion
        groups = group_batches(drawn, self.pads, trainer.training_pass.takes_batch_idx, extra)
        passed: list[tuple[Group, Passed]] = []

        def backward(first: bool) -> None:
            with trainer.collector.muted(not first):
                given = self._fill_gradients(stack, groups, first)
            if first:
                passed.extend(given)

        motion.see(trainer.solver.rates)
        step = LocalStep(cast(Client, stack.clients), motion.steps, stack.x, stack.grad, backward)
        try:
            with trainer.solver.withheld():
                method.gradient(step)
                if not passed:
                    trainer.training_pass.warn_of_none()
                    return []
                with torch.no_grad():
                    method.correct(step)
                    trainer._clip(step.grad)
                    method.after_clip(step)
                stack.solver.step()
        except MisconfigurationException:
            raise
        except Exception as error:
            what = str(error).strip().partition("\n")[0].rstrip(".")
            if isinstance(error, torch.cuda.OutOfMemoryError):
                what = f"`stack_chunk_size` must be below {len(stack.members)} here"
            raise MisconfigurationException(f"a step of a stack fails with {type(error).__name__}: {what}") from error
        motion.add_step()
        return passed

    def _fill_gradients(self, stack: Stack, groups: list[Group], first: bool) -> list[tuple[Group, Passed]]:
        """Fill the gradients of all clients; gives nothing if the batches are skipped."""
        given: list[tuple[Group, Passed]] = []
        for group in groups:
            if len(group.rows) == len(stack.members):
                buffers = stack.buffers if first else [buffer.clone() for buffer in stack.buffers]
                passed = self._passes(stack.x, buffers, group)
                stack.grad.copy_(passed.grad)
                if first:
                    stack.buffers = list(passed.buffers)
            else:
                rows = torch.tensor(group.rows, device=stack.x.device)
                passed = self._passes(stack.x[rows], [buffer[rows] for buffer in stack.buffers], group)
                stack.grad[rows] = passed.grad
                if first:
                    for buffer, after in zip(stack.buffers, passed.buffers, strict=True):
                        buffer[rows] = after
            given.append((group, passed))
        skipped = {passed.skipped for _, passed in given}
        if len(skipped) > 1:
            raise MisconfigurationException(
                "`training_step` returns None for the batches of some clients and not of others"
            )
        return [] if skipped == {True} else given
