"""A declaration of thread safety counts in the class that makes it, and nowhere else."""

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import nn

from lightning_fedstop.data import Digits, Federated, MedMNIST, NpzImages
from lightning_fedstop.models import ImageClassifier
from lightning_fedstop.models._chance import draws
from lightning_fedstop.utilities.thread_safety import declares_thread_safety
from tests.helpers import ToyData


def images(tmp_path):
    path = tmp_path / "images.npz"
    arrays = {f"{split}_images": np.zeros((2, 8, 8), np.uint8) for split in ("train", "val", "test")}
    np.savez(path, **arrays, **{f"{split}_labels": np.arange(2) for split in ("train", "val", "test")})
    return NpzImages(path, num_clients=2)


@pytest.mark.parametrize("make", [images, lambda _: MedMNIST("bloodmnist"), lambda _: Digits()])
def test_our_image_sets_declare_it_and_what_inherits_from_them_does_not(tmp_path, make):
    data = make(tmp_path)
    assert declares_thread_safety(data)
    assert declares_thread_safety(Federated(data, num_clients=2))
    data.__class__ = type("Own", (type(data),), {})
    assert data.is_thread_safe
    assert not declares_thread_safety(data)
    assert not declares_thread_safety(Federated(data, num_clients=2))


def test_what_wraps_a_data_module_says_what_that_says():
    assert not declares_thread_safety(Federated(LightningDataModule(), num_clients=2))
    assert not declares_thread_safety(type("Own", (Federated,), {})(Digits(), num_clients=2))
    assert not declares_thread_safety(ToyData())
    assert not declares_thread_safety(None)
    assert not declares_thread_safety(type("Not", (), {"is_thread_safe": False})())


def classifier(backbone="convnextv2_atto", **arguments):
    small = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)} if backbone.startswith("convnext") else {}
    small |= arguments.pop("backbone_kwargs", {})
    return ImageClassifier(backbone, 3, 1, backbone_kwargs=small, **arguments)


def hooked():
    model = classifier()
    model.backbone.stem.register_forward_hook(lambda *_: None)
    return model


def with_dropout():
    model = classifier()
    model.backbone.head = nn.Sequential(nn.Dropout(0.1), model.backbone.head)
    return model


@pytest.mark.parametrize(
    ("make", "is_safe"),
    [
        (classifier, True),
        (lambda: classifier(matmul_layers=True), True),
        (lambda: classifier("resnet10t"), True),
        (lambda: classifier(backbone_kwargs={"drop_path_rate": 0.1}), False),
        (lambda: classifier(backbone_kwargs={"drop_rate": 0.1}), False),
        (lambda: classifier("resnet10t", backbone_kwargs={"drop_rate": 0.1}), False),
        (lambda: classifier("resnet10t", backbone_kwargs={"drop_block_rate": 0.1}), False),
        (hooked, False),
        (with_dropout, False),
    ],
)
def test_the_classifier_knows_when_it_is_none(make, is_safe):
    model = make()
    assert declares_thread_safety(model) == is_safe
    state = torch.get_rng_state()
    if is_safe:
        model.train()(torch.zeros(2, 1, 32, 32))
        assert torch.equal(torch.get_rng_state(), state)


def test_a_classifier_of_ones_own_has_to_say_so_itself():
    class Own(ImageClassifier):
        pass

    class Declared(Own):
        is_thread_safe = True

    assert not declares_thread_safety(Own("resnet10t", 3))
    assert declares_thread_safety(Declared("resnet10t", 3))


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Dropout(0.0), False),
        (nn.AlphaDropout(0.1), True),
        (nn.LSTM(2, 2, 2, dropout=0.2), True),
        (nn.LSTM(2, 2), False),
        (nn.MultiheadAttention(2, 1, dropout=0.1), True),
        (nn.MultiheadAttention(2, 1), False),
        (nn.RReLU(), True),
        (nn.BatchNorm1d(2), False),
    ],
)
def test_layers_that_draw_random_numbers(layer, expected):
    assert draws(layer) == expected
