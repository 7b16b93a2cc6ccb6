"""Section 2.2 of the specification: which methods coincide where, with momentum, weight decay and an active clip."""

import pytest
import torch

from lightning_fedstop.methods import (
    SCAFFOLD,
    FedAvg,
    FedDyn,
    FedGamma,
    FedLESAM,
    FedProx,
    FedSAM,
    FedSMOO,
    FedSpeed,
    FedWMSAM,
)
from lightning_fedstop.methods.momentum import momentum_gain
from tests.methods.problems import ALL, PARTIAL, convnext, quadratic

EXACT = 0.0
CLOSE = 1e-12


def distance(first, second, rounds=None):
    """The largest difference of global models over the first ``rounds`` rounds."""
    pairs = list(zip(first, second, strict=True))[:rounds]
    return max((a["theta"] - b["theta"]).abs().max().item() for a, b in pairs)


@pytest.fixture(params=[quadratic, convnext], ids=["quadratic", "convnext"])
def train(request, tmp_path):
    return lambda method, *args, **kwargs: request.param(method, tmp_path, *args, **kwargs)


@pytest.mark.parametrize(
    ("first", "second", "tolerance"),
    [
        pytest.param(lambda: FedProx(mu=0.0), FedAvg, EXACT, id="FedProx(mu=0) = FedAvg"),
        pytest.param(lambda: FedSAM(rho=0.0), FedAvg, EXACT, id="FedSAM(rho=0) = FedAvg"),
        pytest.param(lambda: FedLESAM(rho=0.0), FedAvg, EXACT, id="FedLESAM(rho=0) = FedAvg"),
        pytest.param(lambda: FedGamma(rho=0.0), SCAFFOLD, EXACT, id="FedGamma(rho=0) = SCAFFOLD"),
        pytest.param(lambda: FedSpeed(0.3, rho=0.0), lambda: FedDyn(0.3), EXACT, id="FedSpeed(rho=0) = FedDyn"),
        pytest.param(lambda: FedSpeed(0.3, 0.1, mix=0.0), lambda: FedDyn(0.3), EXACT, id="FedSpeed(mix=0) = FedDyn"),
        pytest.param(lambda: FedSMOO(0.3, rho=0.0), lambda: FedDyn(0.3), EXACT, id="FedSMOO(rho=0) = FedDyn"),
        pytest.param(
            lambda: FedSMOO(0.3, rho=0.0, message="mu"), lambda: FedDyn(0.3), EXACT, id="FedSMOO(rho=0, mu) = FedDyn"
        ),
        pytest.param(
            lambda: FedWMSAM(rho=0.0, alpha_init=1.0, alpha_rate=0.0), SCAFFOLD, CLOSE, id="FedWMSAM(1, 0) = SCAFFOLD"
        ),
    ],
)
def test_methods_coincide(train, first, second, tolerance):
    assert distance(train(first()), train(second())) <= tolerance


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(SCAFFOLD, FedAvg, id="SCAFFOLD = FedAvg"),
        pytest.param(lambda: FedLESAM(rho=0.3), FedAvg, id="FedLESAM = FedAvg"),
        pytest.param(lambda: FedGamma(rho=0.1), lambda: FedSAM(rho=0.1), id="FedGamma = FedSAM"),
    ],
)
def test_round_1_coincides_and_later_rounds_differ(train, first, second):
    first, second = train(first()), train(second())
    assert distance(first, second, rounds=1) == EXACT
    assert distance(first, second) > 1e-6


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(lambda: FedSpeed(0.3), lambda: FedSpeed(0.3, dual_average="sampled"), id="dual"),
        pytest.param(lambda: FedLESAM(0.1, memory="client"), lambda: FedLESAM(0.1, memory="last_round"), id="memory"),
    ],
)
def test_options_coincide_when_all_clients_take_part(train, first, second):
    assert distance(train(first(), ALL), train(second(), ALL)) <= CLOSE
    assert distance(train(first(), PARTIAL), train(second(), PARTIAL)) > 1e-6


@pytest.mark.parametrize("tiny", [FedDyn, FedSMOO, FedSpeed])
def test_duals_with_a_tiny_weight_are_not_fedavg(train, tiny):
    no_clip = {"clip": None}
    plain = train(FedAvg(), ALL, **no_clip)
    dual = train(tiny(1e-9) if tiny is FedDyn else tiny(1e-9, rho=0.0), ALL, **no_clip)
    moved = plain[0]["theta"] - plain[0]["theta_0"]
    assert moved.norm() > 1e-4
    assert torch.allclose(dual[0]["theta"], plain[0]["theta_0"] + 2 * moved, atol=1e-9)


K1 = {"K": 1}


def test_one_local_step(tmp_path):
    assert distance(quadratic(FedProx(mu=5.0), tmp_path, **K1), quadratic(FedAvg(), tmp_path, **K1)) == EXACT
    smoo, speed = quadratic(FedSMOO(0.3, 0.1), tmp_path, **K1), quadratic(FedSpeed(0.3, 0.1), tmp_path, **K1)
    assert distance(smoo, speed, rounds=1) <= CLOSE
    more = quadratic(FedSMOO(0.3, 0.1), tmp_path, K=3), quadratic(FedSpeed(0.3, 0.1), tmp_path, K=3)
    assert distance(*more, rounds=1) > 1e-7
    without = quadratic(FedAvg(), tmp_path, **K1, momentum=0.0)
    assert distance(quadratic(FedAvg(), tmp_path, **K1), without) == EXACT


def test_fedwmsam_begins_as_fedavg_with_a_smaller_rate(tmp_path):
    plain = {"momentum": 0.0, "wd": 0.0, "clip": None, "lr_decay": 1.0}
    wmsam = quadratic(FedWMSAM(rho=0.0, alpha_init=0.1), tmp_path, **plain)
    fedavg = quadratic(FedAvg(), tmp_path, **plain | {"lr": 0.005})
    assert distance(wmsam, fedavg, rounds=1) <= CLOSE


def test_split_proximal_term_is_exact_while_the_clip_is_idle(tmp_path):
    for clip, same in ((None, True), (0.5, False)):
        split = quadratic(FedProx(2.0, prox_inside_clip=False), tmp_path, clip=clip)
        difference = distance(split, quadratic(FedProx(2.0), tmp_path, clip=clip))
        assert (difference <= CLOSE) is same


def test_scaffold_of_equal_clients_is_fedavg(tmp_path):
    one = {"A": [[[2.0, 0.5], [0.5, 1.0]]] * 3, "b": [[1.0, 0.0]] * 3, "K": 2, "clip": None}
    assert distance(quadratic(SCAFFOLD(), tmp_path, ALL, **one), quadratic(FedAvg(), tmp_path, ALL, **one)) <= CLOSE
    alone = {"A": [[[2.0, 0.5], [0.5, 1.0]]], "b": [[1.0, 0.0]], "K": 2}
    schedule = [[0]] * 3
    scaffold = quadratic(SCAFFOLD(), tmp_path, schedule, **alone)
    assert distance(scaffold, quadratic(FedAvg(), tmp_path, schedule, **alone)) <= CLOSE


@pytest.mark.parametrize(
    ("method", "server", "client"),
    [
        (SCAFFOLD, "c", "c"),
        (lambda: FedGamma(0.05), "c", "c"),
        (lambda: FedWMSAM(0.05), "c", "c"),
        (lambda: FedDyn(0.3), "H", "h"),
        (lambda: FedSpeed(0.3, 0.05), "H", "h"),
        (lambda: FedSMOO(0.3, 0.05), "H", "h"),
    ],
)
def test_server_state_is_the_mean_of_the_clients(tmp_path, method, server, client):
    for got in quadratic(method(), tmp_path):
        zeros = torch.zeros_like(got["theta"])
        mean = sum(got["states"].get((client, index), zeros) for index in range(3)) / 3
        assert mean.norm() > 1e-3
        assert torch.allclose(got["state"][server], mean, atol=CLOSE)


def test_option_ii_is_the_mean_local_gradient(tmp_path):
    plain = {"momentum": 0.0, "wd": 0.0, "clip": None}
    option_ii, gradients = (quadratic(SCAFFOLD(control_update=u), tmp_path, **plain) for u in ("delta", "grad_mean"))
    assert distance(option_ii, gradients) <= CLOSE
    with_momentum = [quadratic(SCAFFOLD(control_update=u), tmp_path) for u in ("delta", "grad_mean")]
    assert distance(*with_momentum) > 1e-6


def test_option_i_is_the_gradient_at_the_global_model(tmp_path):
    rounds = quadratic(SCAFFOLD(control_update="option_I"), tmp_path, ALL, clip=None)
    A, b = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double(), torch.tensor([1.0, 0.0]).double()
    assert torch.allclose(rounds[1]["states"]["c", 0], A @ (rounds[0]["theta"] - b), atol=CLOSE)


@pytest.mark.parametrize(("steps", "momentum", "gain"), [(5, 0.9, 13.1441), (20, 0.9, 120.9419), (7, 0.0, 7.0)])
def test_momentum_gain_is_how_far_a_constant_gradient_moves(steps, momentum, gain):
    x = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=1.0, momentum=momentum)
    for _ in range(steps):
        x.grad = torch.ones(1)
        optimizer.step()
    assert momentum_gain(steps, momentum) == pytest.approx(-x.item(), rel=1e-5) == pytest.approx(gain, rel=1e-5)
