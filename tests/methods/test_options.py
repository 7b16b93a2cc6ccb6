"""Options of the methods, their refusals, other local solvers, and the presets of the released code."""

import inspect

import pytest
import torch

from lightning_fedstop import methods
from lightning_fedstop.core.client_states import ClientStates
from lightning_fedstop.methods import (
    SCAFFOLD,
    Client,
    FedDyn,
    Federation,
    FedGamma,
    FedLESAM,
    FedProx,
    FedSAM,
    FedSMOO,
    FedSpeed,
    FedWMSAM,
    LocalStep,
    released_code,
)
from lightning_fedstop.methods.momentum import momentum_gain
from lightning_fedstop.methods.sharpness import scalar_perturbation
from tests.helpers import ToyData, ToyModule
from tests.methods.problems import METHODS, quadratic, toy

every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: methods.FedAvg(server_lr=0), "`server_lr` of FedAvg must be a finite number above 0, got 0"),
        (lambda: FedProx(mu=-1), "`mu` of FedProx must be a finite number of at least 0, got -1"),
        (lambda: FedDyn(alpha=0), "`alpha` of FedDyn must be a finite number above 0, got 0"),
        (lambda: FedSMOO(alpha=0), "`alpha` of FedSMOO must be a finite number above 0, got 0"),
        (lambda: FedSpeed(alpha=0), "`alpha` of FedSpeed must be a finite number above 0, got 0"),
        (lambda: FedDyn(alpha_scaling="size"), "`alpha_scaling` of FedDyn must be one of None, 'inverse_size'"),
        (lambda: FedSAM(rho=float("nan")), "`rho` of FedSAM must be a finite number of at least 0, got nan"),
        (lambda: FedSpeed(mix=1.5), r"`mix` of FedSpeed must be a number in \[0, 1\], got 1.5"),
        (lambda: FedSpeed(dual_average="some"), "`dual_average` of FedSpeed must be one of 'all', 'sampled'"),
        (lambda: FedSMOO(message="s"), "`message` of FedSMOO must be one of 'residual', 'mu'"),
        (lambda: FedLESAM(memory="all"), "`memory` of FedLESAM must be one of 'client', 'last_round'"),
        (lambda: FedLESAM(perturbation="l1"), "`perturbation` of FedLESAM must be one of 'norm', 'released_code'"),
        (lambda: FedWMSAM(perturbation="norm"), "`perturbation` of FedWMSAM must be one of 'look_ahead', 'official"),
        (lambda: FedWMSAM(alpha_init=2), r"`alpha_init` of FedWMSAM must be a number in \[0, 1\], got 2"),
        (lambda: FedWMSAM(agreement="cos"), "`agreement` of FedWMSAM must be one of 'one_plus_cosine', 'published'"),
        (lambda: SCAFFOLD(control_gain="L"), "`control_gain` of SCAFFOLD must be one of 'S', 'K', 'released_code'"),
        (lambda: FedGamma(control_gain=0.0), "`control_gain` of FedGamma must be a finite number above 0, got 0.0"),
        (lambda: SCAFFOLD(control_gain=True), "`control_gain` of SCAFFOLD must be a finite number above 0, got True"),
        (
            lambda: SCAFFOLD(control_update="I"),
            "`control_update` of SCAFFOLD must be one of None, 'delta', 'grad_mean'",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@every_method
def test_the_server_learning_rate_scales_the_mean_update(tmp_path, make):
    (whole,), (half,) = (toy(lambda lr=lr: with_rate(make, lr), tmp_path, schedule=[[0, 2]])[1] for lr in (1.0, 0.5))
    moved = torch.stack([model - whole["theta_0"] for model in whole["client_models"].values()]).mean(0)
    rest = whole["theta"] - whole["theta_0"] - moved
    torch.testing.assert_close(half["theta"], half["theta_0"] + moved / 2 + rest, rtol=0, atol=1e-6)


def with_rate(make, server_lr):
    method = make()
    method.server_lr = server_lr
    return method


def test_inverse_size_gives_small_clients_a_larger_weight(tmp_path):
    """One step from theta_{r-1} in round 2: the dual is all that the weight acts on."""
    weights = []

    class Notes(FedDyn):
        def correct(self, step):
            before = step.grad.clone()
            super().correct(step)
            dual = step.client.vectors["dual"]
            if dual.any() and step.k == 0:
                weights.append((step.client.index, ((step.grad - before).norm() / dual.norm()).item()))

    toy(lambda: Notes(0.5, "inverse_size"), tmp_path, schedule=[[0, 1, 2]] * 2)
    mean = (6 + 4 + 7) / 3
    assert dict(weights) == pytest.approx({0: 0.5 * mean / 6, 1: 0.5 * mean / 4, 2: 0.5 * mean / 7}, rel=1e-4)


def test_agreement_as_published(tmp_path):
    _, rounds = toy(lambda: FedWMSAM(0.1, 0.5, 0.3, agreement="published"), tmp_path, schedule=[[0, 1]] * 2)
    first, second = rounds
    deltas = [model - second["theta_0"] for model in second["client_models"].values()]
    cosine = sum(torch.cosine_similarity(d, -first["state"]["m"], dim=0).item() for d in deltas) / 2
    expected = 0.7 * first["state"]["alpha"] + 0.3 * min(max(cosine, 0.1), 0.9)
    assert second["state"]["alpha"] == pytest.approx(expected, abs=1e-5)


SOLVERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


class Solved(ToyModule):
    def __init__(self, solver):
        super().__init__()
        self.solver = solver

    def configure_optimizers(self):
        return self.solver(self.parameters())


class Gradients(Solved):
    """Notes the gradients of client 0 in round 1, where the correction is zero."""

    def __init__(self, solver):
        super().__init__(solver)
        self.seen = []

    def on_after_backward(self):
        if self.trainer.current_epoch == 0:
            self.seen.append(torch.cat([p.grad.reshape(-1).clone() for p in self.parameters()]))


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("make", [SCAFFOLD, lambda: FedWMSAM(rho=0.0, alpha_init=0.5)], ids=["SCAFFOLD", "FedWMSAM"])
def test_with_another_solver_control_variates_are_mean_gradients(tmp_path, solver, make):
    module = Gradients(solver)
    _, rounds = toy(make, tmp_path, module=module, schedule=[[0], [0, 1]])
    mean = torch.stack(module.seen).mean(0)
    torch.testing.assert_close(rounds[0]["states"]["c", 0], mean, rtol=1e-4, atol=1e-6)
    if "m" in rounds[0]["state"]:
        # The momentum is the mean of v = alpha g, in the gradient's units and not in the solver's.
        torch.testing.assert_close(rounds[0]["state"]["m"], 0.5 * mean, rtol=1e-4, atol=1e-6)
    assert torch.isfinite(rounds[-1]["theta"]).all()


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_the_difference_rule_needs_plain_sgd(tmp_path, solver):
    sentence = "`control_update='delta'` of SCAFFOLD needs SGD with neither dampening nor Nesterov"
    with pytest.raises(ValueError, match=sentence):
        toy(lambda: SCAFFOLD(control_update="delta"), tmp_path, module=Solved(solver))


@every_method
def test_every_method_runs_with_adamw(tmp_path, make):
    _, rounds = toy(make, tmp_path, module=Solved(SOLVERS["AdamW"]))
    assert torch.isfinite(rounds[-1]["theta"]).all()
    assert not torch.equal(rounds[-1]["theta"], rounds[0]["theta_0"])


@pytest.mark.parametrize("momentum", [0.5, 1.0])
def test_momentum_gain_of_unusual_momentum(momentum):
    moves, buffer = 0.0, 0.0
    for steps in range(1, 5):
        buffer = momentum * buffer + 1
        moves += buffer
        assert momentum_gain(steps, momentum) == pytest.approx(moves)


def federation(sizes=(6, 4), batch_size=4, tensors=(3, 2)):
    theta = torch.zeros(sum(tensors), dtype=torch.float64)
    states = ClientStates()
    states.open(theta)
    return Federation(theta, list(sizes), states, list(tensors), local_epochs=5, batch_size=batch_size)


@pytest.mark.parametrize(("sizes", "batch_size"), [((6, 4), None), ((0, 4), 4)])
def test_the_gain_of_client_0_needs_its_samples_and_a_batch_size(sizes, batch_size):
    with pytest.raises(ValueError, match="needs the data module's `batch_size` and samples of client 0"):
        SCAFFOLD(control_gain="released_code").setup(federation(sizes, batch_size))


def test_the_gain_of_client_0_is_a_fraction(tmp_path):
    method = SCAFFOLD(control_gain="released_code")
    method.setup(federation())
    client = Client(1, 1, 4, torch.zeros(5), 0.1, 0.9)
    assert method.control.distance(client, 5, client.theta) == pytest.approx(0.1 * 5 * 6 / 4)


RELEASED = {
    "FedAvg": {},
    "FedSAM": {},
    "FedProx": {"prox_inside_clip": False},
    "FedDyn": {"prox_inside_clip": False},
    "FedSpeed": {"prox_inside_clip": False, "dual_average": "all", "mix": 1.0},
    "FedSMOO": {"prox_inside_clip": False, "message": "mu"},
    "FedLESAM": {"perturbation": "released_code", "memory": "last_round"},
    "FedWMSAM": {"perturbation": "released_code", "momentum_decay": 0.998, "alpha_init": 1e-3, "alpha_rate": 0.01},
    "SCAFFOLD": {},
    "FedGamma": {},
}


@pytest.mark.parametrize("name", RELEASED)
def test_presets_of_the_released_code(name, tmp_path):
    preset = getattr(released_code, name)
    method = preset()
    assert isinstance(method, getattr(methods, name))
    for option, value in RELEASED[name].items():
        assert getattr(method, option) == value
    for parameter, value in (("alpha", 1e-3), ("rho", 1e-3), ("mu", 1e-3)):
        if parameter in inspect.signature(preset).parameters and name != "FedSAM":
            assert getattr(method, parameter) == value
    if hasattr(method, "control"):
        assert (method.control.gain, method.control.update) == ("released_code", "delta")
    _, rounds = toy(preset, tmp_path)
    assert torch.isfinite(rounds[-1]["theta"]).all()


def test_presets_differ_from_the_published_methods_where_the_clip_is_active(tmp_path):
    for name in ("FedProx", "FedDyn", "FedSpeed", "FedSMOO"):
        split = quadratic(getattr(released_code, name)(0.5), tmp_path)
        whole = quadratic(
            getattr(methods, name)(0.5, **{"rho": 1e-3} if name in ("FedSpeed", "FedSMOO") else {}), tmp_path
        )
        assert (split[-1]["theta"] - whole[-1]["theta"]).norm() > 1e-6


def test_the_rule_of_one_number_per_tensor():
    """Two tensors, of 3 and 2 numbers, moved by the first two entries of the direction over their absolute sum."""
    direction = torch.tensor([[3.0, -1.0, 9.0, 9.0, 9.0], [0.0] * 5], dtype=torch.float64)
    moved = scalar_perturbation(direction, 0.2, [3, 2])
    expected = torch.tensor([[0.15] * 3 + [-0.05] * 2, [0.0] * 5], dtype=torch.float64)
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-7)


def perturbed(method, client, x, k):
    """Where ``method`` takes the gradient of a step, as a difference to ``x``."""
    grad = torch.zeros_like(x)
    at = []
    before = x.clone()
    method.start(client)
    method.gradient(LocalStep(client, k, x, grad, lambda first: at.append(x - before)))
    return at[-1]


def test_fedlesam_released_code_by_hand():
    method = released_code.FedLESAM(rho=0.5)
    method.setup(federation())
    first, second = torch.tensor([1.0, 2, 3, 4, 5]).double(), torch.tensor([1.3, 1.9, 0, 0, 0]).double()
    assert not perturbed(method, Client(0, 1, 6, first, 0.1, 0.9), first.clone(), 0).any()
    method.aggregate(first, torch.zeros(5))
    moved = perturbed(method, Client(1, 2, 4, second, 0.1, 0.9), second.clone(), 0)
    # u = theta_{r-1} - theta_{r-2} begins with 0.3 and -0.1.
    torch.testing.assert_close(moved, torch.tensor([-0.375] * 3 + [0.125] * 2).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["released_code", "official_direction"])
def test_fedwmsam_released_directions_by_hand(kind):
    method = FedWMSAM(rho=0.5, alpha_init=0.5, perturbation=kind)
    method.setup(federation())
    method.m = torch.tensor([2.0, -1, 0, 0, 0]).double()
    method.control.c = torch.tensor([1.0, 0, 0, 0, 1]).double()
    theta = torch.zeros(5).double()
    x = torch.tensor([1.0, 1, 0, 0, 0]).double()
    # m_m = m + c = (3, -1, 0, 0, 1); after two steps the target is 2 m_m, and target - x = (5, -3, 0, 0, 2).
    moved = perturbed(method, Client(0, 3, 6, theta, 0.1, 0.9), x, 2)
    released = [-0.5 * 5 / 8] * 3 + [0.5 * 3 / 8] * 2
    official = [-0.5 * entry / 38**0.5 for entry in (5, -3, 0, 0, 2)]
    expected = torch.tensor(released if kind == "released_code" else official).double()
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-6)


def test_momentum_decay_multiplies_the_momentum(tmp_path):
    plain, decayed = (toy(lambda d=d: FedWMSAM(momentum_decay=d), tmp_path, schedule=[[0, 1]])[1] for d in (1.0, 0.5))
    assert torch.equal(decayed[0]["state"]["m"], plain[0]["state"]["m"] / 2)


def test_weights_reach_the_momentum_of_fedwmsam_but_no_control_variate(tmp_path):
    data = {"data": ToyData((6, 2, 7), evaluated=False), "schedule": [[0, 1]]}
    uniform, samples = (toy(FedWMSAM, tmp_path, weighting=w, **data)[1][0]["state"] for w in ("uniform", "samples"))
    assert torch.equal(uniform["c"], samples["c"])
    assert not torch.allclose(uniform["m"], samples["m"])
