"""What a user brings to the command line: modules and data modules of several kinds."""

from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedstop.core.client_states import ClientStates
from lightning_fedstop.data import Digits
from lightning_fedstop.federation.cohort import UniformCohort
from lightning_fedstop.models import ImageClassifier


class Linear(LightningModule):
    """Needs ``num_classes``."""

    def __init__(self, num_classes: int, width: int = 64):
        super().__init__()
        self.save_hyperparameters()
        self.num_classes = num_classes
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(width, num_classes))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TenClasses(Linear):
    """Takes no ``num_classes``."""

    def __init__(self, width: int = 64):
        super().__init__(10, width)
        self.save_hyperparameters()


class ByDefault(Linear):
    """Has a ``num_classes`` of its own."""

    def __init__(self, num_classes: int = 3):
        super().__init__(num_classes)


class WithRate(TenClasses):
    """Shares an argument's name, not its default, with the default model."""

    def __init__(self, lr: float = 0.25):
        super().__init__()
        self.lr = lr


class ByRate(TenClasses):
    """Shares an argument's name, not its default, with the model above."""

    def __init__(self, lr: float = 0.5):
        super().__init__()


class Loyal(UniformCohort):
    """A cohort with arguments."""

    def __init__(self, share: float = 1.0, period: int = 1):
        self.share, self.period = share, period


class Fickle(UniformCohort):
    """Shares an argument's name, not its default, with the cohort above."""

    def __init__(self, share: float = 0.5):
        self.share = share


class OwnStates(ClientStates):
    """Takes what its base takes."""


class OwnLogger(Logger):
    """Needs no arguments, and writes into the present folder."""

    name, version = "own", 0

    def log_metrics(self, metrics, step=None):
        with Path("own.txt").open("a") as file:
            file.write(f"{sorted(metrics)}\n")

    def log_hyperparams(self, params, *args, **kwargs):
        pass


class OwnClassifier(ImageClassifier):
    """Passes on what it does not know."""

    def __init__(self, note: str = "", **kwargs):
        super().__init__(**kwargs)


class Faulty(TenClasses):
    """Has a mistake in the user's own code."""

    def training_step(self, batch, batch_idx):
        raise ValueError("a mistake in training")


class Silent(Digits):
    """Does not say how many classes there are."""

    num_classes = property(lambda self: None, lambda self, value: None)


class Unreadable(Digits):
    """Fails while it is set up."""

    def setup(self, stage=None):
        Path("no-such-file.npz").read_bytes()


class Plain(LightningDataModule):
    """An ordinary data module of 40 images of 3 classes."""

    def __init__(self, batch_size: int = 5):
        super().__init__()
        self.save_hyperparameters()
        self.num_classes = 3
        self.in_chans = 1

    def train_dataloader(self):
        images = torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(images, torch.arange(40) % 3), batch_size=self.hparams.batch_size)


class Broken(TenClasses):
    """Cannot be built."""

    def __init__(self):
        super().__init__()
        1 / 0  # noqa: B018
