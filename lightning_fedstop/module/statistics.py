"""Running statistics and metrics in local training: only the first pass of a step counts."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_fedstop.core.module_state import ModuleState

_METRIC_COUNTERS = ("_update_count", "_computed")


@contextmanager
def frozen_statistics(module: nn.Module, trained: Iterable[Tensor]) -> Iterator[None]:
    """Put running statistics, frozen parameters and metrics back after the block.

    Inside it, which holds a whole pass, layers normalise by the batch.

    Args:
        module: the module.
        trained: its trainable parameters, which are left alone.
    """
    before = ModuleState(module, trained)
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    states = [{name: _copied(vars(m)[name]) for name in (*m._defaults, *_METRIC_COUNTERS)} for m in metrics]
    try:
        yield
    finally:
        before.restore()
        for metric, state in zip(metrics, states, strict=True):
            vars(metric).update(state)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_copied(item) for item in value] if isinstance(value, list) else deepcopy(value)
