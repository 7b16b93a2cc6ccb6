import hashlib
import warnings

import numpy as np
import pytest
import torch

from lightning_fedstop.data import DirichletSkew, MedMNIST

info = pytest.importorskip("medmnist.info").INFO
SERVED = [name for name in info if not name.endswith("3d") and name != "chestmnist"]


@pytest.fixture
def put(make_archive):
    """An archive under a set's official name, with fewer images than the official one."""

    def make(dataset="bloodmnist", size=28, **options):
        channels = info[dataset]["n_channels"]
        shape = (size, size, 3) if channels == 3 else (size, size)
        name = f"{dataset}.npz" if size == 28 else f"{dataset}_{size}.npz"
        options = {"shape": shape, "num_classes": len(info[dataset]["label"]), "sizes": (44, 11, 11)} | options
        return make_archive(name, **options).parent

    return make


@pytest.mark.slow
def test_serves_all_single_label_2d_sets(put):
    assert len(SERVED) == 11
    for name in SERVED:
        module = MedMNIST(name, size=28, root=put(name), num_clients=4)
        module.prepare_data()
        module.setup(None)
        assert module.num_classes == len(info[name]["label"]) == len(module.class_names)
        images, labels = module.on_after_batch_transfer(next(iter(module.train_dataloader())), 0)
        assert images.shape[1:] == (module.in_chans, 28, 28)
        assert labels.max() < module.num_classes
        assert sum(module.client_sizes) == 44


@pytest.mark.parametrize(
    ("size", "file"), [(28, "dermamnist.npz"), (64, "dermamnist_64.npz"), (224, "dermamnist_224.npz")]
)
def test_known_at_construction_without_a_file(tmp_path, size, file):
    module = MedMNIST("DermaMNIST", size=size, root=tmp_path / "nowhere")
    assert (module.num_classes, module.in_chans, module.image_size) == (7, 3, size)
    assert module.file == tmp_path / "nowhere" / file
    assert not (tmp_path / "nowhere").exists()
    assert (module.num_clients, module.batch_size) == (100, 256)


def test_default_folder_is_that_of_the_medmnist_package():
    assert str(MedMNIST().file).endswith(".medmnist/bloodmnist_64.npz")
    assert MedMNIST().file.is_absolute()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "chestmnist"}, r"`dataset='chestmnist'` cannot be used: it is multi-label \(14 findings"),
        ({"dataset": "organmnist3d"}, "its images are volumes"),
        ({"dataset": "bloodmist"}, r"`dataset` must be one of pathmnist, .*did you mean 'bloodmnist'\?"),
        ({"size": 32}, "`size` must be one of 28, 64, 128, 224, got 32"),
        ({"num_clients": 0}, "`num_clients`"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        MedMNIST(**arguments)


def test_a_missing_file_is_named_with_its_source(tmp_path):
    module = MedMNIST("bloodmnist", root=tmp_path)
    for call in (module.prepare_data, lambda: module.setup("fit")):
        with pytest.raises(FileNotFoundError) as caught:
            call()
        message = str(caught.value)
        assert "download=True" in message
        assert "put bloodmnist_64.npz from https://zenodo.org/" in message
        assert str(tmp_path) in message
        assert "\n" not in message


def test_download_is_that_of_the_medmnist_package(tmp_path, monkeypatch, put):
    import torchvision.datasets.utils as utils

    asked = {}

    def download_url(url, root, filename, md5):
        asked.update(url=url, root=root, filename=filename, md5=md5)

    monkeypatch.setattr(utils, "download_url", download_url)
    root = tmp_path / "new" / "folder"
    MedMNIST("dermamnist", size=64, root=root, download=True).prepare_data()
    assert asked["filename"] == "dermamnist_64.npz"
    assert asked["md5"] == info["dermamnist"]["MD5_64"]
    assert asked["url"] == info["dermamnist"]["url_64"]
    assert asked["root"] == str(root)
    assert root.is_dir()


def test_a_failed_download_is_one_sentence(tmp_path, monkeypatch, put):
    import torchvision.datasets.utils as utils

    def offline(**_):
        raise OSError("no route to host")

    monkeypatch.setattr(utils, "download_url", offline)
    module = MedMNIST("bloodmnist", size=28, root=tmp_path / "empty", download=True)
    with pytest.raises(
        RuntimeError, match=r"bloodmnist\.npz' is missing and could not be downloaded: put blood"
    ) as caught:
        module.prepare_data()
    assert "\n" not in str(caught.value)
    module = MedMNIST("bloodmnist", size=28, root=put(), download=True)
    with pytest.raises(RuntimeError, match="not the official one"):
        module.prepare_data()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": (27, 27, 3)}, r"\(27, 27, 3\), but bloodmnist at size 28 has \(28, 28, 3\)"),
        ({"shape": (28, 28)}, r"\(28, 28, 1\), but bloodmnist"),
        ({"num_classes": 9}, "must be class numbers from 0 to 7, got 0 to 8"),
        ({"train_images": None}, "has no array 'train_images'"),
        ({"train_labels": np.zeros((44, 14), int)}, "multi-label"),
    ],
)
def test_a_wrong_file_gets_a_sentence(put, options, message):
    module = MedMNIST("bloodmnist", size=28, root=put(**options), num_clients=2)
    with pytest.raises(ValueError, match=message):
        module.setup("fit")


def test_a_truncated_file_gets_a_sentence(put):
    root = put()
    file = root / "bloodmnist.npz"
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"bloodmnist\.npz' cannot be read") as caught:
        MedMNIST("bloodmnist", size=28, root=root).setup("fit")
    message = str(caught.value)
    found = hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()
    assert f"its MD5 sum is {found}, not {info['bloodmnist']['MD5']}, that of the official file" in message
    assert "set `download=True`, or put bloodmnist.npz from https://zenodo.org/" in message
    assert "\n" not in message


def test_a_file_that_is_not_the_official_one_is_told_with_both_sums(put, monkeypatch):
    root = put("pneumoniamnist", num_classes=2)
    found = hashlib.md5((root / "pneumoniamnist.npz").read_bytes(), usedforsecurity=False).hexdigest()
    module = MedMNIST("pneumoniamnist", size=28, root=root, num_clients=4)
    official = info["pneumoniamnist"]["MD5"]
    said = f"its MD5 sum is {found}, not {official}; unless you made it a part of the set, set `down"
    with pytest.warns(UserWarning, match=said):
        module.prepare_data()
    module.setup("fit")
    assert sum(module.client_sizes) == 44
    monkeypatch.setitem(info["pneumoniamnist"], "MD5", found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.prepare_data()


def test_works_in_a_plain_trainer(put, quiet_trainer, linear, tmp_path):
    root = put("pneumoniamnist", num_classes=2)
    module = MedMNIST("pneumoniamnist", size=28, root=root, num_clients=4, batch_size=16, skew=DirichletSkew(0.5))
    model, trainer = linear(28 * 28, 2), quiet_trainer()
    trainer.fit(model, module)
    assert len(model.seen) == 3
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    again = MedMNIST.load_from_checkpoint(tmp_path / "run.ckpt", weights_only=True)
    assert (again.file, repr(again.skew)) == (module.file, repr(module.skew))


def test_real_images_under_the_official_name(shared_data, tmp_path):
    (tmp_path / "dermamnist.npz").symlink_to(shared_data("ham10000_derma7_officialsplit_28_mini1000.npz"))
    module = MedMNIST("dermamnist", size=28, root=tmp_path, num_clients=50)
    module.prepare_data()
    module.setup("fit")
    assert sum(module.client_sizes) == 700
    images, labels = next(iter(module.client_dataloader(0, torch.Generator())))
    assert images.shape == (14, 28, 28, 3)
    assert labels.shape == (14,)


def test_decoded_images_are_kept_where_they_are_asked_for(put, tmp_path):
    root, cache = put("bloodmnist"), tmp_path / "cache"
    batches = []
    for cache_dir in (None, cache, str(cache)):
        module = MedMNIST("bloodmnist", size=28, root=root, num_clients=4, cache_dir=cache_dir)
        module.setup("validate")
        batches.append(next(iter(module.val_dataloader()))[0])
        assert cache.exists() == (cache_dir is not None)
    assert all(torch.equal(batches[0], other) for other in batches[1:])
    with pytest.raises(TypeError, match="`cache_dir` must be the path of a folder"):
        MedMNIST(cache_dir=3)
