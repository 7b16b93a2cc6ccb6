import numpy as np
import torch
from sklearn.datasets import load_digits

from lightning_fedstop.data import Digits, DirichletSkew


def test_split_is_stratified_fixed_and_whole():
    parts = {split: Digits(seed=seed).read_split(split) for seed, split in enumerate(("train", "val", "test"))}
    assert {split: len(labels) for split, (_, labels) in parts.items()} == {"train": 1297, "val": 200, "test": 300}
    for images, labels in parts.values():
        assert images.shape[1:] == (8, 8, 1)
        assert images.dtype == np.uint8
        share = np.bincount(labels) / len(labels)
        np.testing.assert_allclose(share, np.bincount(load_digits().target) / 1797, atol=0.01)
    together = np.sort(np.concatenate([images.reshape(-1, 64) for images, _ in parts.values()]), axis=0)
    original = np.rint(load_digits().images.reshape(-1, 64) * 255 / 16)
    np.testing.assert_array_equal(together, np.sort(original, axis=0))
    assert (together.min(), together.max()) == (0, 255)


def test_defaults_and_partition():
    module = Digits(skew=DirichletSkew(0.5), seed=1)
    module.setup("fit")
    assert (module.num_clients, module.batch_size) == (20, 32)
    assert (module.num_classes, module.in_chans, module.image_size) == (10, 1, 8)
    assert sum(module.client_sizes) == 1297
    other = Digits(skew=DirichletSkew(0.5), seed=2)
    other.setup("fit")
    assert other.client_sizes != module.client_sizes
    assert np.array_equal(other.train_labels, module.train_labels)


def test_works_in_a_plain_trainer(quiet_trainer, linear):
    model, module = linear(64, 10), Digits()
    trainer = quiet_trainer()
    trainer.fit(model, module)
    trainer.test(model, module)
    assert len(model.seen) == -(-1297 // 32)
    assert model.evaluated == 200 + 200 + 300
    assert {shape[1:] for _, shape, _, _, _ in model.seen} == {torch.Size([1, 8, 8])}
