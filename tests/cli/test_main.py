import json
import os
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml

from lightning_fedstop.cli import FedStopCLI
from lightning_fedstop.cli.main import OTHER_COMMANDS, TRAINING_COMMANDS, main
from lightning_fedstop.data import DirichletSkew
from lightning_fedstop.models import ImageClassifier
from tests import cli_classes
from tests.cli_tools import CONF, ROOT, TINY, USER, refusal


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty folder to work in; class paths of the tests can be imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedstop"])
    return tmp_path


def built(*args):
    """Model, data and loop of some arguments, without running them."""
    return FedStopCLI([*TINY, *args], run=False)


def printed_config(capsys, *args):
    with pytest.raises(SystemExit) as exit:
        main(["fit", *args, "--print_config"])
    assert exit.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def versions(root):
    return sorted(root.rglob("config.yaml"))


# Runs


def test_fit_twice_takes_two_folders_and_a_saved_config_runs_again(root):
    main(["fit", *TINY])
    (first,) = versions(root)
    text = first.read_text()
    main(["fit", *TINY])
    assert len(versions(root)) == 2
    assert first.read_text() == text
    main(["fit", "--config", str(first)])
    third = versions(root)[-1]
    assert yaml.safe_load(third.read_text()) == yaml.safe_load(text)
    weights = [torch.load(next(config.parent.rglob("*.ckpt")), weights_only=True) for config in (first, third)]
    for key, value in weights[0]["state_dict"].items():
        assert torch.equal(value, weights[1]["state_dict"][key])


def test_saved_config_keeps_what_the_user_gave_and_leaves_open_what_the_data_says(root):
    main(["fit", *TINY, "--trainer.max_rounds", "1"])
    main(["fit", *TINY, "--trainer.max_rounds", "1", "--model.num_classes", "12"])
    open_, given = (yaml.safe_load(path.read_text())["model"]["init_args"] for path in versions(root))
    assert open_ == {"width": 64}
    assert given == {"width": 64, "num_classes": 12}


def test_config_of_a_continued_run_is_written_beside_the_first(root):
    cli = built()
    (callback,) = (c for c in cli.trainer.callbacks if type(c).__name__ == "RunConfigCallback")
    (root / "config.yaml").write_text("first")
    trainer = SimpleNamespace(log_dir=str(root), is_global_zero=True, reporter=cli.trainer.reporter)
    callback.setup(trainer, cli.model, "fit")
    callback.setup(trainer, cli.model, "test")
    assert (root / "config.yaml").read_text() == "first"
    assert sorted(path.name for path in root.iterdir()) == ["config.yaml", "config_1.yaml"]


def test_no_config_is_written_where_nothing_is(root):
    cli = built()
    (callback,) = (c for c in cli.trainer.callbacks if type(c).__name__ == "RunConfigCallback")
    callback.setup(SimpleNamespace(log_dir=None, is_global_zero=True), cli.model, "fit")
    assert list(root.iterdir()) == []


def test_checkpoint_of_a_run_loads_in_plain_lightning_and_is_evaluated(root, capsys):
    main(["fit", *TINY, "--config", str(CONF / "classifier.yaml"), "--trainer.max_rounds", "1"])
    path = next(root.rglob("*.ckpt"))
    hparams = torch.load(path, weights_only=True)["hyper_parameters"]
    assert (hparams["num_classes"], hparams["in_chans"]) == (10, 1)
    assert isinstance(ImageClassifier.load_from_checkpoint(path), ImageClassifier)
    capsys.readouterr()
    for command, metric in (("validate", "val_acc"), ("test", "test_acc")):
        main([command, *TINY, "--ckpt_path", str(path)])
        assert metric in capsys.readouterr().out


def test_training_goes_on_with_the_model_that_was_chosen(root, capsys):
    main(["fit", *TINY, "--trainer.max_rounds", "1"])
    path = str(next(root.rglob("*.ckpt")))
    other = ["--config", str(CONF / "classifier.yaml")]
    assert "(model was 'Linear' and is 'ImageClassifier')" in refusal(capsys, "fit", *TINY, *other, "--ckpt_path", path)
    without_model = yaml.safe_load((CONF / "tiny.yaml").read_text())
    del without_model["model"]
    (root / "x.yaml").write_text(yaml.safe_dump(without_model))
    main(["fit", "--config", "x.yaml", "--ckpt_path", path])
    assert len(list(root.rglob("summary.json"))) == 2


def test_ctrl_c_prints_the_command_that_goes_on(root, capsys, monkeypatch):
    args = ["fit", *TINY, "--trainer.method", "SCAFFOLD", "--trainer.default_root_dir", "a folder"]
    main([*args, "--trainer.default_root_dir", "whole"])
    step = cli_classes.Linear.training_step

    def interrupted(module, batch, batch_idx):
        if module.trainer.current_epoch == 1:
            raise KeyboardInterrupt
        return step(module, batch, batch_idx)

    monkeypatch.setattr(cli_classes.Linear, "training_step", interrupted)
    with pytest.raises(SystemExit) as exit:
        main(args)
    assert exit.value.code == 130
    said = capsys.readouterr().err
    assert "fedstop fit: interrupted; finished rounds are kept.\n" in said
    monkeypatch.setattr(cli_classes.Linear, "training_step", step)
    command = re.search(r"Interrupted after round 1 of 2: go on with `fedstop (.*)`\.", said)[1]
    main(shlex.split(command))
    assert len((root / "a folder/lightning_logs/version_1/metrics.csv").read_text().splitlines()) == 3
    runs = [root / "whole/lightning_logs/version_0", root / "a folder/lightning_logs/version_1"]
    hashes = {json.loads((run / "summary.json").read_text())["parameters_hash"] for run in runs}
    assert len(hashes) == 1


@pytest.mark.parametrize("bar", ["null", "false", "true"])
def test_the_last_lines_are_printed_with_and_without_a_bar(root, capsys, bar):
    main(["fit", *TINY, "--trainer.enable_progress_bar", bar])
    said = capsys.readouterr().out
    assert "Stopped at round 2 of 2" in said
    assert "Test: test_loss" in said
    assert f"Record: {root}" in said


def test_hyperparameters_of_a_users_model_are_its_own(root):
    main(["fit", *TINY, "--model", USER + "TenClasses", "--trainer.max_rounds", "1"])
    path = next(root.rglob("*.ckpt"))
    assert "num_classes" not in torch.load(path, weights_only=True)["hyper_parameters"]
    assert cli_classes.TenClasses.load_from_checkpoint(path).num_classes == 10


def test_optimizer_and_scheduler_of_the_command_line_are_used(root):
    args = ["--optimizer", "SGD", "--optimizer.lr", "0.5"]
    args += ["--lr_scheduler", "ExponentialLR", "--lr_scheduler.gamma", "0.5"]
    cli = built(*args)
    (optimizer,), (scheduler,) = cli.model.configure_optimizers()
    assert optimizer.param_groups[0]["params"] == list(cli.model.parameters())
    assert (optimizer.param_groups[0]["lr"], scheduler.gamma) == (0.5, 0.5)
    main(["fit", *TINY, *args])
    header, *rows = next(root.rglob("metrics.csv")).read_text().splitlines()
    column = header.split(",").index("lr")
    assert [float(row.split(",")[column]) for row in rows] == [0.5, 0.25]


@pytest.mark.parametrize(
    "args",
    [
        ["--trainer.logger", "[{class_path: CSVLogger, init_args: {save_dir: a}}, OwnLogger]"],
        ["--trainer.logger", "[OwnLogger, {class_path: CSVLogger, init_args: {save_dir: a}}]"],
        ["--trainer.logger+=CSVLogger", "--trainer.logger.save_dir=a", "--trainer.logger+=OwnLogger"],
    ],
)
def test_several_loggers_by_their_short_names(root, args):
    main(["fit", *TINY, *args])
    rows = next((root / "a").rglob("metrics.csv")).read_text().splitlines()
    assert len(rows) >= 3
    assert (root / "own.txt").read_text().count("val_loss") == 2


def test_mistake_in_training_code_keeps_its_traceback(root):
    with pytest.raises(ValueError, match="a mistake in training"):
        main(["fit", *TINY, "--model", USER + "Faulty"])


@pytest.mark.process
def test_module_in_the_present_directory_runs_as_a_process(root):
    (root / "mymodule.py").write_text("from tests.cli_classes import *\n")
    command = [sys.executable, "-m", "lightning_fedstop", "fit", *TINY, "--model", "mymodule.TenClasses"]
    command += ["--trainer.max_rounds", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(versions(root)) == 1


def test_present_directory_is_searched_last(root, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (root / "fedstop_local_model.py").write_text("from tests.cli_classes import TenClasses as Mine\n")
    main(["fit", *TINY, "--model", "fedstop_local_model.Mine", "--trainer.max_rounds", "1"])
    assert sys.path[-1] == str(root)


# What goes together


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], (10, None)),
        (["--model.num_classes", "12"], (12, None)),
        (["--model", USER + "ByDefault"], (10, None)),
        (["--model", USER + "ByDefault", "--model.num_classes", "4"], (4, None)),
        (["--model", USER + "TenClasses"], (10, None)),
        (["--model", USER + "TenClasses", "--data", USER + "Silent"], (10, None)),
        (["--model", USER + "ByDefault", "--data", USER + "Silent"], (3, None)),
        (["--config", str(CONF / "classifier.yaml")], (10, 1)),
        (["--config", str(CONF / "classifier.yaml"), "--model.num_classes", "11", "--model.in_chans", "2"], (11, 2)),
        (["--config", str(CONF / "classifier.yaml"), "--model", USER + "OwnClassifier"], (10, 1)),
        (["--config", str(CONF / "federated.yaml")], (3, None)),
    ],
)
def test_model_takes_from_the_data_what_it_has_and_the_user_did_not_give(root, args, expected):
    model = built(*args).model
    num_classes = model.hparams["num_classes"] if isinstance(model, ImageClassifier) else model.num_classes
    assert (num_classes, model.hparams.get("in_chans")) == expected


def test_model_and_data_have_defaults(root, capsys):
    config = printed_config(capsys, "--model.backbone", "convnextv2_atto", "--data.dataset", "dermamnist")
    assert config["model"]["class_path"].endswith(".ImageClassifier")
    assert config["model"]["init_args"]["backbone"] == "convnextv2_atto"
    assert config["data"]["class_path"].endswith(".MedMNIST")
    assert config["seed_everything"] == 0


def test_wrapped_data_module_keeps_its_own_hyperparameters(root):
    main(["fit", *TINY, "--config", str(CONF / "federated.yaml"), "--trainer.max_rounds", "1"])
    cli = built("--config", str(CONF / "federated.yaml"))
    assert cli.datamodule.datamodule.hparams == {"batch_size": 6}


def test_short_class_names(root):
    cli = built("--trainer.method", "FedAvg", "--data.skew", "DirichletSkew", "--data.skew.concentration", "0.3")
    assert type(cli.trainer.method).__name__ == "FedAvg"
    assert isinstance(cli.datamodule.skew, DirichletSkew)
    assert cli.datamodule.skew.concentration == 0.3


@pytest.mark.parametrize("in_file", [False, True])
def test_a_class_has_its_own_defaults_not_those_of_the_default_class(capsys, tmp_path, in_file):
    (tmp_path / "own.yaml").write_text("model: tests.cli_classes.WithRate\ndata: Digits\n")
    given = ["--config", str(tmp_path / "own.yaml")]
    config = printed_config(capsys, *(given if in_file else ["--model", "tests.cli_classes.WithRate", "--data=Digits"]))
    assert config["model"]["init_args"] == {"lr": 0.25}
    assert (config["data"]["init_args"]["num_clients"], config["data"]["init_args"]["batch_size"]) == (20, 32)


@pytest.mark.parametrize("name", ["released_code.FedLESAM", "ReleasedFedLESAM"])
def test_methods_of_the_released_code_by_name(root, name):
    method = built("--trainer.method", name, "--trainer.method.rho", "0.5").trainer.method
    assert (type(method).__name__, method.rho, method.memory) == ("ReleasedFedLESAM", 0.5, "last_round")
    assert type(built("--trainer.method", "FedLESAM").trainer.method).__name__ == "FedLESAM"


def test_callbacks_are_appended_to_those_of_the_configuration(capsys):
    config = printed_config(
        capsys, "--config", str(ROOT / "configs/quickstart.yaml"), "--trainer.callbacks+=LearningRateMonitor"
    )
    names = [callback["class_path"].rpartition(".")[2] for callback in config["trainer"]["callbacks"]]
    assert names == ["TaskVectorEarlyStopping", "LearningRateMonitor"]


@pytest.mark.parametrize(
    ("base", "overlay", "name", "arguments"),
    [
        ("bloodmnist", "iid", "Iid", {}),
        ("bloodmnist", "dirichlet", "DirichletSkew", {"concentration": 0.1}),
        ("bloodmnist", "pathological", "PathologicalSkew", {"classes_per_client": 2}),
        ("bloodmnist", "quantity", "QuantitySkew", {"concentration": 0.1}),
        ("quickstart", "dirichlet", "DirichletSkew", {"concentration": 0.1}),
    ],
)
def test_skew_overlays_switch_class_and_arguments(capsys, base, overlay, name, arguments):
    files = [f"{base}.yaml", f"skew/{overlay}.yaml", "method/fedavg.yaml", "accelerator/cuda.yaml"]
    config = printed_config(capsys, *(arg for file in files for arg in ("--config", str(ROOT / "configs" / file))))
    data, skew = config["data"]["init_args"], config["data"]["init_args"]["skew"]
    assert skew["class_path"].rpartition(".")[2] == name
    coefficients = {
        key: skew["init_args"][key] for key in ("concentration", "classes_per_client") if key in skew["init_args"]
    }
    assert coefficients == arguments
    assert data["num_clients"] == (20 if base == "quickstart" else 100)
    assert config["trainer"]["accelerator"] == "cuda"


@pytest.mark.parametrize("dataset", ["bloodmnist", "dermamnist", "pathmnist"])
def test_paper_configs_hold_the_papers_settings(root, dataset):
    files = [f"{dataset}.yaml", "accelerator/cpu.yaml"]
    cli = FedStopCLI([arg for file in files for arg in ("--config", str(ROOT / "configs" / file))], run=False)
    loop, data, rates = cli.trainer, cli.datamodule, cli.model.hparams
    assert (loop.max_rounds, loop.clients_per_round, loop.local_epochs, loop.gradient_clip_val) == (500, 10, 5, 10)
    assert (data.dataset, data.image_size, data.num_clients, data.batch_size) == (dataset, 64, 100, 256)
    assert (data.skew.concentration, data.download) == (0.1, True)
    assert [rates[name] for name in ("lr", "momentum", "weight_decay", "lr_decay")] == [1e-3, 0.9, 1e-3, 0.998]
    assert rates["backbone"] == "convnextv2_nano"
    stop = loop.callbacks[0]
    assert (type(stop).__name__, stop.criterion.threshold, stop.criterion.patience) == (
        "TaskVectorEarlyStopping",
        0.01,
        10,
    )


# Commands


def test_usage_and_version(capsys):
    main([])
    usage = capsys.readouterr().out
    assert all(f"  {name} " in usage for name in ("fit", "validate", "test", "partition"))
    main(["--version"])
    assert capsys.readouterr().out.startswith("fedstop 0.")


def test_commands_that_do_not_train_load_neither_torch_nor_lightning():
    code = "import sys; from lightning_fedstop.cli.main import main; main(['--help']); main(['version'])"
    code += "; assert not {'torch', 'lightning'}.intersection(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


@pytest.mark.process
@pytest.mark.parametrize(
    ("args", "code", "lines"),
    [
        (["fit", "--help"], 0, []),
        (["fit", "--nothing"], 2, ["fedstop fit: error: "]),
        (["partition", *TINY, "--trainer.default_root_dir", "{}"], 0, []),
    ],
)
def test_a_process_ends_without_lines_of_others_on_stderr(tmp_path, args, code, lines):
    """Such as those of nanobind about leaked functions."""
    command = [sys.executable, "-m", "lightning_fedstop", *(arg.format(tmp_path) for arg in args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == code
    said = [line for line in done.stderr.splitlines() if line != "Seed set to 0"]
    assert len(said) == len(lines), said
    assert all(line.startswith(start) for line, start in zip(said, lines, strict=True))


def test_unknown_command(capsys):
    sentence = refusal(capsys, "fitt")
    known = ", ".join([*TRAINING_COMMANDS, *OTHER_COMMANDS])
    assert f"there is no command 'fitt'; did you mean 'fit'? There are {known}." in sentence


def test_help_of_a_command_lists_the_keys(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--help"])
    assert exit.value.code == 0
    assert "--trainer.clients_per_round" in capsys.readouterr().out


def test_partition_prints_draws_and_saves_without_building_a_model(root, capsys):
    args = ["--model", "ImageClassifier", "--model.weights_path", "none.pth", "--save", "p.npz"]
    main(["partition", *TINY, *args])
    printed = capsys.readouterr().out
    assert "5 clients, 1297 of 1297 samples" in printed
    assert (root / "partition.png").stat().st_size > 1000
    main(["partition", *TINY, "--picture", "null", "--data.skew", "null", "--data.partition_path", "p.npz"])
    table = [line for line in printed.splitlines() if line.startswith("│")]
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")] == table


def test_partition_takes_the_saved_configuration_of_a_run(root, capsys):
    main(["fit", *TINY, "--trainer.max_rounds", "1"])
    (config,) = versions(root)
    main(["partition", "--config", str(config), "--picture", "picture.svg"])
    assert (root / "picture.svg").is_file()
    assert "1297 of 1297 samples" in capsys.readouterr().out


def test_partition_errors_are_one_sentence(root, capsys):
    assert "trainer.max_rouds" in refusal(capsys, "partition", *TINY, "--trainer.max_rouds", "3")
    assert "Plain" in refusal(capsys, "partition", *TINY, "--data", USER + "Plain")
    assert "partition.xyz" in refusal(capsys, "partition", *TINY, "--picture", "partition.xyz")
