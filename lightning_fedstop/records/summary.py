"""The short story of a run: ``summary.json`` and what is printed at the end."""

import functools
import hashlib
import platform
import sys
from importlib import metadata
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

PACKAGES = ("lightning-fedstop", "lightning", "torch", "torchvision", "timm", "medmnist", "torchmetrics", "numpy")


@functools.cache
def versions() -> dict[str, str]:
    """The versions of Python and of the packages a run depends on; those not installed are left out."""
    installed = {distribution.metadata["Name"]: distribution.version for distribution in metadata.distributions()}
    found = {package: installed[package] for package in PACKAGES if package in installed}
    return {"python": platform.python_version(), **found}


def device_name(device: torch.device) -> str:
    """The accelerator's own name, or the processor's architecture."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"


def peak_memory(device: torch.device) -> dict[str, int]:
    """Peak memory of this process so far, in bytes: resident, and allocated on the accelerator."""
    peak: dict[str, int] = {}
    if sys.platform != "win32":
        import resource

        # `ru_maxrss` counts KiB on Linux and bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        peak["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if device.type == "cuda":
        peak["accelerator"] = torch.cuda.max_memory_allocated(device)
    return peak


def parameters_hash(vector: Tensor) -> str:
    """SHA-256 of the bytes of a vector; equal hashes mean equal bits.

    >>> parameters_hash(torch.zeros(2)) == parameters_hash(torch.zeros(2))
    True
    """
    return hashlib.sha256(vector.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def summarize(
    stop_round: int,
    stop_reason: str,
    budget: int,
    test: dict[str, float],
    checkpoint: str | None,
    log_dir: str | None,
    device: torch.device,
    seconds: float,
    theta: Tensor,
) -> dict[str, Any]:
    """The content of ``summary.json``.

    Args:
        stop_round: rounds trained.
        stop_reason: why the run ended, a sentence.
        budget: rounds it might have trained.
        test: the test figures of the last global model, empty without test data.
        checkpoint: the path of the checkpoint to use, if one was written.
        log_dir: the run's version folder.
        device: what it ran on.
        seconds: wall time of the whole fit.
        theta: the last global model, shape ``(d,)``.
    """
    return {
        "stop_round": stop_round,
        "stop_reason": stop_reason,
        "budget": budget,
        "share_used": stop_round / budget,
        "test": test,
        "checkpoint": checkpoint,
        "log_dir": log_dir,
        "num_parameters": theta.numel(),
        "parameters_hash": parameters_hash(theta),
        "device": device_name(device),
        "seconds": seconds,
        "seconds_per_round": seconds / stop_round if stop_round else None,
        "peak_memory_bytes": peak_memory(device),
        "versions": versions(),
    }


def print_metrics(metrics: dict[str, float]) -> None:
    """Print the metrics of an evaluation as a table."""
    table = Table("metric", "value")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4f}")
    Console().print(table)


def describe(summary: dict[str, Any]) -> str:
    """The summary as a few lines of text.

    >>> print(describe({"stop_round": 26, "budget": 100, "share_used": 0.26, "stop_reason": "Saturated.",
    ...                 "test": {"test_acc": 0.95}, "checkpoint": None, "log_dir": "runs/version_0"}))
    Stopped at round 26 of 100 (74 % of the budget saved): Saturated.
    Test: test_acc 0.9500
    Record: runs/version_0
    """
    saved = 1 - summary["share_used"]
    lines = [
        f"Stopped at round {summary['stop_round']} of {summary['budget']} ({saved:.0%} of the budget saved): ".replace(
            "%", " %"
        )
        + summary["stop_reason"]
    ]
    if summary["test"]:
        lines.append("Test: " + ", ".join(f"{name} {value:.4f}" for name, value in summary["test"].items()))
    if summary["checkpoint"]:
        lines.append(f"Checkpoint: {summary['checkpoint']}")
    lines.append(f"Record: {summary['log_dir']}")
    return "\n".join(lines)
