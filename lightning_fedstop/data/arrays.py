"""Image sets that stay where they are put, as uint8: a client's batches are index lists into them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import Self

from lightning_fedstop.data.classes import IntArray
from lightning_fedstop.data.federated import FederatedDataModule
from lightning_fedstop.data.partitions.skew import Skew
from lightning_fedstop.utilities.validate import whole_number

Batch = tuple[Tensor, Tensor]
_STAGES = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ()}


def normalise(images: Tensor, twice: bool = False) -> Tensor:
    """Turn uint8 images of shape ``(n, H, W, C)`` into float32 of shape ``(n, C, H, W)``.

    With u = pixel / 255 the result is 2u - 1, or 4u - 3 with ``twice`` (the authors' code normalises two times).

    >>> normalise(torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 2, 1)).flatten().tolist()
    [-1.0, 1.0]
    """
    scaled = images.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    for _ in range(1 + twice):
        scaled.mul_(2).sub_(1)
    return scaled


class ClientBatches:
    """The batches of one client: each ``iter()`` is one epoch, shuffled by ``generator``."""

    def __init__(self, data: Batch, indices: Tensor, batch_size: int, generator: torch.Generator) -> None:
        self.data = data
        self.indices = indices
        self.batch_size = batch_size
        self.generator = generator

    def __len__(self) -> int:
        """Batches per epoch, ceil(n_m / B)."""
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self.indices), generator=self.generator)
        epoch = self.indices[order].to(self.data[0].device)
        for start in range(0, len(epoch), self.batch_size):
            chosen = epoch[start : start + self.batch_size]
            yield _picked(self.data, chosen)


class _ResidentImages(Dataset[Any]):
    """Data set from which a ``DataLoader`` fetches a whole batch at once."""

    def __init__(self, data: Batch) -> None:
        self.images, self.labels = data

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        chosen = torch.as_tensor(indices, device=self.images.device)
        return _picked((self.images, self.labels), chosen)


def _picked(data: Batch, chosen: Tensor) -> Batch:
    """Some of the samples; on a CPU indexing would take ten times as long."""
    images, labels = data
    return images.index_select(0, chosen), labels.index_select(0, chosen)


def _as_fetched(batch: Any) -> Any:
    return batch


class ArrayDataModule(FederatedDataModule):
    """Base of image sets held as uint8 tensors and normalised, as float32, after the transfer to the device.

    A batch is ``(images, labels)``: images uint8 of shape ``(n, H, W, C)`` until :meth:`on_after_batch_transfer`, which
    a ``Trainer`` and a ``FederatedLoop`` both call, makes float32 of shape ``(n, C, H, W)`` with values 2u - 1; labels
    int64 of shape ``(n,)``. A subclass implements :meth:`read_split`.

    Args:
        num_classes: the number of classes C.
        in_chans: 1 or 3.
        image_size: height and width in pixels; of oblong images, the smaller of the two.
        num_clients: the number of clients N.
        batch_size: local batch size B; also that of the pooled training loader.
        skew: how samples are dealt; ``None`` is ``Iid``.
        seed: decides the partition; ``None`` takes the one ``seed_everything`` set, else 0.
        partition_path: a saved partition, used instead of a new draw.
        normalize_twice: scale to 4u - 3 as the authors' released code does.
        eval_batch_size: batch size of the validation and test loaders.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        num_classes: int,
        in_chans: int,
        image_size: int,
        num_clients: int = 10,
        batch_size: int = 32,
        skew: Skew | None = None,
        seed: int | None = None,
        partition_path: str | Path | None = None,
        normalize_twice: bool = False,
        eval_batch_size: int = 256,
    ) -> None:
        super().__init__(num_clients, skew, seed, partition_path)
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.image_size = image_size
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.eval_batch_size = whole_number("eval_batch_size", eval_batch_size, 1)
        self.normalize_twice = bool(normalize_twice)
        self._device = torch.device("cpu")
        self._splits: dict[str, Batch | None] = {}

    @property
    def class_names(self) -> list[str]:
        """The C names of the classes; their numbers where there are none."""
        return [str(k) for k in range(self.num_classes)]

    def read_split(self, split: str) -> tuple[NDArray[np.uint8], IntArray] | None:
        """Read ``"train"``, ``"val"`` or ``"test"``.

        Returns:
            Images of shape ``(n, H, W, C)`` and class numbers of shape ``(n,)``, or ``None`` where the split is absent
            or empty.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement `read_split`.")

    def setup(self, stage: str) -> None:
        """Read what ``stage`` needs (once); for ``"fit"``, deal the training set."""
        for split in _STAGES.get(stage, ("train", "val", "test")):
            if split in self._splits:
                continue
            arrays = self.read_split(split)
            if arrays is None:
                self._splits[split] = None
                continue
            images, labels = arrays
            if split == "train":
                self.deal(labels, len(labels))
            self._splits[split] = (torch.from_numpy(images).to(self._device), torch.from_numpy(labels).to(self._device))

    def to(self, device: torch.device | str) -> Self:
        """Move images and labels to ``device`` once; splits read later go there too."""
        self._device = torch.device(device)
        for split, data in self._splits.items():
            if data is not None:
                self._splits[split] = (data[0].to(self._device), data[1].to(self._device))
        return self

    def _split(self, split: str, stage: str) -> Batch | None:
        if split not in self._splits:
            raise RuntimeError(f'{type(self).__name__} has no {split} images yet: call `setup("{stage}")` first.')
        return self._splits[split]

    def client_dataloader(self, client: int, generator: torch.Generator) -> ClientBatches:
        """The batches of one client; see :meth:`FederatedDataModule.client_dataloader`."""
        indices = torch.from_numpy(self.partition[client].copy())
        data = self._split("train", "fit")
        assert data is not None
        return ClientBatches(data, indices, self.batch_size, generator)

    def train_dataloader(self) -> Any:
        """The pooled training set, shuffled."""
        data = self._split("train", "fit")
        assert data is not None
        return DataLoader(_ResidentImages(data), batch_size=self.batch_size, shuffle=True, collate_fn=_as_fetched)

    def val_dataloader(self) -> Any:
        """The validation set in order, or no loader where there is none."""
        return self._in_order("val", "validate")

    def test_dataloader(self) -> Any:
        """The test set in order, or no loader where there is none."""
        return self._in_order("test", "test")

    def _in_order(self, split: str, stage: str) -> Any:
        data = self._split(split, stage)
        if data is None:
            return []
        # A generator of its own: a DataLoader draws a seed per epoch, and evaluation must not move the global stream.
        return DataLoader(
            _ResidentImages(data),
            batch_size=self.eval_batch_size,
            collate_fn=_as_fetched,
            generator=torch.Generator(),
        )

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalise the uint8 images of a batch on the device they are on."""
        images, labels = batch
        return (normalise(images, self.normalize_twice) if images.dtype == torch.uint8 else images), labels
