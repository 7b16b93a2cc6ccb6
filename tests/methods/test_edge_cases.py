"""Section 2.1 of the specification: every method at the edges."""

from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_fedstop.federation import server
from lightning_fedstop.methods import (
    SCAFFOLD,
    Client,
    FedAvg,
    FedGamma,
    FedLESAM,
    FedProx,
    FedSAM,
    FedSMOO,
    FedWMSAM,
    LocalStep,
)
from lightning_fedstop.methods.base import normalized
from tests.helpers import ToyData, ToyModule
from tests.methods.problems import METHODS, same_bits, toy

every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)


def data(*sizes, batch_size=4):
    return ToyData(sizes, batch_size, evaluated=False)


class Batches(Callback):
    """The sizes of each client's batches."""

    def __init__(self):
        self.of = []

    def on_client_start(self, trainer, module, client):
        self.of.append((client, []))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.of[-1][1].append(len(batch[0]))


@every_method
def test_one_sample_and_less_than_a_batch(tmp_path, make):
    batches = Batches()
    _, rounds = toy(make, tmp_path, batches, schedule=[[0, 1]] * 2, data=data(1, 3), local_epochs=3)
    assert sorted(batches.of[:2]) == [(0, [1, 1, 1]), (1, [3, 3, 3])]
    assert torch.isfinite(rounds[-1]["theta"]).all()
    assert not torch.equal(rounds[0]["theta"], rounds[1]["theta"])


@every_method
def test_a_client_without_samples_is_as_if_it_were_not_drawn(tmp_path, make):
    _, drawn = toy(make, tmp_path, schedule=[[0, 1, 2]] * 3, data=data(6, 0, 4))
    _, absent = toy(make, tmp_path, schedule=[[0, 2]] * 3, data=data(6, 0, 4))
    assert all(map(same_bits, drawn, absent))
    assert not any(client == 1 for _, client in drawn[-1]["states"])


@every_method
def test_a_round_of_empty_clients_leaves_everything_as_it_is(tmp_path, make):
    _, rounds = toy(make, tmp_path, schedule=[[0, 2], [1], [0, 2]], data=data(6, 0, 4))
    assert same_bits(rounds[0], rounds[1])
    assert not torch.equal(rounds[1]["theta"], rounds[2]["theta"])


@every_method
def test_one_client_and_all_clients(tmp_path, make):
    for schedule in ([[1]] * 3, [[0, 1, 2]] * 3):
        _, rounds = toy(make, tmp_path, schedule=schedule)
        assert torch.isfinite(rounds[-1]["theta"]).all()
        for server_name, client_name in (("c", "c"), ("H", "h")):
            if server_name in rounds[-1]["state"]:
                vectors = [v for (name, _), v in rounds[-1]["states"].items() if name == client_name]
                mean = sum(vectors) / 3
                torch.testing.assert_close(rounds[-1]["state"][server_name], mean, rtol=0, atol=1e-6)


class Rates(ToyModule):
    """Learning rate 0 in round 2 alone."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda round: float(round != 1))]


@every_method
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_learning_rate_of_0(tmp_path, make, precision):
    _, rounds = toy(make, tmp_path, schedule=[[0, 1], [0, 2], [0, 1]], module=Rates(), precision=precision)
    first, second, third = rounds
    assert torch.equal(first["theta"], second["theta"])
    for name in {"c", "m", "H"} & first["state"].keys():
        assert torch.equal(first["state"][name], second["state"][name])
    for (name, client), vector in second["states"].items():
        if name in "ch":
            assert torch.equal(vector, first["states"].get((name, client), torch.zeros_like(vector)))
    assert not torch.equal(third["theta"], second["theta"])


@every_method
def test_a_gradient_of_0(tmp_path, make):
    class Flat(ToyModule):
        def loss(self, batch):
            return super().loss(batch) * 0

    _, rounds = toy(make, tmp_path, module=Flat())
    assert torch.equal(rounds[-1]["theta"], rounds[0]["theta_0"])
    assert not any(vector.any() for vector in rounds[-1]["states"].values())
    assert not normalized(torch.zeros(2, 3)).any()


@every_method
def test_mixed_precision_keeps_states_in_float32(tmp_path, make):
    loop, rounds = toy(make, tmp_path, precision="bf16-mixed")
    assert loop.server.theta.dtype is torch.float32
    assert torch.isfinite(rounds[-1]["theta"]).all()
    assert all(vector.dtype is torch.float32 for vector in rounds[-1]["states"].values())
    assert all(v.dtype is torch.float32 for v in rounds[-1]["state"].values() if torch.is_tensor(v))
    exact = toy(make, tmp_path)[1][-1]["theta"]
    assert 0 < (rounds[-1]["theta"] - exact).norm() < 0.1


class First(Callback):
    """What each client's first step of a round starts with: x - theta, and the perturbation of the method."""

    def __init__(self, method):
        self.offsets, self.perturbations, self.directions = [], [], []
        gradient = method.gradient

        def spied(step):
            if step.k == 0:
                self.offsets.append(step.x - step.client.theta)
                self.directions.append((step.client.round, step.client.vectors.get("e")))
                backward = step.backward

                def noted(perturbation=None):
                    self.perturbations.append(perturbation)
                    return backward(perturbation)

                step.backward = noted
            gradient(step)

        method.gradient = spied


short = pytest.mark.parametrize("precision", ["bf16-true", "16-true"])


@every_method
@short
def test_a_client_starts_exactly_at_its_theta(tmp_path, make, precision):
    method = make()
    first = First(method)
    loop, _ = toy(lambda: method, tmp_path, precision=precision)
    assert loop.server.theta.dtype is torch.float32
    assert not torch.equal(loop.server.theta, loop.server.theta.to(loop.lightning_module.dtype).float())
    assert len(first.offsets) == 8
    assert not any(offset.any() for offset in first.offsets)


@short
@pytest.mark.parametrize("kind", ["look_ahead", "official_direction", "released_code"])
def test_fedwmsam_does_not_perturb_the_first_step(tmp_path, kind, precision):
    method = FedWMSAM(0.1, perturbation=kind)
    first = First(method)
    toy(lambda: method, tmp_path, precision=precision)
    assert len(first.perturbations) == 8
    assert not any(perturbation.any() for perturbation in first.perturbations)


@short
def test_one_step_of_fedprox_is_fedavg(tmp_path, precision):
    given = {"schedule": [[0, 1, 2]] * 3, "precision": precision, "data": data(4, 3, 2, batch_size=4)}
    plain, proximal = toy(FedAvg, tmp_path, **given)[1], toy(lambda: FedProx(100.0), tmp_path, **given)[1]
    assert all(map(same_bits, plain, proximal))


@short
@pytest.mark.parametrize("memory", ["client", "last_round"])
def test_fedlesam_knows_how_the_global_model_moved_to_more_digits_than_the_module(tmp_path, memory, precision):
    class Thetas(Callback):
        def on_train_start(self, trainer, module):
            self.of = [trainer.server.theta.clone()]

        def on_train_epoch_end(self, trainer, module):
            self.of.append(trainer.server.theta.clone())

    method, thetas = FedLESAM(0.1, memory=memory), Thetas()
    first = First(method)
    slow = ToyModule(lr=1e-4)
    toy(lambda: method, tmp_path, thetas, schedule=[[0]] * 4, precision=precision, module=slow)
    assert [round for round, _ in first.directions] == [1, 2, 3, 4]
    for (_, e), before, now in zip(first.directions[1:], thetas.of, thetas.of[1:], strict=False):
        torch.testing.assert_close(e, 0.1 * normalized(before - now))


class PartlyFrozen(ToyModule):
    def __init__(self):
        super().__init__(net=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)))
        for index, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(index not in (1, 2))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


@every_method
def test_frozen_parameters_move_nowhere(tmp_path, make):
    module = PartlyFrozen()
    frozen = {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}
    _, rounds = toy(make, tmp_path, module=module)
    assert len(frozen) == 2
    for name, parameter in module.named_parameters():
        assert parameter.requires_grad is (name not in frozen)
        assert name not in frozen or torch.equal(parameter, frozen[name])
    assert rounds[-1]["theta"].numel() == 16 + 4 + 8 + 2
    assert not torch.equal(rounds[-1]["theta"], rounds[0]["theta_0"])


class Normalised(ToyModule):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(net=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))


class Buffers(Callback):
    def __init__(self):
        self.of = {}

    def on_client_end(self, trainer, module, client):
        self.of[client] = {name: buffer.clone() for name, buffer in module.named_buffers()}


@every_method
def test_buffers_are_averaged_and_counters_take_the_maximum(tmp_path, make):
    module, buffers = Normalised(), Buffers()
    toy(make, tmp_path, buffers, schedule=[[0, 1]], module=module, data=data(8, 4))
    one, other = buffers.of[0], buffers.of[1]
    torch.testing.assert_close(
        module.net[1].running_mean, (one["net.1.running_mean"] + other["net.1.running_mean"]) / 2
    )
    assert not torch.equal(one["net.1.running_mean"], other["net.1.running_mean"])
    assert module.net[1].num_batches_tracked == 2


@every_method
def test_running_statistics_come_from_the_unperturbed_pass_alone(tmp_path, make):
    """After one step in round 1 they are those of FedAvg, whose only pass is unperturbed."""
    modules = Normalised(), Normalised()
    for module, method in zip(modules, (make, FedAvg), strict=True):
        toy(method, tmp_path, schedule=[[0]], module=module, data=data(4))
    for got, expected in zip(modules[0].buffers(), modules[1].buffers(), strict=True):
        assert torch.equal(got, expected)


@every_method
def test_batches_of_one_sample_and_batchnorm(tmp_path, make):
    sizes = data(5, 1, 8)
    with pytest.raises(ValueError, match="Normalised has BatchNorm, which needs batches of at least 2 samples"):
        toy(make, tmp_path, module=Normalised(), data=sizes)
    batches = Batches()
    module = Normalised()
    options = {"module": module, "data": sizes, "drop_single_sample_batches": True, "local_epochs": 2}
    _, rounds = toy(make, tmp_path, batches, schedule=[[0, 1]] * 2, **options)
    assert sorted(batches.of[:2]) == [(0, [4, 4]), (1, [])]
    assert not any(client == 1 for _, client in rounds[-1]["states"])
    _, without = toy(make, tmp_path, schedule=[[0]] * 2, **options | {"module": Normalised()})
    assert all(map(same_bits, rounds, without))


def test_option_i_leaves_out_the_same_batches(tmp_path):
    options = {"module": Normalised(), "data": data(5, 1), "drop_single_sample_batches": True}
    _, rounds = toy(lambda: SCAFFOLD(control_update="option_I"), tmp_path, schedule=[[0, 1]] * 2, **options)
    assert list(rounds[-1]["states"]) == [("c", 0)]
    assert torch.isfinite(rounds[-1]["states"]["c", 0]).all()


def test_fedwmsam_with_alpha_1_does_not_divide(tmp_path):
    _, rounds = toy(lambda: FedWMSAM(0.1, alpha_init=1.0, alpha_rate=0.0), tmp_path)
    assert rounds[-1]["state"]["alpha"] == 1
    assert torch.isfinite(rounds[-1]["theta"]).all()


@pytest.mark.parametrize("method", [FedSAM, FedGamma, FedLESAM, FedSMOO])
def test_radius_0_takes_one_pass_a_step(tmp_path, method):
    passes = []

    class Counts(ToyModule):
        def training_step(self, batch, batch_idx):
            passes.append(1)
            return super().training_step(batch, batch_idx)

    _, rounds = toy(lambda: method(rho=0.0), tmp_path, schedule=[[0]], module=Counts(), data=data(8))
    assert len(passes) == 2
    assert not any(name == "mu" for name, _ in rounds[-1]["states"])


@pytest.mark.parametrize("fails", [False, True])
def test_x_is_restored_from_a_copy(fails):
    x, seen = torch.tensor([1e-3, 1.0]), []

    def backward(first):
        seen.append((first, x.tolist()))
        if fails:
            raise RuntimeError("out of memory")

    before = x.clone()
    step = LocalStep(Client(0, 1, 1, before, 0.1, 0.0), 0, x, torch.zeros(2), backward)
    for _ in range(2):
        with pytest.raises(RuntimeError) if fails else nullcontext():
            step.backward(torch.tensor([1e3, 0.1]))
    assert torch.equal(x, before)
    assert [first for first, _ in seen] == [True, False]
    assert seen[0][1] != before.tolist()


@every_method
def test_the_order_of_clients_does_not_matter(tmp_path, make, monkeypatch):
    schedule = [[0, 1, 2], [1, 2], [0, 1, 2]]
    _, forward = toy(make, tmp_path, schedule=schedule, weighting="samples")
    dealt = server.assign_clients
    monkeypatch.setattr(server, "assign_clients", lambda *given: [hand[::-1] for hand in dealt(*given)])
    _, backward = toy(make, tmp_path, schedule=schedule, weighting="samples")
    assert list(forward[0]["client_models"]) == list(backward[0]["client_models"])[::-1]
    assert all(map(same_bits, forward, backward))
