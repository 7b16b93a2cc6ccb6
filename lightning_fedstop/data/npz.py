"""Any image archive in MedMNIST's layout."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_fedstop.data.archives.archive import SPLITS, ImageArchive
from lightning_fedstop.data.arrays import ArrayDataModule
from lightning_fedstop.data.classes import IntArray
from lightning_fedstop.data.partitions.skew import Skew
from lightning_fedstop.utilities.validate import whole_number


class NpzImages(ArrayDataModule):
    """An archive in MedMNIST's layout, dealt to clients.

    The file holds ``{train,val,test}_images``, uint8 of shape ``(n, H, W)``, ``(n, H, W, 1)`` or ``(n, H, W, 3)``, and
    ``{train,val,test}_labels``, whole numbers of shape ``(n,)`` or ``(n, 1)``; validation and test may be absent.

    Args:
        path: the ``.npz`` file.
        num_clients: the number of clients N.
        batch_size: local batch size B.
        skew: how samples are dealt; ``None`` is ``Iid``.
        seed: decides the partition; ``None`` takes the one ``seed_everything`` set, else 0.
        num_classes: the number of classes; ``None`` takes the largest label of all splits plus 1.
        partition_path: a saved partition, used instead of a new draw.
        normalize_twice: scale pixels to 4u - 3 instead of 2u - 1, as the authors' released code does.
        eval_batch_size: batch size of the validation and test loaders.
        cache_dir: a folder in which the images are kept decoded; all processes that name it map the same memory, such
            as the runs of a sweep. It takes the images' uncompressed size on the disk and may be deleted when no
            process uses it. By default each process decodes the file into memory of its own, and nothing is written.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is unreadable or not of this layout, or an argument is out of range.
    """

    is_thread_safe = True

    def __init__(
        self,
        path: str | Path,
        num_clients: int = 10,
        batch_size: int = 32,
        skew: Skew | None = None,
        seed: int | None = None,
        num_classes: int | None = None,
        partition_path: str | Path | None = None,
        normalize_twice: bool = False,
        eval_batch_size: int = 256,
        cache_dir: str | Path | None = None,
    ) -> None:
        self.archive = ImageArchive(path, cache_dir)
        super().__init__(
            _count_classes(self.archive) if num_classes is None else whole_number("num_classes", num_classes, 1),
            self.archive.in_chans,
            min(self.archive.height, self.archive.width),
            num_clients,
            batch_size,
            skew,
            seed,
            partition_path,
            normalize_twice,
            eval_batch_size,
        )
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """See :meth:`ArrayDataModule.setup`; before a fit the whole archive is checked, the test split included.

        Raises:
            ValueError: if an array is damaged or a label out of range.
        """
        if stage == "fit" and not self._splits:
            self.archive.check(self.num_classes, soon=("train", "val"))
        super().setup(stage)

    def read_split(self, split: str) -> tuple[NDArray[np.uint8], IntArray] | None:
        """Read a split; see :meth:`ArrayDataModule.read_split`."""
        return self.archive.read(split, self.num_classes)


def _count_classes(archive: ImageArchive) -> int:
    largest = max(int(archive.labels(split).max()) for split in SPLITS if archive.sizes[split])
    # A stray mark such as 255 for "unknown" would silently make a model of 256 outputs.
    if largest >= sum(archive.sizes.values()):
        raise ValueError(
            f"The largest label in '{archive.path}' is {largest}, with {sum(archive.sizes.values())} images in all: "
            f"labels must be class numbers from 0, or give `num_classes`."
        )
    return largest + 1
