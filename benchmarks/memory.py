"""Peak memory of a whole process against the number of clients."""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Paced, print_table
from benchmarks.workloads import WORKLOADS, add_workload, write_work
from lightning_fedstop.data import Partition


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The work, how many clients, and which method."""
    add_workload(parser)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("options", nargs="*", help="for our loop, as name=value")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One process for each N; the images are the same, and small, so that what grows with N shows."""
    figures: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or str(_write_images(Path(folder) / "images.npz", 2 * max(options.clients)))
        for clients in options.clients:
            workload = replace(WORKLOADS[options.workload], num_clients=clients)
            work = write_work(Path(folder), workload, options.rounds + 2, data)
            with Paced("our_loop", work, options.threads, options.options) as ours:
                for _ in range(options.rounds):
                    ours.round(counts=True)
                peak = ours.figures.peak * 1024
            partition = Partition.load(work.parent / "partition.npz")
            indices = (partition.indices.nbytes + partition.offsets.nbytes) / 2**20
            figures[clients] = {"peak_mib": peak, "indices_mib": indices, "beyond_mib": peak - indices}
    floor = next(iter(figures.values()))["beyond_mib"]
    for figure in figures.values():
        figure["ratio"] = figure["beyond_mib"] / floor
    columns = ("clients", "peak MiB", "index arrays MiB", "beyond them MiB", "ratio")
    rows = [(clients, *figure.values()) for clients, figure in figures.items()]
    print_table(f"{options.workload}, {options.rounds} rounds", columns, rows)
    return {str(clients): figure for clients, figure in figures.items()}


def _write_images(path: Path, samples: int) -> Path:
    """An archive of random images of 8 pixels."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (samples, 8, 8, 3), np.uint8)
    np.savez(path, train_images=images, train_labels=generator.integers(0, 8, samples).astype(np.uint8))
    return path
