import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric

from lightning_fedstop.running_statistics import frozen_statistics, serving_single_samples
from tests.helpers import ToyData, ToyModule, fit


class Counting(nn.Module):
    """A layer that puts a new tensor in its buffer's place, beside metrics of both kinds of state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(1))
        self.norms = nn.ModuleList([nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)])
        self.mean, self.all = MeanMetric(), CatMetric()

    def forward(self, x):
        self.average = self.average + 1
        self.mean(x)
        self.all(x)
        return self.norms[1](self.norms[0](x))


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_pass_counts_nowhere_and_normalises_all_the_same(frozen):
    module, x = Counting(), torch.randn(3, 2, 4, requires_grad=True)
    module(x)

    def state():
        return {**module.state_dict(), "mean": module.mean.compute(), "all": module.all.compute()}

    before = {name: value.clone() for name, value in state().items()}
    tensor = module.norms[0].running_mean
    with frozen_statistics(module, frozen):
        module(x * 2 + 1).square().sum().backward()
    assert x.grad is not None
    assert module.norms[0].running_mean is tensor
    changed = [name for name, value in state().items() if not torch.equal(value, before[name])]
    assert bool(changed) is not frozen
    assert module.mean._update_count == (1 if frozen else 2)


@pytest.mark.parametrize(("layer", "x"), [(nn.BatchNorm1d(3), (1, 3)), (nn.BatchNorm2d(3), (1, 3, 1, 1))])
def test_a_batch_of_one_value_per_channel_is_normalised_by_running_statistics(layer, x):
    x = torch.randn(x)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(x)
    layer.reset_running_stats()
    expected = layer.eval()(x)
    layer.train()
    with serving_single_samples(layer):
        assert torch.equal(layer(x), expected)
        assert layer.training
        assert layer.num_batches_tracked == 0
        layer(torch.cat([x, -x]))
        assert layer.num_batches_tracked == 1
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


def test_without_running_statistics_torch_refuses_it_still():
    layer = nn.BatchNorm1d(3, track_running_stats=False)
    with serving_single_samples(layer), pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.zeros(1, 3))
    assert layer.training


def test_a_client_whose_last_batch_is_one_sample_trains_with_batchnorm(tmp_path):
    module = ToyModule(net=nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
    fit(tmp_path, module=module, data=ToyData([9]), clients_per_round=1, max_rounds=1)
    assert module.net[0].num_batches_tracked == 2
    assert module.training
