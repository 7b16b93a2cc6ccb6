import gc

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_fedstop.federation.cohort import Cohort, ScheduledCohort
from lightning_fedstop.federation.local_training import ClientResult
from tests.helpers import ToyData, ToyModule, fit, flat


class Recorder(Callback):
    def __init__(self):
        self.cohorts = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.cohorts.append([])

    def on_client_start(self, trainer, pl_module, client):
        self.cohorts[-1].append(client)
        assert torch.equal(flat(pl_module), trainer.server.theta)


def test_every_client_starts_from_the_global_model_and_cohorts_follow_the_seed(tmp_path):
    schedules = []
    for seed in (0, 0, 1):
        recorder = Recorder()
        fit(tmp_path, recorder, max_rounds=4, seed=seed)
        schedules.append([sorted(cohort) for cohort in recorder.cohorts])
    assert schedules[0] == schedules[1] != schedules[2]
    assert all(len(cohort) == 2 for cohort in schedules[0])


def test_a_taken_update_is_not_kept_while_the_next_client_trains(tmp_path):
    alive = []

    class Looking(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            alive.append(sum(type(item) is ClientResult for item in gc.get_objects()))

    fit(tmp_path, Looking(), max_rounds=1)
    assert set(alive) == {0}


def test_a_cohort_of_ones_own(tmp_path):
    class Last(Cohort):
        def sample(self, round, num_clients, size, generator):
            return [num_clients - 1]

    recorder = Recorder()
    fit(tmp_path, recorder, cohort=Last(), max_rounds=2)
    assert recorder.cohorts == [[4], [4]]


def test_the_global_model_is_saved_whichever_client_trains(tmp_path):
    class Saves(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            before = {name: value.clone() for name, value in pl_module.state_dict().items()}
            trainer.save_checkpoint(tmp_path / "x.ckpt")
            saved = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
            after = pl_module.state_dict()
            assert all(torch.equal(before[name], after[name]) for name in before)
            assert not torch.equal(saved["net.1.weight"], after["net.1.weight"])
            weights = torch.cat([saved[name].reshape(-1) for name, _ in pl_module.named_parameters()])
            assert torch.equal(weights, trainer.server.theta)
            assert saved["net.0.num_batches_tracked"] == trainer.current_epoch * 2

    module = ToyModule(net=nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
    fit(tmp_path, Saves(), module=module, data=ToyData([8, 8]), max_rounds=2)


@pytest.mark.parametrize("schedule", [[[5]], [[-1]]])
def test_a_schedule_that_does_not_fit_is_refused_before_training(tmp_path, schedule):
    with pytest.raises(ValueError, match="the clients are 0 to 4"):
        fit(tmp_path, cohort=ScheduledCohort(schedule))
