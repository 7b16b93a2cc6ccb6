"""``fedstop fit --ckpt_path``: whatever would make it another run is named and refused, the rest goes on."""

import shutil

import pytest
import torch
import yaml

from lightning_fedstop.cli.main import main
from lightning_fedstop.loop.checkpoint_file import read_checkpoint
from lightning_fedstop.records.run_record import read_rounds
from tests.cli_tools import CONF, TINY, USER, refusal

BASE = [
    *TINY,
    *("--optimizer", "SGD", "--optimizer.lr", "0.1", "--lr_scheduler", "ExponentialLR", "--lr_scheduler.gamma", "0.9"),
    *("--trainer.method", "FedProx", "--trainer.method.mu", "0.1"),
    *("--trainer.callbacks+=TaskVectorEarlyStopping", "--trainer.callbacks.threshold", "0.001"),
]
REFUSED = {
    "model.num_classes was 10 and is 12": ["--model.num_classes", "12"],
    "model was 'Linear' and is 'TenClasses'": ["--model", USER + "TenClasses"],
    "trainer.method.mu was 0.1 and is 0.2": ["--trainer.method.mu", "0.2"],
    "comes from FedProx, this run uses FedAvg": ["--trainer.method", "FedAvg"],
    "trainer.clients_per_round was 2 and is 3": ["--trainer.clients_per_round", "3"],
    "trainer.clients_per_round was 2 and is 4": ["--trainer.clients_per_round", "0.8"],
    "trainer.local_epochs was 1 and is 2": ["--trainer.local_epochs", "2"],
    "trainer.cohort was 'UniformCohort' and is 'ScheduledCohort'": [
        *("--trainer.cohort", "ScheduledCohort", "--trainer.cohort.schedule", "[[0, 1], [2, 3]]"),
    ],
    "data.skew.concentration was 0.7 and is 0.5": ["--data.skew.concentration", "0.5"],
    "(data.skew was 'DirichletSkew' and is 'Iid')": ["--data.skew", "Iid"],
    "data.num_clients was 5 and is 6": ["--data.num_clients", "6"],
    "data.seed was 0 and is 3": ["--data.seed", "3"],
    "data.batch_size was 8 and is 16": ["--data.batch_size", "16"],
    "data.normalize_twice was False and is True": ["--data.normalize_twice", "true"],
    "comes from seed 0, this run uses 1": ["--seed_everything", "1"],
    "(optimizer.lr was 0.1 and is 0.2)": ["--optimizer.lr", "0.2"],
    "(optimizer was 'SGD' and is 'Adam')": ["--optimizer", "Adam"],
    "(lr_scheduler.gamma was 0.9 and is 0.8)": ["--lr_scheduler.gamma", "0.8"],
}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    root = tmp_path_factory.mktemp("first")
    main(["fit", *BASE, "--trainer.default_root_dir", str(root)])
    return root


@pytest.fixture
def root(tmp_path, first, monkeypatch):
    """A copy of the first run, to go on from."""
    shutil.copytree(first, tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "runs")
    return tmp_path / "runs"


@pytest.mark.parametrize("sentence", REFUSED)
def test_another_run_is_refused_with_the_keys_that_differ(root, capsys, sentence):
    said = refusal(capsys, "fit", *BASE, "--trainer.max_rounds", "4", *REFUSED[sentence], "--ckpt_path", "last")
    assert sentence in said
    assert "resume with the same" in said
    assert [path.name for path in (root / "lightning_logs").iterdir()] == ["version_0"]  # and leaves nothing behind


@pytest.mark.parametrize("given", [["--model.num_classes", "12"], ["--model.width", "64", "--model.num_classes=12"]])
def test_a_checkpoint_by_its_path_does_not_overrule_the_model_that_was_named(root, capsys, given):
    path = str(next(root.rglob("last.ckpt")))
    said = refusal(capsys, "fit", *BASE, *given, "--ckpt_path", path)
    assert "(model.num_classes was 10 and is 12)" in said


def test_without_a_model_that_of_the_checkpoint_goes_on(root):
    config = yaml.safe_load((CONF / "tiny.yaml").read_text())
    del config["model"]
    (root / "x.yaml").write_text(yaml.safe_dump(config))
    more = ["--config", "x.yaml", *BASE[2:], "--trainer.max_rounds", "3"]
    main(["fit", *more, "--ckpt_path", str(next(root.rglob("last.ckpt")))])
    assert read_checkpoint(root / "lightning_logs/version_1/checkpoints/last.ckpt")["hyper_parameters"]["width"] == 64


def test_what_does_not_make_it_another_run_may_change(root, tmp_path):
    """Budget, rules, logger, folders, how often is evaluated, where states are kept, how data is read."""
    again = [
        *("--trainer.max_rounds", "4", "--trainer.min_rounds", "1", "--trainer.callbacks.threshold", "0.01"),
        *("--trainer.callbacks+=ModelSummary", "--trainer.check_val_every_n_round", "2"),
        *("--trainer.limit_val_batches", "0", "--trainer.on_nonfinite", "drop", "--trainer.clients_per_round", "0.4"),
        *("--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(tmp_path / "csv")),
        *("--trainer.client_states", "ClientStates", "--trainer.client_states.storage", "disk"),
        *("--data.eval_batch_size", "50", "--trainer.default_root_dir", str(tmp_path / "other")),
    ]
    main(["fit", *BASE, *again, "--ckpt_path", str(next(root.rglob("last.ckpt")))])
    rows = read_rounds(tmp_path / "other/lightning_logs/version_0/metrics.csv")
    assert [row["round"] for row in rows] == list("1234")
    main(["fit", *BASE, "--trainer.max_rounds", "4", "--trainer.default_root_dir", str(tmp_path / "whole")])
    one, other = (read_checkpoint(next((tmp_path / name).rglob("last.ckpt"))) for name in ("whole", "other"))
    assert torch.equal(one["federated"]["theta"], other["federated"]["theta"])
