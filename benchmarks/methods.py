"""All ten methods relative to FedAvg."""

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.measure import Paced, print_table, ratio, side_by_side
from benchmarks.workloads import WORKLOADS, add_workload, write_work
from lightning_fedstop import methods

NAMES = (
    "FedAvg",
    "FedProx",
    "SCAFFOLD",
    "FedDyn",
    "FedSAM",
    "FedSpeed",
    "FedSMOO",
    "FedGamma",
    "FedLESAM",
    "FedWMSAM",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The work."""
    add_workload(parser)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Time all methods in turn; each should cost about its number of gradients a step."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        work = write_work(Path(folder), WORKLOADS[options.workload], options.rounds + 2, options.data)
        paced = {
            name: stack.enter_context(Paced("our_loop", work, options.threads, [f"method={name}"])) for name in NAMES
        }
        figures = side_by_side(paced, options.rounds)
    rows, result = [], {}
    for name, found in figures.items():
        gradients = getattr(methods, name)().gradients_per_step
        relative = ratio(found, figures["FedAvg"])
        per_gradient = relative / gradients
        result[name] = {
            "relative": relative,
            "gradients": gradients,
            "per_gradient": per_gradient,
            "seconds": found.seconds,
        }
        rows.append((name, found.median, relative, gradients, per_gradient))
    columns = ("method", "seconds a round", "relative to FedAvg", "gradients a step", "relative / gradients")
    print_table(options.workload, columns, rows)
    return result
