"""What methods keep: resumed, begun anew in a second fit, and no more than they need."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_fedstop.core.client_states import ClientStates
from lightning_fedstop.methods import SCAFFOLD, FedDyn, FedGamma, FedLESAM, FedSMOO, FedSpeed, FedWMSAM
from lightning_fedstop.methods.base import Client, Federation
from lightning_fedstop.methods.shared_models import SharedModels
from tests.helpers import ToyModule
from tests.methods.problems import METHODS, equal, same_bits, toy

every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
SCHEDULE = [[0, 1], [1, 2], [0, 2], [0, 1]]


class Decays(ToyModule):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


@every_method
def test_resuming_after_round_2_of_4_gives_the_same_bits(tmp_path, make):
    saver = ModelCheckpoint(tmp_path / "saved", filename="{epoch}", save_top_k=-1)
    storage = {"client_states": ClientStates("disk"), "module": Decays(), "enable_checkpointing": True}
    _, whole = toy(make, tmp_path, saver, schedule=SCHEDULE, **storage)
    again = {"client_states": ClientStates("memory"), "module": Decays()}
    _, resumed = toy(make, tmp_path, schedule=SCHEDULE, ckpt_path=tmp_path / "saved" / "epoch=1.ckpt", **again)
    assert len(resumed) == 2
    assert all(map(same_bits, whole[2:], resumed))
    assert not torch.equal(whole[1]["theta"], whole[3]["theta"])
    assert not list(tmp_path.rglob(".client_states*"))


@every_method
def test_a_second_fit_of_the_same_method_starts_clean(tmp_path, make):
    method, states = make(), ClientStates()
    fits = [toy(lambda: method, tmp_path, client_states=states)[1] for _ in range(2)]
    assert all(map(same_bits, *fits))


@pytest.mark.parametrize("name", ["FedAvg", "FedProx", "FedSAM"])
def test_stateless_methods_keep_nothing(tmp_path, name):
    _, rounds = toy(METHODS[name], tmp_path, client_states=ClientStates("disk"))
    assert rounds[-1]["states"] == {}
    assert rounds[-1]["state"] == {}


@pytest.mark.parametrize(
    ("name", "kept"),
    [("SCAFFOLD", "c"), ("FedDyn", "h"), ("FedSpeed", "h"), ("FedGamma", "c"), ("FedWMSAM", "c"), ("FedLESAM", "")],
)
def test_other_methods_keep_vectors_of_those_who_took_part(tmp_path, name, kept):
    _, rounds = toy(METHODS[name], tmp_path, schedule=[[2], [0, 2]])
    assert sorted(rounds[0]["states"]) == [(letter, 2) for letter in kept]
    assert sorted(rounds[1]["states"]) == [(letter, client) for letter in kept for client in (0, 2)]


class Models(Callback):
    """The rounds whose models are alive after each round."""

    def __init__(self):
        self.alive = []

    def on_train_epoch_end(self, trainer, module):
        self.alive.append(trainer.method.old.rounds)


@pytest.mark.parametrize("storage", ["memory", "disk"])
def test_fedlesam_keeps_one_model_for_all_clients_of_a_round(tmp_path, storage):
    models, method = Models(), FedLESAM(0.1)
    states = ClientStates(storage, dtype="bfloat16")
    schedule = [[0, 1, 2], [1, 2], [1], [0, 1, 2]]
    toy(lambda: method, tmp_path, models, schedule=schedule, client_states=states)
    assert models.alive == [{1}, {1, 2}, {1, 2, 3}, {4}]
    assert method.old.rounds == set()


def test_fedlesam_keeps_models_exactly_whatever_the_dtype_of_client_states(tmp_path):
    runs = [
        toy(METHODS["FedLESAM"], tmp_path, client_states=ClientStates(dtype=dtype))[1] for dtype in (None, "bfloat16")
    ]
    assert torch.equal(runs[0][-1]["theta"], runs[1][-1]["theta"])


@pytest.mark.parametrize("method", [lambda: FedLESAM(0.1, memory="last_round"), lambda: FedLESAM(rho=0.0)])
def test_fedlesam_without_client_memory_keeps_no_models(tmp_path, method):
    _, rounds = toy(method, tmp_path)
    assert rounds[-1]["state"]["models"] == {}
    assert rounds[-1]["state"]["round_of"] == {}


def test_shared_models():
    states = ClientStates()
    states.open(torch.zeros(2))
    shared = SharedModels(states.companion())
    shared.put(3, 1)
    assert shared.get(3) is None
    # Another process trained client 5 in the same round.
    shared.share(lambda new: [new, [(5, 1)]], torch.ones(2))
    assert shared.get(5).tolist() == shared.get(3).tolist() == [1, 1]
    state = shared.state_dict()
    other = SharedModels(states.companion())
    other.load_state_dict(state)
    other.put(3, 2)
    other.put(5, 2)
    other.share(lambda new: [new], torch.full((2,), 2.0))
    assert other.rounds == {2}
    assert shared.rounds == {1}
    assert equal(shared.state_dict(), state)
    states.close()
    assert shared.rounds == set()


def test_alpha_of_fedwmsam_follows_the_agreement(tmp_path):
    """The rule of the specification on the trace's own client models, with the momentum of the round before."""
    _, rounds = toy(lambda: FedWMSAM(0.1, alpha_init=0.5, alpha_rate=0.3), tmp_path)
    alpha, momentum = 0.5, torch.zeros_like(rounds[0]["theta"])
    for got in rounds:
        deltas = [model - got["theta_0"] for model in got["client_models"].values()]
        values = [1 + torch.cosine_similarity(delta, momentum, dim=0).item() for delta in deltas]
        agreement = sum(values) / len(values) if momentum.any() else 0.0
        alpha = 0.7 * alpha + 0.3 * min(max(agreement, 0.1), 0.9)
        assert got["state"]["alpha"] == pytest.approx(alpha, abs=1e-5)
        momentum = got["state"]["m"]
    assert alpha != pytest.approx(0.5, abs=0.05)


def trained(method, states, num_clients=6, num_rounds=200, dim=50):
    """A method after rounds in which half of the clients, drawn at random, moved by random numbers."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(dim, generator=generator)
    states.open(theta)
    method.setup(Federation(theta, [1] * num_clients, states, [dim]))
    for round_ in range(1, num_rounds + 1):
        states.begin()
        for index in torch.randperm(num_clients, generator=generator)[: num_clients // 2].tolist():
            client = Client(index, round_, 1, theta, lr=0.1, momentum=0.9)
            method.start(client)
            method.finish(client, torch.randn(dim, generator=generator), steps=3)
        states.commit()
        method.aggregate(theta, torch.zeros(dim, dtype=torch.float64))
    return method


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize(
    ("make", "server", "kept"),
    [
        (SCAFFOLD, "c", "c"),
        (FedGamma, "c", "c"),
        (FedWMSAM, "c", "c"),
        (FedDyn, "H", "h"),
        (FedSpeed, "H", "h"),
        (lambda: FedSMOO(rho=0.0), "H", "h"),
    ],
)
def test_the_server_holds_the_mean_of_what_the_clients_keep(make, server, kept, dtype):
    states = ClientStates(dtype=dtype)
    held = trained(make(), states).state_dict()[server].double()
    mean = torch.stack([states.get(kept, client) for client in range(6)]).double().mean(0)
    assert (held - mean).norm() < 1e-6 * mean.norm()


@pytest.mark.parametrize(("dtype", "kept"), [(None, 0.1), ("bfloat16", 0.10009765625)])
def test_fedsmoo_sends_the_dual_that_the_client_keeps(dtype, kept):
    states, method = ClientStates(dtype=dtype), FedSMOO(rho=0.1)
    theta = torch.zeros(2)
    states.open(theta)
    method.setup(Federation(theta, [1], states, [2]))
    client = Client(0, 1, 1, theta, lr=0.1, momentum=0.0)
    method.start(client)
    client.vectors["mu"].fill_(0.1)
    client.vectors["e"] = torch.zeros(2)
    method.finish(client, torch.zeros(2), steps=1)
    assert method.messages.compute().tolist() == pytest.approx([kept] * 2, rel=1e-7)
