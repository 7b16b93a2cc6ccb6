"""The local models of several clients while they train at once."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedstop.core.parameters import FlatParameters
from lightning_fedstop.methods.base import Client, ClientStack
from lightning_fedstop.module.flat_optimizer import FlatSolver


class Stack:
    """The local models of clients that take their steps together, and what belongs to them.

    Args:
        module: holds the global model.
        parameters: its trainable parameters.
        optimizer: its optimizer.
        clients: prepared by the method.
        names: the buffers of which each client has its own.

    Attributes:
        members: the clients still training, by their place in ``clients``.
        given: all clients.
        x: shape ``(M, d)``; their local models.
        grad: shape ``(M, d)``; their gradients.
        left: local model and buffers of the others when they ran out of batches, by their place in ``clients``.
    """

    def __init__(
        self,
        module: LightningModule,
        parameters: FlatParameters,
        optimizer: Optimizer,
        clients: Sequence[Client],
        names: Sequence[str],
    ) -> None:
        self.members = list(range(len(clients)))
        self.given = clients
        self.x = parameters.vector.repeat(len(clients), 1)
        self.grad = torch.zeros_like(self.x)
        self.clients = ClientStack(clients)
        held = dict(module.named_buffers())
        self.names = names
        self.buffers = [torch.stack([held[name].detach()] * len(clients)) for name in names]
        self.solver = FlatSolver(optimizer, parameters, self.x, self.grad)
        self.left: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}

    def keep(self, rows: list[int]) -> None:
        """Go on with these clients alone; the others have finished."""
        for row in set(range(len(self.members))) - set(rows):
            client = self.given[self.members[row]]
            client.vectors = {name: vector[row].clone() for name, vector in self.clients.vectors.items()}
            # The others go on with the motion that they have in common.
            client.motion = deepcopy(self.clients.motion)
            buffers = {name: buffer[row].clone() for name, buffer in zip(self.names, self.buffers, strict=True)}
            self.left[self.members[row]] = (self.x[row].clone(), buffers)
        self.members = [self.members[row] for row in rows]
        chosen = torch.tensor(rows, dtype=torch.long, device=self.x.device)
        self.x, self.grad = self.x[chosen], self.grad[chosen]
        self.buffers = [buffer[chosen] for buffer in self.buffers]
        self.clients.keep(chosen)
        self.solver.keep(chosen, self.x, self.grad)
