import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_fedstop.core.seeding import torch_generator
from lightning_fedstop.data import ArrayDataModule, Digits, DirichletSkew, Iid, NpzImages
from lightning_fedstop.data.arrays import normalise


@pytest.fixture
def module(make_archive):
    module = NpzImages(make_archive(), num_clients=3, batch_size=4, skew=DirichletSkew(0.5), eval_batch_size=5)
    module.setup("fit")
    return module


def test_normalises_as_2u_minus_1_in_float32():
    images = torch.arange(256, dtype=torch.uint8).reshape(2, 8, 16, 1)
    u = images.permute(0, 3, 1, 2).to(torch.float32) / 255
    once, twice = normalise(images), normalise(images, twice=True)
    assert once.dtype == torch.float32
    assert once.is_contiguous()
    assert torch.equal(once, (u - 0.5) / 0.5)
    torch.testing.assert_close(twice, 4 * u - 3)
    assert (float(twice.min()), float(twice.max())) == (-3.0, 1.0)
    assert images.max() == 255


def test_a_module_sees_normalised_images_and_class_numbers(module):
    images, labels = batch = next(iter(module.client_dataloader(0, torch.Generator())))
    assert (images.dtype, images.shape[1:], labels.dtype) == (torch.uint8, (6, 5, 3), torch.int64)
    batch = module.on_after_batch_transfer(module.on_before_batch_transfer(batch, 0), 0)
    assert torch.equal(batch[0], normalise(images))
    assert torch.equal(module.on_after_batch_transfer(batch, 0)[0], batch[0])
    module.normalize_twice = True
    torch.testing.assert_close(module.on_after_batch_transfer((images, labels), 0)[0], 2 * batch[0] - 1)


def test_client_batches_are_the_clients_samples(module):
    images, labels = module.read_split("train")
    for client in range(3):
        loader = module.client_dataloader(client, torch.Generator())
        batches = list(loader)
        n = module.client_sizes[client]
        assert [len(y) for _, y in batches] == [4] * (n // 4) + ([n % 4] if n % 4 else [])
        assert len(batches) == len(loader)
        got = sorted(x.numpy().tobytes() + bytes([int(y)]) for xs, ys in batches for x, y in zip(xs, ys, strict=True))
        held = module.partition[client]
        assert got == sorted(images[i].tobytes() + bytes([labels[i]]) for i in held)


def test_epochs_come_from_the_generator_alone(module):
    def epochs(generator):
        loader = module.client_dataloader(1, generator)
        return [[x.flatten().tolist() for x, _ in loader] for _ in range(2)]

    torch.manual_seed(0)
    first = epochs(torch_generator(0, "client", 2, 1))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert epochs(torch_generator(0, "client", 2, 1)) == first
    assert torch.equal(torch.get_rng_state(), before)
    assert first[0] != first[1]
    assert epochs(torch_generator(0, "client", 3, 1)) != first


def test_an_empty_client_has_no_batches(make_archive):
    module = NpzImages(make_archive(sizes=(4, 0, 0)), num_clients=6, skew=Iid(min_samples=0))
    module.setup("fit")
    loader = module.client_dataloader(5, torch.Generator())
    assert (len(loader), list(loader), list(loader)) == (0, [], [])
    with pytest.raises(IndexError, match="there are 6"):
        module.client_dataloader(6, torch.Generator())


def test_evaluation_is_in_order_and_moves_no_generator(module):
    images, labels = module.read_split("val")
    before = torch.get_rng_state()
    batches = list(module.val_dataloader())
    assert torch.equal(torch.get_rng_state(), before)
    assert [len(y) for _, y in batches] == [5, 3]
    assert len(module.val_dataloader()) == 2
    np.testing.assert_array_equal(torch.cat([x for x, _ in batches]).numpy(), images)
    np.testing.assert_array_equal(torch.cat([y for _, y in batches]).numpy(), labels)


def test_pooled_training_set_is_shuffled_whole(module):
    seen = [torch.cat([y for _, y in module.train_dataloader()]) for _ in range(2)]
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0].sort().values, seen[1].sort().values)
    assert len(seen[0]) == 40
    # What Lightning does under DDP.
    loader = module.train_dataloader()
    halves = [
        DataLoader(loader.dataset, 4, sampler=DistributedSampler(loader.dataset, 2, r), collate_fn=loader.collate_fn)
        for r in (0, 1)
    ]
    assert [sum(len(y) for _, y in half) for half in halves] == [20, 20]
    assert torch.equal(loader.dataset[3][0], loader.dataset.images[3])


def test_splits_are_read_when_needed_and_only_once(make_archive, monkeypatch):
    module, reads = NpzImages(make_archive()), []
    read = module.read_split
    monkeypatch.setattr(module, "read_split", lambda split: (reads.append(split), read(split))[1])
    module.setup("test")
    assert reads == ["test"]
    for loader in (module.train_dataloader, module.val_dataloader):
        with pytest.raises(RuntimeError, match=r"call `setup\("):
            loader()
    module.setup("fit")
    module.setup("fit")
    module.setup("validate")
    module.setup("predict")
    assert reads == ["test", "train", "val"]


def test_moves_what_is_read_before_and_after(make_archive):
    module = NpzImages(make_archive())
    module.setup("fit")
    assert module.to("meta") is module
    module.setup("test")
    for loader in (module.train_dataloader(), module.test_dataloader()):
        assert loader.dataset.images.device.type == loader.dataset.labels.device.type == "meta"
    images, labels = next(iter(module.client_dataloader(0, torch.Generator())))
    assert images.device.type == labels.device.type == "meta"


def test_absent_splits_have_no_loader(make_archive, quiet_trainer, linear):
    module = NpzImages(make_archive(val_images=None, val_labels=None, sizes=(40, 0, 0)), num_clients=2)
    module.setup(None)
    assert module.val_dataloader() == module.test_dataloader() == []
    model = linear(90, 4)
    quiet_trainer().fit(model, module)
    assert model.evaluated == 0
    assert len(model.seen) == 2


def test_works_in_a_plain_trainer(module, quiet_trainer, linear):
    model, trainer = linear(90, 4), quiet_trainer()
    trainer.fit(model, module)
    assert {(dtype, shape[1:], labels) for dtype, shape, _, _, labels in model.seen} == {
        (torch.float32, (3, 6, 5), torch.int64)
    }
    assert min(low for _, _, low, _, _ in model.seen) >= -1
    assert max(high for _, _, _, high, _ in model.seen) <= 1
    assert len(model.seen) == 10
    model.evaluated = 0
    trainer.test(model, module)
    assert model.evaluated == 12


def test_checkpoints_hold_plain_types_and_build_the_module_again(
    make_archive, quiet_trainer, linear, tmp_path, monkeypatch
):
    monkeypatch.setenv("PL_GLOBAL_SEED", "2")
    module = NpzImages(make_archive(), num_clients=3, skew=DirichletSkew(0.7))
    trainer = quiet_trainer(enable_checkpointing=True)
    trainer.fit(linear(90, 4), module)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    torch.load(tmp_path / "run.ckpt", weights_only=True)
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    again = NpzImages.load_from_checkpoint(tmp_path / "run.ckpt", weights_only=True)
    again.setup("fit")
    assert repr(again.skew) == repr(module.skew)
    np.testing.assert_array_equal(again.partition.indices, module.partition.indices)


@pytest.mark.parametrize("name", ["num_clients", "batch_size", "eval_batch_size"])
@pytest.mark.parametrize("value", [0, -3, 1.5, True])
def test_counts_are_checked_at_construction(name, value):
    with pytest.raises((TypeError, ValueError), match=f"`{name}` must be an integer of at least 1"):
        Digits(**{name: value})


def test_a_saved_partition_is_used(module, make_archive, tmp_path):
    path = module.partition.save(tmp_path / "deal")
    loaded = NpzImages(make_archive(), num_clients=3, partition_path=path)
    loaded.setup("fit")
    assert loaded.client_sizes == module.client_sizes
    with pytest.raises(ValueError, match="other data"):
        NpzImages(make_archive(sizes=(41, 8, 12)), num_clients=3, partition_path=path).setup("fit")


def test_a_subclass_must_read():
    with pytest.raises(NotImplementedError, match="read_split"):
        ArrayDataModule(2, 1, 8).setup("fit")
