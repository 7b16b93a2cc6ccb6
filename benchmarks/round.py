"""Ours against the bare loop."""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import Paced, print_table, ratio, side_by_side
from benchmarks.workloads import WORKLOADS, add_workload, write_work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The work, and arguments for our loop."""
    add_workload(parser)
    parser.add_argument("options", nargs="*", help="for our loop, as name=value, such as method=SCAFFOLD")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Time both in turn; the ratio is the median over rounds, each of which is the same work for both."""
    with tempfile.TemporaryDirectory() as folder:
        work = write_work(Path(folder), WORKLOADS[options.workload], options.rounds + 2, options.data)
        with (
            Paced("bare_loop", work, options.threads) as bare,
            Paced("our_loop", work, options.threads, options.options) as ours,
        ):
            figures = side_by_side({"bare": bare, "ours": ours}, options.rounds)
    result = {
        "ratio": ratio(figures["ours"], figures["bare"]),
        "memory_ratio": figures["ours"].peak / figures["bare"].peak,
        "idle": statistics.median(figures["ours"].idle),
        "workload": options.workload,
        **{name: {"seconds": f.seconds, "peak_gib": f.peak} for name, f in figures.items()},
    }
    rows = [("bare", figures["bare"].median, figures["bare"].peak, "")]
    rows.append(("ours", figures["ours"].median, figures["ours"].peak, f"{result['idle']:.1%}"))
    rows.append(("ours / bare", result["ratio"], result["memory_ratio"], ""))
    columns = ("", "seconds a round", "peak GiB", "idle share")
    print_table(f"{options.workload}, {options.rounds} rounds", columns, rows)
    return result
