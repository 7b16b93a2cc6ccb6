"""Depthwise convolutions and response norms as matrix products."""

import pytest
import timm
import torch
from torch import nn

from lightning_fedstop.models import ImageClassifier
from lightning_fedstop.models._matmul import DepthwiseMatmul, SummedResponseNorm, use_matmul


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kernel", "height", "width"), [(7, 1, 1), (7, 2, 3), (7, 8, 8), (3, 5, 4), (5, 8, 2), (7, 9, 8)]
)
def test_a_depthwise_product_equals_the_convolution(kernel, height, width, bias, training):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 6, kernel, padding=kernel // 2, groups=6, bias=bias)).double()
    images = torch.randn(4, 6, height, width, dtype=torch.float64, requires_grad=True)
    seen = torch.randn(4, 6, height, width, dtype=torch.float64)
    wanted = torch.autograd.grad((model(images) * seen).sum(), [images, *model.parameters()])
    output = model(images)
    assert use_matmul(model) == 1
    assert isinstance(model[0], DepthwiseMatmul)
    model.train(training)
    assert torch.allclose(model(images), output, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad((model(images) * seen).sum(), [images, *model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-11, atol=1e-11) for a, b in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize(
    ("where", "is_taken"), [("training", True), ("evaluation", False), ("no_grad", False), ("bfloat16", False)]
)
def test_the_operator_serves_training_in_full_precision_alone(where, is_taken):
    """A model that is exported for use must not need an operator of this package."""
    model = nn.Sequential(nn.Conv2d(6, 6, 7, padding=3, groups=6))
    use_matmul(model)
    model.train(where != "evaluation")
    with torch.set_grad_enabled(where != "no_grad"), torch.autocast("cpu", enabled=where == "bfloat16"):
        output = model(torch.randn(4, 6, 3, 3))
    assert ("depthwise" in type(output.grad_fn).__name__) == is_taken


def test_the_response_norm_has_timms_values_and_a_gradient_where_a_channel_is_zero():
    model = timm.create_model("convnextv2_atto", num_classes=3, conv_mlp=False).double()
    layer = model.stages[0].blocks[0].mlp.grn
    nn.init.normal_(layer.weight)
    images = torch.randn(2, 4, 4, 160, dtype=torch.float64)
    images[..., 5] = 0
    images.requires_grad_()
    wanted = layer(images)
    (slope,) = torch.autograd.grad(wanted.square().sum(), images)
    use_matmul(model)
    summed = model.stages[0].blocks[0].mlp.grn
    assert isinstance(summed, SummedResponseNorm)
    assert summed.weight is layer.weight
    assert torch.allclose(summed(images), wanted, rtol=1e-12)
    (gradient,) = torch.autograd.grad(summed(images).square().sum(), images)
    assert torch.isfinite(gradient).all()
    assert torch.allclose(gradient, slope, rtol=1e-10, atol=1e-10)


def test_layers_of_another_kind_stay():
    model = nn.Sequential(
        nn.Conv2d(6, 6, 7, padding=3),
        nn.Conv2d(6, 12, 7, padding=3, groups=6),
        nn.Conv2d(6, 6, 7, padding=2, groups=6),
        nn.Conv2d(6, 6, 7, padding=3, groups=6, stride=2),
        nn.Conv2d(6, 6, 7, padding=3, groups=6, padding_mode="reflect"),
        nn.Conv2d(6, 6, 4, padding=2, groups=6),
    )
    assert use_matmul(model) == 0


def test_a_classifier_gives_the_same_logits_and_loads_the_other_layouts_weights():
    torch.manual_seed(0)
    plain = ImageClassifier("convnextv2_atto", num_classes=4, backbone_kwargs={"conv_mlp": False})
    fast = ImageClassifier("convnextv2_atto", num_classes=4, matmul_layers=True)
    fast.load_state_dict(plain.state_dict())
    images = torch.randn(3, 3, 32, 32)
    assert any(isinstance(module, DepthwiseMatmul) for module in fast.modules())
    assert torch.allclose(fast(images), plain(images), atol=1e-5)


def test_a_backbone_without_such_layers_is_refused():
    with pytest.raises(ValueError, match="`matmul_layers`: resnet18 has no depthwise convolution"):
        ImageClassifier("resnet18", num_classes=4, matmul_layers=True)
