import json
import shlex
from types import SimpleNamespace

import pytest
import yaml

from experiments.paper import Choice, Run, runs_of
from experiments.paper.commands import CONFIGS, command_line, config_files, fit_arguments
from experiments.paper.runs import FORMS, PHI, ROUNDS, SCALES
from lightning_fedstop.cli.fit import FedStopCLI
from lightning_fedstop.cli.main import main


@pytest.fixture
def parsed(capsys):
    """The configuration that the command of a run prints."""

    def parse(run, *args, **options):
        with pytest.raises(SystemExit) as exit:
            main([*fit_arguments(run, "runs", *args, **options), "--print_config"])
        assert exit.value.code == 0
        config = yaml.safe_load(capsys.readouterr().out)
        return json.loads(json.dumps(config), object_hook=lambda keys: SimpleNamespace(**keys))

    return parse


def test_all_configurations_are_used_and_there():
    used = {
        name
        for form in FORMS
        for scale in SCALES
        for run in runs_of("all", Choice(form, scale))
        for name in config_files(run)
    }
    there = {path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml")}
    assert used == there


def test_the_published_form_has_the_papers_settings(parsed):
    config = parsed(Run("pathmnist", "FedAvg", "dirichlet", 0.01, log_lr=-2, seed=2))
    trainer, data, model = config.trainer, config.data.init_args, config.model.init_args
    assert (trainer.max_rounds, trainer.clients_per_round, trainer.local_epochs) == (500, 10, 5)
    assert (trainer.gradient_clip_val, trainer.check_val_every_n_round, trainer.check_test_every_n_round) == (10, 1, 1)
    assert trainer.default_root_dir == "runs/published-pathmnist-dirichlet-0.01-FedAvg-lr-0.01-seed-2"
    assert config.seed_everything == 2
    assert config.data.class_path == "lightning_fedstop.MedMNIST"
    assert (data.dataset, data.size, data.num_clients, data.batch_size) == ("pathmnist", 64, 100, 256)
    assert data.download
    assert not data.normalize_twice
    skew = data.skew
    assert skew.class_path == "lightning_fedstop.DirichletSkew"
    assert (skew.init_args.concentration, skew.init_args.variant) == (0.01, "paper")
    assert (model.backbone, model.pretrained, model.lr) == ("convnextv2_nano", True, 0.01)
    assert (model.momentum, model.weight_decay, model.lr_decay) == (0.9, 0.001, 0.998)


def test_nothing_stops_a_run(parsed):
    *rules, saver = parsed(Run("bloodmnist", "FedAvg", "quantity", 1.0)).trainer.callbacks
    assert [rule.class_path.rpartition(".")[2] for rule in rules] == [
        "TaskVectorEarlyStopping",
        "ConsensusEarlyStopping",
    ]
    assert all(rule.init_args.observe_only for rule in rules)
    assert saver.class_path == "lightning.pytorch.callbacks.ModelCheckpoint"


@pytest.mark.parametrize("method", PHI)
@pytest.mark.parametrize("form", FORMS)
def test_phi_reaches_the_method(method, form, tmp_path):
    log_phi = None if PHI[method] is None else -1
    run = Run("bloodmnist", method, "pathological", 3, log_phi, form=form, scale="tiny")
    _, *arguments = fit_arguments(run, tmp_path)
    built = FedStopCLI(arguments, run=False).trainer.method
    released = form == "released_code" and method not in ("FedAvg", "FedSAM")
    assert type(built).__name__ == f"{'Released' if released else ''}{method}"
    if log_phi is not None:
        assert getattr(built, PHI[method]) == 0.1
    if method in ("FedSpeed", "FedSMOO"):
        assert built.alpha == 0.001


def test_the_released_form_is_that_of_the_authors_code(parsed):
    data = parsed(Run("dermamnist", "FedAvg", "pathological", 1, form="released_code")).data.init_args
    assert data.normalize_twice
    assert (data.skew.init_args.classes_per_client, data.skew.init_args.variant) == (1, "released_code")
    assert (data.dataset, data.size, data.batch_size) == ("dermamnist", 64, 256)


@pytest.mark.parametrize("scale", ["small", "tiny"])
def test_a_smaller_scale_keeps_the_setting_and_changes_the_size(parsed, scale):
    config = parsed(Run("bloodmnist", "FedDyn", "quantity", 0.01, -2, -1, scale=scale))
    assert config.trainer.max_rounds == ROUNDS[scale]
    assert config.data.init_args.skew.init_args.concentration == 0.01
    assert config.data.init_args.num_clients < 100
    assert config.trainer.method.init_args.alpha == 0.01
    assert config.model.init_args.lr == 0.1
    assert config.trainer.gradient_clip_val == 10
    size = {"small": ("MedMNIST", 28), "tiny": ("Digits", None)}[scale]
    assert (config.data.class_path.rpartition(".")[2], getattr(config.data.init_args, "size", None)) == size


def test_with_a_data_folder_nothing_is_downloaded(parsed):
    data = parsed(Run("bloodmnist", "FedAvg", "dirichlet", 0.1), "files").data.init_args
    assert (str(data.root), data.download) == ("files", False)
    assert "--data.root" not in fit_arguments(Run("bloodmnist", "FedAvg", "dirichlet", 0.1, scale="tiny"), "runs", "x")


def test_the_runs_share_decoded_images_under_their_root(parsed):
    for run in (Run("bloodmnist", "FedAvg", "dirichlet", 0.1), Run("bloodmnist", "FedAvg", "quantity", 1.0, seed=1)):
        assert str(parsed(run).data.init_args.cache_dir) == "runs/decoded"
    assert parsed(run, extra=["--data.cache_dir", "null"]).data.init_args.cache_dir is None
    assert "--data.cache_dir" not in fit_arguments(Run("bloodmnist", "FedAvg", "dirichlet", 0.1, scale="tiny"), "runs")


def test_the_users_arguments_come_last_but_for_the_checkpoint(parsed):
    run = Run("bloodmnist", "FedAvg", "dirichlet", 0.1)
    arguments = fit_arguments(run, "runs", extra=["--model.lr", "0.5"], resume=True)
    assert arguments[-4:] == ["--model.lr", "0.5", "--ckpt_path", "last"]
    assert parsed(run, extra=["--model.lr", "0.5"]).model.init_args.lr == 0.5


def test_a_command_can_be_pasted_into_a_shell(tmp_path, monkeypatch):
    run = Run("bloodmnist", "FedAvg", "dirichlet", 0.1)
    arguments = fit_arguments(run, tmp_path / "my runs")
    assert shlex.split(command_line(arguments)) == ["fedstop", *arguments]
    monkeypatch.chdir(CONFIGS.parent)
    assert f"--config {CONFIGS.name}/base.yaml " in command_line(fit_arguments(run, "runs"))
