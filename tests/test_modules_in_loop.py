"""Modules with all that a real one may hold: frozen, tied, compiled, recurrent, in any precision."""

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

from lightning_fedstop.methods import FedSAM
from tests.helpers import ToyData, ToyModule, fit, flat, one_client


class Rich(LightningModule):
    """Frozen, tied and unused parameters, BatchNorm, a child module, a batch that is a dict."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(4)
        self.child = ToyModule()
        self.accuracy = MulticlassAccuracy(2)

    def training_step(self, batch, batch_idx):
        logits = self.child.net(self.norm(self.second(self.frozen(self.first(batch["x"])))))
        self.accuracy(logits, batch["y"])
        self.log("acc", self.accuracy)
        self.child.log("child_loss", 1.0)
        return cross_entropy(logits, batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class DictData(ToyData):
    def client_dataloader(self, client, generator):
        return [{"x": x, "y": y} for x, y in super().client_dataloader(client, generator)]


def test_frozen_tied_unused_parameters_and_buffers(tmp_path):
    module = Rich()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    requires = {name: p.requires_grad for name, p in module.named_parameters()}
    loop, _ = fit(tmp_path, module=module, data=DictData([6, 4], evaluated=False), max_rounds=1)
    after = module.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved >= {"first.weight", "second.weight", "norm.weight", "norm.running_mean", "child.net.weight"}
    assert not any(name.startswith(("frozen", "unused")) for name in moved)
    assert {name: p.requires_grad for name, p in module.named_parameters()} == requires
    assert module.second.weight is module.first.weight
    assert after["norm.num_batches_tracked"].dtype == torch.int64
    assert after["norm.num_batches_tracked"] == 2  # the larger client's two batches
    assert 0 <= loop.callback_metrics["acc"] <= 1
    assert loop.callback_metrics["child_loss"] == 1
    assert vars(module).keys().isdisjoint({"log"})
    assert vars(module.child).keys().isdisjoint({"log"})


def test_batchnorm_statistics_are_averaged_over_the_cohort(tmp_path):
    models = {}

    class Norm(ToyModule):
        def __init__(self):
            super().__init__(net=nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))

        def on_client_end(self, client):
            models[client] = self.net[0].running_var.clone()

    module = Norm()
    fit(tmp_path, module=module, data=ToyData([4, 8]), max_rounds=1, weighting="samples")
    expected = (4 * models[0].double() + 8 * models[1].double()) / 12
    torch.testing.assert_close(module.net[0].running_var.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16), ("64-true", torch.float64)]
)
def test_precisions(tmp_path, precision, dtype):
    seen = set()

    class Typed(ToyModule):
        def training_step(self, batch, batch_idx):
            seen.add((batch[0].dtype, self.net(batch[0]).dtype))
            return super().training_step(batch, batch_idx)

    loop = one_client(tmp_path, module := Typed(), precision=precision, max_rounds=2)
    assert {p.dtype for p in module.parameters()} == {dtype}
    assert loop.server.theta.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    inside = torch.bfloat16 if "bf16" in precision else torch.float64
    assert seen == {(torch.float32 if "mixed" in precision else inside, inside)}
    assert not torch.equal(flat(module).float(), flat(ToyModule()))


def test_recurrent_modules(tmp_path):
    class Recurrent(ToyModule):
        def __init__(self):
            super().__init__(net=nn.LSTM(1, 2, batch_first=True))

        def loss(self, batch):
            return cross_entropy(self.net(batch[0].unsqueeze(-1))[0][:, -1], batch[1])

    module = Recurrent()
    before = flat(module)
    one_client(tmp_path, module, sizes=(8,))
    assert not torch.equal(flat(module), before)


def test_a_second_pass_over_a_batch_leaves_statistics_metrics_and_logs_alone(tmp_path):
    """FedSAM passes twice over each batch; with radius near 0 nothing else tells it from FedAvg."""
    results = []
    for method in (None, FedSAM(rho=1e-30)):
        torch.manual_seed(0)
        module = Rich()
        loop, _ = fit(tmp_path, module=module, data=DictData([6, 4], evaluated=False), max_rounds=1, method=method)
        results.append((loop.callback_metrics["acc"], module.norm.running_mean, module.norm.num_batches_tracked))
    for plain, twice in zip(*results, strict=True):
        torch.testing.assert_close(twice, plain)


def test_a_compiled_module(tmp_path):
    module = ToyModule()
    compiled = torch.compile(module, backend="eager")
    with pytest.raises(TypeError, match=r"must be a `lightning\.pytorch\.LightningModule`, got OptimizedModule"):
        one_client(tmp_path, compiled)
    module.net = torch.compile(module.net, backend="eager")
    one_client(tmp_path, module)
    torch.testing.assert_close(flat(module), flat(one_client(tmp_path, ToyModule()).lightning_module))


def test_fabric_is_only_told_of_precision_and_device(tmp_path):
    """The local model is never wrapped: its class, and the callbacks Fabric knows of, stay as they are."""
    loop = one_client(tmp_path, ToyModule())
    assert type(loop.lightning_module) is ToyModule
    assert isinstance(loop.fabric, Fabric)
    assert loop.fabric._models_setup == 0
