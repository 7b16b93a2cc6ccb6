"""Peak memory of a whole process against the number of clients."""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measure import Paced, print_table
from benchmarks.workloads import WORKLOADS, add_workload, write_work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The work, how many clients, and which method."""
    add_workload(parser)
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("options", nargs="*", help="for our loop, as name=value")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One process for each N; the images are the same."""
    peaks: dict[int, float] = {}
    for clients in options.clients:
        chosen = WORKLOADS[options.workload]
        samples = max(chosen.samples, 2 * max(options.clients))
        workload = replace(chosen, num_clients=clients, samples=samples)
        with tempfile.TemporaryDirectory() as folder:
            work = write_work(Path(folder), workload, options.rounds + 2, options.data)
            with Paced("our_loop", work, options.threads, options.options) as ours:
                for _ in range(options.rounds):
                    ours.round(counts=True)
            peaks[clients] = ours.figures.peak
    floor = next(iter(peaks.values()))
    rows = [(clients, peak, peak / floor) for clients, peak in peaks.items()]
    print_table(f"{options.workload}, {options.rounds} rounds", ("clients", "peak GiB", "ratio"), rows)
    return {str(clients): {"peak_gib": peak, "ratio": peak / floor} for clients, peak in peaks.items()}
