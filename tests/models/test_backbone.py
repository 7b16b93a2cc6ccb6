import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_fedstop.models import ImageClassifier, _backbone
from lightning_fedstop.models._backbone import nearest_size, takes

TINY = {"depths": [1, 1, 1, 1], "dims": [4, 4, 8, 8]}


@pytest.fixture
def source():
    """A backbone with a head of 5 classes for 3 channels, none of whose tensors is as it is drawn at first."""
    model = timm.create_model("convnextv2_atto", num_classes=5, **TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def classifier(path, **arguments):
    given = {"backbone": "convnextv2_atto", "num_classes": 5, "backbone_kwargs": TINY, "weights_path": path}
    return ImageClassifier(**given | arguments)


def equal_keys(module, source):
    own, theirs = module.backbone.state_dict(), source.state_dict()
    assert own.keys() == theirs.keys()
    return {key for key in own if own[key].shape == theirs[key].shape and torch.equal(own[key], theirs[key])}


@pytest.mark.parametrize("kind", ["safetensors", "pth", "checkpoint", "lightning"])
def test_weights_of_a_file_are_taken_over(tmp_path, source, kind):
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pth")
    state = source.state_dict()
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "pth":
        torch.save(state, path)
    elif kind == "checkpoint":
        torch.save({"epoch": 3, "state_dict": {f"module.{key}": value for key, value in state.items()}}, path)
    else:
        torch.save({"state_dict": {f"backbone.{key}": value for key, value in state.items()}}, path)
    module = classifier(path)
    assert equal_keys(module, source) == set(state)
    assert not module.backbone.pretrained_cfg.get("state_dict")


def test_head_of_another_size_is_left_at_random_and_all_else_taken_over(tmp_path, source):
    torch.save(source.state_dict(), tmp_path / "w.pth")
    module = classifier(tmp_path / "w.pth", num_classes=2)
    assert set(source.state_dict()) - equal_keys(module, source) == {"head.fc.weight", "head.fc.bias"}


def test_other_input_channels_are_adapted_as_timm_does(tmp_path, source):
    torch.save(source.state_dict(), tmp_path / "w.pth")
    module = classifier(tmp_path / "w.pth", in_chans=1)
    assert set(source.state_dict()) - equal_keys(module, source) == {"stem.0.weight"}
    summed = source.stem[0].weight.sum(1, keepdim=True)
    torch.testing.assert_close(module.backbone.stem[0].weight, summed)


def test_weights_without_a_head_are_taken_over(tmp_path):
    headless = timm.create_model("convnextv2_atto", num_classes=0, **TINY)
    torch.save(headless.state_dict(), tmp_path / "w.pth")
    own = classifier(tmp_path / "w.pth").backbone.state_dict()
    assert all(torch.equal(own[key], value) for key, value in headless.state_dict().items())


def test_the_file_is_read_once(tmp_path, source, monkeypatch):
    torch.save(source.state_dict(), tmp_path / "w.pth")
    reads = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: reads.append(args) or load(*args, **kwargs))
    module = classifier(tmp_path / "w.pth", num_classes=2)
    module(torch.zeros(1, 3, 32, 32))
    assert len(reads) == 1


def test_weights_of_another_model_are_refused(tmp_path):
    torch.save(timm.create_model("resnet18", channels=[2, 2, 2, 2]).state_dict(), tmp_path / "w.pth")
    with pytest.raises(ValueError, match=r"`weights_path`: .*w\.pth does not hold weights of convnextv2_.*0 of its"):
        classifier(tmp_path / "w.pth")


def test_a_part_of_the_weights_is_refused(tmp_path, source):
    state = dict(list(source.state_dict().items())[5:])
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(ValueError, match="tensors match by name and shape"):
        classifier(tmp_path / "w.pth", num_classes=2)


def test_missing_and_unreadable_files_are_refused(tmp_path, source):
    with pytest.raises(FileNotFoundError, match=r"`weights_path`: .*none\.pth does not exist"):
        classifier(tmp_path / "none.pth")
    with pytest.raises(FileNotFoundError, match="is a directory"):
        classifier(tmp_path)
    for name in ("w.pth", "w.safetensors"):
        (tmp_path / name).write_text("no weights")
        with pytest.raises(ValueError, match="cannot be read"):
            classifier(tmp_path / name)
    torch.save([1], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="holds no tensors"):
        classifier(tmp_path / "list.pth")
    source.stem[0].bias.data[0] = torch.nan
    torch.save(source.state_dict(), tmp_path / "nan.pth")
    with pytest.raises(ValueError, match=r"not finite, in 'stem\.0\.bias'"):
        classifier(tmp_path / "nan.pth")


def test_pretrained_without_network_is_one_sentence_that_names_weights_path(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        RuntimeError, match=r"^`pretrained=True`: the published weights of convnextv2_atto.*`weights_path`"
    ) as e:
        ImageClassifier("convnextv2_atto", 2, pretrained=True)
    assert "\n" not in str(e.value)
    assert e.value.__suppress_context__


class Takes(nn.Module):
    """Takes images whose sides are all in a range, as a stand-in for backbones of all kinds."""

    def __init__(self, *sides, own=64):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.sides, self.pretrained_cfg = sides, {"input_size": (1, own, own)}

    def forward(self, x):
        if any(side not in self.sides for side in x.shape[2:]):
            raise RuntimeError("Kernel size can't be greater than actual input size")
        return x


@pytest.mark.parametrize(
    ("sides", "given", "expected"),
    [
        (range(32, 999), (40, 40), (40, 40)),
        (range(32, 999), (28, 28), (32, 32)),
        (range(32, 999), (20, 100), (32, 100)),
        ([64], (28, 28), (64, 64)),
        ([64], (300, 200), (64, 64)),
        (range(16, 999, 16), (28, 28), (32, 32)),
    ],
)
def test_nearest_size(sides, given, expected):
    assert nearest_size(Takes(*sides), 1, *given) == expected


def test_nearest_size_says_when_there_is_none():
    with pytest.raises(ValueError, match="no image size up to 64 px"):
        nearest_size(Takes(), 1, 28, 28)


@pytest.mark.parametrize(
    ("name", "kwargs", "least"),
    [
        ("convnextv2_atto", TINY, 32),
        ("resnet18", {"channels": [2, 2, 2, 2]}, 1),
        ("vit_tiny_patch16_224", {"embed_dim": 6, "depth": 1, "num_heads": 1, "img_size": 64}, 64),
    ],
)
def test_real_backbones_are_measured(name, kwargs, least):
    model = _backbone.build_backbone(name, 3, 1, False, None, kwargs)
    assert takes(model, 1, least, least)
    assert not takes(model, 1, least - 1, least - 1)
    assert nearest_size(model, 1, max(1, least - 4), max(1, least - 4)) == (least, least)


def test_batch_norm_and_fixed_size_backbones_train_on_small_one_channel_images():
    for name, kwargs in (
        ("resnet18", {"channels": [2, 2, 2, 2]}),
        ("vit_tiny_patch16_224", {"embed_dim": 6, "depth": 1, "num_heads": 1}),
    ):
        module = ImageClassifier(name, num_classes=3, in_chans=1, backbone_kwargs=kwargs)
        loss = module.training_step((torch.randn(4, 1, 28, 28), torch.tensor([0, 1, 2, 0])))
        loss.backward()
        assert loss.isfinite()
