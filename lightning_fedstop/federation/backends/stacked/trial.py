"""Compares the first step of two clients, taken one by one and as a stack."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fedstop.core.module_state import ModuleState
from lightning_fedstop.core.parameters import is_finite
from lightning_fedstop.core.seeding import RandomStream, global_state, seeded
from lightning_fedstop.federation.backends.stacked.batches import Drawn
from lightning_fedstop.federation.backends.stacked.passes import can_be_padded
from lightning_fedstop.federation.backends.stacked.steps import StackSteps
from lightning_fedstop.federation.local_training import Job, LocalTrainer
from lightning_fedstop.methods.base import Client
from lightning_fedstop.module.training_pass import BatchPasses

TOLERANCE = 0.02
"""Largest distance of a stacked direction from the single one, in units of its length: above what rounding does, also
on devices that round the factors of a product to ten bits, and below what a mistake does."""


@dataclass
class Trial:
    """Outcome of a stacked step that agrees with single ones.

    Attributes:
        moving: the names of the buffers of which each client needs its own.
        pads: batches may be padded to one shape.
        draws: the step draws random numbers of torch's.
    """

    moving: list[str]
    pads: bool
    draws: bool


def try_stack(twin: LocalTrainer, jobs: Sequence[Job]) -> Trial | None:
    """Take the first step of some clients one by one and stacked, and compare.

    Args:
        twin: trains a copy of the module, so that the module is left as it is.
        jobs: of the clients.

    Returns:
        The outcome; ``None`` if no client had a batch to try.

    Raises:
        MisconfigurationException: saying why they cannot be stacked.
    """
    drawn = [(job, item) for job in jobs if (item := _first_batch(twin, job)) is not None]
    if not drawn:
        return None
    start = ModuleState(twin.module, twin.parameters.parameters)
    singles, moving, draws = _single_directions(twin, drawn, start)
    reason: str | None = None
    for pads in [True, False] if can_be_padded(twin.module) and not draws else [False]:
        twin.load_global(drawn[0][0].client, start)
        steps = StackSteps(twin, moving, pads)
        reason = _difference(steps, drawn, [None if draws else single for single in singles])
        if reason is None:
            return Trial(moving, pads, draws)
    raise MisconfigurationException(reason)


def _first_batch(twin: LocalTrainer, job: Job) -> Drawn | None:
    batches = job.make_batches()
    with RandomStream(job.seed).resumed():
        return next(twin.device_batches(batches), None)


def _prepared(twin: LocalTrainer, job: Job) -> Client:
    """Prepare a client for a step of which nothing is left."""
    client = replace(job.client, vectors={})
    if twin.method.needs_full_gradient:
        client.vectors["full_gradient"] = torch.zeros_like(twin.parameters.grad)
    client.motion = twin.new_motion()
    twin.method.start(client)
    return client


def _single_directions(
    twin: LocalTrainer, drawn: Sequence[tuple[Job, Drawn]], start: ModuleState
) -> tuple[list[Tensor | None], list[str], bool]:
    """Find the directions of the clients' steps, the buffers that change, and whether torch's generators are used."""
    moving: dict[str, None] = {}
    singles: list[Tensor | None] = []
    draws = False
    for job, (batch_idx, batch) in drawn:
        client = _prepared(twin, job)
        twin.load_global(client, start)
        with seeded(job.seed), twin.solver.withheld():
            state = global_state()
            loss = twin.find_direction(client, BatchPasses(twin.training_pass, batch, batch_idx))
            now = global_state()
        if twin.parameters.unused:
            raise MisconfigurationException(
                f"a step gives no gradient to the parameter {twin.parameters.unused[0]}, which weight decay would move"
                " in a stack"
            )
        draws |= any(not torch.equal(state[name], now[name]) for name in ("torch", "cuda") if name in state)
        singles.append(None if loss is None else twin.parameters.grad.clone())
        moving |= dict.fromkeys(start.changed())
    if frozen := next((name for name, _ in twin.module.named_parameters() if name in moving), None):
        raise MisconfigurationException(
            f"the training of {type(twin.module).__name__} changes the frozen parameter {frozen}, of which a stack of"
            " clients has one"
        )
    return singles, list(moving), draws


def _difference(steps: StackSteps, drawn: Sequence[tuple[Job, Drawn]], singles: Iterable[Tensor | None]) -> str | None:
    """Name what tells a stacked step from the single ones, ``None`` if nothing does."""
    twin = steps.trainer
    stack = steps.stack([_prepared(twin, job) for job, _ in drawn])
    with seeded(drawn[0][0].seed):
        steps.step(stack, [item for _, item in drawn], extra=steps.pads)
    for direction, single in zip(stack.grad, singles, strict=True):
        if single is None or not is_finite(single):
            continue
        length, distance = torch.linalg.vector_norm(single), torch.linalg.vector_norm(direction - single)
        if not distance <= TOLERANCE * length:
            return (
                f"a stacked step of {type(twin.module).__name__} with {type(twin.method).__name__} is off by"
                f" {float(distance / length):.2g} of its length"
            )
    return None
