"""One local step in several ways of computing it, in one process and in turn."""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.measure import print_table
from lightning_fedstop.models import ImageClassifier

Step = Callable[[], None]

# What is passed to `ImageClassifier`; `bf16` is the loop's `precision: bf16-mixed`, `compiled` is `backbone.compile()`.
WAYS: dict[str, dict[str, Any]] = {
    "timm": {"matmul_layers": False},
    "default": {},
    "everywhere": {"matmul_layers": True},
    "channels_last": {"channels_last": True},
    "bf16": {"bf16": True},
    "compiled": {"compiled": True},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the sizes and the ways."""
    parser.add_argument("--backbone", default="convnextv2_atto")
    parser.add_argument("--size", type=int, default=32, help="side of the images in pixels")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="ratios are to the first")


def _step(options: argparse.Namespace, way: str) -> Step:
    torch.manual_seed(0)
    switches = dict(WAYS[way])
    context: Any = torch.autocast("cpu", torch.bfloat16) if switches.pop("bf16", False) else nullcontext()
    is_compiled = switches.pop("compiled", False)
    if not options.backbone.startswith("convnext"):
        switches.pop("matmul_layers", None)
    module = ImageClassifier(options.backbone, num_classes=8, **switches)
    if is_compiled:
        module.backbone.compile()
    images = torch.randn(options.batch_size, 3, options.size, options.size)
    batch = images, torch.randint(0, 8, (options.batch_size,))
    (optimizer,), _ = module.configure_optimizers()

    def step() -> None:
        with context:
            loss = module.per_sample_loss(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Time the ways in turn, after two steps of each to warm up, the first of which compiles."""
    torch.set_num_threads(options.threads)
    steps = {way: _step(options, way) for way in options.ways}
    firsts: dict[str, float] = {}
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    cpu_seconds: dict[str, list[float]] = {way: [] for way in steps}
    for number in range(options.rounds + 2):
        for way, step in steps.items():
            began, cpu_began = time.perf_counter(), time.process_time()
            step()
            took, cpu_took = time.perf_counter() - began, time.process_time() - cpu_began
            if number == 0:
                firsts[way] = took
            elif number > 1:
                seconds[way].append(took)
                cpu_seconds[way].append(cpu_took)
    medians, cpu_medians = ({w: statistics.median(s) for w, s in found.items()} for found in (seconds, cpu_seconds))
    first = options.ways[0]
    result: dict[str, Any] = {
        way: {
            "seconds": seconds[way],
            "median": median,
            "ratio": median / medians[first],
            "cpu_seconds": cpu_seconds[way],
            "cpu_ratio": cpu_medians[way] / cpu_medians[first],
            "first_step": firsts[way],
        }
        for way, median in medians.items()
    }
    rows = [(way, f["median"], f["ratio"], f["cpu_ratio"], f["first_step"]) for way, f in result.items()]
    title = f"{options.backbone}, {options.size} px, {options.batch_size} images, {options.threads} threads"
    print_table(title, ("way", "seconds a step", "ratio", "ratio of process time", "first step"), rows)
    return result
