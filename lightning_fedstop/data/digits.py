"""Scikit-learn's handwritten digits: the set that needs no network."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_fedstop.data.arrays import ArrayDataModule
from lightning_fedstop.data.classes import IntArray
from lightning_fedstop.data.partitions.skew import Skew
from lightning_fedstop.utilities.extras import require_extra

_SIZES = {"test": 300, "val": 200, "train": 1297}


class Digits(ArrayDataModule):
    """1797 grey images of handwritten digits, 8 x 8 pixels, that come with scikit-learn.

    The split into 1297 training, 200 validation and 300 test images is stratified and always the same. Grey values 0
    to 16 become 0 to 255.

    Args:
        num_clients: the number of clients N.
        batch_size: local batch size B.
        skew: how samples are dealt; ``None`` is ``Iid``.
        seed: decides the partition; ``None`` takes the one ``seed_everything`` set, else 0.
        partition_path: a saved partition, used instead of a new draw.
        normalize_twice: scale pixels to 4u - 3 instead of 2u - 1, as the authors' released code does.
        eval_batch_size: batch size of the validation and test loaders.

    Raises:
        ValueError: if an argument is out of range.

    >>> module = Digits(num_clients=4)
    >>> module.setup("fit")
    >>> module.client_sizes
    [325, 324, 324, 324]
    """

    is_thread_safe = True

    def __init__(
        self,
        num_clients: int = 20,
        batch_size: int = 32,
        skew: Skew | None = None,
        seed: int | None = None,
        partition_path: str | Path | None = None,
        normalize_twice: bool = False,
        eval_batch_size: int = 256,
    ) -> None:
        require_extra("sklearn", "images", "`Digits`")
        super().__init__(
            10, 1, 8, num_clients, batch_size, skew, seed, partition_path, normalize_twice, eval_batch_size
        )
        self.save_hyperparameters()

    def read_split(self, split: str) -> tuple[NDArray[np.uint8], IntArray] | None:
        """Read a split; see :meth:`ArrayDataModule.read_split`."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        labels = digits.target.astype(np.int64)
        chosen = np.flatnonzero(_splits(labels) == split)
        images = np.rint(digits.images[chosen] * (255 / 16)).astype(np.uint8)
        return images[..., None], labels[chosen]


def _splits(labels: IntArray) -> NDArray[np.str_]:
    """Stratified split at regular intervals within each class."""
    split = np.full(len(labels), "train")
    rest = np.lexsort((np.random.RandomState(0).permutation(len(labels)), labels))
    for name in ("test", "val"):
        passed = np.arange(len(rest) + 1) * _SIZES[name] // len(rest)
        taken = np.diff(passed) > 0
        split[rest[taken]] = name
        rest = rest[~taken]
    return split
