import itertools

import pytest
import torch
from torch import nn

from lightning_fedstop.aggregation import BufferMean, RunningMean, RunningSum


def test_mean_is_weighted_float64_and_independent_of_order():
    values = [torch.tensor([1e4, 1.0]), torch.tensor([0.1, 2.0]), torch.tensor([-1e4, 4.0])]
    weights = [3, 1, 2]
    means = []
    for order in itertools.permutations(range(3)):
        mean = RunningMean(torch.zeros(2))
        for i in order:
            mean.add(values[i], weights[i])
        means.append(mean.compute())
    expected = sum(w * v.double() for w, v in zip(weights, values, strict=True)) / 6
    assert means[0].dtype == torch.float64
    assert all(torch.equal(mean, expected) for mean in means)


def test_mean_and_sum_reduce_over_processes():
    def other(tensor, op):  # another process holds 10 with weight 1
        assert op == "sum"
        return tensor + (1 if tensor.ndim == 0 else 10)

    mean, total = RunningMean(torch.zeros(1)), RunningSum(torch.zeros(1))
    for add in (lambda: mean.add(torch.tensor([4.0]), 3), lambda: total.add(torch.tensor([4.0]))):
        add()
    assert mean.compute(other).item() == (12 + 10) / 4
    assert mean.total_weight(other) == 4
    assert total.take(other).item() == 14
    assert total.take(other).item() == 10  # zero again


def test_mean_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one client with a sample"):
        RunningMean(torch.zeros(1)).compute()


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float16))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("seen", torch.tensor([False, False]))
        self.register_buffer("mask", torch.tensor(-torch.inf), persistent=False)
        self.register_buffer("phase", torch.tensor([1j]))
        self.register_buffer("empty", torch.zeros(0))


def test_buffers_are_averaged_by_weight_and_counters_take_the_maximum():
    module = Buffers()
    buffers = BufferMean(module)
    for weight, mean, count, seen, phase in [(1, 1.0, 6, [True, False], 2.0), (3, 5.0, 9, [False, False], 6.0)]:
        buffers.reset()
        assert (module.mean.tolist(), module.count.item(), module.phase.item()) == ([0, 0], 5, 1j)
        module.mean.fill_(mean)
        module.count.fill_(count)
        module.seen.copy_(torch.tensor(seen))
        module.phase.fill_(phase)
        buffers.add(weight)
    buffers.write()
    assert module.mean.tolist() == [4, 4]
    assert module.mean.dtype == torch.float16
    assert module.count.item() == 9
    assert module.count.dtype == torch.int64
    assert module.seen.tolist() == [True, False]
    assert module.phase.item() == 5
    assert module.mask == -torch.inf


def test_buffer_counters_reduce_by_their_maximum():
    module = nn.BatchNorm1d(1)
    buffers = BufferMean(module)
    module.num_batches_tracked.fill_(3)
    buffers.add(1)
    ops = []
    buffers.write(lambda tensor, op: ops.append(op) or (tensor + 1 if op == "max" else tensor))
    assert sorted(set(ops)) == ["max", "sum"]
    assert module.num_batches_tracked == 4


def test_a_buffer_that_the_module_replaces_is_followed():
    module = nn.Module()
    module.register_buffer("average", torch.zeros(1))
    buffers = BufferMean(module)
    for value in (2.0, 4.0):
        buffers.reset()
        assert module.average == 0
        module.average = module.average + value
        buffers.add(1)
    buffers.write()
    assert module.average == 3
