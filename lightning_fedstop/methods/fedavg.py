"""Federated averaging."""

from lightning_fedstop.methods.base import FederatedMethod


class FedAvg(FederatedMethod):
    """FedAvg (McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data").

    Clients run plain local steps; the server moves by the mean of their updates::

        theta_r = theta_{r-1} + eta_g * sum_m w_m (theta_m - theta_{r-1})

    The weights w_m are the loop's ``weighting``. Keeps no state.

    Args:
        server_lr: eta_g; 1 gives the plain average of the clients' models.
    """
