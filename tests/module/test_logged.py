import pytest
import torch
from lightning.pytorch import LightningModule
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAccuracy

from lightning_fedstop.module.logged import ResultCollector


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.accuracy = BinaryAccuracy()
        self.child = LightningModule()
        self.child.mean = MeanMetric()


def alone(tensor, op):
    return tensor


def compute(collector, reduce=alone, gather=lambda items: [items]):
    results = collector.compute(reduce, gather)
    return {name: value.item() for name, value in results.callback.items()}, results


def batches(collector, values, sizes, **arguments):
    with collector.attached():
        for value, size in zip(values, sizes, strict=True):
            collector.start_batch((torch.zeros(size, 2), torch.zeros(size)))
            collector.module.log("x", value, **arguments)


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [("mean", (1 * 4 + 5 * 2 + 3 * 1) / 7), ("sum", 9), ("min", 1), ("max", 5), (torch.mean, 17 / 7), (min, 1)],
)
def test_numbers_are_reduced_over_batches_by_samples(reduce_fx, expected):
    collector = ResultCollector(Module())
    batches(collector, [1.0, torch.tensor([5.0], requires_grad=True), 3], [4, 2, 1], reduce_fx=reduce_fx)
    metrics, results = compute(collector)
    assert metrics == {"x": pytest.approx(expected)}
    assert results.callback["x"].shape == ()
    assert compute(collector)[0] == {}  # forgotten


def test_a_given_batch_size_wins_and_outside_batches_all_weigh_one():
    collector = ResultCollector(Module())
    batches(collector, [1.0, 2.0], [4, 4], batch_size=1)
    assert compute(collector)[0] == {"x": 1.5}
    with collector.attached():
        collector.start_batch(None)
        for value in (1.0, 4.0):
            collector.module.log_dict({"a": value, "b": 2 * value})
    assert compute(collector)[0] == {"a": 2.5, "b": 5.0}


@pytest.mark.parametrize(
    ("arguments", "callback", "logged", "bar"),
    [
        ({}, ["x"], ["x"], []),
        ({"prog_bar": True, "logger": False}, ["x"], [], ["x"]),
        ({"on_step": True, "on_epoch": False}, ["x"], ["x"], []),
        ({"on_step": True, "on_epoch": True}, ["x", "x_epoch"], ["x_epoch"], []),
    ],
)
def test_names_are_those_of_a_trainer_at_an_epochs_end(arguments, callback, logged, bar):
    collector = ResultCollector(Module())
    batches(collector, [2.0], [3], **arguments)
    _, results = compute(collector)
    assert (sorted(results.callback), sorted(results.logged), sorted(results.prog_bar)) == (callback, logged, bar)


def test_dicts_and_loader_suffixes():
    collector = ResultCollector(Module())
    collector.dataloader_suffix = "/dataloader_idx_1"
    with collector.attached():
        collector.module.log("loss", {"a": 1.0, "b": torch.tensor(2.0)})
        collector.module.log("plain", 3.0, add_dataloader_idx=False)
    assert compute(collector)[0] == {"loss.a/dataloader_idx_1": 1, "loss.b/dataloader_idx_1": 2, "plain": 3}


def test_metrics_are_computed_once_over_all_batches_and_reset():
    collector = ResultCollector(module := Module())
    with collector.attached():
        for preds, target in [([1, 1, 0], [1, 0, 0]), ([1], [0])]:
            module.accuracy(torch.tensor(preds), torch.tensor(target))
            module.log("acc", module.accuracy)
    assert compute(collector)[0] == {"acc": 0.5}
    assert module.accuracy._update_count == 0


def test_metric_collections_and_metrics_of_children():
    module = Module()
    module.metrics = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()}, prefix="val_")
    collector = ResultCollector(module)
    with collector.attached():
        for value in (1.0, 3.0):
            module.metrics(torch.tensor(value))
            module.log_dict(module.metrics)
            module.child.mean(value)
            module.child.log("child", module.child.mean, metric_attribute="mean")
            module.child.log("number", value)
    assert compute(collector)[0] == {"val_mean": 2, "val_sum": 4, "child": 2, "number": 2}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2), "'x' must be a number or a tensor of one element, got Tensor"),
        ("text", "got str"),
        (MeanMetric(), "logged as 'x' must be an attribute of Module"),
    ],
)
def test_values_that_are_no_number_are_refused(value, message):
    collector = ResultCollector(Module())
    with pytest.raises(ValueError, match=message):
        collector.log("x", value)


def test_other_reductions_and_metrics_of_many_numbers_are_refused():
    collector = ResultCollector(module := Module())
    with pytest.raises(ValueError, match="`reduce_fx` of logged 'x' must be one of"):
        collector.log("x", 1.0, reduce_fx="median")
    module.many = BinaryAccuracy(multidim_average="samplewise")
    module.many(torch.ones(2, 3), torch.ones(2, 3).long())
    collector.log("many", module.many)
    with pytest.raises(ValueError, match="'many' must come to one number"):
        compute(collector)


def test_muted_and_detached():
    collector = ResultCollector(module := Module())
    with collector.attached(), collector.muted():
        module.log("x", 1.0)
        with collector.muted(False):
            module.log("y", 1.0)
    with collector.attached(), collector.muted(False):
        module.log("z", 1.0)
    assert compute(collector)[0] == {"z": 1}
    assert "log" not in vars(module)
    module.__dict__["log"] = marker = object()
    with collector.attached(), collector.attached():
        pass
    assert vars(module)["log"] is marker


def test_processes_are_merged_and_one_without_values_learns_the_names():
    """Here nothing was logged; the other process has logged a mean of 6 over 2 samples and a minimum of 7."""
    other = [("loss", "mean", True, True, False, None), ("low", "min", False, True, False, None)]
    values = iter([(0.0, 12.0), (0.0, 2.0), (torch.inf, 7.0)])

    def reduce(tensor, op):
        mine, theirs = next(values)
        assert tensor.item() == mine
        return torch.tensor(theirs, dtype=torch.float64)

    metrics, results = compute(ResultCollector(Module()), reduce, lambda items: [items, other])
    assert metrics == {"loss": 6, "low": 7}
    assert results.prog_bar == {"loss": 6}
