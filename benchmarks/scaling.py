"""Several processes, and several threads of one, against one that trains one client after the other."""

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measure import Paced, print_table, ratio, side_by_side
from benchmarks.workloads import WORKLOADS, add_workload, write_work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The work, and how many clients at once."""
    add_workload(parser)
    parser.add_argument("--counts", type=int, nargs="+", default=[2], help="clients that are trained at once")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Time all in turn; each client has ``--threads`` threads of torch everywhere."""
    each = options.threads
    ways = {"one after the other": (each, ["devices=1"])}
    for count in options.counts:
        ways[f"{count} processes"] = each, [f"devices={count}", "strategy=ddp"]
        ways[f"{count} threads"] = count * each, ["devices=auto"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        work = write_work(Path(folder), WORKLOADS[options.workload], options.rounds + 2, options.data)
        paced = {
            name: stack.enter_context(Paced("our_loop", work, threads, given))
            for name, (threads, given) in ways.items()
        }
        figures = side_by_side(paced, options.rounds)
    floor = next(iter(figures.values()))
    result: dict[str, Any] = {
        name: {
            "seconds": found.seconds,
            "ratio": ratio(found, floor),
            "peak_gib": found.peak,
            "idle": statistics.median(found.idle),
        }
        for name, found in figures.items()
    }
    rows = [
        (name, found.median, result[name]["ratio"], found.peak, f"{result[name]['idle']:.1%}")
        for name, found in figures.items()
    ]
    print_table(options.workload, ("clients", "seconds a round", "ratio", "peak GiB", "idle share"), rows)
    return result
