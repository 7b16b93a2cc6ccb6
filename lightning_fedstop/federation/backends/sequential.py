"""One client after the other, in the one module of a process."""

import time
from collections.abc import Iterator, Sequence

from lightning_fedstop.core.module_state import ModuleState
from lightning_fedstop.federation.local_training import ClientResult, Job, LocalTrainer


class Sequential:
    """Back end that trains one client after the other.

    Args:
        trainer: the local training loop.

    Attributes:
        finished: the moment when the last client was done, by ``time.perf_counter``.
    """

    def __init__(self, trainer: LocalTrainer) -> None:
        self.trainer = trainer
        self.finished: list[float] = []

    def run(self, jobs: Sequence[Job], start: ModuleState) -> Iterator[ClientResult]:
        """Train the clients of a round on this process.

        Args:
            jobs: who trains on what.
            start: buffers and frozen parameters of the round's start.

        Yields:
            Each client's result, in the order of ``jobs``; the module then holds the client's local model.
        """
        for job in jobs:
            yield self.trainer.train(job, start)
            # The jobs outlive their clients' training, and the vectors of a whole cohort would be too many.
            job.client.vectors = {}
        self.finished = [time.perf_counter()]
