"""Dynamic regularisation: proximal steps with dual variables."""

from typing import Any, Literal

from torch import Tensor

from lightning_fedstop.methods.base import Client, FederatedMethod, Federation, LocalStep, add_scaled
from lightning_fedstop.methods.duals import Duals, add_proximal_term
from lightning_fedstop.utilities.validate import one_of, positive

AlphaScaling = Literal["inverse_size"]


class FedDyn(FederatedMethod):
    """FedDyn (Acar et al. 2021, "Federated Learning Based on Dynamic Regularization").

    In the scaled form, h_m = -(client gradient) / alpha, with H the mean of h_m over all N clients::

        v       = g_m(x) + alpha (x - theta_{r-1} + h_m)
        h_m    += Delta_m,   H += (1/N) sum_m Delta_m
        theta_r = mean of theta_m + H

    Keeps H and, for each client that has taken part, h_m. It is not FedAvg for alpha near 0: with all clients taking
    part, round 1 moves twice as far.

    Args:
        alpha: weight of the regularisation, above 0; the paper tries 0.1, 0.01 and 0.001.
        alpha_scaling: ``"inverse_size"`` gives client m the weight alpha * n_mean / n_m, as the method's first code.
        prox_inside_clip: clip the whole v; otherwise alpha x is added after the clip, see :class:`FedProx`.
        server_lr: eta_g, the factor on the mean update.
    """

    def __init__(
        self,
        alpha: float = 0.01,
        alpha_scaling: AlphaScaling | None = None,
        prox_inside_clip: bool = True,
        server_lr: float = 1.0,
    ) -> None:
        super().__init__(server_lr)
        self.alpha = positive("alpha", alpha, self)
        self.alpha_scaling = one_of("alpha_scaling", alpha_scaling, (None, "inverse_size"), self)
        self.prox_inside_clip = prox_inside_clip
        self.duals = Duals()

    def setup(self, federation: Federation) -> None:
        """Create H."""
        super().setup(federation)
        self.duals.setup(federation)
        self.mean_size = sum(federation.client_sizes) / federation.num_clients

    def weight(self, client: Client) -> float | Tensor:
        """Return the client's alpha, or those of a stack of clients."""
        return self.alpha if self.alpha_scaling is None else self.alpha * self.mean_size / client.num_samples

    def start(self, client: Client) -> None:
        """Prepare h_m."""
        self.duals.start(client)

    def correct(self, step: LocalStep) -> None:
        """Add the proximal term and the dual."""
        weight = self.weight(step.client)
        add_proximal_term(step, weight, self.prox_inside_clip)
        add_scaled(step.grad, step.client.vectors["dual"], weight)

    def after_clip(self, step: LocalStep) -> None:
        """Add alpha x, if the proximal term is split."""
        if not self.prox_inside_clip:
            add_scaled(step.grad, step.x, self.weight(step.client))

    def finish(self, client: Client, delta: Tensor, steps: int) -> None:
        """Update h_m."""
        self.duals.finish(client, delta)

    def aggregate(self, theta: Tensor, mean_delta: Tensor) -> Tensor:
        """Update H; average, and add it."""
        return super().aggregate(theta, mean_delta + self.duals.aggregate() / self.server_lr)

    def state_dict(self) -> dict[str, Any]:
        """Return the server's H."""
        return self.duals.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load H."""
        self.duals.load_state_dict(state_dict)
