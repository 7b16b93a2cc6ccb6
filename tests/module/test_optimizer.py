import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import LBFGS, SGD, Adagrad, Adam
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau, StepLR

from lightning_fedstop.module.optimizer import LocalSolver
from tests.helpers import ToyModule


class Configured(ToyModule):
    """Returns what ``make(parameters)`` gives from ``configure_optimizers``."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make(list(self.parameters()))


def solver(make):
    return LocalSolver(Configured(make))


def with_decay(form):
    def make(parameters):
        optimizer = SGD(parameters, lr=1.0)
        return form(optimizer, ExponentialLR(optimizer, 0.5))

    return make


FORMS = {
    "optimizer": (lambda o, s: o, 1.0),
    "list": (lambda o, s: [o], 1.0),
    "tuple": (lambda o, s: (o,), 1.0),
    "two lists": (lambda o, s: ([o], [s]), 0.5),
    "two lists with a dict": (lambda o, s: ([o], [{"scheduler": s, "interval": "step"}]), 0.5),
    "no scheduler": (lambda o, s: ([o], []), 1.0),
    "dict": (lambda o, s: {"optimizer": o}, 1.0),
    "dict with scheduler": (lambda o, s: {"optimizer": o, "lr_scheduler": s}, 0.5),
    "dict with dict": (lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s}}, 0.5),
    "list of a dict": (lambda o, s: [{"optimizer": o, "lr_scheduler": s}], 0.5),
    "tuple of a dict": (lambda o, s: ({"optimizer": o, "lr_scheduler": {"scheduler": s}},), 0.5),
    "every second": (lambda o, s: ([o], [{"scheduler": s, "frequency": 2}]), 1.0),
}


@pytest.mark.parametrize(("form", "lr"), FORMS.values(), ids=FORMS)
def test_every_form_of_configure_optimizers(form, lr):
    it = solver(with_decay(form))
    assert it.lr == 1.0
    it.optimizer.step()
    it.start_round()
    it.end_round({}, 1)
    assert it.lr == lr


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda p: None, "got none"),
        (lambda p: [], "got none"),
        (lambda p: {"lr_scheduler": 1}, "got none"),
        (lambda p: [SGD(p, 1.0), Adam(p)], r"got \['SGD', 'Adam'\]"),
        (lambda p: ([SGD(p, 1.0), SGD(p, 1.0)], []), "got"),
        (lambda p: ({"optimizer": SGD(p, 1.0)}, {"optimizer": SGD(p, 1.0)}), "exactly one optimizer"),
        (lambda p: ([o := SGD(p, 1.0)], [StepLR(o, 1), StepLR(o, 1)]), "at most one scheduler"),
        (lambda p: "SGD", "exactly one optimizer"),
    ],
)
def test_other_numbers_of_optimizers_are_refused(make, found):
    with pytest.raises(MisconfigurationException, match=found):
        solver(make)


def test_manual_optimization_is_refused():
    module = ToyModule()
    module.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="ToyModule sets `automatic_optimization=False`"):
        LocalSolver(module)


def take_step(it, gradient=1.0):
    for parameter in it.module.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    it.optimizer.step()


@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.1, momentum=0.9), lambda p: Adam(p), lambda p: Adagrad(p)])
def test_each_client_starts_with_the_state_of_a_new_optimizer(make):
    """Adagrad makes its state when it is made, the others at the first step."""
    it, fresh = solver(make), solver(make)
    it.start_round()
    for _ in range(2):
        with torch.no_grad():
            for parameter, start in zip(it.module.parameters(), ToyModule().parameters(), strict=True):
                parameter.copy_(start)
        it.start_client()
        for gradient in (1.0, -3.0):
            take_step(it, gradient)
    for gradient in (1.0, -3.0):
        take_step(fresh, gradient)
    for got, expected in zip(it.module.parameters(), fresh.module.parameters(), strict=True):
        assert torch.equal(got, expected)


def test_rates_that_a_clients_steps_change_are_the_rounds_again():
    it = solver(lambda p: SGD([{"params": p[:1], "lr": 1.0}, {"params": p[1:], "lr": 2.0}], momentum=0.5))
    it.start_round()
    it.start_client()
    for group in it.optimizer.param_groups:
        group["lr"] *= 10
    assert (it.lr, it.momentum) == (10.0, 0.5)  # this client's
    assert it.state_dict()["groups"][0]["lr"] == 1.0
    it.start_client()
    assert [group["lr"] for group in it.optimizer.param_groups] == [1.0, 2.0]
    it.optimizer.param_groups[0]["lr"] = 7.0
    it.end_clients()
    assert it.lr == 1.0


def test_rates_that_are_changed_between_rounds_last_and_those_of_a_rounds_start_are_not_saved_from_within_it():
    it = solver(lambda p: SGD(p, 0.1))
    it.settle()
    it.optimizer.param_groups[0]["lr"] = 0.2  # by a hook of the round's start, which a resumed run calls again
    it.start_round()
    it.start_client()
    assert (it.lr, it.state_dict()["groups"][0]["lr"]) == (0.2, 0.1)
    it.end_clients()
    it.optimizer.param_groups[0]["lr"] = 0.3
    it.end_round({}, 1)
    assert (it.lr, it.state_dict()["groups"][0]["lr"]) == (0.3, 0.3)


def test_momentum_is_0_where_there_is_none():
    assert solver(lambda p: Adam(p)).momentum == 0
    assert solver(lambda p: LBFGS(p)).momentum == 0


def plateau(config=None, **arguments):
    def make(parameters):
        optimizer = SGD(parameters, lr=1.0)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **(config or {})}, **arguments}

    return make


@pytest.mark.parametrize("make", [plateau({"monitor": "loss"}), plateau(monitor="loss")])
def test_plateau_follows_its_metric(make):
    it = solver(make)
    rates = []
    for round, loss in enumerate([1.0, 0.5, 0.6, 0.7], start=1):
        it.start_round()
        it.end_round({"loss": torch.tensor(loss)}, round)
        rates.append(it.lr)
    assert rates == [1.0, 1.0, 0.5, 0.25]


def test_plateau_without_its_metric():
    with pytest.raises(MisconfigurationException, match="ReduceLROnPlateau needs `monitor`"):
        solver(plateau())
    it = solver(plateau({"monitor": "loss"}))
    it.start_round()
    with pytest.raises(MisconfigurationException, match=r"monitors 'loss', which is not logged; logged are \['lr'\]"):
        it.end_round({"lr": torch.tensor(1.0)}, 1)
    it = solver(plateau({"monitor": "loss", "strict": False}))
    it.start_round()
    it.end_round({}, 1)
    assert it.lr == 1.0


def test_the_modules_own_lr_scheduler_step_is_called():
    module = Configured(with_decay(lambda o, s: ([o], [s])))
    steps = []
    module.lr_scheduler_step = lambda scheduler, metric: steps.append((type(scheduler), metric))
    it = LocalSolver(module)
    it.start_round()
    it.end_round({}, 1)
    assert steps == [(ExponentialLR, None)]
    assert it.lr == 1.0


@pytest.mark.parametrize(
    "make",
    [
        with_decay(lambda o, s: ([o], [s])),
        lambda p: ([o := SGD(p, 1.0)], [LambdaLR(o, lambda round: 1 / (1 + round))]),
        plateau(monitor="loss"),
    ],
)
def test_state_restores_rates_and_schedule(make):
    one, other = solver(make), solver(make)
    losses = {"loss": torch.tensor(1.0)}
    for round in (1, 2, 3):
        one.start_round()
        one.optimizer.step()
        one.end_clients()
        one.end_round(losses, round)
    other.load_state_dict(one.state_dict())
    for it in (one, other):
        it.start_round()
        it.optimizer.step()
        it.end_clients()
        it.end_round(losses, 4)
    assert other.lr == one.lr < 1


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.1), True),
        (lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True), False),
        (lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.5), False),
        (lambda p: SGD([{"params": p[:1], "lr": 1.0}, {"params": p[1:]}], 0.1), True),
        (lambda p: Adam(p), False),
    ],
)
def test_is_plain_sgd(make, plain):
    assert solver(make).is_plain_sgd is plain
