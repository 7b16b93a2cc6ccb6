import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedstop import data as data_kinds
from lightning_fedstop import methods, stopping
from lightning_fedstop.cli.main import main
from lightning_fedstop.core.client_states import ClientStates
from lightning_fedstop.data import DirichletSkew, FederatedDataModule
from lightning_fedstop.federation.cohort import ScheduledCohort, UniformCohort
from lightning_fedstop.methods import SCAFFOLD, FedProx
from lightning_fedstop.records import read_rounds
from lightning_fedstop.records.config import described, write_config
from lightning_fedstop.utilities.describe import constructor_arguments
from tests.helpers import ToyData, ToyModule, fit


def test_a_run_built_in_python_describes_itself(tmp_path):
    loop, _ = fit(tmp_path, method=FedProx(0.5), seed=3)
    config = yaml.safe_load((Path(loop.log_dir) / "config.yaml").read_text())
    assert config["trainer"]["max_rounds"] == 3
    assert config["trainer"]["seed"] == 3
    assert config["trainer"]["method"]["class_path"] == "lightning_fedstop.methods.fedprox.FedProx"
    assert config["trainer"]["default_root_dir"] == str(tmp_path)
    assert config["model"] == {"class_path": "tests.helpers.ToyModule", "init_args": {"lr": 0.1}}
    assert config["data"]["class_path"] == "tests.helpers.ToyData"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (Path("a/b"), "a/b"),
        ((1, 2.5, None), [1, 2.5, None]),
        ({"x": {1}}, {"x": [1]}),
        (
            DirichletSkew(0.5),
            {
                "class_path": "lightning_fedstop.data.partitions.dirichlet.DirichletSkew",
                "init_args": {"concentration": 0.5},
            },
        ),
        (object(), {"class_path": "builtins.object"}),
        (np.arange(3), {"class_path": "numpy.ndarray"}),
        ([np.int64(3), np.float32(0.5), np.bool_(True), np.str_("x")], [3, 0.5, True, "x"]),
    ],
)
def test_values_become_plain(tmp_path, value, written):
    write_config(tmp_path / "config.yaml", {"value": described(value)}, ToyModule(), ToyData(), None)
    got = yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["value"]
    if isinstance(written, dict) and "init_args" in written:
        assert written["init_args"].items() <= got.pop("init_args").items()
        written = {"class_path": written["class_path"]}
    assert got == written


def test_what_the_command_line_wrote_stays(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("mine: 1\n")
    write_config(path, {}, ToyModule(), ToyData(), None)
    assert path.read_text() == "mine: 1\n"


class Shifts(LightningDataModule):
    """A user's own data, whose arguments are kept as attributes alone."""

    def __init__(self, samples=40, batch_size=4):
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def train_dataloader(self):
        x = torch.randn(self.samples, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), self.batch_size)


class Random(ToyModule):
    """Begins at random; its optimizer's class is an argument."""

    def __init__(self, lr=0.1, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, hidden=3):
        super().__init__(lr, nn.Sequential(nn.Linear(4, hidden), nn.Linear(hidden, 2)))
        self.save_hyperparameters()
        self.optimizer = optimizer  # what the command line saves of it is its path

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=self.lr)


RULES = {
    "TaskVectorEarlyStopping": {"threshold": 0.037, "patience": 4, "min_rounds": 2, "variant": "released_code"},
    "ConsensusEarlyStopping": {"threshold": 0.2, "patience": 5, "shift": "mean_norm", "observe_only": True},
    "ValidationEarlyStopping": {
        "monitor": "val_loss",
        "threshold": 0.5,
        "patience": 6,
        "mode": "max",
        "percent": False,
    },
}


def test_a_run_built_in_python_is_run_again_by_the_command(tmp_path):
    seed_everything(11, verbose=False)
    rules = [getattr(stopping, name)(**arguments) for name, arguments in RULES.items()]
    lightnings = [EarlyStopping("train_loss", patience=9, min_delta=0.5), ModelCheckpoint(every_n_train_steps=2)]
    data = FederatedDataModule.from_datamodule(Shifts(samples=60), 6, DirichletSkew(0.7))
    loop, _ = fit(
        tmp_path,
        *rules,
        *lightnings,
        module=Random(0.05, torch.optim.Adam),
        data=data,
        method=SCAFFOLD(control_update="grad_mean"),
        cohort=ScheduledCohort([[0, 1], [2, 5]]),
        client_states=ClientStates("disk"),
        logger=CSVLogger(tmp_path / "csv"),
        gradient_clip_val=3.0,
        max_rounds=2,
    )
    config = Path(loop.log_dir) / "config.yaml"
    written = yaml.safe_load(config.read_text())["trainer"]
    for rule in written["callbacks"][:3]:
        assert RULES[rule["class_path"].rpartition(".")[2]].items() <= rule["init_args"].items()
    assert "wait_count" not in config.read_text()
    main(["fit", "--config", str(config)])
    runs = [tmp_path / "lightning_logs" / f"version_{number}" for number in (0, 1)]
    partitions = [(run / "partition.json").read_text() for run in runs]
    rows = [read_rounds(run / "metrics.csv") for run in runs]
    timeless = [[{k: v for k, v in row.items() if not k.startswith("seconds")} for row in table] for table in rows]
    assert partitions[0] == partitions[1]
    assert timeless[0] == timeless[1]
    again = yaml.safe_load((runs[1] / "config.yaml").read_text())["trainer"]
    assert [rule["class_path"].rpartition(".")[2] for rule in again["callbacks"]] == [
        *RULES,
        "EarlyStopping",
        "ModelCheckpoint",
    ]
    assert sorted(path.name for path in (tmp_path / "csv/lightning_logs").iterdir()) == ["version_0", "version_1"]


OURS = [
    *(getattr(stopping, name) for name in RULES),
    *(kind for kind in vars(methods).values() if inspect.isclass(kind) and issubclass(kind, methods.FederatedMethod)),
    *(data_kinds.Iid, data_kinds.DirichletSkew, data_kinds.QuantitySkew, data_kinds.PathologicalSkew),
    *(data_kinds.Digits, UniformCohort, ClientStates),
]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_argument_of_ours_is_kept_under_its_name(kind):
    assert constructor_arguments(kind()).keys() == inspect.signature(kind).parameters.keys()


def test_the_version_of_a_logger_and_the_seconds_of_a_duration_are_no_arguments(tmp_path):
    logger = described(CSVLogger(tmp_path, name="mine"))
    assert logger["init_args"] == {"save_dir": str(tmp_path), "name": "mine"}
    assert described(Timer("00:00:00:10")) == {"class_path": "lightning.pytorch.callbacks.timer.Timer"}


@pytest.mark.parametrize("change", [{"patience": 9}, {"mode": "max"}])
def test_what_a_fit_makes_of_a_callback_is_not_written(tmp_path, change):
    saver = ModelCheckpoint(monitor="val_loss")
    loop, _ = fit(tmp_path, saver, EarlyStopping("val_loss", **change))
    written = yaml.safe_load((Path(loop.log_dir) / "config.yaml").read_text())["trainer"]["callbacks"]
    assert saver.dirpath is not None
    assert written[0]["init_args"].keys() & {"dirpath", "best_model_path"} == set()
    assert change.items() <= written[1]["init_args"].items()
