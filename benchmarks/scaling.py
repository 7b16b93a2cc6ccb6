"""More processes against one."""

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measure import Paced, print_table, side_by_side
from benchmarks.workloads import WORKLOADS, add_workload, write_work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The work, and how many processes."""
    add_workload(parser)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Time each number of processes in turn."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        work = write_work(Path(folder), WORKLOADS[options.workload], options.rounds + 2, options.data)
        paced = {
            str(count): stack.enter_context(
                Paced("our_loop", work, options.threads, [f"devices={count}"] + ["strategy=ddp"] * (count > 1))
            )
            for count in options.processes
        }
        figures = side_by_side(paced, options.rounds)
    floor = next(iter(figures.values())).median
    result: dict[str, Any] = {
        name: {"seconds": found.seconds, "ratio": found.median / floor, "idle": statistics.median(found.idle)}
        for name, found in figures.items()
    }
    rows = [(name, found.median, result[name]["ratio"], result[name]["idle"]) for name, found in figures.items()]
    print_table(options.workload, ("processes", "seconds a round", "ratio", "idle share"), rows)
    return result
