"""Base of federated methods: arithmetic on flat vectors, called from the local training loop.

A method never loops over batches and never touches a module, a device or a data loader. Its vectors have the trainable
dimension ``d`` last, so that the same lines serve one client, ``(d,)``, and a stack of clients, ``(M, d)``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_fedstop.core.aggregation import Reduce, gather_alone, reduce_alone
from lightning_fedstop.core.client_states import ClientStates
from lightning_fedstop.core.parameters import norm
from lightning_fedstop.methods.momentum import Motion
from lightning_fedstop.utilities.validate import positive

EPSILON = 1e-7
"""Added to a norm before dividing by it."""


def normalized(vector: Tensor) -> Tensor:
    """Return v / (||v|| + eps) over the last dimension; zero stays zero.

    >>> normalized(torch.tensor([0.0, 0.0]))
    tensor([0., 0.])
    """
    scale = 1 / (norm(vector, keepdim=True) + EPSILON)
    return (vector * scale.to(torch.promote_types(vector.dtype, torch.float32))).to(vector.dtype)


@dataclass
class Federation:
    """What a method may know before the first round.

    Attributes:
        theta: shape ``(d,)``; the initial global model.
        client_sizes: n_m, the samples of each of the N clients.
        states: where vectors of clients are kept between rounds.
        tensor_sizes: how the ``d`` parameters are split into tensors.
        local_epochs: E.
        batch_size: B, as far as the data module names it.
        plain_sgd: whether the local solver is SGD with at most heavy-ball momentum and no dampening; its rates are in
            :attr:`Client.motion`.
        reduce: sums a tensor over the processes.
        gather: the lists that the processes pass in, in order of rank.
    """

    theta: Tensor
    client_sizes: Sequence[int]
    states: ClientStates
    tensor_sizes: Sequence[int]
    local_epochs: int = 1
    batch_size: int | None = None
    plain_sgd: bool = True
    reduce: Reduce = reduce_alone
    gather: Callable[[list[Any]], list[list[Any]]] = gather_alone

    @property
    def num_clients(self) -> int:
        """N, all clients of the federation."""
        return len(self.client_sizes)


def add_scaled(target: Tensor, vector: Tensor, weight: float | Tensor) -> None:
    """Add ``weight * vector`` to ``target`` in place.

    A weight of shape ``(M, 1)`` has a number for each client.

    >>> target = torch.ones(2, 3)
    >>> add_scaled(target, torch.ones(3), torch.tensor([[1.0], [2.0]]))
    >>> target.tolist()
    [[2.0, 2.0, 2.0], [3.0, 3.0, 3.0]]
    """
    if isinstance(weight, Tensor):
        target.add_(weight.to(target.dtype) * vector)
    else:
        target.add_(vector, alpha=weight)


@dataclass
class Client:
    """One client in one round.

    Attributes:
        index: which client, from 0.
        round: the round, from 1.
        num_samples: n_m, always at least 1: a client without samples takes no part.
        theta: shape ``(d,)``; the model that the client starts from: the global one as the module holds it, rounded in
            ``bf16-true`` and ``16-true``. So ``x - theta`` is exactly 0 before the first step.
        lr: the local learning rate, of the first parameter group, when the client starts.
        momentum: mu_h, its heavy-ball momentum, 0 if the local solver has none.
        weight: the client's weight in the mean of updates, before the weights are normalised.
        vectors: what :meth:`FederatedMethod.start` prepared for the local steps, by name.
        exact_theta: shape ``(d,)``; the global model as the server holds it; ``theta`` itself by default.
        motion: how far the client's steps go, with the rates of all parameter groups; by default ``lr`` and
            ``momentum`` are those of all.
    """

    index: int
    round: int
    num_samples: int
    theta: Tensor
    lr: float
    momentum: float
    weight: float = 1.0
    vectors: dict[str, Tensor] = field(default_factory=dict)
    exact_theta: Tensor = None  # type: ignore[assignment]
    motion: Motion = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.exact_theta is None:
            self.exact_theta = self.theta
        if self.motion is None:
            self.motion = Motion([(self.lr, self.momentum)])


class ClientStack:
    """Clients of a round that take their local steps at once.

    Attributes:
        num_samples: shape ``(M, 1)``, float64.
        vectors: by name, stacked along a new first dimension, so ``(M, d)``; a name that only some of the clients have
            is zero for the others.

    ``round``, ``theta``, ``lr``, ``momentum`` and ``motion`` are those of all clients. There is no ``index``: what a
    client alone has goes into its ``vectors`` in :meth:`FederatedMethod.start`.
    """

    def __init__(self, clients: Sequence[Client]) -> None:
        first = clients[0]
        self.round, self.theta, self.lr, self.momentum = first.round, first.theta, first.lr, first.momentum
        self.motion = first.motion
        sizes = [client.num_samples for client in clients]
        self.num_samples = torch.tensor(sizes, dtype=torch.float64, device=first.theta.device).unsqueeze(1)
        self.vectors: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for client in clients for name in client.vectors):
            given = [client.vectors.pop(name, None) for client in clients]
            like = next(vector for vector in given if vector is not None)
            self.vectors[name] = torch.stack([torch.zeros_like(like) if v is None else v for v in given])

    def keep(self, rows: Tensor) -> None:
        """Keep these clients alone."""
        self.num_samples = self.num_samples[rows]
        self.vectors = {name: vector[rows] for name, vector in self.vectors.items()}


class LocalStep:
    """One local step, as a method sees it.

    Attributes:
        client: whose step it is; for a stack of clients a :class:`ClientStack`, which looks the same.
        k: the step's number within the round, from 0.
        x: shape ``(d,)``, or ``(M, d)``; the local model.
        grad: of the same shape; the gradient, filled by :meth:`backward` and changed in place by the method.
    """

    def __init__(self, client: Client, k: int, x: Tensor, grad: Tensor, backward: Callable[[bool], None]) -> None:
        self.client = client
        self.k = k
        self.x = x
        self.grad = grad
        self._backward = backward
        self._passes = 0

    def backward(self, perturbation: Tensor | None = None) -> Tensor:
        """Fill :attr:`grad` with the batch's loss gradient at ``x`` or ``x + perturbation``.

        ``x`` is put back from a copy, exactly. Running statistics and logged values come from the first pass of a step
        alone.

        Returns:
            :attr:`grad`.
        """
        first = self._passes == 0
        self._passes += 1
        if perturbation is None:
            self._backward(first)
            return self.grad
        before = self.x.clone()
        self.x.add_(perturbation)
        try:
            self._backward(first)
        finally:
            self.x.copy_(before)
        return self.grad


class FederatedMethod:
    """Base of federated methods; each overrides the steps in which it differs.

    Args:
        server_lr: eta_g, the factor on the mean update in the server step.

    Raises:
        ValueError: if ``server_lr`` is not positive and finite.
    """

    gradients_per_step = 1
    """Backward passes of one local step."""

    download_vectors = 1
    """Vectors of length d that a client receives in a round, where it keeps its own state, as in a deployment."""

    upload_vectors = 1
    """Vectors of length d that a client sends back; see :meth:`uploads`."""

    needs_full_gradient = False
    """Whether ``client.vectors["full_gradient"]`` must hold the gradient of F_m at ``theta`` before :meth:`start`."""

    def __init__(self, server_lr: float = 1.0) -> None:
        self.server_lr = positive("server_lr", server_lr, self)

    def setup(self, federation: Federation) -> None:
        """Create the server's state, before round 1 or before a checkpoint is loaded."""
        self.federation = federation

    def start(self, client: Client) -> None:
        """Put into ``client.vectors`` what the client's steps need this round."""

    def gradient(self, step: LocalStep) -> None:
        """Fill ``step.grad``: one backward pass at ``x`` unless the method perturbs."""
        step.backward()

    def correct(self, step: LocalStep) -> None:
        """Add the method's terms to ``step.grad``, in place, before the clip."""

    def after_clip(self, step: LocalStep) -> None:
        """Add terms that the clip must not scale to ``step.grad``, in place; none by default."""

    def finish(self, client: Client, delta: Tensor, steps: int) -> None:
        """Update the client's state and add to the round's running sums.

        Args:
            client: the client, with the vectors of :meth:`start`.
            delta: shape ``(d,)``; Delta_m, the client's last model minus the model it started from.
            steps: K_m, the local steps really taken.
        """

    def uploads(self, client: Client) -> int:
        """Count the vectors of length d that this client sends back after its steps."""
        return self.upload_vectors

    def aggregate(self, theta: Tensor, mean_delta: Tensor) -> Tensor:
        """Return theta_r = theta_{r-1} + eta_g * mean Delta_m, after the last client.

        Args:
            theta: shape ``(d,)``; the global model of the round's start.
            mean_delta: shape ``(d,)``, float64; the weighted mean of the clients' Delta_m.

        Returns:
            shape ``(d,)``; the new global model.
        """
        return (theta + self.server_lr * mean_delta).to(theta.dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the server's state, as tensors and plain values."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of :meth:`state_dict`."""
