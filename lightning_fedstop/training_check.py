"""Whether a device trains: a few seconds of federated training on one repeated batch."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lightning_fedstop.data import FederatedDataModule
from lightning_fedstop.loop import FederatedLoop
from lightning_fedstop.models import ImageClassifier

BACKBONE, SIDE, BATCH_SIZE = "convnextv2_atto", 32, 16
_MAX_STEPS = 2000


@dataclass
class TrainingCheck:
    """What a check found.

    Attributes:
        steps: taken, of a batch of 16 images of 32 px.
        first_step_seconds: what the first one took; on an accelerator it includes the search for kernels.
        steps_per_second: of the others.
    """

    steps: int
    first_step_seconds: float
    steps_per_second: float


def train_briefly(accelerator: str, index: int = 0, seconds: float = 4.0) -> TrainingCheck:
    """Train a convnextv2_atto in a :class:`~lightning_fedstop.loop.FederatedLoop`, which writes nothing.

    Args:
        accelerator: as the loop takes it.
        index: which of its devices; of no meaning on the CPU.
        seconds: when to stop; never before the third step.

    Raises:
        FloatingPointError: if the weights are not finite afterwards; what else the device raises is passed on.
    """
    module = ImageClassifier(BACKBONE, num_classes=8)
    data = _OneBatch(seconds, _waiting(accelerator))
    loop = FederatedLoop(
        local_epochs=_MAX_STEPS,
        clients_per_round=1,
        accelerator=accelerator,
        devices=1 if accelerator == "cpu" else [index],
        check_val_every_n_round=None,
        logger=False,
        enable_progress_bar=False,
        fast_dev_run=True,
    )
    loop.fit(module, data)
    if loop.nonfinite_reason is not None:
        raise FloatingPointError("the weights are not finite after a few steps of training")
    return data.batches.result()


def _waiting(accelerator: str) -> Callable[[], Any]:
    """A function that waits for what the device was told to do, so that steps are timed and not their launch."""
    return {"cpu": lambda: None, "mps": torch.mps.synchronize}.get(accelerator, torch.cuda.synchronize)


class _TimedBatches:
    """One batch an epoch, as long as there is time; notes when each begins."""

    def __init__(self, seconds: float, wait: Callable[[], Any]) -> None:
        self.seconds = seconds
        self.wait = wait
        self.marks: list[float] = []
        self.over = False
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(BATCH_SIZE, 3, SIDE, SIDE, generator=generator)
        self.batch = (images, torch.arange(BATCH_SIZE) % 8)

    def __iter__(self) -> Iterator[Any]:
        if self.over:
            return
        self.wait()
        self.marks.append(time.perf_counter())
        self.over = len(self.marks) > 3 and self.marks[-1] - self.marks[0] > self.seconds
        if not self.over:
            yield self.batch

    def result(self) -> TrainingCheck:
        """The figures: a step lies between two marks."""
        first, second, *_, last = self.marks
        steps = len(self.marks) - 1
        return TrainingCheck(steps, second - first, (steps - 1) / max(last - second, 1e-9))


class _OneBatch(FederatedDataModule):
    """One client, who has one batch."""

    def __init__(self, seconds: float, wait: Callable[[], Any]) -> None:
        super().__init__(num_clients=1)
        self.batches = _TimedBatches(seconds, wait)

    @property
    def client_sizes(self) -> list[int]:
        return [BATCH_SIZE]

    def client_dataloader(self, client: int, generator: torch.Generator) -> _TimedBatches:
        return self.batches
