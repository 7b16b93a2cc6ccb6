"""The depthwise convolution with a backward pass of its own, against torch's."""

import pytest
import torch
from torch.nn import functional as F

from lightning_fedstop.models._depthwise import LARGEST_MAP, depthwise, weight_grad

SHAPES = [(1, 1, 7), (2, 3, 7), (5, 4, 3), (8, 8, 7), (9, 8, 7), (3, 3, 1)]


def maps(height, width, kernel, channels=5, count=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (count, channels, height, width), (channels, 1, kernel, kernel), (channels,)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("height", "width", "kernel"), SHAPES)
def test_its_gradients_and_their_gradients_are_right(height, width, kernel):
    inputs = maps(height, width, kernel, channels=2, count=2)
    assert torch.autograd.gradcheck(depthwise, inputs)
    assert torch.autograd.gradgradcheck(depthwise, inputs)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(("height", "width", "kernel"), SHAPES)
def test_it_equals_torchs_convolution_in_single_precision(height, width, kernel, channels_last):
    input, weight, bias = maps(height, width, kernel, channels=16, count=20, dtype=torch.float32)
    if channels_last:
        input = input.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    inputs = [input, weight, bias]
    output, wanted = depthwise(*inputs), F.conv2d(*inputs, padding=kernel // 2, groups=16)
    seen = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    pairs = zip(
        [output, *torch.autograd.grad(output, inputs, seen)],
        [wanted, *torch.autograd.grad(wanted, inputs, seen)],
        strict=True,
    )
    for ours, torchs in pairs:
        assert torch.allclose(ours, torchs, rtol=1e-4, atol=1e-5 * float(torchs.abs().max()))


@pytest.mark.parametrize(("height", "width", "kernel"), SHAPES)
@pytest.mark.parametrize("channels", [1, 5])
def test_a_graph_knows_the_shapes_and_layouts_that_come_out(height, width, kernel, channels):
    input, weight, bias = maps(height, width, kernel, channels, dtype=torch.float32)
    torch.library.opcheck(depthwise, (input, weight, bias))
    torch.library.opcheck(depthwise, (input, weight, None))
    torch.library.opcheck(weight_grad, (input, torch.randn_like(input).requires_grad_(), kernel))


def test_a_frozen_weight_gets_no_gradient():
    input, weight, bias = maps(4, 4, 3)
    weight.requires_grad_(False)
    depthwise(input, weight, bias).sum().backward()
    assert weight.grad is None
    assert bias.grad.tolist() == [3 * 16.0] * 5
    assert input.grad is not None


def test_both_ways_to_the_weights_gradient_are_tried_here():
    pixels = [height * width for height, width, _ in SHAPES]
    assert min(pixels) <= LARGEST_MAP < max(pixels)
