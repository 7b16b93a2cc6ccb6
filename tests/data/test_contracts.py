"""What every public skew and data module must keep, found by looking: a new one is tested by being there."""

import inspect
import json
import warnings

import numpy as np
import pytest
import torch

from lightning_fedstop.data import ArrayDataModule, FederatedDataModule, Partition, Skew
from lightning_fedstop.data.config import as_skew
from lightning_fedstop.data.registry import public_classes

SKEWS = public_classes(Skew)
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), [40, 60, 80, 20, 100]))


@pytest.fixture(params=SKEWS.values(), ids=SKEWS)
def skew(request):
    return request.param()


def test_the_package_has_these():
    assert {"Iid", "DirichletSkew", "PathologicalSkew", "QuantitySkew"} <= set(SKEWS)
    assert {"Digits", "MedMNIST", "NpzImages"} <= set(public_classes(ArrayDataModule))
    assert "Federated" in public_classes(FederatedDataModule)


def test_every_sample_is_dealt_once(skew):
    clients = skew.partition(LABELS, 10, seed=1)
    assert len(clients) == 10
    assert all(client.dtype == np.int64 and client.ndim == 1 for client in clients)
    np.testing.assert_array_equal(np.sort(np.concatenate(clients)), np.arange(len(LABELS)))
    assert min(map(len, clients)) >= skew.min_samples


def test_the_seed_decides_and_nothing_else(skew):
    first, again, other = (Partition.create(skew, LABELS, 10, seed).digest for seed in (3, 3, 4))
    assert first == again != other
    state = np.random.get_state()[1].tolist()  # noqa: NPY002 - the global generator must not move
    skew.partition(LABELS, 10, 0)
    assert np.random.get_state()[1].tolist() == state  # noqa: NPY002


def test_clients_may_be_empty_on_request_alone(skew):
    with pytest.raises(ValueError, match="cannot deal"):
        skew.partition(np.array([0, 1]), 8)
    if "min_samples" in inspect.signature(type(skew)).parameters:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = {"classes_per_client": 1} if hasattr(skew, "classes_per_client") else {}
            clients = type(skew)(min_samples=0, **arguments).partition(np.array([0, 0, 1, 1, 1]), 8)
        assert sorted(np.concatenate(clients).tolist()) == [0, 1, 2, 3, 4]


def test_a_partition_is_described_drawn_and_read_again(skew, tmp_path):
    partition = Partition.create(skew, LABELS, 10, seed=1)
    assert type(skew).__name__ in partition.describe(LABELS, 5)
    assert partition.plot(tmp_path / "p.svg", LABELS, 5).stat().st_size > 1000
    assert Partition.load(partition.save(tmp_path / "p.npz"), LABELS, 10).digest == partition.digest


def test_a_configuration_gives_the_same_skew_again(skew):
    config = json.loads(json.dumps(skew.as_config()))
    assert repr(as_skew(config)) == repr(skew)
    assert set(config["init_args"]) == set(inspect.signature(type(skew)).parameters)


def made(kind, tmp_path, make_archive):
    """A small data module of a class, by the arguments that it takes."""
    parameters = inspect.signature(kind).parameters
    given = {"num_clients": 4, "batch_size": 8, "skew": SKEWS["DirichletSkew"](0.5), "seed": 0}
    if "path" in parameters:
        given["path"] = make_archive()
    if "root" in parameters:
        make_archive("bloodmnist.npz", (28, 28, 3), num_classes=8)
        given |= {"root": tmp_path, "size": 28}
    return kind(**given)


@pytest.fixture(params=public_classes(ArrayDataModule).values(), ids=public_classes(ArrayDataModule))
def data(request, tmp_path, make_archive):
    module = made(request.param, tmp_path, make_archive)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the archive is no official file
        module.prepare_data()
        module.setup("fit")
        module.setup("test")
    return module


def test_a_data_module_deals_each_training_image_once(data):
    pooled = sum(len(labels) for _, labels in data.train_dataloader())
    assert sum(data.client_sizes) == len(data.train_labels) == pooled
    assert len(data.class_names) == data.num_classes
    for client, size in enumerate(data.client_sizes):
        batches = list(data.client_dataloader(client, torch.Generator().manual_seed(0)))
        assert sum(len(labels) for _, labels in batches) == size
        again = list(data.client_dataloader(client, torch.Generator().manual_seed(0)))
        assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, again, strict=True))


def test_a_data_module_gives_normalised_images(data):
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        images, labels = data.on_after_batch_transfer(next(iter(loader)), 0)
        assert images.shape[1:] == (data.in_chans, data.image_size, data.image_size) or data.image_size == min(
            images.shape[2:]
        )
        assert images.dtype == torch.float32
        assert -1 <= images.min() <= images.max() <= 1
        assert 0 <= labels.min() <= labels.max() < data.num_classes


def test_a_data_module_keeps_plain_hyperparameters(data):
    assert json.loads(json.dumps(dict(data.hparams), default=str))
    assert data.hparams["skew"]["class_path"].endswith("DirichletSkew")
