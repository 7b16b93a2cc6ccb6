"""Modules with all that a real one may hold: frozen, tied, compiled, recurrent, in any precision."""

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parameter import UninitializedBuffer
from torchmetrics.classification import MulticlassAccuracy

from lightning_fedstop.core.module_state import ModuleState
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
    module = ToyModule()
    module.compile(backend="eager")
    one_client(tmp_path, module)
    torch.testing.assert_close(flat(module), flat(one_client(tmp_path, ToyModule()).lightning_module))


def as_float8(tensor):
    return tensor.to(torch.float8_e4m3fn)


class Wrapped(torch.Tensor):
    """A tensor around another one, such as those that hold a part of a tensor, or its quantised numbers."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        inner = [one.inner if isinstance(one, Wrapped) else one for one in args]
        result = func(*inner, **(kwargs or {}))
        return cls(result) if isinstance(result, torch.Tensor) else result


QUANTIZED = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
TRAINED = {
    "complex": (torch.ones(4, dtype=torch.complex64), "dtype torch.complex64: train it as real numbers"),
    "sparse": (torch.eye(4).to_sparse(), "layout torch.sparse_coo: parameters must be dense"),
    "csr": (torch.eye(4).to_sparse_csr(), "layout torch.sparse_csr: parameters must be dense"),
    "float8": (as_float8(torch.ones(4)), "dtype torch.float8_e4m3fn: parameters need two bytes"),
    "wrapper": (Wrapped(torch.ones(4)), "is a Wrapped: give `fit` a module of plain tensors"),
    "meta": (torch.ones(4, device="meta"), "is on the device 'meta' and holds nothing"),
    "lazy": (nn.LazyLinear(2).weight, "is lazy: run one batch"),
}
HELD = {
    "complex": torch.ones(4, dtype=torch.complex64),
    "sparse": torch.eye(4).to_sparse(),
    "csr": torch.eye(4).to_sparse_csr(),
    "quantised": QUANTIZED,
    "float8": as_float8(torch.ones(4)),
    "int8": torch.ones(4, dtype=torch.int8),
    "uint16": torch.ones(4, dtype=torch.uint16),
    "bool": torch.ones(4, dtype=torch.bool),
    "expanded": torch.ones(1, 4).expand(3, 4),
    "nan": torch.tensor([torch.nan]),
    "empty": torch.ones(0),
    "wrapper": Wrapped(torch.ones(4)),
}


@pytest.mark.parametrize("kind", TRAINED)
def test_parameters_that_cannot_be_trained_are_refused_by_name_before_anything_is_written(tmp_path, kind):
    module = ToyModule()
    tensor, message = TRAINED[kind]
    module.odd = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
    with pytest.raises(ValueError, match=f"^Parameter 'odd' of ToyModule .*{message}"):
        fit(tmp_path, module=module)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", ["meta", "lazy"])
def test_buffers_that_hold_nothing_are_refused_by_name(tmp_path, kind):
    module = ToyModule()
    module.register_buffer("odd", torch.ones(4, device="meta") if kind == "meta" else UninitializedBuffer())
    with pytest.raises(ValueError, match=r"^Buffer 'odd' of ToyModule is (lazy|on the device 'meta')"):
        fit(tmp_path, module=module)


@pytest.mark.parametrize("is_parameter", [False, True])
@pytest.mark.parametrize("kind", HELD)
def test_tensors_of_any_kind_may_be_held_that_training_leaves_alone(tmp_path, kind, is_parameter):
    module, tensor = ToyModule(), HELD[kind]
    if is_parameter:
        module.odd = nn.Parameter(tensor, requires_grad=False)
    else:
        module.register_buffer("odd", tensor)
    odd, state = module.odd, ModuleState(module, [])
    for method in (None, FedSAM()):
        fit(tmp_path, module=module, method=method, enable_checkpointing=False)
    assert module.odd is odd
    assert "odd" not in state.changed()


class Counts(ToyModule):
    """Adds one to ``odd`` in each step."""

    def __init__(self, start, is_parameter):
        super().__init__()
        if is_parameter:
            self.odd = nn.Parameter(start, requires_grad=False)
        else:
            self.register_buffer("odd", start)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.odd.copy_(
                (self.odd.to(torch.complex64 if self.odd.is_complex() else torch.float32) + 1).to(self.odd.dtype)
            )
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("is_parameter", [False, True])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        *[
            (dtype, 1.5)
            for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64)
        ],
        *[(dtype, 2) for dtype in (torch.int64, torch.int8, torch.uint8, torch.uint16)],
        (torch.bool, 1),
    ],
)
def test_plain_numbers_of_any_dtype_are_averaged_or_the_largest_taken(tmp_path, dtype, expected, is_parameter):
    module = Counts(torch.zeros(2).to(dtype), is_parameter)
    fit(tmp_path, module=module, data=ToyData([4, 8], evaluated=False), max_rounds=1)
    assert module.odd.dtype == dtype
    assert module.odd.to(torch.complex64).tolist() == [expected] * 2


def test_fabric_is_only_told_of_precision_and_device(tmp_path):
    """The local model is never wrapped: its class, and the callbacks Fabric knows of, stay as they are."""
    loop = one_client(tmp_path, ToyModule())
    assert type(loop.lightning_module) is ToyModule
    assert isinstance(loop.fabric, Fabric)
    assert loop.fabric._models_setup == 0
