"""Perturbations of a given radius, shared by the sharpness-aware methods."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fedstop.methods.base import EPSILON, LocalStep, normalized


def perturbation(direction: Tensor, rho: float) -> Tensor:
    """Return the step of length rho along a direction, shape ``(..., d)``; zero stays zero."""
    return rho * normalized(direction)


def sharpness_aware_gradient(step: LocalStep, rho: float) -> None:
    """Fill ``step.grad`` with g(x + rho * n(g(x))), both on the step's batch.

    With ``rho=0`` it is g(x), in one pass.
    """
    gradient = step.backward()
    if rho:
        step.backward(perturbation(gradient, rho))


def scalar_perturbation(direction: Tensor, rho: float, tensor_sizes: Sequence[int]) -> Tensor:
    """Perturb tensor ``j`` by one number, as the released code does.

    The number is made of entry ``j`` of the flat direction::

        e_j = rho * u[j] / (sum_j |u[j]| + eps)

    Args:
        direction: u, shape ``(..., d)``.
        rho: the factor.
        tensor_sizes: parameters of each tensor, in order.
    """
    heads = direction[..., : len(tensor_sizes)]
    scalars = rho * heads / (heads.abs().sum(dim=-1, keepdim=True) + EPSILON)
    return torch.repeat_interleave(scalars, torch.tensor(tensor_sizes, device=direction.device), dim=-1)
