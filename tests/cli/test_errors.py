import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fedstop.cli.errors import user_sentence
from lightning_fedstop.cli.explain import explain
from lightning_fedstop.cli.fit import FedStopParser
from lightning_fedstop.cli.main import main
from lightning_fedstop.data.config import as_skew
from tests import cli_classes
from tests.cli_tools import CONF, TINY, USER, refusal


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--trainer.max_rouds", "3"], ["trainer.max_rouds", "; did you mean trainer.max_rounds"]),
        (["--config", str(CONF / "key_misspelt.yaml")], ["trainer.max_rouds", "; did you mean trainer.max_rounds"]),
        (["--config", str(CONF / "group_misspelt.yaml")], ["traner.max_rounds", "did you mean trainer.max_rounds"]),
        (["--trainer.max_round", "3"], ["trainer.max_round", "; did you mean trainer.max_rounds"]),
        (["--trainer.max_round=3"], ["trainer.max_round", "; did you mean trainer.max_rounds"]),
        (["--seed_every", "3"], ["--seed_every", "; did you mean seed_everything?"]),
        (["--conf", str(CONF / "tiny.yaml")], ["--conf", "; did you mean config?"]),
        (["--model.num_class", "3"], ["model: Linear:", "'num_class'", "; did you mean num_classes?"]),
        (
            ["--data.skew.concentr", "3"],
            ["data.skew: DirichletSkew:", "'concentr'", "; did you mean concentration?"],
        ),
        (
            ["--trainer.method=FedDyn", "--trainer.method.alph=1"],
            ["FedDyn:", "'alph'", "; did you mean alpha"],
        ),
        (["--nothing", "3"], ["nrecognized arguments: --nothing", "there are", "trainer, model, data, optimizer"]),
        (
            ["--trainer.quantum_leap", "3"],
            ["trainer.quantum_leap", "; there are trainer.method, trainer.max_rounds"],
        ),
        (["3"], ["nrecognized arguments: 3; there are"]),
        (["--trainer.max_rounds", "x"], ["trainer.max_rounds: must be int, got 'x'"]),
        (["--trainer.limit_val_batches", "x"], ["trainer.limit_val_batches: must be int or float or null, got 'x'"]),
        (["--trainer.weighting", "x"], ["trainer.weighting"]),
        (["--model.width", "x"], ["model.width: must be int, got 'x'"]),
        (["--data.skew.concentration", "x"], ["data.skew.concentration: must be float, got 'x'"]),
        (["--model", "ImageClasifier"], ["model: there is no class 'ImageClasifier'", "did you mean ImageClassifier"]),
        (["--data.skew", "Skewness"], ["data.skew: there is no class 'Skewness'", "DirichletSkew, Iid, "]),
        (["--trainer.method", "FedAvgg"], ["trainer.method: there is no class 'FedAvgg'", "did you mean FedAvg"]),
        (["--model", "no_such_module.Net"], ["model: no_such_module.Net", "No module named 'no_such_module'"]),
        (["--model", USER + "Nothing"], ["model: ", "module 'tests.cli_classes' has no attribute 'Nothing'"]),
        (
            ["--model", "os.path.join"],
            ["model: ", "does not correspond to a subclass of LightningModule, got 'os.path.join'"],
        ),
        (["--model.widht", "3"], ["model: Linear:", "'widht'", "; did you mean width?"]),
        (["--config", str(CONF / "skew_misspelt.yaml")], ["data.skew: DirichletSkew", "did you mean concentration?"]),
        (
            ["--config", str(CONF / "callback_misspelt.yaml")],
            ["trainer.callbacks: TaskVector", "did you mean patience?"],
        ),
        (
            ["--config", str(CONF / "callback_without_monitor.yaml")],
            ["EarlyStopping: ", "monitor", "required"],
        ),
        (
            ["--trainer.callbacks+=EarlyStopping"],
            ["trainer.callbacks: EarlyStopping: ", "monitor", "required"],
        ),
        (
            ["--lr_scheduler", "ExponentialLR"],
            ["lr_scheduler: ExponentialLR: ", "gamma", "required"],
        ),
        (
            ["--optimizer", "SGD", "--optimizer.lrr", "1"],
            ["optimizer: SGD:", "'lrr'", "; did you mean lr?"],
        ),
        (["--config", "none.yaml"], ["config: File does not exist: ", "none.yaml"]),
        (["--config", str(CONF)], ["config: Path is not a file: "]),
        (["--config", str(CONF / "no_yaml.txt")], ["no_yaml.txt: it is not plain YAML", "line 2"]),
        (["--config", str(CONF / "list.yaml")], ["list.yaml: it must hold keys such as `trainer:`, but holds [1]"]),
        (["--config"], ["--config: expected one argument"]),
        (["--model", ".Net"], ["model: Unexpected import path format: .Net"]),
        (["--model", "3"], ["model: there is no class '3'"]),
        (
            ["--trainer.method", "scaffold"],
            ["trainer.method: there is no class 'scaffold'; did you mean SCAFFOLD?"],
        ),
        (["--optimizer", "adamw"], ["optimizer: there is no class 'adamw'; did you mean AdamW?"]),
        (["--data", "medmnist"], ["data: there is no class 'medmnist'; did you mean MedMNIST?"]),
        (["--data.skew", "IID"], ["data.skew: there is no class 'IID'; did you mean Iid?"]),
        (
            ["--trainer.method", "Nope"],
            ["FedAvg, FedDyn, FedGamma, FedLESAM, FedProx, FedSAM, FedSMOO, FedSpeed, FedWMSAM, SCAFFOLD, Released"],
        ),
        (["--trainer.logger", "Nope"], ["trainer.logger: there is no class 'Nope'; there are RunRecord, CSVLogger, "]),
        (["--trainer.logger", "[CSVLogger, Nope]"], ["trainer.logger: there is no class 'Nope'; there are "]),
        (["--trainer.logger", "[CSVLogger, csvlogger]"], ["no class 'csvlogger'; did you mean CSVLogger?"]),
        (
            ["--trainer.logger", "[CSVLogger, TensorBoardLogger]"],
            ["trainer.logger: CSVLogger: ", "save_dir", "required"],
        ),
        (["--data.skew", "Skew"], ["data.skew: there is no class 'Skew'; there are DirichletSkew, Iid"]),
    ],
)
def test_what_cannot_be_parsed_is_one_sentence(root, capsys, args, says):
    sentence = refusal(capsys, "fit", *TINY, *args)
    assert [part for part in says if part not in sentence] == []


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--data.skew.concentration", "0"], "DirichletSkew: `concentration` must be"),
        (["--trainer.max_rounds", "0"], "FederatedLoop: `max_rounds` must be an integer of at least 1, got 0."),
        (["--trainer.accelerator", "abacus"], "accelerator='abacus'"),
        (["--trainer.callbacks+=TaskVectorEarlyStopping", "--trainer.callbacks.patience=0"], "`patience` must be"),
        (
            ["--config", str(CONF / "classifier.yaml"), "--model.num_classes", "1"],
            "ImageClassifier: `num_classes` must",
        ),
        (["--model", "ImageClassifier", "--model.backbone", "convnextv9"], "timm has no model 'convnextv9'"),
        (["--data", USER + "Plain"], "--data Federated --data.datamodule tests.cli_classes.Plain"),
        (
            ["--data", USER + "Silent"],
            "model.num_classes: tests.cli_classes.Linear needs it and Silent does not say it",
        ),
        (["--data", USER + "Unreadable"], "no-such-file.npz"),
        (["--trainer.clients_per_round", "6"], "`clients_per_round` must be at most"),
        (["--ckpt_path", "none.ckpt"], "none.ckpt"),
        (["--ckpt_path", str(CONF / "tiny.yaml")], "tiny.yaml' cannot be read as a checkpoint"),
        (["--config", str(CONF / "classifier.yaml"), "--model.num_classes", "9"], "`num_classes` must be at least 10"),
        (["--trainer.default_root_dir", str(CONF / "tiny.yaml")], "The run cannot be recorded under"),
        (["--trainer.strategy", "ddp_spawn"], "`strategy` must start whole processes"),
        (["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=x"], "conditioned on metric `x`"),
    ],
)
def test_what_is_refused_while_building_or_reading_data_is_one_sentence(root, capsys, args, sentence):
    assert sentence in refusal(capsys, "fit", *TINY, *args)


def test_debug_adds_the_traceback(root, capsys):
    for args in (
        ["fit", "--debug", *TINY, "--trainer.max_rounds", "0"],
        ["fit", *TINY, "--trainer.max_rounds=x", "--debug"],
    ):
        with pytest.raises(SystemExit) as exit:
            main(args)
        assert exit.value.code == 2
        error = capsys.readouterr().err
        assert "Traceback" in error
        assert [line for line in error.splitlines() if line.startswith("fedstop fit: error: ")]


def parser():
    built = FedStopParser(exit_on_error=False)
    built.add_argument("--trainer.max_rounds", type=int)
    return built


def test_a_class_of_the_other_package_is_refused_with_its_name(root, capsys, monkeypatch):
    monkeypatch.setattr(cli_classes, "Twin", type("Twin", (), {"__module__": "pytorch_lightning.core"}), raising=False)
    for key, kind in (("model", "LightningModule"), ("data", "LightningDataModule"), ("trainer.callbacks", "Callback")):
        sentence = refusal(capsys, "fit", *TINY, f"--{key}", USER + "Twin")
        assert sentence.startswith(f"{key}: ")
        assert f"a subclass of {kind}, got '{USER}Twin'; `pytorch_lightning` is another p" in sentence


UNION = """Parser key "data":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'NoneType'>, <class 'lightning.pytorch.core.datamodule.LightningDataModule'>]
  Errors:
    - Expected a <class 'NoneType'>
    - Problem with given class_path 'lightning_fedstop.data.Digits':
        Validation failed: {reason}
  Given value type: <class 'dict'>
  Given value: {{'class_path': 'Digits'}}"""


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("Unrecognized arguments: --trainer.max_rouds 3", "; did you mean trainer.max_rounds?"),
        (
            "Validation failed: Subcommand 'fit' does not accept nested key 'trainer.max_rouds'",
            "'trainer.max_rouds'; did you mean trainer.max_rounds?",
        ),
        ("Validation failed: Key 'traner' is not expected", "Key 'traner' is not expected; did you mean trainer"),
        (UNION.format(reason="Key 'batchsize' is not expected"), "data: Digits: "),
        (UNION.format(reason="Key 'batchsize' is not expected"), "; did you mean batch_size or eval_batch_size?"),
        (UNION.format(reason='Key "seed" is required but'), 'data: Digits: Validation failed: Key "seed" is required'),
        ("Option 'data.skew' is not accepted before subcommand 'fit'", "accepted before subcommand 'fit'."),
        (
            "--data.help: Expected a dot import path string: Nope",
            "--data.help: Expected a dot import path string: Nope.",
        ),
        ("something new\n  in two lines", "something new in two lines"),
    ],
)
def test_wordings_of_older_and_unknown_versions_of_jsonargparse(message, sentence):
    assert sentence in explain(message, parser())


def raised(code, module):
    try:
        exec(compile(code, "code.py", "exec"), {"__name__": module})
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def as_if_running(function, *args):
    """An error that comes out of the training of a run."""

    def _run_subcommand():
        function(*args)

    try:
        _run_subcommand()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def refuse_as_lightning():
    raise MisconfigurationException("no monitor")


def test_only_what_this_package_refuses_is_a_sentence_once_it_runs():
    assert user_sentence(as_if_running(as_skew, 3)).startswith("`skew` must be a Skew")
    assert user_sentence(as_if_running(lambda: None + 1)) is None
    assert user_sentence(as_if_running(as_skew, {}, 1)) is None
    assert user_sentence(as_if_running({}.__getitem__, "key")) is None
    assert user_sentence(as_if_running(refuse_as_lightning)) == "no monitor."


def test_everything_that_is_refused_before_it_runs_is_a_sentence():
    assert user_sentence(raised("raise ValueError('first\\nsecond')", "users_module")) == "first second."
    assert user_sentence(raised("raise OSError()", "users_module")) == "OSError."
    assert user_sentence(raised("{}['key']", "users_module")) is None
