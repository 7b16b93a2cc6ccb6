"""Layers of ConvNeXt as matrix products, for small feature maps on a processor without fast depthwise kernels.

A depthwise convolution on a map of P pixels is, channel by channel, a product with a (P, P) matrix that holds the
kernel's taps. At P <= 64 this costs more multiplications than the convolution and less time, because a matrix product
uses the processor's full width. In training on a CPU the weight's gradient alone is taken that way, which is what costs
most there; see :mod:`lightning_fedstop.models._depthwise`.
"""

import torch
from timm.layers.grn import GlobalResponseNorm
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedstop.models._compiled import is_transformed
from lightning_fedstop.models._depthwise import LARGEST_MAP, depthwise, placement


class DepthwiseMatmul(nn.Conv2d):
    """A depthwise convolution of stride 1 that keeps the map's size, or the matrix product that it is."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps of shape ``(n, channels, height, width)`` to maps of the same shape."""
        if self._trains_on_cpu(input):
            convolved: Tensor = depthwise(input, self.weight, self.bias)
            return convolved
        count, channels, height, width = input.shape
        pixels = height * width
        if pixels > LARGEST_MAP:
            return nn.Conv2d.forward(self, input)
        kernel = self.kernel_size[0]
        taps: Tensor = placement(height, width, kernel, input.device, self.weight.dtype)
        matrix = (self.weight.reshape(channels, kernel * kernel) @ taps).view(channels, pixels, pixels)
        product = input.reshape(count, channels, pixels).transpose(0, 1) @ matrix
        output = product.transpose(0, 1).reshape(count, channels, height, width)
        return output if self.bias is None else output + self.bias.view(1, -1, 1, 1)

    def _trains_on_cpu(self, input: Tensor) -> bool:
        """Whether there will be a backward pass that a custom operator may take, in a precision that a sum needs."""
        if not (self.training and torch.is_grad_enabled() and input.device.type == "cpu"):
            return False
        if input.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled("cpu"):
            return False
        return torch.compiler.is_compiling() or not is_transformed()


class CompiledDepthwise(DepthwiseMatmul):
    """The same in a graph that is compiled for a CPU, and the convolution that it was anywhere else."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps of shape ``(n, channels, height, width)`` to maps of the same shape."""
        return super().forward(input) if _is_compiling_for_cpu(input) else nn.Conv2d.forward(self, input)


class CompiledPointwise(nn.Conv2d):
    """A convolution of one pixel: a linear layer in a graph that is compiled for a CPU, else as it was."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps of shape ``(n, channels, height, width)`` to maps of as many pixels."""
        if not _is_compiling_for_cpu(input):
            return super().forward(input)
        return F.linear(input.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def _is_compiling_for_cpu(input: Tensor) -> bool:
    return bool(torch.compiler.is_compiling()) and input.device.type == "cpu"


class SummedResponseNorm(GlobalResponseNorm):
    """ConvNeXtV2's response norm with the sum of squares written out, which is faster than a norm over two axes."""

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output, of the input's shape."""
        # The square root has no gradient at 0, where the norm's is 0: a channel that is 0 everywhere adds nothing.
        squares = input.square().sum(self.spatial_dim, keepdim=True)
        norm = torch.where(squares > 0, squares, 1.0).sqrt() * (squares > 0)
        ratio = norm / (norm.mean(self.channel_dim, keepdim=True) + self.eps)
        return input + torch.addcmul(self.bias.view(self.wb_shape), self.weight.view(self.wb_shape), input * ratio)


def use_matmul(backbone: nn.Module, where_compiled: bool = False) -> int:
    """Exchange in place the layers that have a counterpart here; the parameters stay the same objects.

    Args:
        backbone: the model.
        where_compiled: only convolutions, and only for a graph that is compiled for a CPU; eager steps stay.

    Returns:
        How many layers were exchanged.
    """
    exchanged = 0
    for parent in list(backbone.modules()):
        for name, layer in list(parent.named_children()):
            kind = _compiled_counterpart(layer) if where_compiled else _counterpart(layer)
            if kind is not None:
                new: nn.Module = kind.__new__(kind)
                new.__dict__ = layer.__dict__
                setattr(parent, name, new)
                exchanged += 1
    return exchanged


def _counterpart(layer: nn.Module) -> type[nn.Module] | None:
    if type(layer) is GlobalResponseNorm:
        return SummedResponseNorm
    return DepthwiseMatmul if _is_depthwise(layer) else None


def _compiled_counterpart(layer: nn.Module) -> type[nn.Module] | None:
    if _is_pointwise(layer):
        return CompiledPointwise
    return CompiledDepthwise if _is_depthwise(layer) else None


def _is_pointwise(layer: nn.Module) -> bool:
    if type(layer) is not nn.Conv2d:
        return False
    plain = layer.kernel_size == layer.stride == layer.dilation == (1, 1)
    return plain and layer.groups == 1 and layer.padding in ((0, 0), "same", "valid")


def _is_depthwise(layer: nn.Module) -> bool:
    if type(layer) is not nn.Conv2d:
        return False
    kernel = layer.kernel_size[0]
    same_size = layer.padding in ((kernel // 2, kernel // 2), "same") and layer.padding_mode == "zeros"
    square = layer.kernel_size == (kernel, kernel) and kernel % 2 == 1
    plain = layer.stride == (1, 1) and layer.dilation == (1, 1)
    return layer.groups == layer.in_channels == layer.out_channels > 1 and square and plain and same_size
