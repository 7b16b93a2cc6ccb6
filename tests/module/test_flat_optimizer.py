"""An optimizer on the vector of parameters takes the steps of the one on the parameters."""

import copy

import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from lightning.pytorch import Callback
from torch import nn
from torch.optim import SGD, Adagrad, Adam
from torch.optim.lr_scheduler import ExponentialLR

from lightning_fedstop.core.parameters import FlatParameters
from lightning_fedstop.module.flat_optimizer import ELEMENTWISE, FlatSolver
from lightning_fedstop.module.optimizer import LocalSolver
from tests.helpers import ToyData, ToyModule, make_loop

SETTINGS = {SGD: {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}}


class Odd(ToyModule):
    """Parameters of sizes that no vector register divides, in two groups that lie apart, one in neither."""

    def __init__(self, kind, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.settings = kind, settings
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1))

    def configure_optimizers(self):
        first, second, third = self.net
        groups = [
            {"params": [first.weight, third.weight], "lr": 0.05},
            {"params": [first.bias, *second.parameters()], "lr": 0.02},
        ]
        return self.kind(groups, **{"lr": 0.01} | self.settings)


def pair(kind):
    """The same module twice, with its own optimizer and with one on the vector."""
    parts = []
    for flattens in (False, True):
        module = Odd(kind, **SETTINGS.get(kind, {}))
        parameters = FlatParameters(module)
        solver = LocalSolver(module)
        if flattens:
            solver.flatten(parameters, Precision())
        solver.start_round()
        parts.append((parameters, solver))
    return parts


def step(parameters, solver, seed):
    parameters.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    parameters.grad.copy_(torch.randn(parameters.grad.shape, generator=generator))
    solver.step(Precision())


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_each_optimizer_takes_the_same_steps_for_each_client(kind):
    own, flat = pair(kind)
    assert (own[1].is_flat, flat[1].is_flat) == (False, True)
    start = own[0].vector.clone()
    for client in range(2):
        for parameters, solver in (own, flat):
            parameters.vector.copy_(start)
            solver.start_client()
            for k in range(4):
                step(parameters, solver, 10 * client + k)
        assert torch.allclose(own[0].vector, flat[0].vector, rtol=1e-6, atol=1e-7)
        assert not torch.equal(flat[0].vector, start)
    assert torch.equal(flat[0].vector[-1], start[-1])  # the parameter that is in no group


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_who_asks_for_the_optimizer_finds_its_state_and_may_change_it(kind):
    own, flat = pair(kind)
    for parameters, solver in (own, flat):
        solver.start_client()
        for k in range(3):
            step(parameters, solver, k)
    found, wanted = flat[1].expose(), own[1].optimizer
    assert not flat[1].is_flat
    states = found.state_dict()["state"], wanted.state_dict()["state"]
    assert states[0].keys() == states[1].keys()
    for number, state in states[1].items():
        assert state.keys() == states[0][number].keys()
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.allclose(states[0][number][name], value, rtol=1e-6, atol=1e-7)
    for parameters, solver in (own, flat):
        solver.optimizer.param_groups[1]["lr"] = 0.5
        step(parameters, solver, 3)
    assert torch.allclose(own[0].vector, flat[0].vector, rtol=1e-6, atol=1e-7)


def test_rates_that_are_changed_between_two_steps_count():
    own, flat = pair(SGD)
    for parameters, solver in (own, flat):
        solver.start_client()
        step(parameters, solver, 0)
        solver.optimizer.param_groups[0]["lr"] = 3.0
        step(parameters, solver, 1)
    assert torch.allclose(own[0].vector, flat[0].vector, rtol=1e-6)


@pytest.mark.parametrize(("given", "taken"), [(None, False), (True, True), (False, False)])
def test_one_tensor_is_taken_alone_unless_the_user_says_otherwise(given, taken):
    module = Odd(SGD, foreach=given)
    parameters, solver = FlatParameters(module), LocalSolver(module)
    flat = FlatSolver(solver.optimizer, parameters, parameters.vector, parameters.grad)
    for _ in range(2):
        assert [group["foreach"] for group in flat.optimizer.param_groups] == [taken, taken]
        flat.step()
    assert solver.optimizer.param_groups[0]["foreach"] is given


def test_a_solver_of_copies_steps_those():
    _, (parameters, solver) = pair(SGD)
    module, optimizer = copy.deepcopy((solver.module, solver.optimizer))
    other = solver.with_copies(module, optimizer)
    assert not other.is_flat
    before = parameters.vector.clone()
    step(FlatParameters(module), other, 0)
    assert torch.equal(parameters.vector, before)


class _Own(SGD):
    pass


@pytest.mark.parametrize(
    ("make", "precision", "reason"),
    [
        (lambda p: Adagrad(p), Precision(), "the optimizer Adagrad is none of SGD, Adam"),
        (lambda p: _Own(p, 0.1), Precision(), "the optimizer _Own is none of"),
        (lambda p: _hooked(SGD(p, 0.1)), Precision(), "the optimizer SGD has step hooks"),
        ("kept", Precision(), "ToyModule keeps the optimizer"),
        (lambda p: SGD(p, 0.1), type("Mine", (Precision,), {})(), "the precision '32-true' has Mine take"),
        (lambda p: SGD(p, 0.1), MixedPrecision("bf16-mixed", "cpu"), None),
    ],
)
def test_other_optimizers_and_precisions_are_refused(make, precision, reason):
    module = ToyModule()
    if make == "kept":
        module.kept = SGD(module.parameters(), 0.1)
    module.configure_optimizers = lambda: module.kept if make == "kept" else make(module.parameters())
    solver = LocalSolver(module)
    refusal = FlatSolver.refusal(solver.optimizer, module, precision)
    assert refusal == reason or refusal.startswith(reason)
    solver.flatten(FlatParameters(module), precision)
    assert solver.is_flat == (reason is None)


def _hooked(optimizer):
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


class Looks(Callback):
    """Reads the momentum after each batch, as a logging callback may."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        (optimizer,) = trainer.optimizers
        self.seen.append([optimizer.state[p]["momentum_buffer"].clone() for p in pl_module.parameters()])


class Watches(ToyModule):
    """Is given the optimizer in a hook of its own."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(len(optimizer.state))


def test_a_callback_sees_the_optimizers_state_in_a_loop(tmp_path):
    looks, plain, watched = Looks(), ToyModule(), ToyModule()
    for module, callbacks in ((plain, []), (watched, [looks])):
        make_loop(tmp_path, max_rounds=2, clients_per_round=2, callbacks=callbacks, devices=1).fit(module, ToyData())
    assert any(buffer.abs().sum() > 0 for buffer in looks.seen[0])
    assert torch.allclose(watched.net.weight, plain.net.weight, rtol=1e-6)


def test_a_hook_that_takes_the_optimizer_takes_the_one_that_steps(tmp_path):
    module = Watches()
    make_loop(tmp_path, max_rounds=1, clients_per_round=1, local_epochs=1, devices=1).fit(module, ToyData((8,)))
    assert module.seen == [0, 2]


@pytest.mark.parametrize("arguments", [{"devices": 1}, {"devices": "auto"}, {"client_backend": "stacked"}])
def test_a_schedulers_own_optimizer_need_not_have_stepped(tmp_path, recwarn, arguments, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    module = ToyModule()
    module.configure_optimizers = lambda: _decaying(Adam(module.parameters(), 0.1))
    make_loop(tmp_path, max_rounds=2, clients_per_round=2, **arguments).fit(module, ToyData())
    assert not any("before `optimizer.step()`" in str(warning.message) for warning in recwarn)
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.025)


def _decaying(optimizer):
    return [optimizer], [ExponentialLR(optimizer, 0.5)]
