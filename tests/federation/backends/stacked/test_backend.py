"""The clients of a round trained as one stack: equal to one after the other, or a warning that says why not."""

import random
import re
import threading
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from torch import nn
from torchmetrics.classification import BinaryAccuracy

from lightning_fedstop import methods
from lightning_fedstop.methods import released_code
from lightning_fedstop.models import ImageClassifier
from tests.helpers import ToyData, ToyModule, Trace, fit
from tests.methods.problems import public_methods

SIZES = (6, 4, 7, 8, 0, 3, 11)


class Net(ToyModule):
    """A small net in float64 with a rate that decays; the first bias may be frozen."""

    def __init__(self, *layers, optimizer=None, frozen=False):
        layers = layers or (nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        super().__init__(net=nn.Sequential(*layers).double())
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
        self.net[0].bias.requires_grad_(not frozen)
        self.optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01))

    def configure_optimizers(self):
        optimizer = self.optimizer([p for p in self.parameters() if p.requires_grad])
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class PerSample(Net):
    """A net whose batches can be padded."""

    def per_sample_loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")

    def training_step(self, batch, batch_idx):
        loss = self.per_sample_loss(batch).mean()
        self.log("train_loss", loss, batch_size=len(batch[1]))
        return loss


class DoubleData(ToyData):
    def __init__(self, sizes=SIZES, **arguments):
        super().__init__(sizes, **arguments)
        self.x = self.x.double()


class Buffers(Trace):
    """Notes the buffers of each client and of the global model too."""

    def on_client_end(self, trainer, module, client):
        super().on_client_end(trainer, module, client)
        self.models[f"buffers of {client}"] = self.buffers(module)

    def on_train_epoch_end(self, trainer, module):
        super().on_train_epoch_end(trainer, module)
        self.rounds[-1]["states"]["buffers"] = self.buffers(module)

    @staticmethod
    def buffers(module):
        return torch.cat([b.double().reshape(-1) for b in module.buffers()] or [torch.zeros(1)])


def train(root, backend, make=PerSample, method=None, data=None, callbacks=(), **arguments):
    """Three rounds of five clients, two local epochs; gives the trace, the loop and what the back end warned of."""
    trace = Buffers()
    chosen = {"clients_per_round": 5, "local_epochs": 2, "client_backend": backend, "method": method}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop, _ = fit(
            root / backend,
            trace,
            *callbacks,
            module=make(),
            data=DoubleData() if data is None else data,
            **chosen | arguments,
        )
    said = [str(w.message) for w in caught if "client_backend" in str(w.message)]
    return trace, loop, said


def assert_equal(root, tolerance=1e-9, said=0, make_method=lambda: None, **arguments):
    """Both back ends, compared: models, states and buffers of clients and server, metrics, and what the record has."""
    given = arguments.pop("stack_chunk_size", None)
    one, single, _ = train(root, "sequential", method=make_method(), **arguments)
    other, stacked, warned = train(root, "stacked", method=make_method(), stack_chunk_size=given, **arguments)
    assert len(warned) == said, warned
    assert len(one.rounds) == len(other.rounds) == 3
    for a, b in zip(one.rounds, other.rounds, strict=True):
        moved = torch.linalg.vector_norm(a["theta"] - a["theta_0"])
        assert moved > 0
        assert torch.linalg.vector_norm(a["theta"] - b["theta"]) <= tolerance * moved
        assert list(a["client_models"]) == list(b["client_models"])
        for client, model in a["client_models"].items():
            assert torch.linalg.vector_norm(model - b["client_models"][client]) <= tolerance * moved.clamp(min=1)
        assert a["states"].keys() == b["states"].keys()
        for key, value in a["states"].items():
            distance = torch.linalg.vector_norm(value - b["states"][key])
            assert distance <= tolerance * torch.linalg.vector_norm(value)
    assert single.callback_metrics.keys() == stacked.callback_metrics.keys()
    for name, value in single.callback_metrics.items():
        assert float(stacked.callback_metrics[name]) == pytest.approx(float(value), rel=tolerance)
    for name in ("clients", "samples", "bytes_up", "bytes_down"):
        assert single.row[name] == stacked.row[name]
    return stacked


@pytest.mark.parametrize("make", [Net, PerSample])
@pytest.mark.parametrize("name", public_methods())
def test_methods(tmp_path, name, make):
    loop = assert_equal(
        tmp_path, make=lambda: make(frozen=True), make_method=getattr(methods, name), gradient_clip_val=0.3
    )
    assert loop.server.backend.steps.pads == (make is PerSample)


VARIANTS = [
    lambda: methods.SCAFFOLD(control_update="grad_mean"),
    lambda: methods.SCAFFOLD(control_update="option_I"),
    lambda: methods.FedDyn(alpha_scaling="inverse_size"),
    lambda: methods.FedDyn(alpha_scaling="inverse_size", prox_inside_clip=False),
    lambda: methods.FedSpeed(mix=0.5, dual_average="sampled"),
    lambda: methods.FedWMSAM(perturbation="official_direction"),
    released_code.FedProx,
    released_code.FedLESAM,
    released_code.FedSMOO,
    released_code.FedWMSAM,
]


@pytest.mark.slow
@pytest.mark.parametrize("make_method", VARIANTS)
def test_options_of_methods(tmp_path, make_method):
    assert_equal(tmp_path, make_method=make_method, gradient_clip_val=0.3, weighting="samples")


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD([{"params": p[::2], "lr": 0.2}, {"params": p[1::2]}], 0.1, 0.5, nesterov=True),
    lambda p: torch.optim.SGD(p[1:], lr=0.1),
    lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=0.02),
    lambda p: torch.optim.Adamax(p, lr=0.02),
    lambda p: torch.optim.NAdam(p, lr=0.02),
    lambda p: torch.optim.RAdam(p, lr=0.02),
    lambda p: torch.optim.Adadelta(p, lr=0.5),
    lambda p: torch.optim.RMSprop(p, lr=0.02, momentum=0.5, centered=True),
    lambda p: torch.optim.Rprop(p, lr=0.02),
    lambda p: torch.optim.ASGD(p, lr=0.02),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(tmp_path, optimizer):
    # A rate of 0.02 and clients of 1 to 3 batches: the optimizer's state has to follow who is still training.
    assert_equal(tmp_path, make=lambda: Net(optimizer=optimizer))


@pytest.mark.parametrize("chunk", [1, 2, 4, 100])
def test_chunks(tmp_path, chunk):
    assert_equal(tmp_path, make_method=methods.SCAFFOLD, stack_chunk_size=chunk)


@pytest.mark.parametrize(
    "arguments",
    [
        {"limit_train_batches": 1},
        {"limit_train_batches": 0.5},
        {"local_epochs": 4, "weighting": "samples"},
        {"drop_single_sample_batches": True, "data": DoubleData((5, 4, 7, 1, 9))},
    ],
)
def test_arguments_of_the_loop(tmp_path, arguments):
    assert_equal(tmp_path, **arguments)


class NormNet(Net):
    def __init__(self):
        super().__init__(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


class NormNetPerSample(PerSample):
    __init__ = NormNet.__init__


class ReplacesBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("grid", torch.arange(3))

    def training_step(self, batch, batch_idx):
        self.mean = 0.9 * self.mean + batch[0].mean(0)
        return super().training_step((batch[0] - self.mean, batch[1]), batch_idx)


@pytest.mark.parametrize("make", [NormNet, ReplacesBuffer])
@pytest.mark.parametrize("make_method", [methods.FedAvg, methods.FedSAM])
def test_each_client_has_its_own_running_statistics(tmp_path, make, make_method):
    data = DoubleData((6, 4, 7, 8, 3, 11))
    assert_equal(tmp_path, make=make, make_method=make_method, data=data)


def test_batch_statistics_forbid_padding(tmp_path):
    class Padless(PerSample):
        def __init__(self):
            super().__init__(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))

    loop = assert_equal(tmp_path, make=Padless, data=DoubleData((6, 4, 7, 8, 3, 11)))
    assert not loop.server.backend.steps.pads


class Mixes(PerSample):
    """Offers a loss for each sample that is none: it depends on the others."""

    def per_sample_loss(self, batch):
        return super().per_sample_loss((batch[0] - 3 * batch[0].mean(0), batch[1]))


class AddsToStep(PerSample):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.net(batch[0]).mean()


class OwnLoss(PerSample):
    """What it inherits as `training_step` calls what it overrides."""

    def per_sample_loss(self, batch):
        return super().per_sample_loss(batch) ** 2


@pytest.mark.parametrize(("make", "pads"), [(Mixes, False), (AddsToStep, False), (OwnLoss, True)])
def test_padding_needs_a_loss_of_each_sample_alone(tmp_path, make, pads):
    loop = assert_equal(tmp_path, make=make)
    assert loop.server.backend.steps.pads == pads


class LogsMuch(PerSample):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("largest", batch[0].max(), reduce_fx="max")
        self.log("smallest", batch[0].min(), reduce_fx=min)
        self.log("constant", 3.0)
        self.log("weighed", loss, batch_size=7)
        self.log_dict({"count": torch.ones(1), "loss": loss}, reduce_fx="sum")
        return {"loss": loss, "logits": self.net(batch[0]), "name": "x"}


class UsesIndex(Net):
    def training_step(self, batch, batch_idx):
        self.log("train_loss", self.loss(batch))
        return self.loss(batch) * (1 + (batch_idx == 1))


class SkipsAll(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 and self.current_epoch == 9 else loss


class TakesBatchAlone(Net):
    def training_step(self, batch):
        self.log("train_loss", self.loss(batch))
        return self.loss(batch)


@pytest.mark.parametrize("make", [LogsMuch, UsesIndex, SkipsAll, TakesBatchAlone])
def test_forms_of_training_step(tmp_path, make):
    assert_equal(tmp_path, make=make)


def test_first_round_of_a_module_that_skips_all(tmp_path):
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return None

    trace, loop, _ = train(tmp_path, "stacked", make=Skips)
    assert torch.equal(trace.rounds[-1]["theta"], trace.rounds[0]["theta_0"])
    assert loop.current_epoch == 3


def test_batches_and_augmentations_are_those_of_one_after_the_other(tmp_path):
    class Augmented(DoubleData):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] + torch.randn(4) * random.random(), batch[1]

    assert_equal(tmp_path, data=Augmented(evaluated=False))


def test_nonfinite_updates_name_their_clients(tmp_path):
    class Diverging(DoubleData):
        def __init__(self):
            super().__init__((6, 4, 7, 8, 3))
            self.x[7] = torch.inf

    for choice in ("stop", "drop", "keep"):
        loops = []
        for backend in ("sequential", "stacked"):
            trace, loop, said = train(tmp_path / choice, backend, data=Diverging(), on_nonfinite=choice, max_rounds=1)
            loops.append((loop.nonfinite_reason, trace.rounds[-1]["theta"]))
            assert not said
        (reason, theta), (other, stacked) = loops
        assert reason == other
        assert (reason is not None) == (choice == "stop")
        torch.testing.assert_close(theta, stacked, equal_nan=True)


def test_dropout_is_stacked_with_a_warning_and_repeats(tmp_path):
    def make():
        return PerSample(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 2))

    traces = []
    for number in range(2):
        trace, loop, said = train(tmp_path / str(number), "stacked", make=make)
        assert loop.server.backend.refusal is None
        assert len(said) == 1
        assert "draws random numbers" in said[0]
        traces.append(trace)
    for a, b in zip(*(trace.rounds for trace in traces), strict=True):
        assert torch.equal(a["theta"], b["theta"])
    models = list(traces[0].rounds[0]["client_models"].values())
    assert not torch.equal(models[0], models[2])


class Item(Net):
    def training_step(self, batch, batch_idx):
        self.last = self.loss(batch).item()
        return super().training_step(batch, batch_idx)


class Branches(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return 2 * loss if loss > 0.5 else loss


class LogsMetric(Net):
    def __init__(self):
        super().__init__()
        self.accuracy = BinaryAccuracy(validate_args=False)

    def training_step(self, batch, batch_idx):
        self.accuracy(self.net(batch[0]).argmax(1), batch[1])
        self.log("accuracy", self.accuracy)
        return super().training_step(batch, batch_idx)


class DrawsInPython(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * random.random()


class Metered(Net):
    """Divides the loss by the mean of all losses so far, which a step that is only tried must not change."""

    def __init__(self):
        super().__init__()
        self.meter = {"losses": [0.0, 0]}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        losses = self.meter["losses"]
        losses[:] = losses[0] + loss.item(), losses[1] + 1
        return loss * losses[1] / losses[0]


class OwnGenerator(Net):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def training_step(self, batch, batch_idx):
        noise = torch.from_numpy(self.rng.normal(0, 0.5, tuple(batch[0].shape)))
        return super().training_step((batch[0] + noise, batch[1]), batch_idx)


class Locked(Net):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class AtClientStart(Net):
    client = 0

    def on_client_start(self, client):
        self.client = client

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.client)


class OwnBackward(Net):
    def backward(self, loss):
        loss.backward()


class AfterBackward(Net):
    def on_after_backward(self):
        pass


class OwnBatchEnd(Net):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


class Captures(Net):
    def __init__(self):
        super().__init__()
        self.kept = [list(self.parameters())]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + sum((p**2).sum() for p in self.kept[0])


class SkipsSome(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if len(batch[0]) < 4 else loss


def with_optimizer(kind, **arguments):
    return lambda: Net(optimizer=lambda p: kind(p, lr=0.1, **arguments))


def hooked(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


class OwnSGD(torch.optim.SGD):
    pass


REFUSED = [
    (Item, r"\.item\(\)"),
    (Branches, "data-dependent control flow"),
    (LogsMetric, "logs the Metric 'accuracy'"),
    (DrawsInPython, "is off by .* of its length"),
    (Metered, r"\.item\(\)"),
    (OwnGenerator, "is off by .* of its length"),
    (Locked, "Locked cannot be copied, .*'_thread.lock' object"),
    (AtClientStart, "AtClientStart has `on_client_start`, which sees a single client"),
    (OwnBackward, "has its own `backward`"),
    (OwnBatchEnd, "has its own `on_train_batch_end`"),
    (AfterBackward, "has `on_after_backward`"),
    (Captures, "is off by .* of its length"),
    (SkipsSome, "returns None for the batches of some clients"),
    (with_optimizer(torch.optim.LBFGS, max_iter=2), "the optimizer LBFGS is none of SGD"),
    (with_optimizer(torch.optim.Adagrad), "the optimizer Adagrad is none of SGD"),
    (with_optimizer(OwnSGD), "the optimizer OwnSGD is none of SGD"),
    (lambda: Net(optimizer=hooked), "the optimizer SGD has step hooks"),
]


@pytest.mark.parametrize(("make", "why"), REFUSED)
def test_what_cannot_be_stacked_is_trained_one_after_the_other(tmp_path, make, why):
    one, single, _ = train(tmp_path, "sequential", make=make)
    other, loop, said = train(tmp_path, "stacked", make=make)
    assert len(said) == 1
    assert said[0].startswith("`client_backend='stacked'` trains one client after the other instead, because ")
    assert re.search(why, said[0])
    assert torch.equal(one.rounds[-1]["theta"], other.rounds[-1]["theta"])
    assert {k: float(v) for k, v in loop.callback_metrics.items()} == {
        k: float(v) for k, v in single.callback_metrics.items()
    }


class Marked(Net):
    client = 0

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.client)


def test_a_callback_that_marks_the_module_for_a_client_is_refused(tmp_path):
    class Marks(Callback):
        def on_client_start(self, trainer, module, client):
            module.client = client

    one, _, _ = train(tmp_path, "sequential", make=Marked, callbacks=[Marks()])
    other, loop, said = train(tmp_path, "stacked", make=Marked, callbacks=[Marks()])
    assert len(said) == 1
    assert loop.server.backend.refusal == "Marks has `on_client_start`, which sees a single client"
    assert torch.equal(one.rounds[-1]["theta"], other.rounds[-1]["theta"])


def test_a_failure_in_a_later_round_falls_back_from_there(tmp_path):
    class Later(PerSample):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return 2 * loss if self.current_epoch and loss > 0 else loss

    loop = assert_equal(tmp_path, make=Later, said=1, make_method=methods.SCAFFOLD)
    assert "data-dependent" in loop.server.backend.refusal


@pytest.mark.parametrize("first", [0, 1])
def test_a_module_that_sets_the_optimizers_rate_in_a_step_falls_back(tmp_path, first):
    class Warming(PerSample):
        def training_step(self, batch, batch_idx):
            if self.current_epoch >= first:
                self.optimizers().param_groups[0]["lr"] = 0.01 / (1 + batch_idx)
            return super().training_step(batch, batch_idx)

    loop = assert_equal(tmp_path, make=Warming, said=1)
    assert loop.server.backend.refusal.startswith("Warming asks for the optimizer in a step")


def test_a_module_that_keeps_its_optimizer_falls_back(tmp_path):
    class Keeping(PerSample):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            self.kept = made[0][0]
            return made

        def training_step(self, batch, batch_idx):
            self.kept.param_groups[0]["lr"] = 0.01 / (1 + batch_idx)
            return super().training_step(batch, batch_idx)

    loop = assert_equal(tmp_path, make=Keeping, said=1)
    assert "Keeping keeps the optimizer" in loop.server.backend.refusal


def test_a_method_whose_norms_go_over_all_clients_is_found_out(tmp_path):
    class FlatNorm(methods.FedAvg):
        def correct(self, step):
            step.grad.div_(step.grad.norm())

    loop = assert_equal(tmp_path, make_method=FlatNorm, said=1)
    assert "Net with FlatNorm" in loop.server.backend.refusal.replace("PerSample", "Net")


def test_a_method_that_asks_which_client_it_is_falls_back(tmp_path):
    class Asks(methods.FedAvg):
        def correct(self, step):
            step.grad.mul_(1 + step.client.index)

    loop = assert_equal(tmp_path, make_method=Asks, said=1)
    assert "index" in loop.server.backend.refusal


def test_gradient_hooks_of_callbacks_fall_back_and_batch_hooks_are_called_with_a_warning(tmp_path):
    seen = {"sequential": [], "stacked": []}

    def note(backend):
        return LambdaCallback(
            on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: seen[backend].append(
                (batch[0].sum().item(), outputs["loss"].item(), batch_idx)
            )
        )

    _, _, said = train(tmp_path, "stacked", callbacks=[note("stacked")])
    train(tmp_path, "sequential", callbacks=[note("sequential")])
    assert len(said) == 1
    assert "calls the batch hooks of LambdaCallback for each client's batch" in said[0]
    one, other = (torch.tensor(sorted(seen[backend])) for backend in seen)
    torch.testing.assert_close(one, other)

    hook = LambdaCallback(on_before_optimizer_step=lambda *_: None)
    _, _, said = train(tmp_path / "more", "stacked", callbacks=[hook])
    assert "LambdaCallback has `on_before_optimizer_step`" in said[0]


def test_minus_one_ends_the_local_epoch_of_that_client(tmp_path):
    def short():
        return LambdaCallback(on_train_batch_start=lambda t, m, batch, batch_idx: -1 if batch_idx == 1 else None)

    one, _, _ = train(tmp_path, "sequential", callbacks=[short()])
    other, loop, _ = train(tmp_path, "stacked", callbacks=[short()])
    assert loop.server.backend.refusal is None
    torch.testing.assert_close(one.rounds[-1]["theta"], other.rounds[-1]["theta"], rtol=1e-9, atol=1e-12)


def test_a_real_error_is_the_modules_own(tmp_path):
    class Broken(Net):
        def training_step(self, batch, batch_idx):
            return {"los": self.loss(batch)}

    with pytest.raises(TypeError, match="must return a dict with 'loss', got one with 'los'"):
        train(tmp_path, "stacked", make=Broken)


class Images(ToyData):
    def __init__(self, sizes=(6, 9, 3)):
        super().__init__(sizes, batch_size=6, evaluated=False)
        self.x = torch.randn(sum(sizes) + 10, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def test_convnextv2_in_single_precision(tmp_path):
    def make():
        torch.manual_seed(0)
        small = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
        return ImageClassifier("convnextv2_atto", 2, 3, lr=0.1, momentum=0.9, backbone_kwargs=small)

    loop = assert_equal(
        tmp_path,
        1e-5,
        make=make,
        make_method=methods.FedSAM,
        data=Images(),
        clients_per_round=3,
        local_epochs=1,
        gradient_clip_val=10.0,
    )
    assert loop.server.backend.steps.pads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"client_backend": "vectorised"},
            "`client_backend` must be one of 'auto', 'sequential'",
        ),
        ({"client_backend": "stacked", "stack_chunk_size": 0}, "`stack_chunk_size` must be an integer of at least 1"),
        ({"stack_chunk_size": 4}, "`stack_chunk_size` needs `client_backend='stacked'`"),
    ],
)
def test_bad_arguments(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, **arguments)
