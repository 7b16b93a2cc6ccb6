"""A depthwise convolution for a CPU with a backward pass of its own.

For a kernel on a map of a few pixels, oneDNN's gradient with respect to the weight takes 20 to 200 times as long as the
convolution, and torch hands it the slower memory layout in a compiled graph. Here the gradient with respect to the
input is the convolution with the kernel turned by half a turn, and that with respect to the weight a matrix product.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LARGEST_MAP = 64
"""Pixels of the largest map whose weight gradient is a product; that takes the square of it for each channel."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def placement(height: int, width: int, kernel: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Which tap leads from which input pixel to which output pixel: 0 or 1, of shape ``(kernel**2, P * P)``.

    A constant for ``torch.compile``, which would compute it anew in each step.
    """
    return _placement(height, width, kernel, device, dtype)


@cache
def _placement(height: int, width: int, kernel: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    row, column = (grid.flatten() for grid in torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
    # [input pixel, output pixel]: the tap's place in the kernel, if it is in it at all.
    down = row[:, None] - row[None, :] + kernel // 2
    right = column[:, None] - column[None, :] + kernel // 2
    inside = (down >= 0) & (down < kernel) & (right >= 0) & (right < kernel)
    tap = torch.where(inside, down * kernel + right, kernel * kernel)
    return F.one_hot(tap, kernel * kernel + 1)[..., :-1].permute(2, 0, 1).flatten(1).to(device, dtype)


# Custom operators, so that a compiled graph leaves the memory layout to them.
@torch.library.custom_op("lightning_fedstop::depthwise", mutates_args=())
def depthwise(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A depthwise convolution of stride 1 with an odd, square kernel that keeps the map's size.

    Args:
        input: shape ``(n, channels, height, width)``.
        weight: shape ``(channels, 1, kernel, kernel)``.
        bias: shape ``(channels,)``.

    Returns:
        The input's shape, in channels-last order.
    """
    channels, _, kernel, _ = weight.shape
    return F.conv2d(_channels_last(input), weight, bias, padding=kernel // 2, groups=channels)


@torch.library.custom_op("lightning_fedstop::depthwise_weight_grad", mutates_args=())
def weight_grad(input: Tensor, grad: Tensor, kernel: int) -> Tensor:
    """The gradient of :func:`depthwise` with respect to its weight, where ``grad`` is that of its output.

    Returns:
        Shape ``(channels, 1, kernel, kernel)``.
    """
    count, channels, height, width = input.shape
    pixels = height * width
    if pixels > LARGEST_MAP:
        weight = input.new_empty(channels, 1, kernel, kernel)
        arguments = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], channels, [False, True, False])
        found: Tensor = torch.ops.aten.convolution_backward(
            _channels_last(grad), _channels_last(input), weight, None, *arguments
        )[1]
        return found.contiguous()
    x, g = (maps.reshape(count, channels, pixels).transpose(0, 1).contiguous() for maps in (input, grad))
    # [channel, input pixel, output pixel], then the sum over the pairs of pixels that a tap leads between.
    pairs = (x.transpose(1, 2) @ g).view(channels, pixels * pixels)
    taps = placement(height, width, kernel, input.device, input.dtype) @ pairs.t()
    gradient: Tensor = taps.t().contiguous().view(channels, 1, kernel, kernel)
    return gradient


def _channels_last(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)


@depthwise.register_fake
def _(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty_like(input, memory_format=torch.channels_last)


@weight_grad.register_fake
def _(input: Tensor, grad: Tensor, kernel: int) -> Tensor:
    return input.new_empty(input.shape[1], 1, kernel, kernel)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    input, weight, bias = inputs
    ctx.save_for_backward(input, weight)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    input, weight = ctx.saved_tensors
    for_input, for_weight, for_bias = ctx.needs_input_grad
    return (
        depthwise(grad, weight.flip(2, 3), None) if for_input else None,
        weight_grad(input, grad, weight.shape[-1]) if for_weight else None,
        grad.sum((0, 2, 3)) if ctx.has_bias and for_bias else None,
    )


def _weight_grad_saves(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _weight_grad_backward(ctx: Any, taps: Tensor) -> tuple[Tensor, Tensor, None]:
    """A gradient's gradient: what is linear in two maps is, by each of them, a convolution of the other."""
    input, grad = ctx.saved_tensors
    return depthwise(grad, taps.flip(2, 3), None), depthwise(input, taps, None), None


depthwise.register_autograd(_backward, setup_context=_save_for_backward)
weight_grad.register_autograd(_weight_grad_backward, setup_context=_weight_grad_saves)
