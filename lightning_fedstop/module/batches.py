"""The clients' batches: how many there are, where they come from, and their way to the device."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from lightning.fabric.strategies import Strategy
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class BatchTransfer:
    """Calls the three transfer hooks; a hook that the data module overrides wins over the module's.

    Args:
        module: the module that will see the batch.
        datamodule: the data module that made it, if any.
        strategy: gives the device, and the input dtype of a "true" precision.
    """

    def __init__(self, module: LightningModule, datamodule: LightningDataModule | None, strategy: Strategy) -> None:
        self._arguments = (datamodule, strategy)
        owners = [
            datamodule if datamodule is not None and is_overridden(hook, datamodule) else module for hook in HOOKS
        ]
        self._before, self._move, self._after = (getattr(o, hook) for o, hook in zip(owners, HOOKS, strict=True))
        self._is_users_move = is_overridden(HOOKS[1], owners[1])
        self.device: torch.device = strategy.root_device
        # As in a `Trainer`: autocast takes care of a mixed precision, and "32-true" leaves the data's dtype alone.
        converts = strategy.precision.precision in ("16-true", "bf16-true", "64-true")
        self._convert = strategy.precision.convert_input if converts else (lambda batch: batch)

    def of_copy(self, module: LightningModule) -> "BatchTransfer":
        """Make the same for a copy of the module."""
        return BatchTransfer(module, *self._arguments)

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Give the batch as ``training_step`` sees it."""
        batch = self._before(batch, dataloader_idx)
        if self._is_users_move or not self._is_there(batch):
            batch = self._move(batch, self.device, dataloader_idx)
        return self._convert(self._after(batch, dataloader_idx))

    def _is_there(self, batch: Any) -> bool:
        """True if a batch of the usual form is on the device; to look for tensors in any form takes much longer."""
        return type(batch) in (tuple, list) and all(type(x) is Tensor and x.device == self.device for x in batch)


def client_sizes(datamodule: Any) -> list[int]:
    """Read the samples of each client.

    Raises:
        TypeError: if ``client_sizes`` are no whole numbers.
        ValueError: if one is negative, or there is none.
    """
    name, given = type(datamodule).__name__, datamodule.client_sizes
    try:
        sizes = [] if isinstance(given, Mapping | str) else [operator.index(size) for size in given]
    except TypeError:
        sizes = []
        given = list(given) if isinstance(given, Iterable) else given
    if not sizes:
        raise TypeError(
            f"`{name}.client_sizes` must be whole numbers, one for each client in order, got {given!r:.80}."
        )
    if (least := min(sizes)) < 0:
        raise ValueError(f"`{name}.client_sizes` must be at least 0, got {least} for client {sizes.index(least)}.")
    return sizes


class LocalBatches:
    """A client's batches; each ``iter()`` is one local epoch.

    Several loaders, in a list or a dict, are combined as a ``Trainer`` combines them, with the longest as the epoch.

    Args:
        given: what ``client_dataloader`` gave.
        client: whose they are.
        source: the data module's class, for messages.

    Attributes:
        given: the same, as it was given.

    Raises:
        TypeError: if ``given`` is nothing that gives batches.
    """

    def __init__(self, given: Any, client: int, source: str) -> None:
        self.client, self.source, self.given = client, source, given
        parts = list(given.values()) if isinstance(given, Mapping) else given
        if isinstance(parts, list | tuple) and any(isinstance(part, DataLoader) for part in parts):
            given = CombinedLoader(given, "max_size_cycle")
        if isinstance(given, Mapping | str) or not isinstance(given, Iterable):
            raise TypeError(
                f"`{source}.client_dataloader` must give the batches of client {client}, such as a DataLoader, got "
                f"{type(given).__name__}."
            )
        self._batches = given
        self._has_batches = False

    def __len__(self) -> int:
        """Batches of an epoch, where the loader knows them."""
        if isinstance(self._batches, CombinedLoader):
            # Its own length needs an iterator, which draws from the loaders' generators.
            return max(len(loader) for loader in self._batches.flattened)
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        had_batches, is_empty = self._has_batches, True
        is_combined = isinstance(self._batches, CombinedLoader)
        for batch in self._batches:
            self._has_batches, is_empty = True, False
            # A combined loader gives the numbers of the batch and of its loader as well.
            yield batch[0] if is_combined else batch
        if had_batches and is_empty:
            raise ValueError(
                f"The batches of client {self.client} are used up after one pass: `{self.source}.client_dataloader` "
                f"must give some that can be gone through again, such as a DataLoader."
            )


def limited(batches: Iterable[Any], limit: int | float | None) -> Iterator[Any]:
    """Give the first ``limit`` batches (int), that share (float), or all (``None``)."""
    return islice(batches, _count(batches, limit))


def limited_length(batches: Iterable[Any], limit: int | float | None) -> int | None:
    """Count the batches that :func:`limited` gives; ``None`` where that is not known."""
    length, count = length_of(batches), _count(batches, limit)
    return length if count is None or length is None else min(length, count)


def _count(batches: Iterable[Any], limit: int | float | None) -> int | None:
    if not isinstance(limit, float):
        return limit
    length = length_of(batches)
    if length is None and 0 < limit < 1:
        raise ValueError(f"A share of the batches ({limit}) needs batches whose number is known; give an integer.")
    return {0.0: 0, 1.0: None}.get(limit, max(1, int(limit * (length or 0))))


def length_of(batches: Iterable[Any]) -> int | None:
    """Count batches; ``None`` where their number is not known."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
