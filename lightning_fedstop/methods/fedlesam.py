"""Sharpness-aware steps whose perturbation costs no second pass."""

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedstop.methods.base import Client, FederatedMethod, Federation, LocalStep
from lightning_fedstop.methods.shared_models import SharedModels
from lightning_fedstop.methods.sharpness import perturbation, scalar_perturbation
from lightning_fedstop.utilities.validate import not_negative, one_of

Memory = Literal["client", "last_round"]
LESAMPerturbation = Literal["norm", "released_code"]


class FedLESAM(FederatedMethod):
    """FedLESAM (Fan et al. 2024, "Locally Estimated Global Perturbations are Better than Local Perturbations ...").

    The perturbation is estimated from the global model that the client received when it last took part, and stays the
    same for the round, so that a step costs one pass::

        v = g_m(x + e),   e = rho (theta_old - theta_{r-1}) / ||theta_old - theta_{r-1}||

    The server averages as in FedAvg. Keeps the old global models that some client last received, one copy for all
    clients of a round. ``rho=0``, and round 1, is FedAvg.

    Args:
        rho: radius of the perturbation, at least 0; to be tuned.
        memory: ``"client"``, as published; ``"last_round"`` takes theta_{r-2} for all clients and keeps one vector.
        perturbation: ``"norm"``, as published; ``"released_code"``, the authors' rule of one number per tensor.
        server_lr: eta_g, the factor on the mean update.
    """

    def __init__(
        self,
        rho: float = 0.01,
        memory: Memory = "client",
        perturbation: LESAMPerturbation = "norm",
        server_lr: float = 1.0,
    ) -> None:
        super().__init__(server_lr)
        self.rho = not_negative("rho", rho, self)
        self.memory: Memory = one_of("memory", memory, ("client", "last_round"), self)
        self.perturbation: LESAMPerturbation = one_of("perturbation", perturbation, ("norm", "released_code"), self)
        self.download_vectors = 1 if memory == "client" else 2

    def setup(self, federation: Federation) -> None:
        """Create the store of old models."""
        super().setup(federation)
        self.old = SharedModels(federation.states.companion())
        self.last: Tensor | None = None

    def start(self, client: Client) -> None:
        """Prepare the round's perturbation; none in a client's first round."""
        old = self.old.get(client.index) if self.memory == "client" else self.last
        if not self.rho or old is None:
            return
        direction = old - client.exact_theta
        if self.perturbation == "norm":
            client.vectors["e"] = perturbation(direction, self.rho)
        else:
            client.vectors["e"] = scalar_perturbation(direction, self.rho, self.federation.tensor_sizes)

    def gradient(self, step: LocalStep) -> None:
        """Fill ``step.grad`` with the gradient at the perturbed point, in one pass."""
        step.backward(step.client.vectors.get("e"))

    def finish(self, client: Client, delta: Tensor, steps: int) -> None:
        """Store the model that the client received."""
        if self.rho and self.memory == "client":
            self.old.put(client.index, client.round)

    def aggregate(self, theta: Tensor, mean_delta: Tensor) -> Tensor:
        """Average as FedAvg."""
        self.old.share(self.federation.gather, theta)
        if self.rho and self.memory == "last_round":
            self.last = theta
        return super().aggregate(theta, mean_delta)

    def state_dict(self) -> dict[str, Any]:
        """Return the old models and the rounds in which clients received them."""
        return {**self.old.state_dict(), "last": torch.empty(0) if self.last is None else self.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the old models."""
        self.old.load_state_dict(state_dict)
        last = state_dict["last"]
        self.last = last.to(self.federation.theta) if last.numel() else None
