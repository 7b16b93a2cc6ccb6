"""Control variates, shared by SCAFFOLD, FedGamma and FedWMSAM."""

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedstop.core.aggregation import RunningSum
from lightning_fedstop.methods.base import Client, Federation, LocalStep
from lightning_fedstop.methods.momentum import Motion
from lightning_fedstop.utilities.validate import one_of, positive

ControlGain = Literal["S", "K", "released_code"] | float
ControlUpdate = Literal["delta", "grad_mean", "option_I"]


class ControlVariates:
    """Control variates c of the server and c_m of the clients, all zero at first.

    After a client's steps, with G_m the gain of its K_m steps::

        c_m+ = c_m - c - Delta_m / (G_m lr)             control_update="delta" (SCAFFOLD's option II)
        c_m+ = mean of the gradients g_m(x_k)           control_update="grad_mean"
        c_m+ = the gradient of F_m at theta_{r-1}       control_update="option_I"
        c   += (1/N) sum over the cohort of (c_m+ - c_m)

    A client whose rates are all 0 leaves c_m as it is. So does ``"delta"``, which has a gain for each parameter group,
    for the groups that have stood still.

    Args:
        owner: the method, named in errors.
        gain: ``"S"``, S(K_m, mu_h), right with and without momentum; ``"K"``, K_m as published for plain SGD;
            ``"released_code"``, E n_0 / B for every client; or a number.
        update: see above; ``None`` is ``"delta"`` for a client whose solver is SGD with one rate for all parameters,
            else ``"grad_mean"``. Where a hook changes rates within a client's steps, the mean of the gradients up to
            there is what ``"delta"`` gives for them.
        needs_mean: whether the mean gradient is asked for where there is no gain, also with ``"option_I"``.
    """

    def __init__(
        self, owner: object, gain: ControlGain = "S", update: ControlUpdate | None = None, needs_mean: bool = False
    ) -> None:
        if isinstance(gain, str):
            one_of("control_gain", gain, ("S", "K", "released_code"), owner)
        else:
            positive("control_gain", gain, owner)
        self.gain: ControlGain = gain
        self.update: ControlUpdate | None = one_of(
            "control_update", update, (None, "delta", "grad_mean", "option_I"), owner
        )
        self.needs_mean = needs_mean
        self.name = type(owner).__name__

    def setup(self, federation: Federation) -> None:
        """Create c."""
        self.federation = federation
        self.c = torch.zeros_like(federation.theta)
        self.change = RunningSum(self.c)
        self._check(federation.plain_sgd)
        if self.gain == "released_code" and not (federation.batch_size and federation.client_sizes[0]):
            raise ValueError(
                f"`control_gain='released_code'` of {self.name} needs the data module's `batch_size` and samples of"
                " client 0."
            )

    def _check(self, is_sgd: bool) -> None:
        if self.update == "delta" and not is_sgd:
            raise ValueError(
                f"`control_update='delta'` of {self.name} needs SGD with neither dampening nor Nesterov momentum as the"
                " local solver: use 'grad_mean' with any other."
            )

    def start(self, client: Client) -> Tensor:
        """Return c - c_m, which the method adds to the client's gradients."""
        self._check(client.motion.is_sgd)
        correction = self.c - self.federation.states.get("c", client.index)
        client.vectors["correction"] = correction
        if self._takes_mean(client.motion):
            client.vectors["gradient_sum"] = torch.zeros_like(correction)
            client.vectors["num_gradients"] = correction.new_zeros(())
        return correction

    def _takes_mean(self, motion: Motion) -> bool:
        if self.update is None or (self.needs_mean and self.update == "option_I"):
            return not motion.is_even
        return self.update == "grad_mean"

    def observe(self, step: LocalStep) -> None:
        """Add a raw gradient to their mean, if that is needed.

        A solver such as LBFGS takes several gradients in a step.
        """
        vectors = step.client.vectors
        if "gradient_sum" not in vectors:
            if not self._takes_mean(step.client.motion):
                return
            self._begin_mean(step)
        vectors["gradient_sum"] += step.grad
        vectors["num_gradients"] += 1

    def _begin_mean(self, step: LocalStep) -> None:
        """Begin the mean of gradients within the steps; earlier ones follow from x."""
        vectors = step.client.vectors
        distance = self.distance(step.client, step.k, step.x)
        known = step.k if distance else 0  # a number: the rates have been the same for all so far
        vectors["gradient_sum"] = torch.zeros_like(step.grad)
        if known:
            vectors["gradient_sum"] -= known * (vectors["correction"] + (step.x - step.client.theta) / distance)
        vectors["num_gradients"] = step.grad.new_full(step.grad.shape[:-1], known)

    def mean_gradient(self, client: Client) -> Tensor:
        """Return the mean of the gradients noted."""
        return client.vectors["gradient_sum"] / client.vectors["num_gradients"]

    def distance(self, client: Client, steps: int, like: Tensor) -> float | Tensor:
        """Return G_m lr, a vector where parameter groups differ; 0 for what stands still."""
        if self.gain == "S":
            return client.motion.distance(steps, like)
        if self.gain == "K":
            gain = float(steps)
        elif self.gain == "released_code":
            federation = self.federation
            gain = federation.local_epochs * federation.client_sizes[0] / float(federation.batch_size or 1)
        else:
            gain = float(self.gain)
        return gain * client.motion.mean_lr(like)

    def mean_step(self, client: Client, delta: Tensor, steps: int, instead: Tensor) -> Tensor:
        """Return -Delta_m / (G_m lr), and ``instead`` for numbers that have stood still."""
        distance = self.distance(client, steps, delta)
        if isinstance(distance, Tensor):
            return torch.where(distance > 0, -delta / distance, instead)
        return -delta / distance

    def finish(self, client: Client, delta: Tensor, steps: int) -> None:
        """Update c_m and the round's sum; nothing if all learning rates are 0."""
        if client.motion.rests:
            return
        correction, states = client.vectors["correction"], self.federation.states
        if self.update == "option_I":
            after = client.vectors["full_gradient"]
        elif "gradient_sum" in client.vectors:
            after = self.mean_gradient(client)
        else:
            # For what has stood still this is c_m.
            after = self.mean_step(client, delta, steps, self.c) - correction
        before = states.get("c", client.index).double()
        self.change.add(states.set("c", client.index, after) - before)

    def uploads(self, client: Client) -> int:
        """Count the vectors that carry c_m to the server; with ``"delta"`` it follows from Delta_m."""
        return int(self.update == "option_I" or "gradient_sum" in client.vectors)

    def aggregate(self) -> None:
        """Apply the round's changes to c."""
        total = self.change.take(self.federation.reduce)
        self.c = (self.c + total / self.federation.num_clients).to(self.c.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the server's c; the clients' c_m are among the loop's client states."""
        return {"c": self.c}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of :meth:`state_dict`."""
        self.c = state_dict["c"].to(self.c)
