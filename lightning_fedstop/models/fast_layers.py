"""Layers of ConvNeXt that train faster on a CPU, with the parameters and, up to rounding, the results of timm's.

For a kernel on a map of a few pixels, oneDNN's gradient with respect to the weight takes 20 to 200 times as long as the
convolution; as a matrix product it takes a fraction of that. A norm over two axes is slower than a sum of squares.
"""

from functools import cache
from typing import Any

import torch
from timm.layers.grn import GlobalResponseNorm
from torch import Tensor, nn
from torch.nn import functional as F

LARGEST_MAP = 64
"""Pixels of the largest map that is worth a product, which takes the square of it for each channel."""


def use_fast_layers(backbone: nn.Module, everywhere: bool = False) -> int:
    """Exchange in place the layers that have a counterpart here; the parameters stay the same objects.

    Args:
        backbone: the model.
        everywhere: compute them as products in evaluation, in any precision and on any device as well, not in training
            in full precision on a CPU alone.

    Returns:
        The number of layers exchanged.
    """
    exchanged = 0
    for parent in list(backbone.modules()):
        for name, layer in list(parent.named_children()):
            kind = _counterpart(layer)
            if kind is not None:
                new: nn.Module = kind.__new__(kind)
                new.__dict__ = layer.__dict__
                vars(new)["everywhere"] = everywhere
                setattr(parent, name, new)
                exchanged += 1
    return exchanged


class FastDepthwise(nn.Conv2d):
    """A depthwise convolution of stride 1 that keeps the map's size."""

    everywhere: bool

    def forward(self, input: Tensor) -> Tensor:
        """Convolve maps of shape ``(n, channels, height, width)``."""
        count, channels, height, width = input.shape
        pixels = height * width
        if pixels > LARGEST_MAP or torch.compiler.is_compiling():
            return super().forward(input)
        if _trains_on_cpu(self, input):
            output: Tensor = _DepthwiseFunction.apply(input, self.weight, self.bias)
            return output
        if not self.everywhere:
            return super().forward(input)
        # Channel by channel a product with a (P, P) matrix that holds the kernel's taps.
        kernel = self.kernel_size[0]
        taps = placement(height, width, kernel, input.device, self.weight.dtype)
        matrix = (self.weight.reshape(channels, kernel * kernel) @ taps).view(channels, pixels, pixels)
        product = input.reshape(count, channels, pixels).transpose(0, 1) @ matrix
        maps = product.transpose(0, 1).reshape(count, channels, height, width)
        return maps if self.bias is None else maps + self.bias.view(1, -1, 1, 1)


class FastResponseNorm(GlobalResponseNorm):
    """ConvNeXtV2's response norm with the sum of squares written out."""

    everywhere: bool

    def forward(self, input: Tensor) -> Tensor:
        """Normalise maps of the layer's layout."""
        if not (self.everywhere or _trains_on_cpu(self, input)):
            output: Tensor = super().forward(input)  # type: ignore[no-untyped-call]
            return output
        # The square root has no gradient at 0, where the norm's is 0: a channel that is 0 everywhere adds nothing.
        squares = input.square().sum(self.spatial_dim, keepdim=True)
        norm = torch.where(squares > 0, squares, 1.0).sqrt() * (squares > 0)
        ratio = norm / (norm.mean(self.channel_dim, keepdim=True) + self.eps)
        return input + torch.addcmul(self.bias.view(self.wb_shape), self.weight.view(self.wb_shape), input * ratio)


class _DepthwiseFunction(torch.autograd.Function):
    """The convolution, and its gradients as a convolution with the turned kernel and as a product."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _convolve(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        for_input, for_weight, for_bias = ctx.needs_input_grad
        return (
            _convolve(grad, weight.flip(2, 3), None) if for_input else None,
            _weight_grad(input, grad, weight.shape[-1]) if for_weight else None,
            grad.sum((0, 2, 3)) if for_bias else None,
        )


def _convolve(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    maps = input.contiguous(memory_format=torch.channels_last)
    return F.conv2d(maps, weight, bias, padding=weight.shape[-1] // 2, groups=len(weight))


def _weight_grad(input: Tensor, grad: Tensor, kernel: int) -> Tensor:
    """The gradient with respect to the weight, where ``grad`` is that of the output."""
    count, channels, height, width = input.shape
    pixels = height * width
    x, g = (maps.reshape(count, channels, pixels).transpose(0, 1).contiguous() for maps in (input, grad))
    # [channel, input pixel, output pixel], then the sum over the pairs of pixels that a tap leads between.
    pairs = (x.transpose(1, 2) @ g).view(channels, pixels * pixels)
    taps = placement(height, width, kernel, input.device, input.dtype) @ pairs.t()
    return taps.t().contiguous().view(channels, 1, kernel, kernel)


@cache
def placement(height: int, width: int, kernel: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Tell which tap leads from which input pixel to which output pixel: 0 or 1, shape ``(kernel**2, P * P)``."""
    with torch.inference_mode(mode=False):  # an evaluation may be the first to ask, and training the next
        return _placement(height, width, kernel).to(device, dtype)


def _placement(height: int, width: int, kernel: int) -> Tensor:
    row, column = (grid.flatten() for grid in torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
    # [input pixel, output pixel]: the tap's place in the kernel, if it is in it at all.
    down = row[:, None] - row[None, :] + kernel // 2
    right = column[:, None] - column[None, :] + kernel // 2
    inside = (down >= 0) & (down < kernel) & (right >= 0) & (right < kernel)
    tap = torch.where(inside, down * kernel + right, kernel * kernel)
    return F.one_hot(tap, kernel * kernel + 1)[..., :-1].permute(2, 0, 1).flatten(1)


def _trains_on_cpu(layer: nn.Module, input: Tensor) -> bool:
    """Whether a backward pass follows, on a CPU and in a precision that a sum needs."""
    if not (layer.training and torch.is_grad_enabled() and input.device.type == "cpu"):
        return False
    if input.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled("cpu"):
        return False
    return not torch.compiler.is_compiling() and not is_transformed()


def is_transformed() -> bool:
    """Check whether a ``torch.func`` transform is under way."""
    # torch has no public name for this.
    return torch._C._functorch.peek_interpreter_stack() is not None


def _counterpart(layer: nn.Module) -> type[nn.Module] | None:
    if type(layer) is GlobalResponseNorm:
        return FastResponseNorm
    if type(layer) is not nn.Conv2d:
        return None
    kernel = layer.kernel_size[0]
    is_same_size = layer.padding in ((kernel // 2, kernel // 2), "same") and layer.padding_mode == "zeros"
    is_square = layer.kernel_size == (kernel, kernel) and kernel % 2 == 1
    is_plain = layer.stride == layer.dilation == (1, 1)
    is_depthwise = layer.groups == layer.in_channels == layer.out_channels > 1
    return FastDepthwise if is_depthwise and is_square and is_plain and is_same_size else None
