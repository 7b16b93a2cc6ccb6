from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

SHARED = Path(__file__).parents[2].parent / "shared"


@pytest.fixture
def shared_data():
    def path(name):
        file = SHARED / "data" / name
        if not file.is_file():
            pytest.skip(f"real data {name} is not beside this checkout")
        return file

    return path


@pytest.fixture
def make_archive(tmp_path):
    """Write a small archive in MedMNIST's layout; keyword arguments replace arrays, ``None`` leaves one out."""

    def make(name="images.npz", shape=(6, 5, 3), sizes=(40, 8, 12), num_classes=4, column=True, **arrays):
        rng = np.random.default_rng(0)
        content = {}
        for split, n in zip(("train", "val", "test"), sizes, strict=True):
            labels = (np.arange(n) % num_classes).astype(np.uint8)
            content[f"{split}_images"] = rng.integers(0, 256, (n, *shape), dtype=np.uint8)
            content[f"{split}_labels"] = labels[:, None] if column else labels
        content = {key: value for key, value in (content | arrays).items() if value is not None}
        file = tmp_path / name
        np.savez_compressed(file, **content)
        return file

    return make


class Linear(LightningModule):
    """An ordinary module that knows nothing of federations."""

    def __init__(self, features, num_classes):
        super().__init__()
        self.layer = torch.nn.Linear(features, num_classes)
        self.seen = []
        self.evaluated = 0

    def training_step(self, batch, batch_idx):
        images, labels = batch
        self.seen.append((images.dtype, images.shape, float(images.min()), float(images.max()), labels.dtype))
        return torch.nn.functional.cross_entropy(self.layer(images.flatten(1)), labels)

    def validation_step(self, batch, batch_idx):
        self.evaluated += len(batch[1])

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.fixture
def linear():
    return Linear


@pytest.fixture
def quiet_trainer(tmp_path):
    def make(**options):
        return Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **({"enable_checkpointing": False, "max_epochs": 1} | options),
        )

    return make
