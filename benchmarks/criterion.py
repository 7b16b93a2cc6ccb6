"""What the stop decision costs."""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import Paced, print_table, side_by_side
from benchmarks.workloads import WORKLOADS, add_workload, write_work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The work."""
    add_workload(parser)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the rule as a share of the round it decides on."""
    with tempfile.TemporaryDirectory() as folder:
        work = write_work(Path(folder), WORKLOADS[options.workload], options.rounds + 2, options.data)
        with Paced("our_loop", work, options.threads, ["rule=1"]) as ours:
            figures = side_by_side({"ours": ours}, options.rounds)["ours"]
    shares = [criterion / seconds for criterion, seconds in zip(figures.criterion, figures.seconds, strict=True)]
    result = {"share": statistics.median(shares), "seconds": statistics.median(figures.criterion), "shares": shares}
    print_table(
        f"{options.workload}, the stop decision",
        ("seconds a decision", "seconds a round", "share of a round"),
        [(f"{result['seconds']:.5f}", figures.median, f"{result['share']:.4%}")],
    )
    return result
