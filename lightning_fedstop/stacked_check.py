"""Finds out with one step of two clients whether a module and a method can be stacked."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fedstop.attributes import Attributes
from lightning_fedstop.parameters import is_finite
from lightning_fedstop.seeding import drawn_from, global_state, seeded
from lightning_fedstop.stacked_batches import Drawn, group_batches
from lightning_fedstop.stacked_pass import can_be_padded
from lightning_fedstop.together import Unsuitable

if TYPE_CHECKING:
    from lightning_fedstop.job import Job
    from lightning_fedstop.stacked import StackedTrainer

TOLERANCE = 0.02
"""Largest distance of a stacked direction from the single one, in units of its length: above what rounding does, also
on devices that round the factors of a product to ten bits, and below what a mistake does."""


def check_stack(trainer: "StackedTrainer", jobs: "Sequence[Job]", load_global: Callable[[], None]) -> bool:
    """Take the first step of some clients one by one and stacked, and compare; nothing of it stays.

    Sets the buffers of which each client has its own, and whether batches are padded.

    Returns:
        False if no client had a batch to try.

    Raises:
        Unsuitable: saying why.
    """
    attributes = Attributes(trainer.module, restorable=True)
    with trainer.collector.muted():
        try:
            return _compare(trainer, jobs, load_global)
        finally:
            attributes.restore()
            load_global()


def _compare(trainer: "StackedTrainer", jobs: "Sequence[Job]", load_global: Callable[[], None]) -> bool:
    module = trainer.module
    drawn = [(job, item) for job in jobs if (item := trainer.first_batch(job)) is not None]
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    moving: dict[str, None] = {}
    singles = []
    draws = False
    for job, (batch_idx, batch) in drawn:
        load_global()
        client = trainer.prepared(job)
        trainer.start_client(client)
        with seeded(job.seed), trainer.not_asking():
            state = global_state()
            outputs = trainer.step(client, 0, batch, batch_idx)
            draws |= _draws(trainer, state)
        singles.append(trainer.parameters.grad.clone() if outputs else None)
        moving |= {n: None for n, b in module.named_buffers() if n in before and not torch.equal(b, before[n])}
    trainer.moving = list(moving)
    reason: str | None = None
    for pads in [True, False] if can_be_padded(module) and not draws else [False]:
        load_global()
        trainer.start_client(drawn[0][0].client) if drawn else None
        reason = _difference(trainer, drawn, [None if draws else single for single in singles], pads)
        if reason is None:
            trainer.pads = pads
            break
    if reason is not None:
        raise Unsuitable(reason)
    if draws:
        rank_zero_warn(
            f"`client_backend='stacked'`: the `training_step` of {type(module).__name__} draws random numbers (dropout,"
            " say), and a stack of clients draws others than one client after the other."
        )
    return bool(drawn)


def _draws(trainer: "StackedTrainer", state: dict[str, Any]) -> bool:
    """Whether the step drew random numbers from torch.

    Raises:
        Unsuitable: if it drew some from Python or NumPy.
    """
    drawn = drawn_from(state, global_state())
    if {"python", "numpy"}.intersection(drawn):
        raise Unsuitable(
            f"the `training_step` of {type(trainer.module).__name__} draws from Python's or NumPy's generator, which a"
            " stack would do once for all clients"
        )
    return bool(drawn)


def _difference(
    trainer: "StackedTrainer", drawn: "Sequence[tuple[Job, Drawn]]", singles: Iterable[Tensor | None], pads: bool
) -> str | None:
    """What tells a stacked step from the single ones, ``None`` if nothing does."""
    if not drawn:
        return None
    attributes = Attributes(trainer.module)
    stack = trainer.make_stack([trainer.prepared(job) for job, _ in drawn])
    groups = group_batches([item for _, item in drawn], pads, trainer.by_index, extra=pads)
    with seeded(drawn[0][0].seed):
        trainer.step_stack(stack, trainer.make_pass(), groups)
    if changed := attributes.changed():
        name = type(trainer.module).__name__
        return f"the `training_step` of {name} changes `{changed[0]}`, which all clients of a stack would share"
    for direction, single in zip(stack.grad, singles, strict=True):
        if single is None or not is_finite(single):
            continue
        length, distance = torch.linalg.vector_norm(single), torch.linalg.vector_norm(direction - single)
        if not distance <= TOLERANCE * length:
            return (
                f"a stacked step of {type(trainer.module).__name__} with {type(trainer.method).__name__} is off by"
                f" {float(distance / length):.2g} of its length"
            )
    return None
