"""One local step in several ways of computing it, in one process and in turn."""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import timm
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.measure import print_table
from lightning_fedstop.models._matmul import use_matmul

Step = Callable[[], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model and the sizes."""
    parser.add_argument("--backbone", default="convnextv2_atto")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))


def _step(options: argparse.Namespace, way: str) -> Step:
    torch.manual_seed(0)
    kwargs: dict[str, Any] = {}
    if way == "matmul" and options.backbone.startswith("convnext"):
        kwargs["conv_mlp"] = False
    model: nn.Module = timm.create_model(options.backbone, num_classes=8, **kwargs)
    images = torch.randn(options.batch_size, 3, options.size, options.size)
    labels = torch.randint(0, 8, (options.batch_size,))
    if way == "matmul":
        use_matmul(model)
    if way == "channels_last":
        model = model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    if way.startswith("compiled"):
        model.compile()
    context = torch.autocast("cpu", torch.bfloat16) if way.endswith("bf16") else nullcontext()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

    def step() -> None:
        with context:
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


WAYS = {
    "eager": "as timm builds it",
    "channels_last": "tensors in channels-last order",
    "matmul": "ImageClassifier(matmul_layers=True)",
    "bf16": "bfloat16 autocast",
    "compiled": "torch.compile",
    "compiled_bf16": "both",
}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Time the ways in turn, after two steps of each to warm up."""
    torch.set_num_threads(options.threads)
    steps = {way: _step(options, way) for way in options.ways}
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    for number in range(options.rounds + 2):
        for way, step in steps.items():
            began = time.perf_counter()
            step()
            if number > 1:
                seconds[way].append(time.perf_counter() - began)
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    floor = next(iter(medians.values()))
    rows = [(way, WAYS[way], median, median / floor) for way, median in medians.items()]
    title = f"{options.backbone}, {options.size} px, {options.batch_size} images"
    print_table(title, ("way", "", "seconds a step", "ratio"), rows)
    return {way: {"seconds": seconds[way], "ratio": median / floor} for way, median in medians.items()}
