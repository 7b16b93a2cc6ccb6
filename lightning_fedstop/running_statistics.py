"""Running statistics and metrics in local training: only the first pass of a step counts."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

_METRIC_COUNTERS = ("_update_count", "_computed")


@contextmanager
def frozen_statistics(module: nn.Module) -> Iterator[None]:
    """Put buffers (running statistics) and metrics back after the block, which holds a whole pass.

    Layers normalise by the batch inside it all the same.
    """
    owners = [owner for owner in module.modules() if any(True for _ in owner.buffers(recurse=False))]
    saved = [{name: (b, b.clone()) for name, b in owner.named_buffers(recurse=False)} for owner in owners]
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    states = [{name: _copied(vars(m)[name]) for name in (*m._defaults, *_METRIC_COUNTERS)} for m in metrics]
    try:
        yield
    finally:
        for owner, buffers in zip(owners, saved, strict=True):
            for name, (buffer, value) in buffers.items():
                with torch.no_grad():
                    setattr(owner, name, buffer.copy_(value))
        for metric, state in zip(metrics, states, strict=True):
            vars(metric).update(state)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_copied(item) for item in value] if isinstance(value, list) else deepcopy(value)
