"""A class that replaces another one starts from its own defaults, and a line says what was dropped with the former."""

import pytest
import yaml

from lightning_fedstop.cli import FedStopCLI
from lightning_fedstop.cli.main import main
from tests.cli_tools import USER

BASE = """
trainer:
  method: {class_path: FedDyn, init_args: {alpha: 0.05, server_lr: 0.5}}
  cohort: {class_path: tests.cli_classes.Loyal, init_args: {share: 0.25, period: 3}}
  client_states: {class_path: ClientStates, init_args: {dtype: bfloat16}}
  callbacks:
    - {class_path: TaskVectorEarlyStopping, init_args: {threshold: 0.05, patience: 3}}
  accelerator: cpu
  devices: 1
data:
  class_path: Digits
  init_args: {num_clients: 7, batch_size: 11, skew: {class_path: DirichletSkew, init_args: {concentration: 0.7}}}
model: {class_path: tests.cli_classes.WithRate, init_args: {lr: 0.7}}
optimizer: {class_path: SGD, init_args: {lr: 0.3, momentum: 0.5}}
lr_scheduler: {class_path: StepLR, init_args: {step_size: 3, gamma: 0.3}}
"""

# Key, the class that is named instead, arguments it needs, what it must have then, and what is said to be dropped.
CASES = [
    ("trainer.method", "FedSpeed", {}, {"alpha": 0.1, "server_lr": 1.0}, "FedDyn: alpha=0.05, server_lr=0.5"),
    ("trainer.method", "SCAFFOLD", {}, {"server_lr": 1.0}, "FedDyn: alpha=0.05, server_lr=0.5"),
    ("trainer.method", "FedSpeed", {"alpha": 0.2}, {"alpha": 0.2, "server_lr": 1.0}, "server_lr=0.5"),
    ("trainer.cohort", USER + "Fickle", {}, {"share": 0.5}, "Loyal: share=0.25, period=3"),
    ("trainer.client_states", USER + "OwnStates", {}, {"dtype": None}, "ClientStates: dtype='bfloat16'"),
    ("data", USER + "Silent", {}, {"num_clients": 20, "batch_size": 32}, "num_clients=7, batch_size=11, skew=Dirichl"),
    ("data.skew", "QuantitySkew", {}, {"concentration": 0.1}, "DirichletSkew: concentration=0.7"),
    ("data.skew", "PathologicalSkew", {"classes_per_client": 2}, {"classes_per_client": 2}, "concentration=0.7"),
    ("model", USER + "ByRate", {}, {"lr": 0.5}, "WithRate: lr=0.7"),
    ("optimizer", "AdamW", {}, {"lr": 0.001}, "SGD: lr=0.3, momentum=0.5"),
    ("lr_scheduler", "ExponentialLR", {"gamma": 0.5}, {"gamma": 0.5}, "StepLR: step_size=3"),
]


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path


def configuration(capsys, *args):
    """The whole configuration, and the notes."""
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", "base.yaml", *args, "--print_config"])
    said = capsys.readouterr()
    assert exit.value.code == 0, said.err
    return yaml.safe_load(said.out), [line for line in said.err.splitlines() if line.startswith("fedstop")]


def at(config, key):
    for name in key.split("."):
        config = config["init_args"][name] if "init_args" in config else config[name]
    return config


def overlay(key, value):
    """A configuration of one key."""
    for name in reversed(key.split(".")):
        value = {name: {"init_args": value} if name == "data" and "class_path" not in value else value}
    return value


def check(said, key, name, wanted, dropped):
    config, notes = said
    spec = at(config, key)
    assert spec["class_path"].endswith(name.rpartition(".")[2])
    assert {argument: spec["init_args"][argument] for argument in wanted} == wanted
    assert len(notes) == 1, notes
    assert notes[0].startswith(
        f"fedstop fit: note: {name.rpartition('.')[2]} starts from its own defaults; dropped with "
    )
    assert dropped in notes[0]


@pytest.mark.parametrize(("key", "name", "arguments", "wanted", "dropped"), CASES)
def test_a_class_named_on_the_command_line(capsys, key, name, arguments, wanted, dropped):
    args = [f"--{key}", name, *(f"--{key}.{argument}={value}" for argument, value in arguments.items())]
    check(configuration(capsys, *args), key, name, wanted, dropped)


@pytest.mark.parametrize(("key", "name", "arguments", "wanted", "dropped"), CASES)
def test_a_class_named_in_a_second_configuration(capsys, root, key, name, arguments, wanted, dropped):
    spec = {"class_path": name, "init_args": arguments}
    (root / "b.yaml").write_text(yaml.safe_dump(overlay(key, spec)))
    check(configuration(capsys, "--config", "b.yaml"), key, name, wanted, dropped)


def test_an_item_of_a_list(capsys, root):
    (root / "b.yaml").write_text("trainer: {callbacks: [{class_path: ValidationEarlyStopping}]}")
    config, notes = configuration(capsys, "--config", "b.yaml")
    (spec,) = config["trainer"]["callbacks"]
    assert (spec["init_args"]["threshold"], spec["init_args"]["patience"]) == (0.01, 10)
    assert "dropped with TaskVectorEarlyStopping: threshold=0.05, patience=3." in notes[0]


@pytest.mark.parametrize(
    "name", ["FedDyn", "lightning_fedstop.methods.FedDyn", "lightning_fedstop.methods.feddyn.FedDyn"]
)
def test_the_same_class_by_any_name_keeps_its_arguments(capsys, name):
    config, notes = configuration(capsys, "--trainer.method", name)
    assert config["trainer"]["method"]["init_args"]["alpha"] == 0.05
    assert notes == []


def test_the_arguments_after_the_last_class_count(capsys):
    args = ["--trainer.method", "FedSpeed", "--trainer.method.rho=0.3", "--trainer.method", "FedSMOO"]
    config, notes = configuration(capsys, *args)
    assert config["trainer"]["method"]["init_args"]["rho"] == 0.1
    assert [note.rpartition("dropped with ")[2] for note in notes] == [
        "FedDyn: alpha=0.05, server_lr=0.5.",
        "FedSpeed: rho=0.3.",
    ]


def test_classes_in_place_of_the_default_ones_are_no_news(capsys, root):
    (root / "base.yaml").write_text("model: tests.cli_classes.WithRate\ndata: Digits\n")
    config, notes = configuration(capsys, "--optimizer", "SGD", "--optimizer.lr", "1")
    assert config["model"]["init_args"] == {"lr": 0.25}
    assert notes == []


def test_what_is_built_has_them(capsys):
    cli = FedStopCLI(["--config", "base.yaml", "--trainer.method", "FedSpeed"], run=False)
    assert (cli.trainer.method.alpha, cli.trainer.method.server_lr) == (0.1, 1.0)
    assert capsys.readouterr().err.count("starts from its own defaults") == 1


def test_other_parsers_of_the_process_are_left_alone():
    from jsonargparse import _typehints

    before = _typehints.discard_init_args_on_class_path_change
    with pytest.raises(SystemExit):
        main(["fit", "--config", "base.yaml", "--trainer.method", "FedSpeed", "--nothing"])
    assert _typehints.discard_init_args_on_class_path_change is before
