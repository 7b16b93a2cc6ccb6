"""What loggers are given of a run."""

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger

from lightning_fedstop.data import Digits, DirichletSkew
from lightning_fedstop.methods import FedProx
from lightning_fedstop.stopping import ConsensusEarlyStopping, TaskVectorEarlyStopping
from tests.cli_classes import TenClasses
from tests.helpers import ToyData, ToyModule, fit


class Given(Logger):
    name = version = None

    def log_hyperparams(self, params, *args, **kwargs):
        self.params = params

    def log_metrics(self, metrics, step=None):
        pass


class Detector(TenClasses):
    """Its hyperparameters have names that a run has too."""

    def __init__(self, threshold=0.5, seed=3, method="anchors", quiet=None):
        super().__init__()
        self.save_hyperparameters(ignore=["quiet"], logger=quiet is None)


EXPECTED = {
    "method": "FedProx",
    "method/mu": 0.5,
    "method/server_lr": 1.0,
    "local_epochs": 1,
    "clients_per_round": 2,
    "num_clients": 4,
    "cohort": "UniformCohort",
    "weighting": "samples",
    "gradient_clip_val": 5.0,
    "max_rounds": 1,
    "seed": 3,
    "skew": "DirichletSkew",
    "skew/concentration": 50.0,
    "rule": "TaskVectorEarlyStopping",
    "threshold": 0.02,
    "patience": 7,
    "ConsensusEarlyStopping": "ConsensusEarlyStopping",
    "ConsensusEarlyStopping/threshold": 0.3,
}
# The module's and the data module's own; the skew is told above.
EXPECTED |= {"width": 64, "batch_size": 8, "model/threshold": 0.5, "model/method": "anchors", "data/seed": 5}


def run(root, logger, module=None):
    rules = [TaskVectorEarlyStopping(0.02, 7), ConsensusEarlyStopping(0.3)]
    data = Digits(4, 8, DirichletSkew(50.0), seed=5)
    arguments = {"method": FedProx(0.5), "weighting": "samples", "gradient_clip_val": 5.0, "seed": 3, "max_rounds": 1}
    fit(root, *rules, module=module or Detector(), data=data, limit_train_batches=1, logger=logger, **arguments)
    return logger


def test_loggers_get_how_a_run_is_federated_beside_what_module_and_data_have_saved(tmp_path):
    params = run(tmp_path, Given()).params
    assert EXPECTED.items() <= params.items()
    assert not [name for name in params if name.startswith("data/skew")]


def test_a_module_that_keeps_its_own_to_itself(tmp_path):
    params = run(tmp_path, Given(), Detector(quiet=True)).params
    assert "model/threshold" not in params
    assert params["threshold"] == 0.02


def test_the_loggers_of_lightning_take_them(tmp_path):
    logger = run(tmp_path, CSVLogger(tmp_path / "csv"))
    written = yaml.safe_load((tmp_path / "csv/lightning_logs/version_0/hparams.yaml").read_text())
    assert EXPECTED.items() <= written.items()
    assert logger.name == "lightning_logs"
    pytest.importorskip("tensorboard")
    run(tmp_path, TensorBoardLogger(tmp_path / "tb"))
    written = yaml.safe_load((tmp_path / "tb/lightning_logs/version_0/hparams.yaml").read_text())
    assert EXPECTED.items() <= written.items()
    assert list((tmp_path / "tb").rglob("events.out*"))


def test_a_run_without_rules_or_a_skew(tmp_path):
    fit(tmp_path, module=ToyModule(0.05), data=ToyData(), logger=(logger := Given()), max_rounds=1)
    assert {"method": "FedAvg", "lr": 0.05, "num_clients": 5}.items() <= logger.params.items()
    assert logger.params.keys().isdisjoint({"rule", "threshold", "patience", "skew"})
