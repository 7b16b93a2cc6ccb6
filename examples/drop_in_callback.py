"""An ordinary Lightning script that stops by itself: one callback is added, nothing else is changed.

A small convolutional net learns scikit-learn's handwritten digits. There is no validation loop and no metric to watch:
the callback looks at the weights alone. Run it with ``python examples/drop_in_callback.py``.
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedstop.stopping import TaskVectorEarlyStopping


class DigitNet(LightningModule):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 4 * 4, 10)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("test_accuracy", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)


def digits() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    data = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)
    return TensorDataset(*(part[:1500] for part in data)), TensorDataset(*(part[1500:] for part in data))


def main(max_epochs: int = 200) -> TaskVectorEarlyStopping:
    seed_everything(0)
    train, test = digits()
    early_stopping = TaskVectorEarlyStopping(threshold=0.01, patience=5)  # the one line added
    trainer = Trainer(
        max_epochs=max_epochs,
        callbacks=[early_stopping],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = DigitNet()
    trainer.fit(model, DataLoader(train, batch_size=64, shuffle=True))
    if early_stopping.stopped:
        print(f"Stopped after {early_stopping.stopped_epoch + 1} of {max_epochs} epochs.")
        print(f"Why: {early_stopping.stopping_reason_message}")
    else:
        print(f"Not stopped within {max_epochs} epochs.")
    trainer.test(model, DataLoader(test, batch_size=297))
    return early_stopping


if __name__ == "__main__":
    main()
