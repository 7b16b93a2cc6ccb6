"""Dual variables and the proximal term, shared by FedDyn, FedSpeed and FedSMOO (and FedProx, which has no dual)."""

from typing import Any

import torch
from torch import Tensor

from lightning_fedstop.core.aggregation import RunningSum
from lightning_fedstop.methods.base import Client, Federation, LocalStep, add_scaled


def add_proximal_term(step: LocalStep, weight: float | Tensor, inside_clip: bool) -> None:
    """Add the gradient of (weight/2) ||x - theta||^2, or, outside the clip, its part at theta alone."""
    theta = step.client.theta
    add_scaled(step.grad, step.x - theta if inside_clip else -theta, weight)


class Duals:
    """The clients' scaled duals h_m and their mean over all N clients, H; all zero at first.

    ``h_m += Delta_m`` after a client's steps, ``H += (1/N) sum over the cohort of Delta_m`` after a round.
    """

    def setup(self, federation: Federation) -> None:
        """Create H."""
        self.federation = federation
        self.mean = torch.zeros_like(federation.theta)
        self.change = RunningSum(self.mean)

    def start(self, client: Client) -> Tensor:
        """The client's h_m."""
        client.vectors["dual"] = self.federation.states.get("h", client.index)
        return client.vectors["dual"]

    def finish(self, client: Client, delta: Tensor) -> Tensor:
        """Update h_m and add its change to the round's sum; gives the new h_m."""
        before = client.vectors["dual"]
        after = self.federation.states.set("h", client.index, before + delta)
        self.change.add(after - before.double())
        return after

    def aggregate(self) -> Tensor:
        """Apply the round's changes to H and give it."""
        total = self.change.take(self.federation.reduce)
        self.mean = (self.mean + total / self.federation.num_clients).to(self.mean.dtype)
        return self.mean

    def state_dict(self) -> dict[str, Any]:
        """The server's H; the clients' h_m are among the loop's client states."""
        return {"H": self.mean}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of :meth:`state_dict` back."""
        self.mean = state_dict["H"].to(self.mean)
