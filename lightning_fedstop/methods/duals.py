"""Dual variables and the proximal term, shared by FedProx, FedDyn, FedSpeed and FedSMOO."""

from typing import Any

import torch
from torch import Tensor

from lightning_fedstop.core.aggregation import RunningSum
from lightning_fedstop.methods.base import Client, Federation, LocalStep, add_scaled


def add_proximal_term(step: LocalStep, weight: float | Tensor, inside_clip: bool) -> None:
    """Add the gradient of (weight/2) ||x - theta||^2; outside the clip, its part at theta."""
    theta = step.client.theta
    add_scaled(step.grad, step.x - theta if inside_clip else -theta, weight)


class Duals:
    """Scaled duals h_m of the clients and their mean H, all zero at first.

    H is the mean over all N clients.

    ``h_m += Delta_m`` after a client's steps, ``H += (1/N) sum over the cohort of Delta_m`` after a round.
    """

    def setup(self, federation: Federation) -> None:
        """Create H."""
        self.federation = federation
        self.mean = torch.zeros_like(federation.theta)
        self.change = RunningSum(self.mean)

    def start(self, client: Client) -> Tensor:
        """Return the client's h_m."""
        client.vectors["dual"] = self.federation.states.get("h", client.index)
        return client.vectors["dual"]

    def finish(self, client: Client, delta: Tensor) -> Tensor:
        """Update h_m, add its change to the round's sum, and return it."""
        before = client.vectors["dual"]
        after = self.federation.states.set("h", client.index, before + delta)
        self.change.add(after - before.double())
        return after

    def aggregate(self) -> Tensor:
        """Apply the round's changes to H and return it."""
        total = self.change.take(self.federation.reduce)
        self.mean = (self.mean + total / self.federation.num_clients).to(self.mean.dtype)
        return self.mean

    def state_dict(self) -> dict[str, Any]:
        """Return the server's H; the clients' h_m are among the loop's client states."""
        return {"H": self.mean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of :meth:`state_dict`."""
        self.mean = state_dict["H"].to(self.mean)
