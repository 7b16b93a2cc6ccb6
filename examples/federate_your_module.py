"""Train a module and a data module of your own over a federation: neither knows that there is one.

The data module is dealt to 10 clients with a label skew, and SCAFFOLD trains the module until the growth-rate criterion
ends the run. Run it with ``python examples/federate_your_module.py``.
"""

import torch
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_fedstop import SCAFFOLD, DirichletSkew, FederatedDataModule, FederatedLoop, TaskVectorEarlyStopping


class YourModule(LightningModule):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.test_accuracy = MulticlassAccuracy(10, average="macro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.test_accuracy(self.net(batch[0]), batch[1])
        self.log("test_accuracy", self.test_accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


class YourData(LightningDataModule):
    def setup(self, stage: str) -> None:
        pixels, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(pixels / 8 - 1, dtype=torch.float32), torch.tensor(labels))
        self.train, self.test = Subset(data, range(1500)), Subset(data, range(1500, 1797))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.test, batch_size=297)


def main(max_rounds: int = 150, default_root_dir: str | None = None) -> FederatedLoop:
    seed_everything(0)
    federation = FederatedDataModule.from_datamodule(YourData(), num_clients=10, skew=DirichletSkew(0.5))
    loop = FederatedLoop(
        method=SCAFFOLD(),
        max_rounds=max_rounds,
        clients_per_round=5,
        local_epochs=2,
        callbacks=[TaskVectorEarlyStopping(threshold=0.01, patience=5)],
        accelerator="cpu",
        default_root_dir=default_root_dir,
    )
    loop.fit(YourModule(), federation)
    return loop


if __name__ == "__main__":
    main()
