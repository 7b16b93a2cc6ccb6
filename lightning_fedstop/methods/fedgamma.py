"""SCAFFOLD with sharpness-aware local steps."""

from lightning_fedstop.methods.base import LocalStep
from lightning_fedstop.methods.control_variates import ControlGain, ControlUpdate
from lightning_fedstop.methods.scaffold import SCAFFOLD
from lightning_fedstop.methods.sharpness import sharpness_aware_gradient
from lightning_fedstop.utilities.validate import not_negative


class FedGamma(SCAFFOLD):
    """FedGamma (Dai et al. 2024, "FedGAMMA: Federated Learning with Global Sharpness-Aware Minimization").

    :class:`SCAFFOLD` with the gradient of :class:`FedSAM`; the perturbation follows the raw gradient::

        v = g_m(x + e) - c_m + c,   e = rho g_m(x) / ||g_m(x)||

    Keeps what SCAFFOLD keeps. ``rho=0`` is SCAFFOLD; round 1 is FedSAM.

    Args:
        rho: radius of the perturbation, at least 0; 0.01 is recommended.
        control_gain: as in :class:`SCAFFOLD`.
        control_update: as in :class:`SCAFFOLD`.
        server_lr: eta_g, the factor on the mean update.
    """

    gradients_per_step = 2

    def __init__(
        self,
        rho: float = 0.01,
        control_gain: ControlGain = "S",
        control_update: ControlUpdate | None = None,
        server_lr: float = 1.0,
    ) -> None:
        super().__init__(control_gain, control_update, server_lr)
        self.rho = not_negative("rho", rho, self)

    def gradient(self, step: LocalStep) -> None:
        """Fill ``step.grad`` with the gradient at the perturbed point."""
        sharpness_aware_gradient(step, self.rho)
