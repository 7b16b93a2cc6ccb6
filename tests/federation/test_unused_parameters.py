"""A parameter without a gradient is left alone, as in a Trainer, whatever decay and momentum would do."""

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedstop import Federated, FederatedLoop, FedProx

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(X, Y), batch_size=16)


class Net(LightningModule):
    """``spare`` is never used, ``late`` in every second batch alone."""

    def __init__(self, optimizer):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.spare, self.late = nn.Linear(4, 2), nn.Linear(3, 3), nn.Linear(4, 2)
        self.optimizer = optimizer
        self.batches = 0

    def training_step(self, batch, batch_idx):
        self.batches += 1
        x, y = batch
        scores = self.net(x) + (self.late(x) if self.batches % 2 else 0)
        return nn.functional.cross_entropy(scores, y)

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def federated(module, tmp_path, epochs, **options):
    loop = FederatedLoop(
        max_rounds=1, clients_per_round=1, local_epochs=epochs, accelerator="cpu", devices=1, enable_progress_bar=False,
        default_root_dir=tmp_path, **options,
    )  # fmt: skip
    loop.fit(module, Federated(Data(), num_clients=1))
    return module


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_the_loop_leaves_it_where_a_trainer_does(optimizer, tmp_path):
    module, other = federated(Net(optimizer), tmp_path, epochs=5), Net(optimizer)
    trainer = Trainer(
        max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(other, Data())
    assert torch.equal(module.spare.weight, Net(optimizer).spare.weight)
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


def test_a_methods_term_moves_it_all_the_same(tmp_path):
    """FedProx pulls a parameter that has moved back to theta in batches that do not use it, too."""
    plain, pulled = (
        federated(Net(sgd), tmp_path, epochs=2, **options) for options in ({}, {"method": FedProx(mu=10.0)})
    )
    start = Net(sgd).late.weight
    assert (pulled.late.weight - start).norm() < 0.9 * (plain.late.weight - start).norm()


def test_a_stack_refuses_it(tmp_path):
    loop = FederatedLoop(
        max_rounds=1, clients_per_round=2, local_epochs=1, accelerator="cpu", client_backend="stacked",
        enable_progress_bar=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="gives no gradient to the parameter spare"):
        loop.fit(Net(sgd), Federated(Data(), num_clients=2))
