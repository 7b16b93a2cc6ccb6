"""Small modules, data and loops for the tests."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedstop.federation.cohort import ScheduledCohort
from lightning_fedstop.loop.federated_loop import FederatedLoop
from tests.oracles import read_oracles

SHARED = Path(__file__).resolve().parents[2] / "shared"


def oracle_cases(method=None):
    """The method cases of the oracles, or those of one method."""
    return [case for case in read_oracles("methods") if method in (None, case["method"])]


def oracle_params(method=None):
    """The cases as parameters of a test."""
    return [pytest.param(case, id=case["name"]) for case in oracle_cases(method)]


class QuadraticModule(LightningModule):
    """F_i(x) = (x - b_i)^T A_i (x - b_i) / 2, whose A_i and b_i come as the batch; float64.

    Args:
        theta0: the start, a number or a list of them.
        tensors: lengths of the parameters that the vector is cut into; one parameter by default.
    """

    def __init__(self, theta0, lr, lr_decay=1.0, momentum=0.0, wd=0.0, tensors=None):
        super().__init__()
        start = torch.tensor(theta0, dtype=torch.float64).reshape(-1)
        self.parts = nn.ParameterList(start.split(tensors or [len(start)]))
        self.lr, self.lr_decay, self.momentum, self.wd = lr, lr_decay, momentum, wd

    @property
    def x(self):
        return torch.cat(list(self.parts))

    def training_step(self, batch, batch_idx):
        A, b = batch
        return (self.x - b) @ A @ (self.x - b) / 2

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.wd)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, self.lr_decay)]


class QuadraticData(LightningDataModule):
    """Client i has K_i batches, all of them (A_i, b_i).

    Args:
        sizes: samples of each client, 1 by default; they only weigh.
    """

    def __init__(self, A, b, K, sizes=None):
        super().__init__()
        self.b = [torch.tensor(value, dtype=torch.float64).reshape(-1) for value in b]
        self.A = [torch.tensor(a, dtype=torch.float64).reshape(len(b_i), -1) for a, b_i in zip(A, self.b, strict=True)]
        self.num_clients = len(b)
        self.K = K if isinstance(K, list) else [K] * len(b)
        self.client_sizes = sizes or [1] * len(b)

    def client_dataloader(self, client, generator):
        return [(self.A[client], self.b[client])] * self.K[client]

    def val_dataloader(self):
        return []

    test_dataloader = val_dataloader


class Trace(Callback):
    """Notes each round's client models, its global model before and after, and the server's and clients' states."""

    def __init__(self):
        self.rounds = []

    def on_train_epoch_start(self, trainer, module):
        self.models, self.theta_0 = {}, flat(module)

    def on_client_end(self, trainer, module, client):
        self.models[client] = flat(module)

    def on_train_epoch_end(self, trainer, module):
        state = {k: v.clone() if torch.is_tensor(v) else v for k, v in trainer.method.state_dict().items()}
        states = {key: trainer.server.states.get(*key) for key in trainer.server.states.written()}
        models = {"client_models": self.models, "theta_0": self.theta_0, "theta": flat(module)}
        self.rounds.append({**models, "state": state, "states": states})


def run_case(case, method, root, **arguments):
    """Train an oracle case with ``method``; gives one dict a round: ``client_models``, ``theta``, ``state``."""
    given = case["input"]
    optional = {name: given[name] for name in ("lr_decay", "momentum", "wd", "tensors") if name in given}
    module = QuadraticModule(given["theta0"], given["lr"], **optional)
    trace = Trace()
    schedule = given["rounds_selected"]
    loop = FederatedLoop(
        method,
        max_rounds=len(schedule),
        clients_per_round=1,
        local_epochs=1,
        cohort=ScheduledCohort(schedule),
        weighting=given.get("weights", "uniform"),
        gradient_clip_val=given.get("clip"),
        **QUIET | {"callbacks": [trace], "enable_checkpointing": False, "default_root_dir": root} | arguments,
    )
    loop.fit(module, QuadraticData(given["A"], given["b"], given["K"], given.get("n")))
    return trace.rounds


def check_case(case, rounds, tolerance=1e-9):
    """Compare what :func:`run_case` gave with the case's client models and global models."""
    assert len(rounds) == len(case["expected"])
    for got, expected in zip(rounds, case["expected"], strict=True):
        assert sorted(map(str, got["client_models"])) == sorted(expected["client_models"])
        for client, model in got["client_models"].items():
            assert model.tolist() == pytest.approx(expected["client_models"][str(client)], abs=tolerance)
        assert got["theta"].tolist() == pytest.approx(expected["theta"], abs=tolerance)


QUIET = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False}


def make_loop(root, *callbacks, **arguments):
    """A silent loop on the CPU: 3 rounds, 2 clients a round, 1 local epoch."""
    small = {"max_rounds": 3, "clients_per_round": 2, "local_epochs": 1, "default_root_dir": root}
    return FederatedLoop(**QUIET | small | {"callbacks": list(callbacks)} | arguments)


class ToyModule(LightningModule):
    """A linear classifier of 4 numbers into 2 classes that logs losses; ``net`` may be any other model."""

    def __init__(self, lr=0.1, net=None):
        super().__init__()
        self.lr = lr
        if net is None:
            self.save_hyperparameters(ignore=["net"])
            net = nn.Linear(4, 2)
            with torch.no_grad():
                net.weight.copy_(torch.linspace(-0.3, 0.4, 8).reshape(2, 4))
                net.bias.zero_()
        self.net = net

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Deep(ToyModule):
    """Everything a resume could lose: momentum-free Adam, a schedule, dropout, BatchNorm."""

    def __init__(self):
        super().__init__(net=nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2)))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


class Seen(ToyModule):
    """Notes the batches it is given."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        return super().training_step(batch, batch_idx)


class Scripted(ToyModule):
    """Logs ``val_loss`` from a list, one a round."""

    def __init__(self, values, **arguments):
        super().__init__(**arguments)
        self.values = values

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.values[self.current_epoch])


class ToyData(LightningDataModule):
    """Clients of given sizes over normal numbers; the class is the sign of the first.

    Args:
        sizes: samples of each client.
        batch_size: of the clients' batches; the short last one is kept.
        evaluated: whether there is validation and test data.
    """

    def __init__(self, sizes=(6, 4, 7, 8, 3), batch_size=4, evaluated=True):
        super().__init__()
        self.client_sizes, self.batch_size, self.evaluated = list(sizes), batch_size, evaluated
        self.num_clients = len(self.client_sizes)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(sum(sizes) + 10, 4, generator=generator)
        self.x, self.y = x, (x[:, 0] > 0).long()

    def dataset(self, start, stop):
        return TensorDataset(self.x[start:stop], self.y[start:stop])

    def client_dataset(self, client):
        start = sum(self.client_sizes[:client])
        return self.dataset(start, start + self.client_sizes[client])

    def client_dataloader(self, client, generator):
        if self.client_sizes[client] == 0:
            return []
        return DataLoader(self.client_dataset(client), self.batch_size, shuffle=True, generator=generator)

    def train_dataloader(self):
        return DataLoader(self.dataset(0, sum(self.client_sizes)), self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.dataset(-10, None), batch_size=4) if self.evaluated else []

    test_dataloader = val_dataloader


def flat(module):
    """All trainable parameters as one vector, a copy."""
    return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters() if p.requires_grad])


def fit(root, *callbacks, module=None, data=None, ckpt_path=None, **arguments):
    """Fit in a loop of :func:`make_loop`; gives the loop and the module."""
    loop = make_loop(root, *callbacks, **arguments)
    module = ToyModule() if module is None else module
    loop.fit(module, ToyData() if data is None else data, ckpt_path=ckpt_path)
    return loop, module


def checkpoint_without_callbacks(root):
    """The last checkpoint of a run of two rounds, in which nothing tells what the run began with."""
    fit(root, max_rounds=2)
    path = next(root.rglob("last.ckpt"))
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["callbacks"] = {}
    del checkpoint["federated"]["distance"]
    torch.save(checkpoint, path)
    return path


def bits(module):
    """A copy of the module's state."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one, other):
    """Whether two states are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def one_client(tmp_path, module, *callbacks, sizes=(6,), **arguments):
    """One round of one client: two batches, of 4 and 2 samples."""
    loop, _ = fit(
        tmp_path,
        *callbacks,
        module=module,
        data=ToyData(sizes),
        **{"max_rounds": 1, "clients_per_round": 1} | arguments,
    )
    return loop
