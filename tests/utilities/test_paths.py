"""Paths of users: ``~`` is expanded, other machines' are refused, and links to folders are followed once."""

import os
import shutil

import pytest

from lightning_fedstop.cli.main import main
from lightning_fedstop.data import Digits, MedMNIST, NpzImages, Partition
from lightning_fedstop.loop.checkpoint_file import find_last
from lightning_fedstop.models import ImageClassifier
from lightning_fedstop.records.reader import find_records, read_record
from lightning_fedstop.records.report import write_report
from lightning_fedstop.utilities.paths import walk
from tests.cli_tools import TINY, refusal
from tests.helpers import bits, fit, make_loop, same

ROUNDS = "round,distance,val_loss\n1,1.0,0.5\n2,1.5,0.4\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def record(tmp_path):
    folder = tmp_path / "logs" / "version_0"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(ROUNDS)
    return folder


# What a user can name, by the argument that a refusal names.
REMOTE = "s3://bucket/x"
TAKERS = {
    "default_root_dir": lambda path: make_loop(path),
    "ckpt_path": lambda path: fit("runs", ckpt_path=path),
    "partition_path": lambda path: Digits(partition_path=path).setup("fit"),
    "root": lambda path: MedMNIST("bloodmnist", root=path),
    "cache_dir": lambda path: MedMNIST("bloodmnist", cache_dir=path),
    "path": lambda path: NpzImages(path),
    "weights_path": lambda path: ImageClassifier("test_vit", num_classes=3, weights_path=path).configure_model(),
}


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize("path", ["s3://bucket/x", "gs://x", "file:///tmp/x", "hdfs://a/b"])
def test_a_path_of_another_machine_is_refused_in_one_sentence(home, tmp_path, name, path):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=f"`{name}` must be a path of this machine, without `://`, got '{path}'"):
        TAKERS[name](path)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("trainer.default_root_dir", "default_root_dir"),
        ("ckpt_path", "ckpt_path"),
        ("data.partition_path", "partition_p"),
    ],
)
def test_the_command_line_refuses_it_too(home, capsys, key, name):
    args = ["--data.skew", "null"] if key.startswith("data") else []
    assert f"`{name}" in (said := refusal(capsys, "fit", *TINY, *args, f"--{key}={REMOTE}"))
    assert said.endswith(".")


def test_runs_and_checkpoints_under_home(home):
    whole, expected = fit("~/runs", max_rounds=2)
    assert whole.log_dir == str(home / "runs" / "lightning_logs" / "version_0")
    fit("~/cut", max_rounds=1)
    _, module = fit("~/cut", max_rounds=2, ckpt_path="~/cut/lightning_logs/version_0/checkpoints/last.ckpt")
    assert same(bits(module), bits(expected))
    assert not (home.parent / "~").exists()


def test_files_under_home(home, record, capsys):
    shutil.copytree(record, home / "version_0")
    assert read_record("~/version_0").rounds == [1, 2]
    assert find_records("~/version_0") == [home / "version_0"]
    page = write_report([read_record("~/version_0")], "~/pages/report.html").page
    assert page == home / "pages" / "report.html"
    main(["replay", "~/version_0", "--out=~/table.csv"])
    assert (home / "table.csv").read_text().startswith("run,rule")
    data = Digits(num_clients=5)
    data.setup("fit")
    assert data.partition.save("~/p.npz") == home / "p.npz"
    assert Partition.load("~/p.npz").fingerprint == data.partition.fingerprint
    assert data.partition.plot("~/p.svg") == home / "p.svg"
    (home / "tiny.yaml").write_text("trainer: {max_rounds: 3}\n")
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config=~/tiny.yaml", "--print_config"])
    assert exit.value.code == 0
    assert "max_rounds: 3" in capsys.readouterr().out
    assert not (home.parent / "~").exists()


def test_a_model_is_taken_from_a_checkpoint_under_home(home, capsys):
    main(["fit", *TINY, "--trainer.default_root_dir=~/a", "--model.width=64", "--trainer.max_rounds=1"])
    config = [*TINY, "--model", "ImageClassifier", "--trainer.enable_progress_bar=false"]
    main(["test", *config, "--ckpt_path=~/a/lightning_logs/version_0/checkpoints/last.ckpt"])
    assert "test_loss" in capsys.readouterr().out


# Links


def link(path, target):
    try:
        path.symlink_to(target, target_is_directory=True)
    except OSError:
        pytest.skip("links cannot be made here")


@pytest.fixture
def linked(tmp_path, record):
    """A folder of links: to a version folder, to the folder above it, and back to itself and its parent."""
    folder = tmp_path / "linked"
    (folder / "deep").mkdir(parents=True)
    link(folder / "deep" / "logs", record.parent)
    link(folder / "deep" / "loop", folder)
    link(folder / "itself", folder / "deep")
    link(record / "up", tmp_path)
    (folder / "gone").symlink_to(tmp_path / "nothing")
    return folder


def test_records_behind_links_are_found_once(linked, record):
    assert [path.resolve() for path in find_records(linked)] == [record]
    assert find_records([linked, record.parent])[0].resolve() == record


def test_what_is_reached_without_a_link_has_that_name(tmp_path, record):
    link(tmp_path / "a", record.parent)
    assert find_records(tmp_path) == [record]


def test_replay_and_report_follow_links(linked, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["replay", str(linked), "--rule", "task_vector"])
    assert "task_vector" in capsys.readouterr().out
    main(["report", str(linked), "--out", "page.html"])
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize("part", ["lightning_logs", "lightning_logs/version_0", "lightning_logs/version_0/checkpoints"])
def test_the_last_checkpoint_is_found_behind_links(tmp_path, part):
    whole, expected = fit(tmp_path / "whole", max_rounds=2)
    fit(tmp_path / "cut", max_rounds=1)
    moved = tmp_path / "elsewhere"
    (tmp_path / "cut" / part).rename(moved)
    link(tmp_path / "cut" / part, moved)
    link(moved / "loop", tmp_path / "cut")
    again, module = fit(tmp_path / "cut", max_rounds=2, ckpt_path="last")
    assert same(bits(module), bits(expected))
    assert again.summary["parameters_hash"] == whole.summary["parameters_hash"]


def test_a_link_to_a_checkpoint_that_has_gone_is_passed_over(tmp_path):
    (tmp_path / "a.ckpt").symlink_to(tmp_path / "nothing.ckpt")
    with pytest.raises(FileNotFoundError, match="found no checkpoint"):
        find_last(tmp_path)


def test_each_folder_is_walked_once(linked, tmp_path):
    folders = [os.path.realpath(folder) for folder, _ in walk(tmp_path)]
    assert len(folders) == len(set(folders))
    assert next(iter(walk(linked)))[0] == linked
