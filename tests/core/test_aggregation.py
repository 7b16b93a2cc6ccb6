import itertools

import pytest
import torch

from lightning_fedstop.core.aggregation import RunningMaximum, RunningMean, RunningSum


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


def test_maximum_counts_the_clients_alone_and_reduces_over_processes():
    maximum = RunningMaximum(torch.zeros(2, dtype=torch.bool))
    for value in ([False, False], [True, False]):
        maximum.add(torch.tensor(value))
    assert maximum.compute().tolist() == [1, 0]
    assert maximum.compute(lambda tensor, op: tensor + 5 if op == "max" else tensor).tolist() == [6, 5]
