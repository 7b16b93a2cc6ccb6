import os

import numpy as np
import pytest
import torch

from lightning_fedstop.data import DirichletSkew, NpzImages, PathologicalSkew, QuantitySkew
from lightning_fedstop.data.archives.archive import ImageArchive


@pytest.mark.parametrize(("shape", "channels"), [((6, 6), 1), ((6, 6, 1), 1), ((6, 6, 3), 3)])
@pytest.mark.parametrize("column", [True, False])
def test_every_form_of_the_layout(make_archive, shape, channels, column):
    module = NpzImages(make_archive(shape=shape, column=column))
    assert (module.num_classes, module.in_chans, module.image_size) == (4, channels, 6)
    module.setup(None)
    for loader, n in ((module.train_dataloader(), 40), (module.val_dataloader(), 8), (module.test_dataloader(), 12)):
        batches = [module.on_after_batch_transfer(batch, 0) for batch in loader]
        assert sum(len(y) for _, y in batches) == n
        assert {x.shape[1:] for x, _ in batches} == {(channels, 6, 6)}
        assert {(y.dtype, y.ndim) for _, y in batches} == {(torch.int64, 1)}


def test_four_images_by_hand(make_archive):
    images = np.array([0, 51, 102, 255], np.uint8).reshape(4, 1, 1)
    labels = np.array([[3], [0], [2], [1]], np.uint8)
    module = NpzImages(make_archive(sizes=(4, 4, 0), shape=(1, 1), val_images=images, val_labels=labels))
    module.setup("validate")
    (batch,) = module.val_dataloader()
    x, y = module.on_after_batch_transfer(batch, 0)
    assert y.tolist() == [3, 0, 2, 1]
    torch.testing.assert_close(x.flatten(), torch.tensor([-1.0, -0.6, -0.2, 1.0]))
    assert float((torch.tensor([3, 0, 1, 1]) == y).float().mean()) == 0.75


def test_classes_are_those_of_all_splits(make_archive):
    labels = np.full((8, 1), 6, np.uint8)
    assert NpzImages(make_archive(val_labels=labels)).num_classes == 7
    assert NpzImages(make_archive(), num_classes=9).num_classes == 9
    short = NpzImages(make_archive(), num_classes=3)
    with pytest.raises(ValueError, match=r"'train_labels' in .* must be class numbers from 0 to 2, got 0 to 3"):
        short.setup("fit")


def test_oblong_images_have_the_size_of_the_smaller_side(make_archive):
    assert NpzImages(make_archive(shape=(9, 6, 3))).image_size == 6


def image(*shape, dtype=np.uint8):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"train_images": None}, "has no array 'train_images'; it holds test_images"),
        ({"train_images": None, "train_labels": None}, "has no array 'train_images' and 'train_labels'"),
        ({"val_labels": None}, "has no array 'val_labels'"),
        ({"test_images": None}, "has no array 'test_images'"),
        ({"train_images": image(40, 6, 5, 3, dtype=np.float32)}, "'train_images' in .* must be uint8, got float32"),
        ({"val_images": image(8, 6, 5, 3, dtype=np.uint16)}, "'val_images' in .* must be uint8, got uint16"),
        ({"train_images": image(40, 6, 5, 4)}, r"must have shape \(n, H, W\).*got \(40, 6, 5, 4\)\."),
        (
            {"train_images": image(40, 3, 6, 5)},
            r"got \(40, 3, 6, 5\) \(channels first: save `images.transpose\(0, 2, 3, 1",
        ),
        ({"train_images": image(40, 1, 6, 5)}, r"got \(40, 1, 6, 5\) \(channels first: save"),
        ({"train_images": image(40, 6, 6, 6)}, r"got \(40, 6, 6, 6\) \(volumes are not served\)"),
        ({"train_images": image(40, 30)}, r"must have shape \(n, H, W\)"),
        ({"train_images": image(40, 0, 5, 3)}, r"must have shape \(n, H, W\)"),
        ({"train_images": image(39, 6, 5, 3)}, "holds 39 images, but 'train_labels' has shape"),
        ({"test_images": image(12, 6, 6, 3)}, r"'test_images' in .* \(6, 6, 3\), but 'train_images' of \(6, 5, 3\)"),
        ({"train_images": image(0, 6, 5, 3), "train_labels": image(0, 1)}, "'train_images' in .* is empty"),
        ({"train_labels": image(40, 14)}, r"'train_labels' in .* got \(40, 14\): one-hot and multi-label"),
        ({"train_labels": np.full((40, 1), -1)}, "must be class numbers from 0 upwards, got -1"),
        ({"train_labels": np.full((40, 1), 255)}, "largest label in .* is 255, with 60 images in all"),
        ({"train_labels": np.array([object()] * 40)}, "'train_labels' in .* whole class numbers, got dtype object"),
        ({"train_labels": np.array(7)}, r"'train_labels' has shape \(\)"),
    ],
)
def test_wrong_arrays_get_a_sentence(make_archive, arrays, message):
    with pytest.raises((ValueError, TypeError), match=message):
        NpzImages(make_archive(**arrays))


def test_labels_must_be_whole_numbers(make_archive):
    with pytest.raises(TypeError, match=r"'train_labels' in .* must hold whole class numbers, got dtype float64"):
        NpzImages(make_archive(train_labels=np.zeros((40, 1))))


def test_files_that_are_no_archive_get_a_sentence(tmp_path, make_archive):
    with pytest.raises(FileNotFoundError, match=r"There is no image archive at .*absent\.npz"):
        NpzImages(tmp_path / "absent.npz")
    with pytest.raises(FileNotFoundError, match="no image archive"):
        NpzImages(tmp_path)
    whole = make_archive().read_bytes()
    for name, content in (("text.npz", b"hello"), ("none.npz", b""), ("cut.npz", whole[: len(whole) // 2])):
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}' cannot be read as an image archive"):
            NpzImages(file)
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(ValueError, match="cannot be read"):
        NpzImages(tmp_path / "array.npy")


def test_damage_inside_an_array_is_found_when_it_is_read(make_archive):
    file = make_archive(sizes=(400, 8, 12))
    content = bytearray(file.read_bytes())
    content[5000:5400] = os.urandom(400)
    file.write_bytes(bytes(content))
    module = NpzImages(file, num_classes=4)
    with pytest.raises(ValueError, match="cannot be read as an image archive"):
        module.setup("fit")


def test_construction_reads_no_images(make_archive, monkeypatch):
    read = []
    array = ImageArchive._array
    monkeypatch.setattr(ImageArchive, "_array", lambda self, key: (read.append(key), array(self, key))[1])
    module = NpzImages(make_archive())
    assert read == ["train_labels", "val_labels", "test_labels"]
    module.setup("test")
    assert read[3:] == ["test_labels", "test_images"]


@pytest.mark.parametrize(
    ("name", "classes", "sizes"),
    [
        ("pbc8_blood_28_mini1000.npz", 8, (700, 100, 200)),
        ("ham10000_derma7_officialsplit_28_mini1000.npz", 7, (700, 100, 200)),
    ],
)
@pytest.mark.parametrize("skew", [DirichletSkew(0.1), PathologicalSkew(2), QuantitySkew(0.1)], ids=repr)
def test_real_images(shared_data, name, classes, sizes, skew):
    module = NpzImages(shared_data(name), num_clients=30, skew=skew)
    assert (module.num_classes, module.in_chans, module.image_size) == (classes, 3, 28)
    module.setup(None)
    assert sum(module.client_sizes) == sizes[0]
    assert min(module.client_sizes) >= 1
    counts = module.partition.class_counts(module.train_labels, classes)
    assert counts.sum(0).tolist() == np.bincount(module.train_labels, minlength=classes).tolist()
    for loader, n in ((module.val_dataloader(), sizes[1]), (module.test_dataloader(), sizes[2])):
        assert sum(len(y) for _, y in loader) == n
