"""Nothing that is read runs code, nothing is written elsewhere, nobody is called."""

import os
import pickle
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_fedstop.cli.main import main
from lightning_fedstop.core.client_states import ClientStates
from lightning_fedstop.data import Digits, DirichletSkew, NpzImages, Partition
from lightning_fedstop.data.config import as_skew
from lightning_fedstop.loop.checkpoint_file import read_checkpoint
from lightning_fedstop.methods import SCAFFOLD
from lightning_fedstop.models import ImageClassifier
from lightning_fedstop.stopping import TaskVectorEarlyStopping
from tests.cli_tools import TINY, refusal
from tests.helpers import Deep, ToyData, fit

_heard: list = []
_listening: list = []
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod")


def _hear(event, args):
    if _listening and (event == "open" or event in _CHANGES or event.startswith(("socket.", "subprocess.", "os.sys"))):
        _heard.append((event, args))


@contextmanager
def heard():
    """What the process does to files and sockets; an audit hook cannot be taken off again, only be deaf."""
    if _hear not in _installed:
        sys.addaudithook(_hear)
        _installed.append(_hear)
    _heard.clear()
    _listening.append(True)
    try:
        yield _heard
    finally:
        _listening.clear()


_installed: list = []


def written(events):
    """The paths that were opened for writing, made, moved or removed."""
    for event, args in events:
        if event == "open":
            path, _, flags = args
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            if writes and isinstance(path, str | bytes | os.PathLike):
                yield Path(os.path.abspath(os.fsdecode(path)))
        elif event in _CHANGES:
            for path in args[:2]:
                if isinstance(path, str | bytes | os.PathLike):
                    yield Path(os.path.abspath(os.fsdecode(path)))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Another present folder and home than the run's own, both empty."""
    for name in ("here", "home", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


def test_a_fit_writes_below_its_root_alone_and_calls_nobody(elsewhere):
    root = elsewhere / "root"
    callbacks = [TaskVectorEarlyStopping(), LearningRateMonitor(), ModelCheckpoint(monitor="val_loss", save_last=True)]
    given = {
        "logger": [CSVLogger(root), TensorBoardLogger(root)],
        "method": SCAFFOLD(),
        "client_states": ClientStates("disk"),
        "max_rounds": 3,
    }
    with heard() as events:
        loop, _ = fit(root, *callbacks, module=Deep(), data=ToyData(), **given)
        fit(root, module=Deep(), data=ToyData(), method=SCAFFOLD(), max_rounds=4, ckpt_path="last")
        loop.test(loop.lightning_module, ToyData(), verbose=False)
    allowed = (root, elsewhere / "temporary", Path("/dev"), Path("/proc"))
    paths = set(written(events))
    assert any(path.name == "metrics.csv" for path in paths)  # the hook hears
    assert [path for path in paths if not any(path == ok or ok in path.parents for ok in allowed)] == []
    assert [(event, args) for event, args in events if event in ("socket.connect", "socket.getaddrinfo")] == []
    assert [event for event, _ in events if event.startswith(("subprocess.", "os.sys"))] == []
    # torch's own writer tells the audit hook nothing.
    assert sorted(path.name for path in elsewhere.iterdir()) == ["here", "home", "root", "temporary"]
    assert [list((elsewhere / name).iterdir()) for name in ("here", "home", "temporary")] == [[], [], []]


def test_the_command_line_writes_below_its_root_alone(elsewhere):
    root = elsewhere / "root"
    with heard() as events:
        main(["fit", *TINY, "--trainer.max_rounds=1", "--trainer.default_root_dir", str(root)])
    assert len(list(root.rglob("config.yaml"))) == 1
    assert [list((elsewhere / name).iterdir()) for name in ("here", "home")] == [[], []]
    assert [event for event, _ in events if event in ("socket.connect", "socket.getaddrinfo")] == []


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_no_file_that_is_read_is_unpickled(tmp_path):
    bomb = Bomb(tmp_path / "went off")
    with open(tmp_path / "pickle", "wb") as file:
        pickle.dump({"state_dict": bomb}, file)
    torch.save({"state_dict": {"weight": bomb}}, tmp_path / "torch")
    torch.save({"state_dict": {}, "hyper_parameters": {"skew": bomb}}, tmp_path / "hparams")
    objects = np.empty(4, object)
    objects[:] = [bomb] * 4
    images = np.zeros((4, 8, 8), np.uint8)
    np.savez(tmp_path / "labels.npz", train_images=images, train_labels=objects)
    np.savez(tmp_path / "images.npz", train_images=objects, train_labels=np.zeros(4, np.uint8))
    np.savez(tmp_path / "partition.npz", indices=objects, offsets=objects)
    for read, path in [
        *((read_checkpoint, name) for name in ("pickle", "torch", "hparams")),
        *((NpzImages, name) for name in ("labels.npz", "images.npz", "pickle")),
        *((Partition.load, name) for name in ("partition.npz", "pickle")),
        *((lambda path: ImageClassifier("resnet18", 2, weights_path=path), name) for name in ("pickle", "torch")),
    ]:
        with pytest.raises((ValueError, TypeError)) as error:
            read(tmp_path / path)
        assert "allow_pickle" not in str(error.value)
        assert "weights_only" not in str(error.value)
    assert not (tmp_path / "went off").exists()


@pytest.mark.parametrize("path", ["os.mkdir", "subprocess.Popen", "builtins.eval", "tests.test_safety.Bomb"])
def test_a_skew_out_of_a_checkpoint_is_nothing_but_a_skew(tmp_path, path):
    given = {"class_path": path, "init_args": {"path": str(tmp_path / "made")}}
    with heard() as events, pytest.raises(TypeError, match="`skew` must be a Skew"):
        as_skew(given)
    assert [event for event, _ in events if event != "open"] == []
    assert not (tmp_path / "made").exists()
    assert as_skew(DirichletSkew(0.3).as_config()).concentration == 0.3
    with pytest.raises(TypeError, match="`skew` must be a Skew"):
        Digits(skew=given)


KEYS = ["model", "data", "data.skew", "trainer.method", "trainer.cohort", "trainer.callbacks", "optimizer"]
FUNCTIONS = ["os.mkdir", "subprocess.Popen", "tests.test_safety.Bomb"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("path", FUNCTIONS)
def test_a_class_path_of_another_kind_is_refused_without_being_called(elsewhere, capsys, key, path):
    value = {"class_path": path, "init_args": {"path": str(elsewhere / "made"), "args": ["true"]}}
    for part in reversed(key.split(".")[1:]):
        value = {part: [value] if part == "callbacks" else value}
    if key == "data.skew":
        value = {"class_path": "Digits", "init_args": value}
    Path("x.yaml").write_text(yaml.safe_dump({key.partition(".")[0]: value}))
    with heard() as events:
        sentence = refusal(capsys, "fit", *TINY, "--config", "x.yaml")
    assert sentence.startswith(f"{key}: ")
    assert path in sentence
    assert "does not correspond to a subclass of" in sentence
    assert [event for event, _ in events if event.startswith(("subprocess.", "os.sys"))] == []
    assert not (elsewhere / "made").exists()


@pytest.mark.parametrize(
    "text",
    [
        "trainer: !!python/object/apply:os.mkdir [made]",
        "trainer: {max_rounds: !!python/object/new:os.mkdir [made]}",
        "model: !!python/name:os.mkdir",
        "data: !!python/module:antigravity",
        "data: !other {a: 1}",
    ],
)
def test_yaml_with_tags_is_refused(elsewhere, capsys, text):
    Path("x.yaml").write_text(text)
    for args in (["--config", "x.yaml"], [f"--config={text}"], ["--trainer", "x.yaml"], ["--data", "x.yaml"]):
        with pytest.raises(SystemExit) as exit:
            main(["fit", *TINY, *args])
        assert exit.value.code == 2
        assert "Traceback" not in capsys.readouterr().err
    assert not Path("made").exists()
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("text", ["trainer: &a {method: *a}", "model: &a [*a]", "&a [*a]"])
def test_anchors_that_hold_themselves_are_refused(elsewhere, capsys, text):
    Path("x.yaml").write_text(text)
    assert "Circular reference" in refusal(capsys, "fit", *TINY, "--config", "x.yaml")


def test_anchors_that_stand_for_more_than_memory_holds_are_refused(elsewhere, capsys):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40)]
    Path("x.yaml").write_text("\n".join(lines))
    assert "stand for more than 100000 values" in refusal(capsys, "fit", *TINY, "--config", "x.yaml")
