"""Summary of a run: ``summary.json`` and the lines printed at the end."""

import hashlib
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_fedstop.records.run_record import RESERVED
from lightning_fedstop.stopping.callbacks.base import CriterionCallback
from lightning_fedstop.stopping.criteria.validation import better_of
from lightning_fedstop.utilities.environment import device_name, versions

OWN_FIGURES = ("distance", "growth_rate", "lr")
"""The loop's own columns whose last values ``summary.json`` repeats."""


def peak_memory(device: torch.device) -> dict[str, int]:
    """Measure peak memory of this process in bytes, resident and on the accelerator."""
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
    """Hash the bytes of a vector with SHA-256; equal hashes mean equal bits.

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
    rules: list[dict[str, Any]] | None = None,
    best: dict[str, dict[str, Any]] | None = None,
    final: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Build the content of ``summary.json``.

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
        rules: what each stopping rule has said, see :func:`describe_rules`.
        best: the best figures of the record, see :func:`extremes`.
        final: its last figures.
    """
    return {
        "stop_round": stop_round,
        "stop_reason": stop_reason,
        "budget": budget,
        "share_used": stop_round / budget,
        "test": test,
        "best": best or {},
        "final": final or {},
        "rules": rules or [],
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


def describe_rules(callbacks: Sequence[Any], averages: Mapping[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Describe each stopping rule among the callbacks and its decision.

    Args:
        callbacks: the run's; those that are no :class:`CriterionCallback` are passed over.
        averages: the test figures of the average that a rule offers, by its ``state_key``.
    """
    described = []
    for callback in callbacks:
        if not isinstance(callback, CriterionCallback):
            continue
        criterion: Any = callback.criterion
        rule = {
            "rule": type(callback).__name__,
            "threshold": criterion.threshold,
            "patience": criterion.patience,
            "observe_only": callback.observe_only,
            "stop_round": callback.stop_round,
            "stopping_reason": callback.stopping_reason.value,
            "stopping_reason_message": callback.stopping_reason_message,
        }
        if hasattr(callback, "monitor"):
            rule["monitor"] = callback.monitor
        average = getattr(callback, "saturation_average", None)
        if average is not None and callback.stopped:
            test = averages.get(callback.state_key, {})
            path = callback.average_path  # type: ignore[attr-defined]
            rule["average"] = {"rounds": average.rounds, "checkpoint": path, "test": test}
        described.append(rule)
    return described


def extremes(rows: Sequence[Mapping[str, str]], rules: Sequence[str] = ()) -> dict[str, Any]:
    """Find the best figures of a record with their rounds, and the last ones.

    All that the module has logged counts. ``mode`` says which way is taken for better: ``"min"`` where the name ends
    like that of a loss or an error, else ``"max"``. Figures that are not finite are no figures.

    Args:
        rows: the rows of the record, as text.
        rules: what the names of the stopping rules' own figures begin with.

    >>> extremes([{"round": "1", "val/loss": "2", "val_acc": ""}, {"round": "2", "val/loss": "3", "val_acc": "nan"}])
    {'best': {'val/loss': {'value': 2.0, 'round': 1, 'mode': 'min'}}, 'final': {'val/loss': 3.0}}
    """
    best: dict[str, dict[str, Any]] = {}
    final: dict[str, float] = {}
    own = tuple(f"{rule}/" for rule in rules)
    for row in rows:
        logged = [name for name in row if name not in RESERVED and not name.startswith(own)]
        figures = {name: float(row[name]) for name in (*logged, *OWN_FIGURES) if row.get(name)}
        final = {name: value for name, value in figures.items() if math.isfinite(value)}
        for name in logged:
            mode = better_of(name) or "max"
            sign = -1 if mode == "min" else 1
            if name in final and (name not in best or sign * final[name] > sign * best[name]["value"]):
                best[name] = {"value": final[name], "round": int(row["round"]), "mode": mode}
    return {"best": best, "final": final}


def print_metrics(metrics: dict[str, float]) -> None:
    """Print the metrics of an evaluation as a table."""
    table = Table("metric", "value")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4f}")
    Console().print(table)


def describe(summary: dict[str, Any]) -> str:
    """Write the summary as a few lines of text.

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
        lines.append("Test: " + _listed(summary["test"]))
    averages = [rule["average"] for rule in summary.get("rules", []) if rule.get("average", {}).get("test")]
    lines += [f"Test, mean of the last {one['rounds']} models: {_listed(one['test'])}" for one in averages]
    if summary["checkpoint"]:
        lines.append(f"Checkpoint: {summary['checkpoint']}")
    lines.append(f"Record: {summary['log_dir']}")
    return "\n".join(lines)


def _listed(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
