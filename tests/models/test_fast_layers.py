"""Fast layers of ConvNeXt against torch's and timm's own."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn

from lightning_fedstop.data import Digits
from lightning_fedstop.models import ImageClassifier
from lightning_fedstop.models.fast_layers import LARGEST_MAP, FastDepthwise, FastResponseNorm, use_fast_layers
from lightning_fedstop.stopping import TaskVectorEarlyStopping
from tests.helpers import make_loop

SHAPES = [(1, 1, 7), (2, 3, 7), (8, 8, 7), (5, 4, 3), (5, 8, 5), (3, 3, 1), (9, 8, 7)]
TINY = {"depths": [1, 1, 1, 1], "dims": [4, 4, 8, 8]}


def depthwise(kernel, bias=True, channels=6):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels, bias=bias))


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("height", "width", "kernel"), SHAPES)
def test_a_depthwise_layer_equals_the_convolution(kernel, height, width, bias, training, everywhere):
    model = depthwise(kernel, bias).double()
    images = torch.randn(4, 6, height, width, dtype=torch.float64, requires_grad=True)
    seen = torch.randn(4, 6, height, width, dtype=torch.float64)
    wanted = torch.autograd.grad((model(images) * seen).sum(), [images, *model.parameters()])
    output = model(images)
    assert use_fast_layers(model, everywhere) == 1
    model.train(training)
    assert torch.allclose(model(images), output, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad((model(images) * seen).sum(), [images, *model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-11, atol=1e-11) for a, b in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize(("height", "width", "kernel"), [(2, 3, 7), (4, 3, 3)])
def test_its_gradients_and_their_gradients_are_right(height, width, kernel):
    model = depthwise(kernel, channels=2).double()
    use_fast_layers(model)
    images = torch.randn(2, 2, height, width, dtype=torch.float64, requires_grad=True)
    inputs = images, model[0].weight, model[0].bias

    def call(images, weight, bias):
        return torch.func.functional_call(model, {"0.weight": weight, "0.bias": bias}, images)

    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(("height", "width", "kernel"), SHAPES)
def test_single_precision_is_equal_to_1e_5(height, width, kernel, channels_last):
    model = depthwise(kernel, channels=16)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.randn(20, 16, height, width).contiguous(memory_format=memory_format).requires_grad_()
    inputs = [images, *model.parameters()]
    output = model(images)
    seen = torch.randn(output.shape)
    wanted = [output, *torch.autograd.grad(output, inputs, seen)]
    use_fast_layers(model)
    output = model(images)
    for ours, torchs in zip([output, *torch.autograd.grad(output, inputs, seen)], wanted, strict=True):
        assert torch.allclose(ours, torchs, rtol=1e-4, atol=1e-5 * float(torchs.detach().abs().max()))


@pytest.mark.parametrize(
    ("where", "is_taken"), [("training", True), ("evaluation", False), ("no_grad", False), ("bfloat16", False)]
)
def test_training_in_full_precision_alone_is_changed(where, is_taken):
    model = depthwise(7)
    use_fast_layers(model)
    model.train(where != "evaluation")
    with torch.set_grad_enabled(where != "no_grad"), torch.autocast("cpu", enabled=where == "bfloat16"):
        output = model(torch.randn(4, 6, 3, 3))
    assert ("Depthwise" in type(output.grad_fn).__name__) == is_taken


def test_a_frozen_weight_gets_no_gradient():
    model = depthwise(3, channels=5)
    use_fast_layers(model)
    model[0].weight.requires_grad_(False)
    images = torch.randn(3, 5, 4, 4, requires_grad=True)
    model(images).sum().backward()
    assert model[0].weight.grad is None
    assert model[0].bias.grad.tolist() == [3 * 16.0] * 5
    assert images.grad is not None


def test_an_evaluation_in_inference_mode_may_come_first():
    model = depthwise(3, channels=2)
    use_fast_layers(model, everywhere=True)
    images = torch.randn(1, 2, 5, 7)
    with torch.inference_mode():
        model(images)
    model.eval()(images).sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("conv_mlp", [True, False])
def test_the_response_norm_has_timms_values_and_a_gradient_where_a_channel_is_zero(conv_mlp):
    model = timm.create_model("convnextv2_atto", num_classes=3, conv_mlp=conv_mlp).double()
    layer = model.stages[0].blocks[0].mlp.grn
    nn.init.normal_(layer.weight)
    images = torch.randn(2, 4, 4, 160, dtype=torch.float64)
    images[..., 5] = 0
    images = (images.permute(0, 3, 1, 2) if conv_mlp else images).requires_grad_()
    wanted = layer(images)
    (slope,) = torch.autograd.grad(wanted.square().sum(), images)
    use_fast_layers(model)
    summed = model.stages[0].blocks[0].mlp.grn
    assert isinstance(summed, FastResponseNorm)
    assert summed.weight is layer.weight
    assert torch.allclose(summed(images), wanted, rtol=1e-12)
    (gradient,) = torch.autograd.grad(summed(images).square().sum(), images)
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
    assert use_fast_layers(model) == 0


def classifier(**arguments):
    torch.manual_seed(0)
    return ImageClassifier("convnextv2_atto", **{"num_classes": 4} | arguments)


def gradients(module):
    images = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    module.per_sample_loss((images, torch.arange(5) % 4)).mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("conv_mlp", [True, False])
def test_a_classifier_has_fast_layers_by_default_and_timms_parameters(conv_mlp):
    kwargs = {"conv_mlp": conv_mlp}
    fast = classifier(backbone_kwargs=kwargs)
    plain = classifier(backbone_kwargs=kwargs, matmul_layers=False)
    shapes = {key: value.shape for key, value in timm.create_model("convnextv2_atto", **kwargs).state_dict().items()}
    assert {key.removeprefix("backbone.") for key in fast.state_dict()} == set(shapes)
    assert fast.state_dict().keys() == plain.state_dict().keys()
    assert any(isinstance(module, FastDepthwise) for module in fast.modules())
    assert not any(isinstance(module, FastDepthwise) for module in plain.modules())
    assert torch.allclose(gradients(fast), gradients(plain), rtol=1e-4, atol=1e-5)
    images = torch.randn(3, 3, 32, 32)
    assert torch.equal(fast.eval()(images), plain.eval()(images))


def test_other_backbones_have_them_on_request_alone():
    module = ImageClassifier("mobilenetv3_small_050", num_classes=4)
    assert not any(isinstance(layer, FastDepthwise) for layer in module.modules())
    asked = ImageClassifier("mobilenetv3_small_050", num_classes=4, matmul_layers=True)
    assert any(isinstance(layer, FastDepthwise) for layer in asked.modules())
    with pytest.raises(ValueError, match="`matmul_layers`: resnet18 has no depthwise convolution"):
        ImageClassifier("resnet18", num_classes=4, matmul_layers=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_trains_its_own_weights(copied):
    module = classifier(backbone_kwargs=TINY)
    wanted = gradients(module)
    module.zero_grad()
    other = copied(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(gradients(other), wanted)


def test_the_backbone_can_be_compiled():
    module, plain = classifier(backbone_kwargs=TINY), classifier(backbone_kwargs=TINY)
    module.backbone.compile(backend="eager")
    assert list(module.state_dict()) == list(plain.state_dict())
    assert torch.allclose(gradients(module), gradients(plain), atol=1e-5)


def test_channels_last_reaches_the_backbone_and_changes_nothing():
    module, plain = (classifier(channels_last=last, backbone_kwargs=TINY) for last in (True, False))
    seen = []
    module.backbone.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    images = torch.randn(4, 3, 32, 32)
    assert torch.allclose(module(images), plain(images), atol=1e-6)
    assert seen[-1].is_contiguous(memory_format=torch.channels_last)


def test_clients_can_be_stacked(tmp_path):
    runs = []
    for backend in ("stacked", "sequential"):
        module = classifier(num_classes=10, in_chans=1, backbone_kwargs=TINY, image_size=32, channels_last=True)
        loop = make_loop(tmp_path, client_backend=backend, max_rounds=1, clients_per_round=3, local_epochs=1, seed=1)
        loop.fit(module, Digits(num_clients=60, batch_size=32))
        runs.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.allclose(*runs, atol=1e-5)


def test_a_run_stops_in_the_same_round_with_and_without(tmp_path):
    rounds, distances = [], []
    for switch in (None, False):
        module = classifier(num_classes=10, in_chans=1, backbone_kwargs=TINY, lr=0.05, matmul_layers=switch)
        rule = TaskVectorEarlyStopping(threshold=0.2, patience=2)
        loop = make_loop(tmp_path, max_rounds=20, clients_per_round=3, local_epochs=1, seed=1, callbacks=[rule])
        loop.fit(module, Digits(num_clients=60, batch_size=32))
        rounds.append(loop.current_epoch)
        distances.append(float(loop.callback_metrics["task_vector/distance"]))
    assert rounds[0] == rounds[1] < 20
    assert distances[0] == pytest.approx(distances[1], rel=1e-4)


def test_both_ways_to_the_weights_gradient_are_tried_here():
    pixels = [height * width for height, width, _ in SHAPES]
    assert min(pixels) <= LARGEST_MAP < max(pixels)


def test_a_checkpoint_of_either_layout_is_read(tmp_path):
    linear = classifier(backbone_kwargs=TINY | {"conv_mlp": False})
    checkpoint = {"state_dict": linear.state_dict(), "hyper_parameters": dict(linear.hparams)}
    checkpoint["hyper_parameters"]["backbone_kwargs"] = TINY
    checkpoint["pytorch-lightning_version"] = "2.6.0"
    torch.save(checkpoint, tmp_path / "linear.ckpt")
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "linear.ckpt")
    images = torch.randn(3, 3, 32, 32)
    assert torch.allclose(loaded.eval()(images), linear.eval()(images), atol=1e-5)
