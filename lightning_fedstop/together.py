"""What the back ends have in common that train several clients at once: what they cannot train falls back."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from lightning_fedstop.job import Job, LocalUpdate
from lightning_fedstop.local import LocalTrainer
from lightning_fedstop.methods.base import Client
from lightning_fedstop.seeding import RandomStream


class Unsuitable(Exception):
    """Says why a module or a method cannot be trained by a back end."""


def first_line(error: Exception) -> str:
    """What an error says, for the inside of a sentence."""
    return str(error).strip().split("\n")[0].rstrip(".")


class TogetherTrainer(LocalTrainer):
    """Base of back ends that train several clients at once, to the same result as one client after the other.

    Whether they can is found out with the first clients of a fit. If they cannot, this is said once, with the reason,
    and clients are trained one after the other.

    Attributes:
        is_checked: whether it has been found out.
        refusal: why clients are trained one after the other, ``None`` if they are not.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.is_checked = False
        self.refusal: str | None = None

    def known_refusal(self, jobs: Sequence[Job]) -> str | None:
        """What speaks against it before anything is tried."""
        raise NotImplementedError

    def check(self, jobs: Sequence[Job], load_global: Callable[[], None]) -> bool:
        """Try a step, of which nothing stays.

        Returns:
            False if no client had a batch to try.

        Raises:
            Unsuitable: saying why it cannot be.
        """
        raise NotImplementedError

    def announce(self, reason: str) -> None:
        """Tell the user of the fall back."""
        raise NotImplementedError

    def suits(self, jobs: Sequence[Job], load_global: Callable[[], None]) -> bool:
        """Whether these clients can be trained at once, found out the first time."""
        if not self.is_checked:
            try:
                if reason := self.known_refusal(jobs):
                    raise Unsuitable(reason)
                self.is_checked = self.check(jobs, load_global)
            except Unsuitable as reason:
                self.fall_back(str(reason))
        return self.is_checked and self.refusal is None

    @contextmanager
    def not_asking(self) -> Iterator[None]:
        """Training of which nothing may ask for the optimizer, because clients have copies of it.

        Raises:
            Unsuitable: if something has, in this thread.
        """
        asked_by, thread = self.solver.asked_by, threading.get_ident()
        asked_by.discard(thread)
        yield
        if thread in asked_by:
            name = type(self.module).__name__
            raise Unsuitable(f"the training of {name} asks for the optimizer, of which each client has its own")

    def fall_back(self, reason: str) -> None:
        """Train one client after the other from now on."""
        self.is_checked = True
        self.refusal = reason
        self.announce(reason)

    def train_in_turn(
        self, jobs: Sequence[Job], load_global: Callable[[], None]
    ) -> Iterator[tuple[Client, LocalUpdate]]:
        """Train clients one after the other that have been started but whose training together was broken off."""
        for job in jobs:
            batches = job.make_batches()
            load_global()
            job.client.vectors = {}
            yield job.client, self._train(job, batches)
            job.client.vectors = {}
        self.finished = [time.perf_counter()]

    def first_batch(self, job: Job) -> tuple[int, Any] | None:
        """A client's first batch, with its number; ``None`` if it has none."""
        batches = job.make_batches()
        with RandomStream(job.seed).resumed():
            return next(self.epoch(batches), None)

    def prepared(self, job: Job) -> Client:
        """A client before its first step, for a step that nothing is left of."""
        client = replace(job.client, vectors={})
        if self.method.needs_full_gradient:
            client.vectors["full_gradient"] = torch.zeros_like(self.parameters.grad)
        self.method.start(client)
        return client
