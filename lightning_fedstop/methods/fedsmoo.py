"""Dynamic regularisation of both the model and the perturbation."""

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedstop.core.aggregation import RunningMean
from lightning_fedstop.methods.base import Client, Federation, LocalStep
from lightning_fedstop.methods.feddyn import FedDyn
from lightning_fedstop.methods.sharpness import perturbation
from lightning_fedstop.utilities.validate import not_negative, one_of

Message = Literal["residual", "mu"]


class FedSMOO(FedDyn):
    """FedSMOO (Sun et al. 2023, "Dynamic Regularized Sharpness Aware Minimization in Federated Learning").

    With beta = 1/alpha of the paper, and duals mu_m of the perturbation beside h_m of :class:`FedDyn`, each step::

        e    = rho (g_m(x) - mu_m - s) / ||g_m(x) - mu_m - s||,   mu_m += e - s
        v    = g_m(x + e) + alpha (x - theta_{r-1} + h_m)

    and after a round, with the last step's e::

        s       = rho * n(mean of (mu_m - e))
        theta_r = mean of theta_m + H

    Keeps H and s and, for each client that has taken part, h_m and mu_m. ``rho=0`` is FedDyn. Where the messages
    nearly cancel, the direction of s is noise.

    Args:
        alpha: 1/beta, weight of the proximal term, above 0; 0.1 is recommended.
        rho: radius of the perturbation, at least 0; 0.1 is recommended.
        message: what s is made of: ``"residual"``, mu_m - e, as published, or ``"mu"``, mu_m, as the authors' code.
        prox_inside_clip: clip the whole v; otherwise alpha x is added after the clip, see :class:`FedProx`.
        server_lr: eta_g, the factor on the mean update.
    """

    gradients_per_step = 2
    download_vectors = 2
    upload_vectors = 2

    def __init__(
        self,
        alpha: float = 0.1,
        rho: float = 0.1,
        message: Message = "residual",
        prox_inside_clip: bool = True,
        server_lr: float = 1.0,
    ) -> None:
        super().__init__(alpha, None, prox_inside_clip, server_lr)
        self.rho = not_negative("rho", rho, self)
        self.message: Message = one_of("message", message, ("residual", "mu"), self)

    def setup(self, federation: Federation) -> None:
        """Create H and s."""
        super().setup(federation)
        self.s = torch.zeros_like(federation.theta)
        self.messages = RunningMean(federation.theta)

    def start(self, client: Client) -> None:
        """Prepare h_m and mu_m."""
        super().start(client)
        if self.rho:
            client.vectors["mu"] = self.federation.states.get("mu", client.index)

    def gradient(self, step: LocalStep) -> None:
        """Fill ``step.grad`` with the gradient at the point that the corrected gradient leads to."""
        gradient = step.backward()
        if not self.rho:
            return
        ascent = perturbation(gradient - step.client.vectors["mu"] - self.s, self.rho)
        step.client.vectors["ascent"] = ascent
        step.backward(ascent)

    def correct(self, step: LocalStep) -> None:
        """Add the proximal term and the dual, and update mu_m.

        Not before: a batch may be skipped until here.
        """
        super().correct(step)
        if self.rho:
            vectors = step.client.vectors
            vectors["e"] = vectors["ascent"]
            vectors["mu"] += vectors["e"] - self.s

    def finish(self, client: Client, delta: Tensor, steps: int) -> None:
        """Update h_m and mu_m, and add the client's message to the round's mean."""
        super().finish(client, delta, steps)
        if self.rho:
            mu = self.federation.states.set("mu", client.index, client.vectors["mu"])
            self.messages.add(mu if self.message == "mu" else mu - client.vectors["e"])

    def aggregate(self, theta: Tensor, mean_delta: Tensor) -> Tensor:
        """Update s and H; average, and add H."""
        if self.rho:
            self.s = perturbation(self.messages.compute(self.federation.reduce), self.rho).to(theta.dtype)
            self.messages = RunningMean(theta)
        return super().aggregate(theta, mean_delta)

    def state_dict(self) -> dict[str, Any]:
        """Return the server's H and s."""
        return {**super().state_dict(), "s": self.s}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load H and s."""
        super().load_state_dict(state_dict)
        self.s = state_dict["s"].to(self.s)
