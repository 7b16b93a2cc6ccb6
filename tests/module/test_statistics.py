from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric

from lightning_fedstop.module.statistics import frozen_statistics


class Counting(nn.Module):
    """A layer that puts a new tensor in its buffer's place, beside metrics of both kinds of state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(1))
        self.target = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.norms = nn.ModuleList([nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)])
        self.mean, self.all = MeanMetric(), CatMetric()

    def forward(self, x):
        self.average = self.average + 1
        self.target.data.add_(1)
        self.mean(x)
        self.all(x)
        return self.norms[1](self.norms[0](x))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_pass_counts_nowhere_and_normalises_all_the_same(frozen):
    module, x = Counting(), torch.randn(3, 2, 4, requires_grad=True)
    module(x)

    def state():
        return {**module.state_dict(), "mean": module.mean.compute(), "all": module.all.compute()}

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    before = {name: value.clone() for name, value in state().items()}
    tensor = module.norms[0].running_mean
    with frozen_statistics(module, trained) if frozen else nullcontext():
        module(x * 2 + 1).square().sum().backward()
    assert x.grad is not None
    assert module.norms[0].running_mean is tensor
    changed = [name for name, value in state().items() if not torch.equal(value, before[name])]
    assert bool(changed) is not frozen
    assert module.mean._update_count == (1 if frozen else 2)
