"""Control variates, shared by SCAFFOLD, FedGamma and FedWMSAM."""

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedstop.aggregation import RunningSum
from lightning_fedstop.methods.base import Client, Federation, LocalStep, one_of, positive

ControlGain = Literal["S", "K", "released_code"] | float
ControlUpdate = Literal["delta", "grad_mean", "option_I"]


def momentum_gain(steps: float, momentum: float) -> float:
    """S(K, mu): how far K heavy-ball steps of a constant gradient move, in units of lr * gradient.

    S(K, mu) = [K - mu (1 - mu^K) / (1 - mu)] / (1 - mu), with S(K, 0) = K and S(K, 1) = K (K + 1) / 2.

    >>> momentum_gain(5, 0.0), round(momentum_gain(5, 0.9), 4)
    (5.0, 13.1441)
    """
    if momentum == 0:
        return float(steps)
    if momentum == 1:
        return steps * (steps + 1) / 2
    return float((steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum))


class ControlVariates:
    """The server's c and the clients' c_m, all zero at first.

    After a client's steps, with G_m the gain of its K_m steps::

        c_m+ = c_m - c - Delta_m / (G_m lr)             control_update="delta" (SCAFFOLD's option II)
        c_m+ = mean of the gradients g_m(x_k)           control_update="grad_mean"
        c_m+ = the gradient of F_m at theta_{r-1}       control_update="option_I"
        c   += (1/N) sum over the cohort of (c_m+ - c_m)

    Args:
        owner: the method, named in errors.
        gain: ``"S"``, S(K_m, mu_h), right with and without momentum; ``"K"``, K_m as published for plain SGD;
            ``"released_code"``, E n_0 / B for every client; or a number.
        update: see above; ``None`` is ``"delta"`` where the local solver is SGD, else ``"grad_mean"``, because other
            solvers have no such gain.
    """

    def __init__(self, owner: object, gain: ControlGain = "S", update: ControlUpdate | None = None) -> None:
        if isinstance(gain, str):
            one_of("control_gain", gain, ("S", "K", "released_code"), owner)
        else:
            positive("control_gain", gain, owner)
        self.gain: ControlGain = gain
        self.update: ControlUpdate | None = one_of(
            "control_update", update, (None, "delta", "grad_mean", "option_I"), owner
        )
        self.name = type(owner).__name__

    def setup(self, federation: Federation) -> None:
        """Create c."""
        self.federation = federation
        self.c = torch.zeros_like(federation.theta)
        self.change = RunningSum(self.c)
        self.rule = self.update or ("delta" if federation.plain_sgd else "grad_mean")
        if self.rule == "delta" and not federation.plain_sgd:
            raise ValueError(
                f"`control_update='delta'` of {self.name} needs SGD with one learning rate and neither dampening nor"
                " Nesterov momentum as the local solver: use 'grad_mean' with any other."
            )
        self.averages = self.rule == "grad_mean"
        if self.gain == "released_code" and not (federation.batch_size and federation.client_sizes[0]):
            raise ValueError(
                f"`control_gain='released_code'` of {self.name} needs the data module's `batch_size` and samples of"
                " client 0."
            )

    def start(self, client: Client) -> Tensor:
        """C - c_m, which the method adds to the client's gradients."""
        correction = self.c - self.federation.states.get("c", client.index)
        client.vectors["correction"] = correction
        if self.averages:
            client.vectors["gradient_sum"] = torch.zeros_like(correction)
            client.vectors["num_gradients"] = correction.new_zeros(())
        return correction

    def observe(self, step: LocalStep) -> None:
        """Note a raw gradient if their mean is asked for; a solver such as LBFGS takes several in a step."""
        if self.averages:
            step.client.vectors["gradient_sum"] += step.grad
            step.client.vectors["num_gradients"] += 1

    def mean_gradient(self, client: Client) -> Tensor:
        """The mean of the gradients noted, where :attr:`averages` is set."""
        return client.vectors["gradient_sum"] / client.vectors["num_gradients"]

    def gain_of(self, client: Client, steps: int) -> float:
        """G_m."""
        if self.gain == "S":
            return momentum_gain(steps, client.momentum)
        if self.gain == "K":
            return float(steps)
        if self.gain == "released_code":
            federation = self.federation
            return federation.local_epochs * federation.client_sizes[0] / float(federation.batch_size or 1)
        return float(self.gain)

    def finish(self, client: Client, delta: Tensor, steps: int) -> None:
        """Update c_m and add its change to the round's sum; nothing if the learning rate is 0."""
        if client.lr == 0:
            return
        correction = client.vectors["correction"]
        if self.rule == "grad_mean":
            after = self.mean_gradient(client)
        elif self.rule == "option_I":
            after = client.vectors["full_gradient"]
        else:
            after = -correction - delta / (self.gain_of(client, steps) * client.lr)
        states = self.federation.states
        before = states.get("c", client.index).double()
        self.change.add(states.set("c", client.index, after) - before)

    def aggregate(self) -> None:
        """Apply the round's changes to c."""
        total = self.change.take(self.federation.reduce)
        self.c = (self.c + total / self.federation.num_clients).to(self.c.dtype)

    def state_dict(self) -> dict[str, Any]:
        """The server's c; the clients' c_m are among the loop's client states."""
        return {"c": self.c}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of :meth:`state_dict` back."""
        self.c = state_dict["c"].to(self.c)
