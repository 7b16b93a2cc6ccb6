"""Methods as in the released code of the early-stopping paper.

Each class here is a published method with other defaults, to replay the paper's tables::

    --trainer.method released_code.FedLESAM

It is also known as ``ReleasedFedLESAM``, a name that no published method has, in configurations and checkpoints.

* Control variates are divided by L = E n_0 / B, made of client 0's samples for every client, a fraction, and without
  regard to momentum: they diverge under the paper's settings unless the clip holds them.
* The proximal term is split: only its half at the start point is inside the clip.
* FedLESAM and FedWMSAM perturb each tensor by one number, and FedLESAM remembers the last round only.
* FedSMOO's server averages mu_m, not mu_m - e.
* FedWMSAM starts with alpha = 0.001 and multiplies the momentum by the decay of the learning rate.

The early-stopping paper's alpha, lamb and rho are all 0.001 unless varied.
"""

from lightning_fedstop import methods
from lightning_fedstop.methods import FedAvg, FedSAM

__all__ = [
    "SCAFFOLD",
    "FedAvg",
    "FedDyn",
    "FedGamma",
    "FedLESAM",
    "FedProx",
    "FedSAM",
    "FedSMOO",
    "FedSpeed",
    "FedWMSAM",
    "ReleasedFedDyn",
    "ReleasedFedGamma",
    "ReleasedFedLESAM",
    "ReleasedFedProx",
    "ReleasedFedSMOO",
    "ReleasedFedSpeed",
    "ReleasedFedWMSAM",
    "ReleasedSCAFFOLD",
]


class ReleasedFedProx(methods.FedProx):
    """:class:`~lightning_fedstop.methods.FedProx` with the proximal term split around the clip."""

    def __init__(self, mu: float = 1e-3) -> None:
        super().__init__(mu, prox_inside_clip=False)


class ReleasedSCAFFOLD(methods.SCAFFOLD):
    """:class:`~lightning_fedstop.methods.SCAFFOLD` with the gain of client 0."""

    def __init__(self) -> None:
        super().__init__(control_gain="released_code", control_update="delta")


class ReleasedFedDyn(methods.FedDyn):
    """:class:`~lightning_fedstop.methods.FedDyn` with the proximal term split around the clip."""

    def __init__(self, alpha: float = 1e-3) -> None:
        super().__init__(alpha, prox_inside_clip=False)


class ReleasedFedSpeed(methods.FedSpeed):
    """:class:`~lightning_fedstop.methods.FedSpeed` with the proximal term split around the clip."""

    def __init__(self, alpha: float = 1e-3, rho: float = 1e-3) -> None:
        super().__init__(alpha, rho, prox_inside_clip=False)


class ReleasedFedSMOO(methods.FedSMOO):
    """:class:`~lightning_fedstop.methods.FedSMOO` with the split proximal term and the message mu_m."""

    def __init__(self, alpha: float = 1e-3, rho: float = 1e-3) -> None:
        super().__init__(alpha, rho, message="mu", prox_inside_clip=False)


class ReleasedFedGamma(methods.FedGamma):
    """:class:`~lightning_fedstop.methods.FedGamma` with the gain of client 0."""

    def __init__(self, rho: float = 1e-3) -> None:
        super().__init__(rho, control_gain="released_code", control_update="delta")


class ReleasedFedLESAM(methods.FedLESAM):
    """:class:`~lightning_fedstop.methods.FedLESAM` with one number per tensor, from the last round's update."""

    def __init__(self, rho: float = 1e-3) -> None:
        super().__init__(rho, memory="last_round", perturbation="released_code")


class ReleasedFedWMSAM(methods.FedWMSAM):
    """:class:`~lightning_fedstop.methods.FedWMSAM` as released.

    Args:
        rho: factor of the perturbation.
        alpha_init: alpha of round 1.
        lr_decay: gamma, the decay of the learning rate in a round, which the released code puts on the momentum.
    """

    def __init__(self, rho: float = 1e-3, alpha_init: float = 1e-3, lr_decay: float = 0.998) -> None:
        super().__init__(
            rho,
            alpha_init,
            perturbation="released_code",
            momentum_decay=lr_decay,
            control_gain="released_code",
            control_update="delta",
        )


FedProx = ReleasedFedProx
SCAFFOLD = ReleasedSCAFFOLD
FedDyn = ReleasedFedDyn
FedSpeed = ReleasedFedSpeed
FedSMOO = ReleasedFedSMOO
FedGamma = ReleasedFedGamma
FedLESAM = ReleasedFedLESAM
FedWMSAM = ReleasedFedWMSAM
