"""What hooks change of the model and its optimizer counts, and lasts as long as in a ``Trainer``."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_fedstop import methods
from lightning_fedstop.federation.cohort import ScheduledCohort
from lightning_fedstop.records import read_rounds
from tests.helpers import Deep, ToyData, ToyModule, bits, fit, flat, same
from tests.methods.problems import public_methods


class Does(Callback):
    """Calls a function with the module in one hook, from its ``first`` call (from 1) on, at most ``times`` times."""

    def __init__(self, hook, function, first=1, times=10**9):
        self.function, self.first, self.last, self.calls = function, first, first + times - 1, 0
        setattr(self, hook, self.do)

    def do(self, trainer, module, *args):
        self.calls += 1
        if self.first <= self.calls <= self.last:
            with torch.no_grad():
                self.function(module)


def add(module):
    for parameter in module.parameters():
        parameter.add_(1.0)


def halve(module):
    for group in module.trainer.optimizers[0].param_groups:
        group["lr"] *= 0.5


def rates(loop):
    return [float(row["lr"]) for row in read_rounds(f"{loop.log_dir}/metrics.csv")]


class Slow(ToyModule):
    """Moves by less than bfloat16 can hold."""

    def __init__(self):
        super().__init__(lr=1e-4)


def test_a_module_that_only_rounds_the_global_model_changes_nothing_but_what_a_hook_changes(tmp_path):
    changes_bias = Does("on_train_epoch_end", lambda module: module.net.bias[:1].add_(1.0))
    thetas = []
    for hooks in ([], [changes_bias]):
        loop, _ = fit(tmp_path, *hooks, module=Slow(), precision="bf16-true", max_rounds=1)
        thetas.append(loop.server.theta)
    bias = 8  # of the first class, behind the weights
    assert not torch.equal(thetas[0], thetas[0].bfloat16().float())
    assert torch.equal(thetas[0][:bias], thetas[1][:bias])
    assert thetas[1][bias] == pytest.approx(1.0, abs=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("method", public_methods())
@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_validation_end", "on_train_epoch_end"])
def test_every_method_goes_on_from_weights_that_a_hook_has_set(tmp_path, method, hook):
    start = flat(ToyModule())
    loop, module = fit(
        tmp_path, Does(hook, add, times=1), method=getattr(methods, method)(), module=ToyModule(lr=1e-9), max_rounds=3
    )
    assert torch.allclose(flat(module), start + 1, rtol=0, atol=1e-5)
    assert torch.equal(loop.server.theta, flat(module))
    assert torch.equal(loop.method.federation.theta, loop.start_weights)


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_validation_end", "on_train_epoch_end"])
def test_a_checkpoint_that_a_hook_writes_holds_one_model(tmp_path, hook):
    def save(module):
        add(module)
        module.trainer.save_checkpoint(tmp_path / "x.ckpt")
        saved = torch.load(tmp_path / "x.ckpt", weights_only=True)
        vector = torch.cat([value.reshape(-1) for value in saved["state_dict"].values()])
        assert torch.equal(vector, saved["federated"]["theta"])
        assert torch.equal(vector, flat(module))

    saves = Does(hook, save)
    fit(tmp_path, saves)
    assert saves.calls > 0


def test_weights_set_in_the_last_hooks_are_those_of_the_summary(tmp_path):
    hashes = {
        fit(tmp_path, *hooks)[0].summary["parameters_hash"]
        for hooks in ([], [Does("on_train_end", add)], [Does("on_fit_end", lambda module: [add(module), add(module)])])
    }
    assert len(hashes) == 3


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_validation_end", "on_train_epoch_end"])
def test_a_rate_that_a_hook_sets_lasts_and_is_recorded(tmp_path, hook):
    loop, _ = fit(tmp_path, Does(hook, halve), module=ToyModule(lr=0.4))
    assert rates(loop) == [0.2, 0.1, 0.05] if hook == "on_train_epoch_start" else [0.4, 0.2, 0.1]


def test_a_rate_of_0_moves_nothing(tmp_path):
    class Still(ToyModule):
        def on_train_epoch_start(self):
            for group in self.optimizers().param_groups:
                group["lr"] = 0.0

    loop, module = fit(tmp_path, module=Still())
    assert torch.equal(flat(module), flat(ToyModule()))
    assert rates(loop) == [0.0] * 3


def test_a_scheduler_goes_on_from_a_rate_that_a_hook_has_set(tmp_path):
    loop, _ = fit(tmp_path, Does("on_validation_end", halve), module=Deep(), max_rounds=3)
    assert rates(loop) == pytest.approx([0.02, 0.02 * 0.35, 0.02 * 0.35**2])


class PerClient(Callback):
    """Gives client 1 ten times the rate and a momentum of 0."""

    def on_client_start(self, trainer, module, client):
        if client == 1:
            trainer.optimizers[0].param_groups[0].update(lr=1.0, momentum=0.0)


def test_a_rate_set_for_a_client_is_this_clients_alone(tmp_path):
    seen = {}

    class Notes(methods.FedAvg):
        def start(self, client):
            seen[client.index] = (client.lr, client.momentum)

    loop, _ = fit(tmp_path, PerClient(), method=Notes(), cohort=ScheduledCohort([[0, 1, 2]]), max_rounds=2)
    assert seen == {0: (0.1, 0.9), 1: (1.0, 0.0), 2: (0.1, 0.9)}
    assert rates(loop) == pytest.approx([0.4, 0.4])
    assert loop.optimizers[0].param_groups[0]["lr"] == 0.1


def test_weights_set_for_a_client_are_where_it_starts_and_part_of_its_update(tmp_path):
    class Moves(Callback):
        def on_client_start(self, trainer, module, client):
            if client == 0:
                with torch.no_grad():
                    add(module)

    _, module = fit(tmp_path, Moves(), module=ToyModule(lr=1e-9), cohort=ScheduledCohort([[0, 1]]), max_rounds=1)
    assert torch.allclose(flat(module), flat(ToyModule()) + 0.5, rtol=0, atol=1e-6)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("change", [add, halve, lambda module: module.net[0].running_mean.add_(1.0)])
def test_threads_refuse_what_a_hook_changes_for_one_client(tmp_path, change, two_threads):
    class Changes(Callback):
        def on_client_start(self, trainer, module, client):
            if client == 1:
                with torch.no_grad():
                    change(module)

    module = ToyModule(net=nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
    with pytest.raises(MisconfigurationException, match="`on_client_start` has changed weights, buffers or rates"):
        fit(
            tmp_path,
            Changes(),
            module=module,
            data=ToyData([8, 8]),
            cohort=ScheduledCohort([[0, 1]]),
            client_backend="threads",
        )


@pytest.mark.parametrize("saved_in", ["on_train_batch_end", "on_client_end", "on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_epoch_end"])
@pytest.mark.parametrize("change", [add, halve])
def test_what_hooks_change_is_changed_once_in_a_resumed_run(tmp_path, change, hook, saved_in):
    """From within a round, a resumed run begins it again, with its hooks."""

    def run(*more, **arguments):
        loop, module = fit(tmp_path, Does(hook, change), *more, module=Deep(), max_rounds=4, **arguments)
        return bits(module), rates(loop)

    def save(module):
        if module.current_epoch == 2:
            module.trainer.save_checkpoint(tmp_path / "x.ckpt")

    whole = run(Does(saved_in, save))
    again = run(ckpt_path=tmp_path / "x.ckpt")
    assert same(again[0], whole[0])
    assert again[1] == whole[1]
