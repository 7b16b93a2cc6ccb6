"""Momentum-guided sharpness-aware steps with control variates."""

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedstop.core.aggregation import RunningMean
from lightning_fedstop.core.parameters import norm
from lightning_fedstop.methods.base import Client, Federation, LocalStep
from lightning_fedstop.methods.control_variates import ControlGain, ControlUpdate
from lightning_fedstop.methods.scaffold import SCAFFOLD
from lightning_fedstop.methods.sharpness import perturbation, scalar_perturbation
from lightning_fedstop.utilities.validate import not_negative, one_of, within_unit

WMSAMPerturbation = Literal["look_ahead", "official_direction", "released_code"]
Agreement = Literal["one_plus_cosine", "published"]


class FedWMSAM(SCAFFOLD):
    """FedWMSAM (Li et al. 2025, "Fast and Flat Federated Learning via Weighted Momentum ..."), in consistent units.

    With the global momentum m (in gradient direction), corr = c - c_m and m_m = m + alpha/(1-alpha) corr::

        u_k  = theta_{r-1} - lr S(k, mu_h) m_m - x_k,   e_k = rho u_k / ||u_k||
        v    = alpha (g_m(x_k + e_k) + corr) + (1 - alpha) m

    and after a round, with the old m in the cosine::

        alpha += lambda (clip(mean of 1 + cos(Delta_m, m), 0.1, 0.9) - alpha)
        m      = -(weighted mean of Delta_m / (G_m lr)),   c as in SCAFFOLD

    From a client that has no gain G_m for all parameters (see :class:`SCAFFOLD`), m takes the mean v of its steps.
    Keeps c, m and alpha and, for each client that has taken part, c_m. ``alpha_init=1, alpha_rate=0, rho=0`` is
    SCAFFOLD.

    Args:
        rho: radius of the perturbation, at least 0; the authors find 0.01 best.
        alpha_init: alpha of round 1, in [0, 1]; the authors' code has 0.1. Round 1 has m = 0, so its effective
            learning rate is alpha_init times the solver's.
        alpha_rate: lambda, how fast alpha follows the agreement, in [0, 1].
        perturbation: ``"look_ahead"``, above; ``"official_direction"``, e = -rho n(theta_{r-1} + k m_m - x_k);
            ``"released_code"``, that direction by the authors' rule of one number per tensor.
        agreement: ``"one_plus_cosine"``, above; ``"published"``, the mean of cos(Delta_m, -m).
        momentum_decay: a factor on m; the released code has the decay of the learning rate here.
        control_gain: G_m, as in :class:`SCAFFOLD`.
        control_update: as in :class:`SCAFFOLD`.
        server_lr: eta_g, the factor on the mean update.
    """

    download_vectors = 3

    def __init__(
        self,
        rho: float = 0.01,
        alpha_init: float = 0.1,
        alpha_rate: float = 0.01,
        perturbation: WMSAMPerturbation = "look_ahead",
        agreement: Agreement = "one_plus_cosine",
        momentum_decay: float = 1.0,
        control_gain: ControlGain = "S",
        control_update: ControlUpdate | None = None,
        server_lr: float = 1.0,
    ) -> None:
        super().__init__(control_gain, control_update, server_lr)
        self.control.needs_mean = True
        self.rho = not_negative("rho", rho, self)
        self.alpha_init = within_unit("alpha_init", alpha_init, self)
        self.alpha_rate = within_unit("alpha_rate", alpha_rate, self)
        kinds = ("look_ahead", "official_direction", "released_code")
        self.perturbation: WMSAMPerturbation = one_of("perturbation", perturbation, kinds, self)
        self.agreement: Agreement = one_of("agreement", agreement, ("one_plus_cosine", "published"), self)
        self.momentum_decay = not_negative("momentum_decay", momentum_decay, self)

    def setup(self, federation: Federation) -> None:
        """Create c, m and alpha."""
        super().setup(federation)
        self.alpha = self.alpha_init
        self.m = torch.zeros_like(federation.theta)
        self._start_round()

    def _start_round(self) -> None:
        self.directions = RunningMean(self.m)
        self.agreements = RunningMean(self.m.new_zeros(()))

    def start(self, client: Client) -> None:
        """Prepare c - c_m and the client's momentum m_m."""
        super().start(client)
        look_ahead = self.m
        if self.alpha < 1:
            look_ahead = look_ahead + self.alpha / (1 - self.alpha) * client.vectors["correction"]
        client.vectors["momentum"] = look_ahead

    def gradient(self, step: LocalStep) -> None:
        """Fill ``step.grad`` with the gradient at the point that the momentum leads to."""
        step.backward(self._perturb(step) if self.rho else None)

    def _perturb(self, step: LocalStep) -> Tensor:
        client, momentum = step.client, step.client.vectors["momentum"]
        if self.perturbation == "look_ahead":
            ahead = client.motion.distance(step.k, step.x)
            return perturbation(client.theta - ahead * momentum - step.x, self.rho)
        direction = client.theta + step.k * momentum - step.x
        if self.perturbation == "official_direction":
            return perturbation(-direction, self.rho)
        return scalar_perturbation(-direction, self.rho, self.federation.tensor_sizes)

    def correct(self, step: LocalStep) -> None:
        """Mix: alpha (g + c - c_m) + (1 - alpha) m."""
        super().correct(step)
        step.grad.mul_(self.alpha).add_(self.m, alpha=1 - self.alpha)

    def finish(self, client: Client, delta: Tensor, steps: int) -> None:
        """Update c_m and the round's means of directions and agreements with m."""
        super().finish(client, delta, steps)
        if not client.motion.rests:
            self.directions.add(self._direction(client, delta, steps), client.weight)
        # `normalized` would bring its epsilon into the cosine.
        norms = norm(delta) * norm(self.m)
        cosine = torch.where(norms > 0, (delta * self.m).sum(dim=-1) / norms, 0.0)
        value = 1 + cosine if self.agreement == "one_plus_cosine" else -cosine
        self.agreements.add(torch.where(norms > 0, value, 0.0))

    def _direction(self, client: Client, delta: Tensor, steps: int) -> Tensor:
        """Return the mean v of the client's steps."""
        if client.motion.started_even or "gradient_sum" not in client.vectors:
            return self.control.mean_step(client, delta, steps, self.m)
        gradient = self.control.mean_gradient(client) + client.vectors["correction"]
        return self.alpha * gradient + (1 - self.alpha) * self.m

    def uploads(self, client: Client) -> int:
        """Count as SCAFFOLD, and the mean gradient where m needs it."""
        return super().uploads(client) + (self.control.update == "option_I" and "gradient_sum" in client.vectors)

    def aggregate(self, theta: Tensor, mean_delta: Tensor) -> Tensor:
        """Update alpha, m and c, and average as FedAvg."""
        agreement = float(self.agreements.compute(self.federation.reduce))
        self.alpha += self.alpha_rate * (min(max(agreement, 0.1), 0.9) - self.alpha)
        if self.directions.total_weight(self.federation.reduce):
            self.m = (self.momentum_decay * self.directions.compute(self.federation.reduce)).to(theta.dtype)
        self._start_round()
        return super().aggregate(theta, mean_delta)

    def state_dict(self) -> dict[str, Any]:
        """Return the server's c, m and alpha."""
        return {**super().state_dict(), "m": self.m, "alpha": self.alpha}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load c, m and alpha."""
        super().load_state_dict(state_dict)
        self.m = state_dict["m"].to(self.m)
        self.alpha = state_dict["alpha"]
