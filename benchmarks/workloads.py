"""The work that is timed, as a file that ours and the bare loop both read."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_fedstop.core.seeding import torch_generator
from lightning_fedstop.data import DirichletSkew, Partition
from lightning_fedstop.federation.cohort import UniformCohort


@dataclass(frozen=True)
class Workload:
    """Sizes of a federation.

    Attributes:
        model: a timm model, or ``"cnn"``.
        size: pixels at which images are processed.
        num_clients: N.
        clients_per_round: M.
        local_epochs: E.
        batch_size: B.
        samples: images of the synthetic set.
    """

    model: str
    size: int
    num_clients: int = 100
    clients_per_round: int = 10
    local_epochs: int = 5
    batch_size: int = 256
    samples: int = 11_959


WORKLOADS = {
    "W1": Workload("convnextv2_atto", 32),
    "W2": Workload("cnn", 28, clients_per_round=50, local_epochs=1, batch_size=32),
    "tiny": Workload("cnn", 28, num_clients=10, clients_per_round=3, local_epochs=1, batch_size=16, samples=200),
}


def add_workload(parser: argparse.ArgumentParser) -> None:
    """The options that choose the work."""
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="W2")
    parser.add_argument("--data", metavar="FILE.npz", help="an archive in MedMNIST's layout; random images by default")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process")


def write_work(folder: Path, workload: Workload, rounds: int, data: str | None = None) -> Path:
    """Write images, partition and cohorts to ``work.npz``."""
    if data is None:
        generator = np.random.default_rng(0)
        images = generator.integers(0, 256, (workload.samples, 28, 28, 3), np.uint8)
        labels = generator.integers(0, 8, workload.samples)
    else:
        with np.load(data, allow_pickle=False) as archive:
            images, labels = archive["train_images"], archive["train_labels"].reshape(-1).astype(np.int64)
    partition = Partition.create(DirichletSkew(0.1), labels, workload.num_clients, seed=0)
    cohort = UniformCohort()
    cohorts = [
        sorted(cohort.sample(r, workload.num_clients, workload.clients_per_round, torch_generator(0, "cohort", r)))
        for r in range(1, rounds + 1)
    ]
    path = folder / "work.npz"
    partition.save(folder / "partition.npz")
    np.savez(
        path,
        images=images,
        labels=labels,
        indices=np.concatenate([partition[client] for client in range(workload.num_clients)]),
        offsets=np.concatenate([[0], np.cumsum(partition.sizes)]),
        cohorts=np.array(cohorts),
        epochs=workload.local_epochs,
        batch_size=workload.batch_size,
        size=workload.size,
        model=workload.model,
        lr=1e-3,
    )
    return path
