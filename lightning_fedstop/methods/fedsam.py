"""FedAvg with sharpness-aware local steps."""

from lightning_fedstop.methods.base import FederatedMethod, LocalStep
from lightning_fedstop.methods.sharpness import sharpness_aware_gradient
from lightning_fedstop.utilities.validate import not_negative


class FedSAM(FederatedMethod):
    """FedSAM (Qu et al. 2022, "Generalized Federated Learning via Sharpness Aware Minimization").

    A client steps along the gradient at a nearby point of higher loss, on the same batch::

        v = g_m(x + e),   e = rho g_m(x) / ||g_m(x)||

    The server averages as in FedAvg. Keeps no state. ``rho=0`` is FedAvg, in one pass per step.

    Args:
        rho: radius of the perturbation, at least 0; 0.1 is common, the early-stopping paper tries 0.1 to 0.001.
        server_lr: eta_g, the factor on the mean update.
    """

    gradients_per_step = 2

    def __init__(self, rho: float = 0.1, server_lr: float = 1.0) -> None:
        super().__init__(server_lr)
        self.rho = not_negative("rho", rho, self)

    def gradient(self, step: LocalStep) -> None:
        """Fill ``step.grad`` with the gradient at the perturbed point."""
        sharpness_aware_gradient(step, self.rho)
