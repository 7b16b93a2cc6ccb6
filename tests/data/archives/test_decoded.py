"""One decoded copy of an archive for many processes: the same bits, made once, never stale, never half."""

import errno
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_fedstop.data import DirichletSkew, NpzImages
from lightning_fedstop.data.archives import decoded as _decoded
from lightning_fedstop.data.archives.archive import ImageArchive

COPY = shutil.copyfileobj
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def images_of(cache):
    return sorted(path.name for path in cache.rglob("*.npy"))


def train_file(cache):
    (path,) = cache.rglob("train_images.npy")
    return path


def left_behind(cache):
    return list(cache.rglob("*.tmp"))


def everything(module):
    """All batches that a module gives, and who has what."""
    module.setup("fit")
    module.setup("test")
    generator = torch.Generator().manual_seed(0)
    loaders = [module.client_dataloader(client, generator) for client in range(module.num_clients)]
    batches = [part for loader in loaders for batch in loader for part in batch]
    batches += [part for loader in (module.val_dataloader(), module.test_dataloader()) for b in loader for part in b]
    return module.client_sizes, batches


def same(one, other):
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1), (6, 5, 3)])
def test_the_same_bits_with_and_without(make_archive, cache, recwarn, shape):
    given = {"path": make_archive(shape=shape), "num_clients": 5, "skew": DirichletSkew(0.3), "seed": 2}
    expected = everything(NpzImages(**given))
    for _ in ("decoded", "found"):
        assert same(everything(NpzImages(**given, cache_dir=cache)), expected)
    assert not recwarn.list
    assert images_of(cache) == ["test_images.npy", "train_images.npy", "val_images.npy"]


def test_real_images_are_the_same(shared_data, cache):
    file = shared_data("pbc8_blood_28_mini1000.npz")
    assert same(everything(NpzImages(file, cache_dir=cache)), everything(NpzImages(file)))


def test_nothing_is_written_that_was_not_asked_for(make_archive, tmp_path, monkeypatch):
    file = make_archive()
    monkeypatch.chdir(tmp_path)
    everything(NpzImages(file))
    assert list(tmp_path.rglob("*")) == [file]


def test_arrays_in_columns_and_a_split_that_is_absent(make_archive, cache):
    images = np.random.default_rng(1).integers(0, 256, (40, 6, 5, 3), np.uint8)
    file = make_archive(train_images=np.asfortranarray(images), val_images=None, val_labels=None)
    module = NpzImages(file, cache_dir=cache)
    module.setup("fit")
    assert np.array_equal(module.archive.read("train", 4)[0], images)
    assert images_of(cache) == ["test_images.npy", "train_images.npy"]


def test_what_is_decoded_is_not_decoded_again(make_archive, cache, monkeypatch):
    file = make_archive()
    expected = everything(NpzImages(file, cache_dir=cache))
    asked = []
    array = ImageArchive._array
    monkeypatch.setattr(ImageArchive, "_array", lambda self, key: (asked.append(key), array(self, key))[1])
    monkeypatch.setattr(_decoded, "_decode", lambda *_: pytest.fail("decoded again"))
    assert same(everything(NpzImages(file, cache_dir=cache)), expected)
    assert {key.partition("_")[2] for key in asked} == {"labels"}
    # The content counts, not where the archive lies.
    moved = shutil.copy(file, cache / file.name)
    assert same(everything(NpzImages(moved, cache_dir=cache)), expected)


def test_a_changed_archive_of_the_same_path_size_and_time_is_decoded_anew(tmp_path, cache):
    file = tmp_path / "images.npz"
    for value in (1, 2):
        np.savez(file, train_images=np.full((9, 4, 4), value, np.uint8), train_labels=np.arange(9) % 2)
        os.utime(file, ns=(10**18, 10**18))
        module = NpzImages(file, num_clients=2, cache_dir=cache)
        module.setup("fit")
        assert {int(x.unique()) for client in (0, 1) for x, _ in module.client_dataloader(client, None)} == {value}


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"x")])
def test_damage_is_noticed_and_mended(make_archive, cache, damage):
    file = make_archive()
    expected = everything(NpzImages(file, cache_dir=cache))
    whole = train_file(cache).read_bytes()
    damage(train_file(cache))
    with pytest.warns(UserWarning, match=r"train_images\.npy' is damaged or cut off and is decoded anew"):
        found = everything(NpzImages(file, cache_dir=cache))
    assert same(found, expected)
    assert train_file(cache).read_bytes() == whole


def test_what_is_written_to_a_map_stays_in_the_process(make_archive, cache):
    file = make_archive()
    module = NpzImages(file, cache_dir=cache)
    before = everything(module)
    whole = train_file(cache).read_bytes()
    images, _ = module._splits["train"]
    images.zero_()
    assert not images.any()
    assert train_file(cache).read_bytes() == whole
    assert same(everything(NpzImages(file, cache_dir=cache)), before)


def test_images_are_mapped_and_not_read(make_archive, cache):
    """The memory of the process is that of the file."""
    module = NpzImages(make_archive(), cache_dir=cache)
    module.setup("fit")
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("the system does not show its maps")
    assert str(train_file(cache)) in maps.read_text()


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("reason", ["Not a directory", "No space left on device"])
def test_a_folder_that_cannot_be_used_costs_only_memory(make_archive, tmp_path, monkeypatch, reason):
    file, cache = make_archive(), tmp_path / "cache"
    expected = everything(NpzImages(file))
    if reason == "Not a directory":
        cache.write_text("a file")
    else:
        monkeypatch.setattr(_decoded.shutil, "copyfileobj", full)
    message = rf"`cache_dir='.*cache'` cannot be used \({reason}\): .* is decoded into memory instead"
    with pytest.warns(UserWarning, match=message) as said:
        found = everything(NpzImages(file, cache_dir=cache))
    assert same(found, expected)
    assert len(said) == 1
    assert not left_behind(cache)


def test_a_damaged_archive_is_refused_and_leaves_nothing(make_archive, cache):
    file = make_archive(sizes=(400, 8, 12))
    content = bytearray(file.read_bytes())
    content[5000:5400] = os.urandom(400)
    file.write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read as an image archive"):
        NpzImages(file, num_classes=4, cache_dir=cache).setup("fit")
    assert images_of(cache) == []
    assert not left_behind(cache)


def test_damage_outside_the_images_is_found_too(make_archive, cache):
    file = make_archive(other=np.arange(4000))
    everything(NpzImages(file, cache_dir=cache))
    content = bytearray(file.read_bytes())
    at = content.rfind(b"other.npy", 0, content.find(b"PK\x01\x02")) + 300
    content[at : at + 100] = os.urandom(100)
    file.write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read as an image archive"):
        NpzImages(file, num_classes=4, cache_dir=cache).setup("fit")


@pytest.mark.parametrize(("value", "error"), [(3, TypeError), (True, TypeError), ("", ValueError), (" ", ValueError)])
def test_what_is_no_folder_is_refused(make_archive, value, error):
    with pytest.raises(error, match="`cache_dir` must be the path of a folder or None, got"):
        NpzImages(make_archive(), cache_dir=value)


def slowly(log):
    """Copies in two parts with a pause, and notes who does."""

    def copy(source, target, length):
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\n")
        target.write(source.read(100))
        time.sleep(0.2)
        COPY(source, target, length)

    return copy


def start(work, count):
    """Let processes do the same at the same moment; gives their exit codes."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(count)

    def child():
        barrier.wait()
        work()
        os._exit(0)

    children = [context.Process(target=child) for _ in range(count)]
    for process in children:
        process.start()
    for process in children:
        process.join(60)
    return [process.exitcode for process in children]


@forks
@pytest.mark.parametrize("locks", [True, False])
def test_processes_that_start_at_once_have_one_copy(make_archive, cache, tmp_path, monkeypatch, locks):
    file, log = make_archive(), tmp_path / "log"
    expected = NpzImages(file).archive.read("train", 4)[0]
    monkeypatch.setattr(_decoded.shutil, "copyfileobj", slowly(log))
    if not locks:
        import fcntl

        monkeypatch.setattr(fcntl, "flock", full)

    def work():
        assert np.array_equal(ImageArchive(file, cache).read("train", 4)[0], expected)

    assert start(work, 4) == [0] * 4
    assert len(log.read_text().splitlines()) == (1 if locks else 4)
    assert not left_behind(cache)
    assert np.array_equal(np.load(train_file(cache)), expected)


@forks
def test_a_process_that_is_killed_leaves_nothing_that_is_taken_for_whole(make_archive, cache, monkeypatch):
    file = make_archive()

    def half(source, target, length):
        target.write(source.read(2000))
        target.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(_decoded.shutil, "copyfileobj", half)
        assert start(lambda: ImageArchive(file, cache).read("train", 4), 1) == [-signal.SIGKILL]
    assert len(left_behind(cache)) == 1
    assert images_of(cache) == []
    assert same(everything(NpzImages(file, cache_dir=cache)), everything(NpzImages(file)))
    assert not left_behind(cache)
