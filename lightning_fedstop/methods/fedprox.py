"""FedAvg with a proximal term."""

from lightning_fedstop.methods.base import FederatedMethod, LocalStep
from lightning_fedstop.methods.duals import add_proximal_term
from lightning_fedstop.utilities.validate import not_negative


class FedProx(FederatedMethod):
    """FedProx (Li et al. 2020, "Federated Optimization in Heterogeneous Networks").

    A client minimises F_m(x) + (mu/2) ||x - theta_{r-1}||^2, so each step follows::

        v = g_m(x) + mu (x - theta_{r-1})

    The server averages as in FedAvg. Keeps no state. ``mu=0``, or one local step, is FedAvg.

    Args:
        mu: weight of the proximal term, at least 0; the paper tries 0.001, 0.01, 0.1 and 1.
        prox_inside_clip: clip the whole v; otherwise only g_m(x) - mu theta_{r-1} is clipped and mu x is added after
            the clip, which pulls the model to zero wherever the clip is active.
        server_lr: eta_g, the factor on the mean update.
    """

    def __init__(self, mu: float = 1e-3, prox_inside_clip: bool = True, server_lr: float = 1.0) -> None:
        super().__init__(server_lr)
        self.mu = not_negative("mu", mu, self)
        self.prox_inside_clip = prox_inside_clip

    def correct(self, step: LocalStep) -> None:
        """Add the proximal term."""
        if self.mu:
            add_proximal_term(step, self.mu, self.prox_inside_clip)

    def after_clip(self, step: LocalStep) -> None:
        """Add mu x, if the proximal term is split."""
        if self.mu and not self.prox_inside_clip:
            step.grad.add_(step.x, alpha=self.mu)
