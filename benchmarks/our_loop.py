"""Our side: ``python -m benchmarks.our_loop WORK.npz THREADS`` trains one round for each line on standard input.

Further arguments are ``name=value`` pairs: ``method=SCAFFOLD``, ``rule=1`` to have a stopping rule decide each round,
``matmul=1`` for the fast layers, and any argument of ``FederatedLoop``.
"""

import json
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from torch.nn import functional as F

from benchmarks.bare_loop import build_model, load_batch
from lightning_fedstop import methods
from lightning_fedstop.data.arrays import ArrayDataModule
from lightning_fedstop.federation.cohort import ScheduledCohort
from lightning_fedstop.loop.federated_loop import FederatedLoop
from lightning_fedstop.models.fast_layers import use_fast_layers
from lightning_fedstop.stopping import TaskVectorEarlyStopping


class Classifier(LightningModule):
    """The bare loop's model as an ordinary module."""

    is_thread_safe = True

    def __init__(self, model: str, num_classes: int, lr: float, matmul: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = build_model(model, num_classes)
        if matmul:
            use_fast_layers(self.model)
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Cross-entropy of a batch."""
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The bare loop's optimizer."""
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9, weight_decay=1e-3)


class WorkData(ArrayDataModule):
    """The images and the partition of a work file."""

    is_thread_safe = True

    def __init__(self, path: Path, num_clients: int, batch_size: int, size: int) -> None:
        partition = path.parent / "partition.npz"
        super().__init__(8, 3, 28, num_clients=num_clients, batch_size=batch_size, partition_path=partition)
        self.path = path
        self.size = size

    def read_split(self, split: str) -> Any:
        """The training images; there are no others."""
        if split != "train":
            return None
        with np.load(self.path) as work:
            return work["images"], work["labels"]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The bare loop's images, so that both sides have them in the same memory layout and so the same kernels."""
        images, labels = batch
        return load_batch(images, self.size), labels


class Paced(Callback):
    """Trains a round for each line on standard input, and answers with its seconds and the peak memory."""

    began: float | None = None

    def on_train_epoch_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Answer for the round before, and wait for the next line."""
        if self.began is not None and trainer.is_global_zero:
            usages = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
            seconds = time.perf_counter() - self.began
            idle = (trainer.row.get("seconds_idle") or 0.0) / seconds
            figures = [seconds, usages[0] / 2**20, trainer.row["seconds_criterion"], idle]
            print(*figures, flush=True)
        if not trainer.strategy.broadcast(trainer.is_global_zero and bool(sys.stdin.readline())):
            raise SystemExit
        self.began = time.perf_counter()


def main(path: Path, threads: int, options: dict[str, Any]) -> None:
    """Fit until standard input ends."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    with np.load(path) as work:
        lr, epochs, batch_size, size = (work[name].item() for name in ("lr", "epochs", "batch_size", "size"))
        cohorts, clients = work["cohorts"].tolist(), len(work["offsets"]) - 1
        module = Classifier(str(work["model"]), int(work["labels"].max()) + 1, lr, bool(options.pop("matmul", 0)))
    rules = [TaskVectorEarlyStopping(1e-9, 1000, observe_only=True)] * bool(options.pop("rule", 0))
    method = getattr(methods, options.pop("method", "FedAvg"))()
    arguments: dict[str, Any] = {"accelerator": "cpu", "devices": 1, **options}
    with tempfile.TemporaryDirectory() as root:
        loop = FederatedLoop(
            method,
            max_rounds=len(cohorts) + 1,
            clients_per_round=len(cohorts[0]),
            local_epochs=epochs,
            cohort=ScheduledCohort([*cohorts, cohorts[-1]]),
            gradient_clip_val=10.0,
            callbacks=[*rules, Paced()],
            check_val_every_n_round=None,
            limit_test_batches=0,
            enable_progress_bar=False,
            enable_checkpointing=False,
            default_root_dir=root,
            **arguments,
        )
        loop.fit(module, WorkData(path, clients, batch_size, size))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    pairs = (argument.partition("=") for argument in sys.argv[3:])
    main(Path(sys.argv[1]), int(sys.argv[2]), {name: _value(value) for name, _, value in pairs})
