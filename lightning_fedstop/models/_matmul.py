"""Layers of ConvNeXt as matrix products, for small feature maps on a processor without fast depthwise kernels.

A depthwise convolution on a map of P pixels is, channel by channel, a product with a (P, P) matrix that holds the
kernel's taps. At P <= 64 this costs more multiplications than the convolution and far less time, because a matrix
product uses the processor's full width and a depthwise convolution of a few pixels does not.
"""

from functools import cache

import torch
from timm.layers.grn import GlobalResponseNorm
from torch import Tensor, nn
from torch.nn import functional as F

LARGEST_MAP = 64
"""Pixels of the largest feature map that is multiplied; the matrix has the square of it."""


@cache
def _placement(height: int, width: int, kernel: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Which tap leads from which input pixel to which output pixel: 0 or 1, of shape ``(kernel**2, P * P)``."""
    row, column = (grid.flatten() for grid in torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
    # [input pixel, output pixel]: the tap's place in the kernel, if it is in it at all.
    down = row[:, None] - row[None, :] + kernel // 2
    right = column[:, None] - column[None, :] + kernel // 2
    inside = (down >= 0) & (down < kernel) & (right >= 0) & (right < kernel)
    tap = torch.where(inside, down * kernel + right, kernel * kernel)
    return F.one_hot(tap, kernel * kernel + 1)[..., :-1].permute(2, 0, 1).flatten(1).to(device, dtype)


class DepthwiseMatmul(nn.Conv2d):
    """A depthwise convolution of stride 1 that keeps the map's size, as a matrix product where the map is small."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps of shape ``(n, channels, height, width)`` to maps of the same shape."""
        count, channels, height, width = input.shape
        pixels = height * width
        if pixels > LARGEST_MAP:
            return super().forward(input)
        kernel = self.kernel_size[0]
        placement = _placement(height, width, kernel, input.device, self.weight.dtype)
        matrix = (self.weight.reshape(channels, kernel * kernel) @ placement).view(channels, pixels, pixels)
        product = input.reshape(count, channels, pixels).transpose(0, 1) @ matrix
        output = product.transpose(0, 1).reshape(count, channels, height, width)
        return output if self.bias is None else output + self.bias.view(1, -1, 1, 1)


class SummedResponseNorm(GlobalResponseNorm):
    """ConvNeXtV2's response norm with the sum of squares written out, which is faster than a norm over two axes."""

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output, of the input's shape."""
        # The square root has no gradient at 0, where the norm's is 0: a channel that is 0 everywhere adds nothing.
        squares = input.square().sum(self.spatial_dim, keepdim=True)
        norm = torch.where(squares > 0, squares, 1.0).sqrt() * (squares > 0)
        ratio = norm / (norm.mean(self.channel_dim, keepdim=True) + self.eps)
        return input + torch.addcmul(self.bias.view(self.wb_shape), self.weight.view(self.wb_shape), input * ratio)


def use_matmul(backbone: nn.Module) -> int:
    """Exchange in place the layers that have a counterpart here; the parameters stay the same objects.

    Returns:
        How many layers were exchanged.
    """
    exchanged = 0
    for parent in list(backbone.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Conv2d and _is_depthwise(layer):
                new: nn.Module = DepthwiseMatmul.__new__(DepthwiseMatmul)
            elif type(layer) is GlobalResponseNorm:
                new = SummedResponseNorm.__new__(SummedResponseNorm)
            else:
                continue
            new.__dict__ = layer.__dict__
            setattr(parent, name, new)
            exchanged += 1
    return exchanged


def _is_depthwise(layer: nn.Conv2d) -> bool:
    kernel = layer.kernel_size[0]
    same_size = layer.padding in ((kernel // 2, kernel // 2), "same") and layer.padding_mode == "zeros"
    square = layer.kernel_size == (kernel, kernel) and kernel % 2 == 1
    plain = layer.stride == (1, 1) and layer.dilation == (1, 1)
    return layer.groups == layer.in_channels == layer.out_channels > 1 and square and plain and same_size
