"""The 2D sets of MedMNIST, from their official files."""

import hashlib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from lightning_fedstop.data.archives.archive import ImageArchive, checked_cache_dir
from lightning_fedstop.data.arrays import ArrayDataModule
from lightning_fedstop.data.classes import IntArray
from lightning_fedstop.data.partitions.skew import Skew
from lightning_fedstop.utilities.extras import require_extra
from lightning_fedstop.utilities.paths import local_path
from lightning_fedstop.utilities.validate import one_of


class MedMNIST(ArrayDataModule):
    """A 2D set of MedMNIST (Yang et al. 2023), dealt to clients.

    The official files are used: ``{dataset}_{size}.npz``, or ``{dataset}.npz`` at 28 pixels, downloaded and verified by
    the ``medmnist`` package where ``download`` is true, or put into ``root`` by hand. Images are square, with 1 or 3
    channels as the set has them. The ordinal set retinamnist is served as plain classes; the multi-label set chestmnist
    and the 3D sets are refused. A file whose MD5 sum is not the official one is used with a warning: it may be a part
    of the set that was made on purpose.

    Args:
        dataset: the set's name, such as ``"bloodmnist"``.
        size: 28, 64, 128 or 224 pixels.
        root: the folder of the files; ``None`` is ``~/.medmnist``, as in the ``medmnist`` package.
        download: fetch the file if it is missing or its MD5 sum is not the official one.
        num_clients: the number of clients N.
        batch_size: local batch size B.
        skew: how samples are dealt; ``None`` is ``Iid``.
        seed: decides the partition; ``None`` takes the one ``seed_everything`` set, else 0.
        partition_path: a saved partition, used instead of a new draw.
        normalize_twice: scale pixels to 4u - 3 instead of 2u - 1, as the authors' released code does.
        eval_batch_size: batch size of the validation and test loaders.
        cache_dir: a folder in which the images are kept decoded; all processes that name it map the same memory, such
            as the runs of a sweep. It takes the images' uncompressed size on the disk and may be deleted when no
            process uses it. By default each process decodes the file into memory of its own, and nothing is written.

    Raises:
        ValueError: if the set is unknown or cannot be served, or an argument is out of range.
        FileNotFoundError: in ``prepare_data`` and ``setup``, if the file is missing and ``download`` is false.
        RuntimeError: in ``prepare_data``, if the download fails.

    >>> module = MedMNIST("dermamnist", size=64)
    >>> module.num_classes, module.in_chans, module.image_size, module.file.name
    (7, 3, 64, 'dermamnist_64.npz')
    """

    is_thread_safe = True

    def __init__(
        self,
        dataset: str = "bloodmnist",
        size: int = 64,
        root: str | Path | None = None,
        download: bool = False,
        num_clients: int = 100,
        batch_size: int = 256,
        skew: Skew | None = None,
        seed: int | None = None,
        partition_path: str | Path | None = None,
        normalize_twice: bool = False,
        eval_batch_size: int = 256,
        cache_dir: str | Path | None = None,
    ) -> None:
        self.dataset = str(dataset).lower()
        self.info = _checked_info(self.dataset)
        one_of("size", size, (28, 64, 128, 224))
        super().__init__(
            len(self.info["label"]),
            int(self.info["n_channels"]),
            size,
            num_clients,
            batch_size,
            skew,
            seed,
            partition_path,
            normalize_twice,
            eval_batch_size,
        )
        self.save_hyperparameters()
        self.download = bool(download)
        self.cache_dir = checked_cache_dir(cache_dir)
        self.root = local_path("~/.medmnist" if root is None else root, "root")
        self._suffix = "" if size == 28 else f"_{size}"
        self._archive: ImageArchive | None = None

    @property
    def file(self) -> Path:
        """The official file."""
        return self.root / f"{self.dataset}{self._suffix}.npz"

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, from the ``medmnist`` package."""
        return [str(self.info["label"][str(k)]) for k in range(self.num_classes)]

    def prepare_data(self) -> None:
        """Download the file if that was asked for; otherwise see that it is there and the official one."""
        if not self.download:
            self._require_file()
            if difference := self._difference():
                rank_zero_warn(
                    f"'{self.file}' is not the official file: {difference}; unless you made it a part of the set, "
                    f"{self._advice()}."
                )
            return
        import medmnist

        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # The package's own download with its MD5 sum, without its constructor, which goes on to read the arrays.
            official = getattr(medmnist, self.info["python_class"])
            files = official.__new__(official)
            files.info, files.root, files.size_flag = self.info, str(self.root), self._suffix
            files.download()
        except Exception as error:
            found = self._difference() if self.file.is_file() else None
            state = f"is not the official one ({found}), which" if found else "is missing and"
            raise RuntimeError(f"'{self.file}' {state} could not be downloaded: put {self._by_hand()}.") from error

    def _require_file(self) -> None:
        if not self.file.is_file():
            raise FileNotFoundError(f"'{self.file}' is missing: {self._advice()}.")

    def _difference(self) -> str | None:
        """The MD5 sums of the file and of the official one; ``None`` where they are equal."""
        found, official = _md5(self.file), self.info[f"MD5{self._suffix}"]
        return None if found == official else f"its MD5 sum is {found}, not {official}"

    def _advice(self) -> str:
        return f"set `download=True`, or put {self._by_hand()}"

    def _by_hand(self) -> str:
        return f"{self.file.name} from {self.info[f'url{self._suffix}']} into '{self.root}' by hand"

    def read_split(self, split: str) -> tuple[NDArray[np.uint8], IntArray] | None:
        """Read a split; see :meth:`ArrayDataModule.read_split`.

        Raises:
            FileNotFoundError: if the file is missing.
            ValueError: if any of it is unreadable or damaged, or it holds other images than the set.
        """
        if self._archive is None:
            self._require_file()
            archive = self._whole_archive()
            found, wanted = (archive.height, archive.width, archive.in_chans), (*[self.image_size] * 2, self.in_chans)
            if found != wanted:
                raise ValueError(
                    f"'{self.file}' has images of (height, width, channels) {found}, but {self.dataset} at size "
                    f"{self.image_size} has {wanted}."
                )
            self._archive = archive
        return self._archive.read(split, self.num_classes)

    def _whole_archive(self) -> ImageArchive:
        """The file as an archive, read through."""
        try:
            archive = ImageArchive(self.file, self.cache_dir)
            archive.check(self.num_classes)
        except (ValueError, TypeError) as error:
            if difference := self._difference():
                reason = str(error).rstrip(".")
                raise type(error)(f"{reason}; {difference}, that of the official file: {self._advice()}.") from error
            raise
        return archive


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _checked_info(dataset: str) -> dict[str, Any]:
    require_extra("medmnist", "images", "`MedMNIST`")
    # Imported here: the package makes its default folder when it is imported.
    from medmnist.info import INFO

    served = [name for name, info in INFO.items() if not name.endswith("3d") and "multi-label" not in info["task"]]
    if dataset in served:
        info: dict[str, Any] = INFO[dataset]
        return info
    if dataset not in INFO:
        near = get_close_matches(dataset, served, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"`dataset` must be one of {', '.join(served)}, got {dataset!r}{hint}.")
    reason = (
        "its images are volumes, and only 2D sets are served"
        if dataset.endswith("3d")
        else f"it is multi-label ({len(INFO[dataset]['label'])} findings that occur together), and the clients and the "
        "loss need one class per image"
    )
    raise ValueError(f"`dataset={dataset!r}` cannot be used: {reason}; use one of {', '.join(served)}.")
