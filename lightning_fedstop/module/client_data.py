"""What a data module says of its clients: how many samples they have, and their batches."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader


def client_sizes(datamodule: Any) -> list[int]:
    """The samples of each client.

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
