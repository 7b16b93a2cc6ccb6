"""What exact norms cost: ours, the plain one in float32, and one over a copy in float64, side by side."""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import print_table
from lightning_fedstop.core.parameters import norm

WAYS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "plain": torch.linalg.vector_norm,
    "ours": norm,
    "copy in float64": lambda vector: vector.double().square().sum().sqrt(),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The lengths of the vectors."""
    sizes = (3_400_000, 15_000_000, 86_000_000)
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="numbers of a vector in float32")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds, their ratio to the plain norm's, and relative error of each way at each length."""
    torch.set_num_threads(options.threads)
    result = {str(size): _measured(size, options.rounds) for size in options.sizes}
    rows = [
        (f"{int(size):,}", way, *figures.values()) for size, ways in result.items() for way, figures in ways.items()
    ]
    rows = [(*head, f"{seconds:.5f}", ratio, f"{error:+.1e}") for *head, seconds, ratio, error in rows]
    print_table("the norm of a vector", ("length", "way", "seconds", "to the plain one", "relative error"), rows)
    return result


def _measured(size: int, rounds: int) -> dict[str, dict[str, float]]:
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0))
    exact = math.sqrt(math.fsum(part.double().square().sum().item() for part in vector.split(1 << 16)))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    lengths: dict[str, float] = {}
    for number in range(rounds + 1):
        for way, call in WAYS.items():
            began = time.perf_counter()
            lengths[way] = float(call(vector))
            if number:
                seconds[way].append(time.perf_counter() - began)
    return {
        way: {
            "seconds": statistics.median(taken),
            "ratio": statistics.median(a / b for a, b in zip(taken, seconds["plain"], strict=True)),
            "error": lengths[way] / exact - 1,
        }
        for way, taken in seconds.items()
    }
