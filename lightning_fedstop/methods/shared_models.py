"""The global models that clients received when they last took part, one copy for all clients of a round."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor


class SharedModels:
    """Who received which global model last; a model is dropped with the last client that needs it.

    Far fewer models than clients are alive: about N/M of them, M the clients in a round.
    """

    def __init__(self) -> None:
        self.round_of: dict[int, int] = {}
        self.models: dict[int, Tensor] = {}
        self._new: list[tuple[int, int]] = []

    def get(self, client: int) -> Tensor | None:
        """The model, shape ``(d,)``, that a client received last; ``None`` if it never took part."""
        round = self.round_of.get(client)
        return None if round is None else self.models[round]

    def put(self, client: int, round: int, model: Tensor) -> None:
        """Note that a client received ``model`` in ``round``; counts from :meth:`share` on."""
        self._new.append((client, round))

    def share(self, gather: Callable[[list[Any]], list[list[Any]]], model: Tensor) -> None:
        """End a round in which the noted clients of all processes received ``model``, and drop what nobody needs."""
        for client, round in (item for part in gather(self._new) for item in part):
            self.round_of[client] = round
            self.models[round] = model
        self._new = []
        needed = Counter(self.round_of.values())
        self.models = {round: kept for round, kept in self.models.items() if needed[round]}

    def state_dict(self) -> dict[str, Any]:
        """The models by round, and the clients' rounds."""
        return {"models": dict(self.models), "round_of": dict(self.round_of)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of :meth:`state_dict` back."""
        self.models = dict(state_dict["models"])
        self.round_of = dict(state_dict["round_of"])
        self._new = []
