"""Modules whose way is known, for the tests of the callbacks."""

import math

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

SATURATING = [1.0, 1.5, 1.6, 1.605, 1.609, 1.612, 1.614, 1.615]  # with threshold .01 counts 1, 2, ... from round 4 on


class Walker(LightningModule):
    """Walks from its start so that its distance after epoch e is ``distances[e]``; no validation loop."""

    def __init__(self, distances=SATURATING, batches=1):
        super().__init__()
        self.distances, self.batches = list(distances), batches
        self.moving = torch.nn.Parameter(torch.full((2, 2), 5.0))
        self.still = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("wandering", torch.zeros(2))

    def training_step(self, batch, batch_idx):
        self.wandering += 10  # a buffer is no part of the distance
        epoch = self.current_epoch
        last = 0.0 if epoch == 0 else self.distances[epoch - 1]
        step = self.distances[epoch] - last if math.isfinite(last) else 0.0
        # With SGD at rate 1 the first element goes up by `step` in an epoch.
        return -self.moving[0, 0] * step / self.batches + 0 * self.still.sum() + 0 * batch[0].sum()

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1.0)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(self.batches, 1)))


class Regression(LightningModule):
    """A small net on fixed data; momentum and a decaying rate make it saturate, and its state worth restoring."""

    def __init__(self, batches=4, batch_size=4):
        super().__init__()
        self.batches, self.batch_size = batches, batch_size
        generator = torch.Generator().manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        x = torch.randn(batch_size, 3, generator=generator)
        # Equal batches: resumed within an epoch, a Trainer begins again with its first batch.
        self.data = TensorDataset(x.repeat(batches, 1), x.sum(1, keepdim=True).repeat(batches, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.85)]

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=len(self.data))


def trainer(*callbacks, max_epochs=8, **arguments):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    quiet |= {"enable_checkpointing": any("Checkpoint" in type(callback).__name__ for callback in callbacks)}
    quiet |= {"accelerator": "cpu", "devices": 1}
    return Trainer(max_epochs=max_epochs, callbacks=list(callbacks), **quiet | arguments)
