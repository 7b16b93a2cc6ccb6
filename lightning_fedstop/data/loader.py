"""A user's training loader: which samples it draws, and the loader of some of them that makes batches as it does."""

from collections.abc import Sized
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data._utils.collate import default_convert  # no public name; set where `batch_size=None`

from lightning_fedstop.data.classes import IntArray

KEPT = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)
"""Arguments of a ``DataLoader`` that the clients' loaders have as well."""

DECIDED = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator")
"""Arguments that are decided here: a client has samples, an order and a generator of its own."""

OWN_CLIENTS = "write a `FederatedDataModule` of your own, whose `client_dataloader` gives the loader of each"


class TrainingLoader:
    """What the clients' loaders take from the loader of the whole training set.

    The training set is what the sampler can draw. Batches are made as in ``loader``: of its size, without the short
    last one where it has ``drop_last``, from lists of indices where its sampler is a ``BatchSampler``, or, with
    ``batch_size=None``, of one item each.

    Args:
        loader: a torch ``DataLoader`` over a map-style data set.
        source: what gave it, for messages.
        batch_size: another size than that of ``loader``.

    Attributes:
        dataset: the data set.
        samples: int64, shape ``(n,)``; its items that can be drawn, in ascending order.
        batch_size: samples of a batch; ``None`` where each item is one.
        drop_last: whether the short last batch is left out.
        by_list: whether the data set is indexed by lists.

    Raises:
        TypeError: if ``loader`` is no such loader, or what its sampler can draw is unknown.
        ValueError: if its sampler draws what the data set has not.
    """

    def __init__(self, loader: Any, source: str, batch_size: int | None = None) -> None:
        _check_class(loader, source)
        drawer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        in_batches = _iterates_as(drawer, BatchSampler)
        if loader.batch_sampler is not None and not in_batches:
            raise TypeError(
                f"{source} draws batches with {type(drawer).__name__}, which cannot be dealt to clients: give its "
                f"DataLoader a `batch_size`, or torch's own BatchSampler."
            )
        sampler = drawer.sampler if in_batches else drawer
        self._loader = loader
        self.source = source
        self.dataset: Dataset[Any] = loader.dataset
        # A data set without a length can be drawn from by those samplers that name its items.
        size = len(loader.dataset) if isinstance(loader.dataset, Sized) else None
        self.samples = _items_drawn(sampler, size, source)
        self._is_whole = len(self.samples) == size
        self.batch_size = batch_size or (drawer.batch_size if in_batches else None)
        self.drop_last = bool(in_batches and drawer.drop_last)
        self.by_list = in_batches and loader.batch_sampler is None
        self._replaced = None if _draws_each_once(sampler) else type(sampler).__name__

    def draws_from(self, other: "TrainingLoader | None") -> bool:
        """Whether the training set is that of another loader."""
        return other is not None and self.dataset is other.dataset and np.array_equal(self.samples, other.samples)

    @property
    def training_set(self) -> Dataset[Any]:
        """The n samples that can be drawn."""
        return self.dataset if self._is_whole else self._part(self.samples)

    def _part(self, samples: IntArray) -> Subset[Any]:
        return Subset(self.dataset, samples.tolist())

    def tell_of_replaced_sampler(self) -> None:
        """Warn that clients draw samples less or more often than the loader does, if so."""
        if self._replaced:
            rank_zero_warn(
                f"{self.source} draws with {self._replaced}; each client draws its own samples without replacement "
                f"instead."
            )

    def tell_of_parts(self) -> None:
        """Say that the parts of a data set could be clients, if it has any."""
        whole = self.dataset
        while isinstance(whole, Subset):
            whole = whole.dataset
        if isinstance(whole, ConcatDataset) and len(whole.datasets) > 1:
            rank_zero_info(
                f"{self.source} joins {len(whole.datasets)} data sets, whose samples are mixed before they are dealt; "
                f"if each is a client, {OWN_CLIENTS}, or a `Skew` of your own that keeps them apart."
            )

    def of(self, samples: IntArray, generator: torch.Generator) -> DataLoader[Any]:
        """The loader of one client.

        Args:
            samples: shape ``(n_m,)``; positions in :attr:`samples`.
            generator: shuffles each epoch.
        """
        part = self._part(self.samples[samples])
        # A torch that lacks an argument has no such attribute either.
        options = {name: getattr(self._loader, name) for name in KEPT if hasattr(self._loader, name)}
        if self.by_list:
            batches = BatchSampler(RandomSampler(part, generator=generator), self.batch_size or 1, self.drop_last)
            return DataLoader(part, batch_size=None, sampler=batches, generator=generator, **options)
        if self.batch_size is not None and options["collate_fn"] is default_convert:
            del options["collate_fn"]
        return DataLoader(part, self.batch_size, shuffle=True, drop_last=self.drop_last, generator=generator, **options)


def _check_class(loader: Any, source: str) -> None:
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"{source} must return one torch DataLoader to be dealt to clients, got {type(loader).__name__}: where "
            f"each of several data sets is a client, {OWN_CLIENTS}."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(f"{source} streams an IterableDataset, which cannot be dealt to clients: use a map-style one.")
    if not _iterates_as(loader, DataLoader):
        raise TypeError(
            f"{source} returns a {type(loader).__name__}, whose own `__iter__` the loaders of clients would lack: "
            f"return a torch DataLoader."
        )


def _iterates_as(value: Any, kind: type) -> bool:
    """Whether a value, of whatever subclass, is gone through as ``kind`` itself is."""
    return isinstance(value, kind) and type(value).__iter__ is kind.__iter__  # type: ignore[attr-defined]


def _items_drawn(sampler: Any, size: int | None, source: str) -> IntArray:
    """The items of a data set of ``size`` (``None``: unknown) that a sampler can draw, in ascending order.

    Raises:
        TypeError: if that cannot be known.
        ValueError: if some of them do not exist.
    """
    if _iterates_as(sampler, RandomSampler) or _iterates_as(sampler, SequentialSampler):
        items = np.arange(len(sampler.data_source))
    elif _iterates_as(sampler, DistributedSampler):
        items = np.arange(len(sampler.dataset))
    elif _iterates_as(sampler, SubsetRandomSampler):
        items = _numbers(sampler.indices)
    elif _iterates_as(sampler, WeightedRandomSampler):
        items = np.flatnonzero(np.asarray(sampler.weights))
    elif isinstance(sampler, list | tuple | range | np.ndarray | torch.Tensor):
        items = _numbers(sampler)
    else:
        raise TypeError(
            f"{source} draws with {type(sampler).__name__}, and which samples that can draw is unknown: put the "
            f"training samples into a torch `Subset`, and leave the sampler out."
        )
    items = np.unique(items).astype(np.int64)
    if size is not None and len(items) and (items[0] < 0 or items[-1] >= size):
        raise ValueError(
            f"{source} draws the items {items[0]} to {items[-1]} of a data set that has {size}, counted from 0."
        )
    return items


def _numbers(values: Any) -> IntArray:
    return np.asarray(values if isinstance(values, torch.Tensor | np.ndarray) else list(values), dtype=np.int64)


def _draws_each_once(sampler: Any) -> bool:
    """Whether an epoch has each sample of the training set once."""
    if isinstance(sampler, WeightedRandomSampler):
        return False
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    drawn = getattr(sampler, "indices", sampler)
    if isinstance(sampler, SequentialSampler | DistributedSampler):
        return True
    return len(np.unique(_numbers(drawn))) == len(drawn)
