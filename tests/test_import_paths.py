"""Import paths that saved configurations and users' scripts name."""

from importlib import import_module

import pytest

PATHS = [
    "accelerators.ROCmAccelerator",
    "aggregation.RunningMean",
    "cli.main",
    "client_state.ClientStates",
    "cohort.UniformCohort",
    "data.partition.Partition",
    "data.partition.fingerprint",
    "data.skew.DirichletSkew",
    "local.LocalTrainer",
    "loop.FederatedLoop",
    "methods.base.FederatedMethod",
    "methods.fedwmsam.FedWMSAM",
    "methods.released_code.FedLESAM",
    "records.reader.read_records",
    "records.replay.replay",
    "stopping.baselines.ValidationEarlyStopping",
    "stopping.consensus_early_stopping.ConsensusEarlyStopping",
    "stopping.criterion.TaskVectorCriterion",
    "stopping.early_stopping.TaskVectorEarlyStopping",
]


@pytest.mark.parametrize("path", PATHS)
def test_it_can_be_imported(path):
    module, _, name = path.rpartition(".")
    assert callable(getattr(import_module(f"lightning_fedstop.{module}"), name))
