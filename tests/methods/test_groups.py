"""Parameter groups with rates of their own, and rates that change while a client trains."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from lightning_fedstop.methods import SCAFFOLD, FedGamma, FedWMSAM
from lightning_fedstop.methods.momentum import Motion
from lightning_fedstop.records import read_rounds
from tests.helpers import ToyData, ToyModule
from tests.methods.problems import same_bits, toy

BODY = 4 * 3 + 3  # parameters of the first layer

CONTROLLED = {
    "SCAFFOLD": SCAFFOLD,
    "FedGamma": lambda: FedGamma(rho=0.0),
    "FedWMSAM": lambda: FedWMSAM(rho=0.0, alpha_init=0.5),
}
controlled = pytest.mark.parametrize("make", CONTROLLED.values(), ids=CONTROLLED)


class Grouped(ToyModule):
    """Two layers, each a parameter group.

    Args:
        rates: of the two groups.
        later: the groups' factors on the rates from round 2 on.
        options: of SGD.
    """

    def __init__(self, rates, later=(1.0, 1.0), **options):
        torch.manual_seed(0)
        super().__init__(net=nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
        self.rates, self.later, self.options = rates, later, options

    def configure_optimizers(self):
        layers = zip(self.net, self.rates, strict=True)
        optimizer = SGD([{"params": list(layer.parameters()), "lr": lr} for layer, lr in layers], **self.options)
        factors = [lambda round, factor=factor: factor if round else 1.0 for factor in self.later]
        return [optimizer], [LambdaLR(optimizer, factors)]


class Noted(Grouped):
    """Notes the raw gradients of each round."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.seen = {}

    def on_after_backward(self):
        gradient = torch.cat([p.grad.reshape(-1).clone() for p in self.parameters()])
        self.seen.setdefault(self.current_epoch, []).append(gradient)

    def mean(self, round):
        return torch.stack(self.seen[round]).mean(0)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@controlled
@pytest.mark.parametrize("rates", [(0.0, 0.1), (0.1, 0.0), (0.3, 0.1)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_control_variates_of_groups_with_rates_of_their_own_are_mean_gradients(tmp_path, make, rates, momentum):
    module = Noted(rates, momentum=momentum)
    _, rounds = toy(make, tmp_path, module=module, schedule=[[0], [0]])
    for number, round in enumerate(rounds):
        close(round["states"]["c", 0], module.mean(number))
    if "m" in rounds[0]["state"]:
        close(rounds[0]["state"]["m"], 0.5 * module.mean(0))


@controlled
def test_groups_whose_rates_part_after_a_round(tmp_path, make):
    module = Noted((0.1, 0.1), later=(1.0, 0.1))
    _, rounds = toy(make, tmp_path, module=module, schedule=[[0], [0]])
    close(rounds[1]["states"]["c", 0], module.mean(1))


class SetsRates(Callback):
    """Sets the rates before the second batch of each epoch."""

    def __init__(self, *rates):
        self.rates = rates

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            for group, rate in zip(trainer.optimizers[0].param_groups, self.rates, strict=True):
                group["lr"] = rate


@pytest.mark.parametrize("make", [SCAFFOLD, lambda: FedGamma(rho=0.0)], ids=["SCAFFOLD", "FedGamma"])
@pytest.mark.parametrize("rates", [(0.02, 0.02), (0.1, 0.02), (0.0, 0.1)])
def test_a_rate_that_changes_while_a_client_trains(tmp_path, make, rates):
    """The mean of the gradients, not of the gradients weighted by their rates."""
    module = Noted((0.1, 0.1))
    data = ToyData((12,), evaluated=False)
    _, rounds = toy(make, tmp_path, SetsRates(*rates), module=module, data=data, schedule=[[0], [0]])
    assert len(module.seen[0]) == 3
    for number, round in enumerate(rounds):
        close(round["states"]["c", 0], module.mean(number))


def test_the_momentum_of_fedwmsam_when_a_rate_changes_while_a_client_trains(tmp_path):
    """Round 1 has no correction: the mean v is alpha times the gradients, weighted by what each has moved."""
    module = Noted((0.1, 0.1))
    make = CONTROLLED["FedWMSAM"]
    data = ToyData((8,), evaluated=False)
    _, rounds = toy(make, tmp_path, SetsRates(0.1, 0.02), module=module, data=data, schedule=[[0]])
    first, second = module.seen[0]
    expected = torch.cat([(first + second)[:BODY] / 2, (5 * first + second)[BODY:] / 6])
    close(rounds[0]["state"]["m"], 0.5 * expected)


@pytest.mark.parametrize("gain", ["S", "K"])
def test_the_difference_rule_takes_each_group_by_itself(tmp_path, gain):
    def make():
        return SCAFFOLD(control_gain=gain, control_update="delta")

    module = Noted((0.3, 0.1))
    _, rounds = toy(make, tmp_path, module=module, schedule=[[0], [0]])
    for number, round in enumerate(rounds):
        close(round["states"]["c", 0], module.mean(number))
    module = Noted((0.0, 0.1))
    _, rounds = toy(make, tmp_path, module=module, schedule=[[0], [0]])
    assert not rounds[1]["states"]["c", 0][:BODY].any()
    close(rounds[1]["states"]["c", 0][BODY:], module.mean(1)[BODY:])


@pytest.mark.parametrize("update", ["delta", "grad_mean"])
def test_one_step_tells_its_gradient(tmp_path, update):
    module = Noted((0.3, 0.1), momentum=0.9)
    data = ToyData((4,), evaluated=False)
    _, rounds = toy(lambda: SCAFFOLD(control_update=update), tmp_path, module=module, data=data, schedule=[[0], [0]])
    close(rounds[1]["states"]["c", 0], module.mean(1))


def test_the_difference_rule_refuses_nesterov_momentum_when_it_comes(tmp_path):
    class Turns(Callback):
        def on_client_start(self, trainer, module, client):
            trainer.optimizers[0].param_groups[0]["nesterov"] = True

    with pytest.raises(ValueError, match="`control_update='delta'` of SCAFFOLD needs SGD with neither dampening nor"):
        toy(lambda: SCAFFOLD(control_update="delta"), tmp_path, Turns())
    toy(SCAFFOLD, tmp_path, Turns())


UPDATES = {
    f"{name} {update}": (make, update) for name, make in CONTROLLED.items() for update in (None, "delta", "option_I")
}


@pytest.mark.parametrize(("make", "update"), UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize(
    ("backend", "callbacks"), [("stacked", []), ("stacked", [SetsRates(0.02, 0.1)]), ("threads", [])]
)
def test_groups_come_to_the_same_in_other_back_ends(tmp_path, backend, make, update, callbacks, recwarn):
    def updated():
        method = make()
        method.control.update, method.needs_full_gradient = update, update == "option_I"
        return method

    modules = [Grouped((0.1, 0.1), later=(0.5, 0.0), momentum=0.9) for _ in range(2)]
    rounds = [
        toy(updated, tmp_path, *callbacks, module=module, client_backend=kind)[1]
        for module, kind in zip(modules, ("sequential", backend), strict=True)
    ]
    assert not [w for w in recwarn if "instead" in str(w.message)]
    if backend == "threads":
        assert all(map(same_bits, *rounds))
    for one, other in zip(*rounds, strict=True):
        close(one["theta"], other["theta"])
        for key, state in one["states"].items():
            close(state, other["states"][key])


class FrozenBody(Grouped):
    """The group of the frozen layer comes first, at rate 0."""

    def __init__(self):
        super().__init__((0.0, 0.1))
        self.net[0].requires_grad_(False)


@pytest.mark.parametrize(
    ("module", "make", "up"),
    [
        (lambda: Grouped((0.1, 0.1)), SCAFFOLD, 1),
        (lambda: Grouped((0.2, 0.1)), SCAFFOLD, 2),
        (lambda: Grouped((0.2, 0.1)), lambda: SCAFFOLD(control_update="delta"), 1),
        (lambda: Grouped((0.1, 0.1)), lambda: SCAFFOLD(control_update="grad_mean"), 2),
        (lambda: Grouped((0.1, 0.1)), lambda: SCAFFOLD(control_update="option_I"), 2),
        (lambda: Grouped((0.1, 0.1), momentum=0.9, nesterov=True), FedWMSAM, 2),
        (lambda: Grouped((0.1, 0.1)), lambda: FedWMSAM(control_update="option_I"), 2),
        (lambda: Grouped((0.2, 0.1)), lambda: FedWMSAM(control_update="option_I"), 3),
        (FrozenBody, SCAFFOLD, 1),
    ],
)
def test_clients_send_what_the_server_cannot_reckon(tmp_path, module, make, up):
    loop, _ = toy(make, tmp_path, module=(module := module()), schedule=[[0, 1, 2]])
    (row,) = read_rounds(f"{loop.log_dir}/metrics.csv")
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    assert int(row["bytes_up"]) == 3 * up * 4 * trained


def test_a_motion_is_how_far_a_constant_gradient_moves():
    """Three numbers in two groups, whose rates and momentum change, and one that no group has."""
    x = torch.zeros(4, dtype=torch.float64)
    optimizer = SGD([{"params": [x[:1]], "lr": 0.1}, {"params": [x[1:3]], "lr": 0.3}], momentum=0.9)
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones_like(group["params"][0])

    def rates():
        return [(group["lr"], group["momentum"]) for group in optimizer.param_groups]

    motion = Motion(rates(), [(0, 1), (1, 2), (None, 1)])
    for lr, momentum in ((0.1, 0.9), (0.2, 0.5), (0.0, 0.5), (0.2, 0.9)):
        optimizer.param_groups[0].update(lr=lr, momentum=momentum)
        motion.see(rates())
        motion.add_step()
        optimizer.step()
    torch.testing.assert_close(motion.distance(4, x), -x, rtol=1e-12, atol=0)
    assert motion.mean_lr(x).tolist() == pytest.approx([0.125, 0.3, 0.3, 0.0])
    assert not motion.rests
    assert Motion([(0.0, 0.9), (0.0, 0.0)]).rests
