"""Data modules whose training set is dealt to clients."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from numpy.typing import NDArray
from typing_extensions import Self

from lightning_fedstop.core.seeding import resolve_seed
from lightning_fedstop.data.classes import IntArray, class_numbers, known_number
from lightning_fedstop.data.config import as_skew, plain
from lightning_fedstop.data.labels import dataset_labels
from lightning_fedstop.data.loader import OWN_CLIENTS, TrainingLoader
from lightning_fedstop.data.partitions.partition import Partition, unlabelled_fingerprint
from lightning_fedstop.data.partitions.skew import Skew
from lightning_fedstop.data.registry import is_own
from lightning_fedstop.utilities.thread_safety import declares_thread_safety
from lightning_fedstop.utilities.validate import other_package, whole_number


class FederatedDataModule(LightningDataModule):
    """A ``LightningDataModule`` whose training set is dealt to clients; also usable in a plain ``Trainer``.

    A data module of your own implements :meth:`client_dataloader` and calls :meth:`deal` in ``setup("fit")`` (or, where
    the clients are given, overrides :attr:`client_sizes` instead of calling it). Where several threads may read from it
    at once, each another client, its class may say so by ``is_thread_safe = True``.

    Args:
        num_clients: the number of clients N.
        skew: how samples are dealt; ``None`` is :class:`~lightning_fedstop.data.Iid`.
        seed: decides the partition; ``None`` takes the one ``seed_everything`` set, else 0.
        partition_path: a partition saved by :meth:`Partition.save`, used instead of a new draw.

    Attributes:
        train_labels: shape ``(n,)``; class numbers of the training set after ``setup("fit")``, ``None`` without.
        label_names: what the classes were called, where they had to be numbered; else ``None``.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        num_clients: int = 10,
        skew: Skew | None = None,
        seed: int | None = None,
        partition_path: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.num_clients = whole_number("num_clients", num_clients, 1)
        self.seed = resolve_seed(seed)
        self.skew = as_skew(skew)
        self.partition_path = partition_path
        self._skew_given = skew is not None
        self._partition: Partition | None = None
        self.train_labels: IntArray | None = None
        self.label_names: list[str] | None = None

    def _set_hparams(self, hp: Any) -> None:
        # Checkpoints load with `weights_only=True`, so that hyperparameters are plain types.
        if isinstance(hp, dict):
            hp = {name: plain(value) for name, value in hp.items()}
            # A module built again from a checkpoint deals as this one, whatever `seed_everything` says by then.
            hp |= {"seed": self.seed} if "seed" in hp else {}
        super()._set_hparams(hp)

    @property
    def partition(self) -> Partition:
        """Samples of each client.

        Raises:
            RuntimeError: before ``setup("fit")``.
        """
        if self._partition is None:
            raise RuntimeError(
                f'{type(self).__name__} has no partition yet: call `setup("fit")` first, in which a data module of '
                f"your own calls `deal`, or override `client_sizes`."
            )
        return self._partition

    @property
    def client_sizes(self) -> list[int]:
        """Samples per client, after ``setup("fit")``."""
        sizes: list[int] = self.partition.sizes.tolist()
        return sizes

    def deal(self, labels: NDArray[Any] | None, num_samples: int) -> None:
        """Deal the training set, or load the partition at ``partition_path``.

        Args:
            labels: shape ``(n,)``; the class of each sample, a whole number or a string, or ``None`` without classes.
            num_samples: n.

        Raises:
            ValueError: if the skew needs labels and there are none or not n, or the saved partition does not fit.
        """
        if labels is None and self.skew.needs_labels and self.partition_path is None:
            raise ValueError(
                f"{type(self.skew).__name__} needs the class of each training sample, and the data set has none: use "
                f"`Iid` or `QuantitySkew`, give it `targets` of whole numbers or strings, or set "
                f"`needs_labels = False` in a skew of your own that reads none."
            )
        if labels is not None and len(labels) != num_samples:
            raise ValueError(f"`labels` must be those of the {num_samples} training samples, got {len(labels)}.")
        known = np.zeros(num_samples, np.int64) if labels is None else labels
        self.train_labels = self.label_names = None
        if labels is not None:
            self.train_labels, self.label_names = class_numbers(labels, known_number(self))
        if self.partition_path is None:
            self._partition = Partition.create(self.skew, known, self.num_clients, self.seed)
            return
        self._partition = Partition.load(self.partition_path, known, self.num_clients)
        if self._skew_given and self._partition.skew != repr(self.skew):
            raise ValueError(
                f"The partition '{self.partition_path}' was dealt by {self._partition.skew}, but `skew` is "
                f"{self.skew!r}: leave one of the two out."
            )

    def client_dataloader(self, client: int, generator: torch.Generator) -> Iterable[Any]:
        """The batches of one client; each ``iter()`` is one epoch shuffled by ``generator``.

        The short last batch is kept; a client without samples has no batches. Any iterable of batches will do that can
        be gone through once for each local epoch; several loaders, in a list or a dict, are combined as a ``Trainer``
        combines them.

        Args:
            client: from 0 to ``num_clients - 1``.
            generator: a CPU generator, the only source of chance.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement `client_dataloader`.")

    def client_fingerprint(self, client: int) -> str:
        """A text that tells a client from others, such as its name; empty by default.

        A resumed run compares it, and the clients' sizes, with those in the checkpoint. A data module that deals a
        :class:`Partition` needs none: its digest tells which samples each client has. Where the clients are given,
        two of equal size that have changed places can only be told apart by their fingerprints.

        Args:
            client: from 0 to ``num_clients - 1``.
        """
        return ""

    def to(self, device: torch.device | str) -> Self:
        """Move resident data to ``device``; here there is none."""
        return self

    @classmethod
    def from_datamodule(
        cls,
        datamodule: LightningDataModule,
        num_clients: int,
        skew: Skew | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        partition_path: str | Path | None = None,
    ) -> "FederatedDataModule":
        """Deal the training set of any data module to clients; see :class:`Federated`."""
        return Federated(datamodule, num_clients, skew, batch_size, seed, partition_path)


class Federated(FederatedDataModule):
    """Deals the training set of a data module you already have to clients.

    The samples that ``datamodule.train_dataloader()`` can draw are dealt: all of its data set, or those that its
    sampler names (``SubsetRandomSampler``, the weights above 0 of ``WeightedRandomSampler``, ...), counted in the order
    of the data set. The loader of a client makes batches as that loader does, with its batch size unless another is
    given, its short last batch, collate function and workers; it shuffles, and draws each sample once an epoch. With
    ``drop_last``, clients of fewer samples than a batch count as empty.

    Where the skew needs classes, whole numbers or strings, they are found in ``targets``, ``labels`` or ``tensors[1]``
    of the data set, or by reading every item once; ``Iid`` and ``QuantitySkew`` ask for none. Everything else, the
    validation and test loaders, the hooks that move batches, state, set-up and tear-down, is the wrapped module's.

    Args:
        datamodule: the data module to federate.
        num_clients: the number of clients N.
        skew: how samples are dealt; ``None`` is ``Iid``.
        batch_size: local batch size; ``None`` takes that of the wrapped loader, and is that after ``setup("fit")``.
        seed: decides the partition; ``None`` takes the one ``seed_everything`` set, else 0.
        partition_path: a saved partition, used instead of a new draw.

    Raises:
        TypeError: if ``datamodule`` is no ``LightningDataModule``, or its training loader is not one ``DataLoader``
            over a map-style data set, or what its sampler can draw is unknown.
        ValueError: if an argument is out of range, or the skew needs classes and the data has none.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.randn(12, 3), torch.arange(12) % 2)
    >>> module = Federated(LightningDataModule.from_datasets(data, batch_size=2), num_clients=3)
    >>> module.setup("fit")
    >>> module.client_sizes, len(module.client_dataloader(0, torch.Generator()))
    ([4, 4, 4], 2)
    """

    def __init__(
        self,
        datamodule: LightningDataModule,
        num_clients: int = 10,
        skew: Skew | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
        partition_path: str | Path | None = None,
    ) -> None:
        if not isinstance(datamodule, LightningDataModule):
            kind = type(datamodule)
            hint = other_package(kind) or f": where each of several data sets is a client, {OWN_CLIENTS}"
            raise TypeError(f"`datamodule` must be a LightningDataModule, got {kind.__name__}{hint}.")
        self.datamodule = datamodule
        super().__init__(num_clients, skew, seed, partition_path)
        self._given_batch_size = None if batch_size is None else whole_number("batch_size", batch_size, 1)
        self.batch_size = self._given_batch_size
        self.drop_last = False
        self.save_hyperparameters(ignore=["datamodule"])
        self._loader: TrainingLoader | None = None
        self.prepare_data_per_node = datamodule.prepare_data_per_node
        self.allow_zero_length_dataloader_with_multiple_devices = (
            datamodule.allow_zero_length_dataloader_with_multiple_devices
        )
        # As attributes, so that Lightning sees a hook as overridden only where the wrapped module overrides it.
        for hook in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            setattr(self, hook, getattr(datamodule, hook))

    def __getattr__(self, name: str) -> Any:
        if name in ("num_classes", "in_chans", "image_size", "class_names") and "datamodule" in vars(self):
            return getattr(self.datamodule, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def is_thread_safe(self) -> bool:
        """Several threads may read it at once if the wrapped data module declares it of itself."""
        return declares_thread_safety(self.datamodule)

    @property
    def trainer(self) -> Any:
        """The trainer of the wrapped module."""
        return self.datamodule.trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self.datamodule.trainer = trainer

    def prepare_data(self) -> None:
        """Prepare the wrapped module's data."""
        self.datamodule.prepare_data()

    def setup(self, stage: str) -> None:
        """Set the wrapped module up; for ``"fit"``, deal its training set."""
        self.datamodule.setup(stage)
        if stage not in ("fit", None):
            return
        source = f"`{type(self.datamodule).__name__}.train_dataloader()`"
        loader = TrainingLoader(self.datamodule.train_dataloader(), source, self._given_batch_size)
        is_new = not loader.draws_from(self._loader)
        if is_new:
            loader.tell_of_replaced_sampler()
            if self.partition_path is None and is_own(type(self.skew)):
                loader.tell_of_parts()
            n = len(loader.samples)
            labels = dataset_labels(loader.training_set, by_list=loader.by_list) if self._asks_for_classes(n) else None
            self.deal(labels, n)
        self._loader, self.batch_size, self.drop_last = loader, loader.batch_size, loader.drop_last
        if is_new:
            self._warn_of_short_clients()

    def _asks_for_classes(self, num_samples: int) -> bool:
        """Whether classes decide who gets what: integer targets may well be no classes."""
        if self.partition_path is None:
            return self.skew.needs_labels
        return Partition.load(self.partition_path).fingerprint != unlabelled_fingerprint(num_samples)

    def _warn_of_short_clients(self) -> None:
        short = [
            client
            for client, (size, kept) in enumerate(zip(self.partition.sizes, self.client_sizes, strict=True))
            if size > kept
        ]
        if short:
            rank_zero_warn(
                f"The training loader has `drop_last=True`: {len(short)} of {self.num_clients} clients (the first is "
                f"client {short[0]} with {self.partition.sizes[short[0]]} samples) have no whole batch of "
                f"{self.batch_size} and count as empty."
            )

    @property
    def client_sizes(self) -> list[int]:
        """Samples per client, after ``setup("fit")``; 0 where ``drop_last`` leaves a client without a batch."""
        sizes = self.partition.sizes
        least = (self.batch_size or 1) if self.drop_last else 0
        kept: list[int] = np.where(sizes < least, 0, sizes).tolist()
        return kept

    def client_dataloader(self, client: int, generator: torch.Generator) -> Iterable[Any]:
        """The batches of one client; see :meth:`FederatedDataModule.client_dataloader`."""
        indices = self.partition[client]
        return [] if len(indices) == 0 or self._loader is None else self._loader.of(indices, generator)

    def train_dataloader(self) -> Any:
        """The wrapped module's loader over the pooled training set."""
        return self.datamodule.train_dataloader()

    def val_dataloader(self) -> Any:
        """The wrapped module's validation loaders, or none."""
        return self._wrapped("val_dataloader")

    def test_dataloader(self) -> Any:
        """The wrapped module's test loaders, or none."""
        return self._wrapped("test_dataloader")

    def predict_dataloader(self) -> Any:
        """The wrapped module's prediction loaders, or none."""
        return self._wrapped("predict_dataloader")

    def _wrapped(self, name: str) -> Any:
        return getattr(self.datamodule, name)() if is_overridden(name, self.datamodule) else []

    def teardown(self, stage: str) -> None:
        """Tear the wrapped module down."""
        self.datamodule.teardown(stage)

    def on_exception(self, exception: BaseException) -> None:
        """Pass the exception to the wrapped module."""
        self.datamodule.on_exception(exception)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped module's state."""
        return self.datamodule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the wrapped module's state."""
        self.datamodule.load_state_dict(state_dict)
