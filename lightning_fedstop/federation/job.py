"""What a client is given in a round, and what it sends back."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fedstop.methods.base import Client


@dataclass
class LocalUpdate:
    """What a client sends back.

    Attributes:
        delta: shape ``(d,)``; Delta_m, the last local model minus the global model, in the global model's dtype.
        steps: K_m, the local steps taken.
    """

    delta: Tensor
    steps: int


@dataclass
class ClientResult:
    """A client at the end of its local steps, where several train at once.

    Attributes:
        steps: the local steps it took.
        x: shape ``(d,)``; its local model.
        state: buffers and frozen parameters that its training may have changed, by name.
        vectors: what the method left in ``client.vectors``.
        logged: what was logged, for :meth:`ResultCollector.merge`.
    """

    steps: int
    x: Tensor
    state: dict[str, Tensor]
    vectors: dict[str, Tensor]
    logged: dict[str, Any] = field(default_factory=dict)


@dataclass
class Job:
    """A client's part in a round.

    Attributes:
        client: who trains.
        make_batches: makes the client's loader anew; it is iterated once per local epoch.
        seed: of the global random generators while the client trains.
    """

    client: Client
    make_batches: Callable[[], Iterable[Any]]
    seed: int


@contextmanager
def naming_client(client: Client) -> Iterator[None]:
    """Add to an exception inside the block whose training raised it; its class and its text stay as they are."""
    try:
        yield
    except Exception as error:
        sentence = f"It was raised in the training of client {client.index} in round {client.round}."
        if sys.version_info >= (3, 11):
            error.add_note(sentence)
        else:
            rank_zero_warn(f"{type(error).__name__}: {error}. {sentence}")
        raise
