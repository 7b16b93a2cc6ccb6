"""FedDyn's duals with a mix of plain and perturbed gradients."""

from typing import Literal

from torch import Tensor

from lightning_fedstop.core.aggregation import RunningMean
from lightning_fedstop.methods.base import Client, Federation, LocalStep
from lightning_fedstop.methods.feddyn import FedDyn
from lightning_fedstop.methods.sharpness import perturbation
from lightning_fedstop.utilities.validate import not_negative, one_of, within_unit

DualAverage = Literal["all", "sampled"]


class FedSpeed(FedDyn):
    """FedSpeed (Sun et al. 2023, "FedSpeed: Larger Local Interval, Less Communication Round, and Higher Accuracy").

    With lambda = 1/alpha of the paper's proximal term, in the scaled form of :class:`FedDyn`::

        g       = (1 - mix) g_m(x) + mix g_m(x + rho g_m(x) / ||g_m(x)||)
        v       = g + alpha (x - theta_{r-1} + h_m)
        theta_r = mean of theta_m + mean of h_m

    Keeps the mean dual and, for each client that has taken part, h_m. ``rho=0`` or ``mix=0`` is FedDyn.

    Args:
        alpha: 1/lambda, weight of the proximal term, above 0; 0.1 is recommended.
        rho: radius of the perturbation, at least 0; 0.1 is recommended.
        mix: share of the perturbed gradient, in [0, 1]; the paper's alpha.
        dual_average: ``"all"`` averages h_m over all N clients, as the authors' code; ``"sampled"`` over the cohort, as
            the published Algorithm 1.
        prox_inside_clip: clip the whole v; otherwise alpha x is added after the clip, see :class:`FedProx`.
        server_lr: eta_g, the factor on the mean update.
    """

    gradients_per_step = 2

    def __init__(
        self,
        alpha: float = 0.1,
        rho: float = 0.1,
        mix: float = 1.0,
        dual_average: DualAverage = "all",
        prox_inside_clip: bool = True,
        server_lr: float = 1.0,
    ) -> None:
        super().__init__(alpha, None, prox_inside_clip, server_lr)
        self.rho = not_negative("rho", rho, self)
        self.mix = within_unit("mix", mix, self)
        self.dual_average: DualAverage = one_of("dual_average", dual_average, ("all", "sampled"), self)

    def setup(self, federation: Federation) -> None:
        """Create the mean duals."""
        super().setup(federation)
        self.sampled_duals = RunningMean(federation.theta)

    def gradient(self, step: LocalStep) -> None:
        """Fill ``step.grad`` with the mix of gradients at x and the perturbed point."""
        plain = step.backward()
        if not self.rho or not self.mix:
            return
        kept = plain * (1 - self.mix) if self.mix < 1 else None
        mixed = step.backward(perturbation(plain, self.rho))
        if kept is not None:
            mixed.mul_(self.mix).add_(kept)

    def finish(self, client: Client, delta: Tensor, steps: int) -> None:
        """Update h_m."""
        dual = self.duals.finish(client, delta)
        if self.dual_average == "sampled":
            self.sampled_duals.add(dual)

    def aggregate(self, theta: Tensor, mean_delta: Tensor) -> Tensor:
        """Average, and add the mean dual."""
        if self.dual_average == "all":
            return super().aggregate(theta, mean_delta)
        self.duals.aggregate()
        mean_dual = self.sampled_duals.compute(self.federation.reduce)
        self.sampled_duals = RunningMean(theta)
        return (theta + self.server_lr * mean_delta + mean_dual).to(theta.dtype)
