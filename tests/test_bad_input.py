"""Bad input of every kind: one sentence, with what was wrong, where, and what is allowed; nothing is left behind.

Configurations and partitions have further tests in ``test_cli_errors.py``, ``test_config_fuzz.py`` and
``user_cases/test_inputs.py``, archives in ``data/test_npz.py``.
"""

import os
import shutil
import zipfile

import numpy as np
import pytest
import torch

from lightning_fedstop.data import NpzImages
from lightning_fedstop.methods import SCAFFOLD
from tests.cli_tools import CONF, TINY, USER, refusal
from tests.helpers import ToyData, ToyModule, fit, make_loop


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


SGD = ["--optimizer", "SGD", "--optimizer.lr", "0.1"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--seed_everything", "-1"], ["seed_everything: must be a whole number from 0 to 4294967295", "got -1"]),
        (["--seed_everything", "4294967296"], ["seed_everything: must be a whole number"]),
        (["--trainer=hello"], ['trainer: Unable to load config "hello"']),
        (["--trainer."], ["--trainer", "; did you mean trainer"]),
        (["--trainer.max_rounds"], ["--trainer.max_rounds: expected one argument"]),
        (["--config="], ["--config: needs the name of a file"]),
        (["--"], ["nrecognized arguments: --"]),
        (
            ["--data.class_pth", "Digits"],
            ["data: Digits:", "'class_pth'", "; did you mean class_path?"],
        ),
        (["--data.init_arg", "3"], ["data: Digits:", "'init_arg'", "; did you mean init_args?"]),
        (
            ["--data.init_args", "3"],
            ["data: Digits: must be a LightningDataModule by name, or with `class_path` and `init_args`, got '3'"],
        ),
        (["--data.class_path", "null"], ["data: must be a LightningDataModule by name, or with `class_path`"]),
        (
            ["--trainer.method.rho", "1"],
            ["trainer.method: ", "name the class that takes 'rho', which is one of FedGamma,"],
        ),
        (["--model", "xyzzy"], ["model: there is no class 'xyzzy'; there are ", "ImageClassifier"]),
        ([*SGD, "--lr_scheduler", "StepLR", "--lr_scheduler.step_size=0"], ["lr_scheduler: StepLR cannot be used"]),
        ([*SGD, "--optimizer.lr=-1"], ["optimizer: SGD cannot be used as given: ValueError: Invalid learning rate"]),
        ([*SGD, "--optimizer.lr=fast"], ["optimizer.lr: must be float, got 'fast'"]),
        (["--lr_scheduler", "StepLR", "--lr_scheduler.step_size=1"], ["lr_scheduler: needs an optimizer beside it"]),
        (["--model", USER + "Broken"], ["model: Broken: ZeroDivisionError: division by zero."]),
        (["--data.skew.concentration", "0"], ["data.skew: DirichletSkew: `concentration` must be a finite number"]),
        (["--trainer.max_rounds", "0"], ["trainer: FederatedLoop: `max_rounds` must be an integer of at least 1"]),
        (["--trainer.method=FedSAM", "--trainer.method.rho=-1"], ["trainer.method: FedSAM: `rho`"]),
        (["--trainer.accelerator", "gpu"], ["trainer: ", "`accelerator='gpu'` cannot be used: "]),
        (["--trainer.devices", "0"], ["trainer: ", "`devices=0` cannot be used: "]),
        (["--trainer.clients_per_round", "6"], ["`clients_per_round` must be at most the number of clients, 5, got 6"]),
    ],
)
def test_a_command_line_is_refused_by_its_key_and_leaves_nothing(root, capsys, args, says):
    if args == ["--trainer.accelerator", "gpu"] and torch.cuda.is_available():
        pytest.skip("there is one")
    sentence = refusal(capsys, "fit", *TINY, *args)
    assert [part for part in says if part not in sentence] == []
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("name", ["Callback", "LightningModule", "FederatedMethod", "ArrayDataModule", "Checkpoint"])
def test_bases_are_not_offered(root, capsys, name):
    for key in ("model", "data", "trainer.method", "trainer.callbacks"):
        sentence = refusal(capsys, "fit", *TINY, f"--{key}=xyzzy")
        assert f" {name}," not in sentence


def test_partitions_that_are_none(root, capsys):
    (root / "folder.npz").mkdir()
    (root / "text.npz").write_text("hello")
    np.savez(root / "other.npz", a=np.zeros(3))
    for name, says in (
        ("none.npz", "There is no saved partition at"),
        ("folder.npz", "There is no saved partition at"),
        ("text.npz", "is not a saved partition: it is no .npz file, or truncated"),
        ("other.npz", "is not a saved partition: "),
    ):
        assert says in refusal(capsys, "fit", *TINY, "--data.partition_path", name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of a run of one round."""
    loop, _ = fit(tmp_path_factory.mktemp("trained"), max_rounds=1)
    return f"{loop.log_dir}/checkpoints/last.ckpt"


def damage(path, how):
    """Make a bad checkpoint of a good one."""
    content = bytearray(path.read_bytes())
    if how == "half":
        content = content[: len(content) // 2]
    elif how == "flipped":
        with zipfile.ZipFile(path) as archive:
            data = max(archive.infolist(), key=lambda info: info.file_size)
            place = data.header_offset + 30 + len(data.filename)
        place = content.index(b"PK\x01\x02") - 200 if place > len(content) else place + data.file_size // 2
        content[place] ^= 0xFF
    elif how == "empty":
        content = bytearray()
    else:
        content = bytearray(b"hello " * 50)
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["half", "flipped", "empty", "text"])
def test_damaged_checkpoints(tmp_path, trained, how):
    path = tmp_path / "x.ckpt"
    shutil.copy(trained, path)
    damage(path, how)
    for run in (
        lambda: fit(tmp_path, ckpt_path=path),
        lambda: make_loop(tmp_path).test(ToyModule(), ToyData(), ckpt_path=path, verbose=False),
    ):
        with pytest.raises(ValueError, match=r"x\.ckpt' cannot be read as a checkpoint: (it is|\w+)"):
            run()
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]


def altered(path, trained, **changes):
    """A checkpoint of which parts are others; ``None`` leaves one out."""
    checkpoint = torch.load(trained, weights_only=True)
    for key, value in changes.items():
        owner = checkpoint if key in checkpoint else checkpoint["federated"]
        owner[key] = value
        if value is None:
            del owner[key]
    torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"federated": None}, "holds weights only: resuming needs a checkpoint that `FederatedLoop.fit` wrote"),
        ({"state_dict": None}, "is no Lightning checkpoint: it has no 'state_dict'"),
        ({"state_dict": {"other": torch.zeros(2)}}, "holds another model than ToyModule"),
        ({"method": None}, "was written by another version of this package, or damaged: see 'method'"),
        ({"method": "SCAFFOLD"}, "comes from SCAFFOLD, this run uses FedAvg"),
        ({"seed": 9}, "comes from seed 9, this run uses 0"),
        ({"seed": "9"}, "see 'seed' in it"),
        ({"theta": [1.0]}, "see 'theta' in it"),
        ({"theta": torch.zeros(3)}, "comes from a run with 3 trainable parameters, this one has 10"),
        ({"round": "two"}, "see 'round' in it"),
        ({"num_clients": 7}, "comes from a federation of 7 clients, this one has 5"),
    ],
)
def test_checkpoints_of_something_else(tmp_path, monkeypatch, trained, changes, says):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    path = altered(tmp_path / "x.ckpt", trained, **changes)
    with pytest.raises(ValueError) as error:
        fit(tmp_path, ckpt_path=path)
    assert says in str(error.value)
    assert "x.ckpt" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]


def test_checkpoints_of_another_method_and_folders(tmp_path, trained):
    with pytest.raises(ValueError, match="comes from FedAvg, this run uses SCAFFOLD: resume with the same method"):
        fit(tmp_path, method=SCAFFOLD(), ckpt_path=trained)
    with pytest.raises(FileNotFoundError, match="which is a folder: give the file in it"):
        fit(tmp_path, ckpt_path=tmp_path)
    assert list(tmp_path.iterdir()) == []


def small_archive(path, **arrays):
    content = {}
    for split in ("train", "val", "test"):
        content[f"{split}_images"] = np.zeros((8, 4, 4), np.uint8)
        content[f"{split}_labels"] = (np.arange(8) % 2).astype(np.uint8)
    np.savez(path, **content | arrays)
    return path


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_label_out_of_range_is_found_before_training_in_any_split(tmp_path, split):
    path = small_archive(tmp_path / "a.npz", **{f"{split}_labels": np.arange(8)})
    module = NpzImages(path, num_classes=2, num_clients=2)
    with pytest.raises(ValueError, match=rf"'{split}_labels' in .* from 0 to 1, got 0 to 7"):
        module.setup("fit")


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_damage_is_found_before_training_in_any_split(tmp_path, split):
    path = small_archive(tmp_path / "a.npz", **{f"{split}_images": np.full((8, 4, 4), 77, np.uint8)})
    content = bytearray(path.read_bytes())
    content[content.index(b"M" * 128) + 60] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read as an image archive"):
        NpzImages(path, num_classes=2, num_clients=2).setup("fit")


def rewritten(path, name, change):
    with zipfile.ZipFile(path) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    members[name] = change(members[name])
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-5],
        lambda content: content + b"more",
        lambda content: content.replace(b"(8, 4, 4)", b"(8, 4,4000000000000)"),
        lambda content: b"hello",
        lambda content: b"",
        lambda content: content[:6] + b"\x09\x00" + content[8:],
        lambda content: content.replace(b"{'descr'", b"{'desc'+"),
    ],
)
@pytest.mark.parametrize("name", ["train_images.npy", "test_images.npy"])
def test_an_array_of_another_length_than_it_says(tmp_path, name, change):
    path = small_archive(tmp_path / "a.npz")
    rewritten(path, name, change)
    with pytest.raises(ValueError, match=r"a\.npz"):
        NpzImages(path, num_clients=2)


def test_labels_beyond_what_a_number_holds(tmp_path):
    path = small_archive(tmp_path / "a.npz", train_labels=np.full(8, 2**63 + 5, np.uint64))
    with pytest.raises(ValueError, match=r"below 2\*\*63, got 9223372036854775813"):
        NpzImages(path, num_clients=2)


def test_an_archive_that_may_not_be_read(tmp_path, monkeypatch):
    path = small_archive(tmp_path / "a.npz")

    def refuse(*args, **kwargs):
        raise PermissionError(13, os.strerror(13), str(path))

    monkeypatch.setattr(zipfile, "ZipFile", refuse)
    with pytest.raises(ValueError, match=r"a\.npz' cannot be read: Permission denied\."):
        NpzImages(path)


def test_a_root_that_cannot_be_written_to(root, capsys):
    for place in (str(CONF / "tiny.yaml"), "/proc/nowhere"):
        sentence = refusal(capsys, "fit", *TINY, "--trainer.default_root_dir", place)
        assert f"The run cannot be recorded under '{place}'" in sentence
