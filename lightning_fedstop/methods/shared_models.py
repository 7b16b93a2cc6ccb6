"""Global models that clients received last, one copy for all clients of a round."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_fedstop.core.client_states import ClientStates


class SharedModels:
    """Global model that each client received last, one copy a round.

    A model is dropped with the last client that needs it.
    Far fewer models than clients are alive: about (N/M) log M of them, M the clients in a round.

    Args:
        models: keeps the models, by round; on every process all of them.
    """

    def __init__(self, models: ClientStates) -> None:
        self.models = models
        self.round_of: dict[int, int] = {}
        self._new: list[tuple[int, int]] = []

    @property
    def rounds(self) -> set[int]:
        """Rounds whose model some client still needs."""
        return {round for _, round in self.models.written()}

    def get(self, client: int) -> Tensor | None:
        """Return the model that a client received last, shape ``(d,)``, or ``None``."""
        round = self.round_of.get(client)
        return None if round is None else self.models.get("model", round)

    def put(self, client: int, round: int) -> None:
        """Note that a client received the global model; counts from :meth:`share` on."""
        self._new.append((client, round))

    def share(self, gather: Callable[[list[Any]], list[list[Any]]], model: Tensor) -> None:
        """End a round: store its model for the noted clients, drop what nobody needs."""
        new = [item for part in gather(self._new) for item in part]
        self._new = []
        self.round_of.update(new)
        for round in {round for _, round in new}:
            self.models.set("model", round, model)
        for round in self.rounds - set(self.round_of.values()):
            self.models.pop(("model", round))

    def state_dict(self) -> dict[str, Any]:
        """Return the models by round, and the clients' rounds."""
        return {"models": self.models.state_dict(), "round_of": dict(self.round_of)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of :meth:`state_dict`."""
        self.models.load_state_dict(state_dict["models"])
        self.round_of = dict(state_dict["round_of"])
        self._new = []
