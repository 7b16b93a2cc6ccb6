"""Finds out with one step of two clients whether a module and a method can be stacked."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_fedstop.client_stack import Unstackable
from lightning_fedstop.methods.base import Client
from lightning_fedstop.seeding import RandomStream, drawn_from, global_state, seeded
from lightning_fedstop.stacked_batches import Drawn, group_batches
from lightning_fedstop.stacked_pass import can_be_padded

if TYPE_CHECKING:
    from lightning_fedstop.job import Job
    from lightning_fedstop.local import LocalTrainer
    from lightning_fedstop.stacked import StackedTrainer

TOLERANCE = 0.02
"""Largest distance of a stacked direction from the single one, in units of its length: above what rounding does, also
on devices that round the factors of a product to ten bits, and below what a mistake does."""


def check(trainer: "StackedTrainer", jobs: "Sequence[Job]", load_global: Callable[[], None]) -> bool:
    """Take the first step of some clients one by one and stacked, and compare; nothing of it stays.

    Sets the buffers of which each client has its own, and whether batches are padded.

    Returns:
        False if no client had a batch to try.

    Raises:
        Unstackable: saying why.
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
    drawn = [(job, item) for job in jobs if (item := first_batch(trainer, job)) is not None]
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    moving: dict[str, None] = {}
    singles = []
    draws = False
    for job, (batch_idx, batch) in drawn:
        load_global()
        client = prepared(trainer, job)
        trainer.start_client(client)
        with seeded(job.seed):
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
        raise Unstackable(reason)
    if draws:
        rank_zero_warn(
            f"`client_backend='stacked'`: the `training_step` of {type(module).__name__} draws random numbers (dropout,"
            " say), and a stack of clients draws others than one client after the other."
        )
    return bool(drawn)


def first_batch(trainer: "LocalTrainer", job: "Job") -> Drawn | None:
    """A client's first batch, with its number; ``None`` if it has none."""
    batches = job.make_batches()
    with RandomStream(job.seed).resumed():
        return next(trainer.epoch(batches), None)


def prepared(trainer: "LocalTrainer", job: "Job") -> Client:
    """A client before its first step, for a step that nothing is left of."""
    client = replace(job.client, vectors={})
    if trainer.method.needs_full_gradient:
        client.vectors["full_gradient"] = torch.zeros_like(trainer.parameters.grad)
    trainer.method.start(client)
    return client


def _draws(trainer: "StackedTrainer", state: dict[str, Any]) -> bool:
    """Whether the step drew random numbers from torch.

    Raises:
        Unstackable: if it drew some from Python or NumPy.
    """
    drawn = drawn_from(state, global_state())
    if {"python", "numpy"}.intersection(drawn):
        raise Unstackable(
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
    stack = trainer.make_stack([prepared(trainer, job) for job, _ in drawn])
    groups = group_batches([item for _, item in drawn], pads, trainer.by_index, extra=pads)
    with seeded(drawn[0][0].seed):
        trainer.step_stack(stack, trainer.make_pass(), groups)
    if changed := attributes.changed():
        name = type(trainer.module).__name__
        return f"the `training_step` of {name} changes `{changed[0]}`, which all clients of a stack would share"
    for direction, single in zip(stack.grad, singles, strict=True):
        if single is None or not torch.isfinite(single).all():
            continue
        length, distance = torch.linalg.vector_norm(single), torch.linalg.vector_norm(direction - single)
        if not distance <= TOLERANCE * length:
            return (
                f"a stacked step of {type(trainer.module).__name__} with {type(trainer.method).__name__} is off by"
                f" {float(distance / length):.2g} of its length"
            )
    return None


class Attributes:
    """The attributes of a module and the modules in it, with what lists, dicts and sets among them hold.

    Args:
        module: parameters and buffers count by which tensors they are, not by their values.
        restorable: keep the values of tensors that are neither, too, for :meth:`restore`.
    """

    def __init__(self, module: nn.Module, restorable: bool = False) -> None:
        self.module = module
        self.held = [(name, owner, dict(vars(owner))) for name, owner in module.named_modules()]
        self.copies = [
            {key: copy(value) for key, value in held.items() if isinstance(value, list | dict | set)}
            for _, _, held in self.held
        ]
        self.versions = [
            {key: value._version for key, value in held.items() if _is_plain_tensor(value)} for _, _, held in self.held
        ]
        self.values = [
            {key: held[key].detach().clone() for key in versions if restorable}
            for (_, _, held), versions in zip(self.held, self.versions, strict=True)
        ]

    def changed(self) -> list[str]:
        """The names of those that are others now, or hold others."""
        names = []
        for (path, owner, held), copies, versions in zip(self.held, self.copies, self.versions, strict=True):
            now = vars(owner)
            for name in held | now:
                same = name in held and name in now and now[name] is held[name]
                if same and name in versions:
                    same = versions[name] == now[name]._version
                if not same or (name in copies and _items(copies[name]) != _items(now[name])):
                    names.append(f"{path}.{name}".lstrip("."))
        return names

    def restore(self) -> None:
        """Put all of them back."""
        for (_, owner, held), copies, values in zip(self.held, self.copies, self.values, strict=True):
            for name, tensor in values.items():
                held[name].detach().copy_(tensor)
            for name, value in copies.items():
                if _items(value) != _items(held[name]):
                    held[name].clear()
                    (held[name].extend if isinstance(value, list) else held[name].update)(value)
            vars(owner).clear()
            vars(owner).update(held)


def _is_plain_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()


def _items(values: Any) -> list[int]:
    """Which objects a collection holds."""
    items = [item for pair in values.items() for item in pair] if isinstance(values, dict) else values
    return [id(item) for item in items]
