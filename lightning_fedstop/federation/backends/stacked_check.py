"""Compares the first step of two clients, taken one by one and as a stack."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fedstop.core.module_state import ModuleState
from lightning_fedstop.core.parameters import is_finite
from lightning_fedstop.core.seeding import global_state, seeded
from lightning_fedstop.federation.backends.stacked_batches import Drawn, group_batches
from lightning_fedstop.federation.backends.stacked_pass import can_be_padded

if TYPE_CHECKING:
    from lightning_fedstop.federation.backends.stacked import StackedTrainer
    from lightning_fedstop.federation.local_training import Job

TOLERANCE = 0.02
"""Largest distance of a stacked direction from the single one, in units of its length: above what rounding does, also
on devices that round the factors of a product to ten bits, and below what a mistake does."""


def check_stack(twin: "StackedTrainer", jobs: "Sequence[Job]") -> tuple[bool, bool]:
    """Take the first step of some clients one by one and stacked, and compare.

    Args:
        twin: trains a copy of the module, so that the module is left as it is. Its ``moving``, the buffers of which
            each client has its own, and ``pads`` are set.
        jobs: of the clients.

    Returns:
        Whether a client had a batch to try, and whether its step drew random numbers of torch's.

    Raises:
        MisconfigurationException: saying why they cannot be stacked.
    """
    drawn = [(job, item) for job in jobs if (item := twin.first_batch(job)) is not None]
    if not drawn:
        return False, False
    start = ModuleState(twin.module, twin.parameters.parameters)
    singles, draws = _single_steps(twin, drawn, start)
    reason: str | None = None
    for pads in [True, False] if can_be_padded(twin.module) and not draws else [False]:
        start.restore()
        twin.start_client(drawn[0][0].client)
        reason = _difference(twin, drawn, [None if draws else single for single in singles], pads)
        if reason is None:
            twin.pads = pads
            return True, draws
    raise MisconfigurationException(reason)


def _single_steps(
    twin: "StackedTrainer", drawn: "Sequence[tuple[Job, Drawn]]", start: ModuleState
) -> tuple[list[Tensor | None], bool]:
    """The directions of the clients' steps, taken one by one, and whether torch's generators were drawn from."""
    moving: dict[str, None] = {}
    singles: list[Tensor | None] = []
    draws = False
    for job, (batch_idx, batch) in drawn:
        start.restore()
        client = twin.prepared(job)
        twin.start_client(client)
        with seeded(job.seed), twin.solver.withheld():
            state = global_state()
            outputs = twin.step(client, batch, batch_idx)
            now = global_state()
        draws |= any(not torch.equal(state[name], now[name]) for name in ("torch", "cuda") if name in state)
        singles.append(twin.parameters.grad.clone() if outputs else None)
        moving |= dict.fromkeys(start.changed())
    if frozen := next((name for name, _ in twin.module.named_parameters() if name in moving), None):
        raise MisconfigurationException(
            f"the training of {type(twin.module).__name__} changes the frozen parameter {frozen}, of which a stack of"
            " clients has one"
        )
    twin.moving = list(moving)
    return singles, draws


def _difference(
    twin: "StackedTrainer", drawn: "Sequence[tuple[Job, Drawn]]", singles: Iterable[Tensor | None], pads: bool
) -> str | None:
    """What tells a stacked step from the single ones, ``None`` if nothing does."""
    stack = twin.make_stack([twin.prepared(job) for job, _ in drawn])
    groups = group_batches([item for _, item in drawn], pads, twin.by_index, extra=pads)
    with seeded(drawn[0][0].seed):
        twin.step_stack(stack, twin.make_pass(), groups)
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
