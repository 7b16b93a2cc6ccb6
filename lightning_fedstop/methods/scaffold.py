"""Control variates against client drift."""

from typing import Any

from torch import Tensor

from lightning_fedstop.methods.base import Client, FederatedMethod, Federation, LocalStep
from lightning_fedstop.methods.control_variates import ControlGain, ControlUpdate, ControlVariates


class SCAFFOLD(FederatedMethod):
    """SCAFFOLD (Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning").

    A client's steps are corrected by the server's control variate c and its own, c_m::

        v    = g_m(x) - c_m + c
        c_m+ = c_m - c - Delta_m / (G_m lr),   c += (1/N) sum_m (c_m+ - c_m)

    The paper's option II has G_m = K_m, right for plain SGD. With heavy-ball momentum mu_h a step moves further, and
    G_m = S(K_m, mu_h) keeps c_m the mean gradient; with G_m = K_m the control variates diverge. Keeps c and, for each
    client that has taken part, c_m. Round 1, and a federation of one client, is FedAvg.

    Args:
        control_gain: G_m: ``"S"``; ``"K"``, as published; ``"released_code"``, E n_0 / B from client 0; or a number.
        control_update: ``"delta"`` (option II, above), ``"grad_mean"`` (the mean gradient of the steps, exact with any
            solver, clip and weight decay, at the price of one more vector) or ``"option_I"`` (the gradient at
            theta_{r-1}, one more pass over the client's data). By default ``"delta"`` for a client whose solver is SGD
            with one rate for all parameters, else ``"grad_mean"``: there is no gain for all then.
        server_lr: eta_g, the factor on the mean update; 1 in the paper's experiments.
    """

    download_vectors = 2

    def __init__(
        self, control_gain: ControlGain = "S", control_update: ControlUpdate | None = None, server_lr: float = 1.0
    ) -> None:
        super().__init__(server_lr)
        self.control_gain: ControlGain = control_gain
        self.control_update: ControlUpdate | None = control_update
        self.control = ControlVariates(self, control_gain, control_update)
        self.needs_full_gradient = control_update == "option_I"

    def setup(self, federation: Federation) -> None:
        """Create c."""
        super().setup(federation)
        self.control.setup(federation)

    def start(self, client: Client) -> None:
        """Prepare c - c_m."""
        self.control.start(client)

    def correct(self, step: LocalStep) -> None:
        """Add c - c_m."""
        self.control.observe(step)
        step.grad.add_(step.client.vectors["correction"])

    def finish(self, client: Client, delta: Tensor, steps: int) -> None:
        """Update c_m."""
        self.control.finish(client, delta, steps)

    def uploads(self, client: Client) -> int:
        """Count the update, and the change of c_m where it does not follow from that."""
        return self.upload_vectors + self.control.uploads(client)

    def aggregate(self, theta: Tensor, mean_delta: Tensor) -> Tensor:
        """Update c and average as FedAvg."""
        self.control.aggregate()
        return super().aggregate(theta, mean_delta)

    def state_dict(self) -> dict[str, Any]:
        """Return the server's c."""
        return self.control.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load c."""
        self.control.load_state_dict(state_dict)
