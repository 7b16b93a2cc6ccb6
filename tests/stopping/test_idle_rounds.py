"""Rounds in which no client's update goes into the model are no checks, live and in a replay."""

import pytest

from lightning_fedstop.federation.cohort import ScheduledCohort
from lightning_fedstop.records import read_rounds
from lightning_fedstop.records.reader import read_record
from lightning_fedstop.records.replay import replay
from lightning_fedstop.stopping import ConsensusEarlyStopping, TaskVectorEarlyStopping, ValidationEarlyStopping
from tests.helpers import ToyData, ToyModule, fit


class Diverging(ToyModule):
    """Diverges in two rounds of three."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.current_epoch % 3 else loss


class Skipping(ToyModule):
    """Skips all batches in two rounds of three."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if self.current_epoch % 3 else loss


IDLE = {
    "empty clients": lambda: (ToyModule(), {"data": ToyData([6, 4, 0]), "cohort": ScheduledCohort([[0, 1], [2], [2]])}),
    "updates dropped": lambda: (Diverging(), {"on_nonfinite": "drop"}),
    "batches skipped": lambda: (Skipping(), {}),
}


@pytest.mark.filterwarnings(
    "ignore:The update of client", "ignore:`training_step` returned None", "ignore:.*no samples"
)
@pytest.mark.parametrize("min_rounds", [0, 9])
@pytest.mark.parametrize("idle", IDLE)
def test_idle_rounds_are_no_checks(tmp_path, idle, min_rounds):
    module, arguments = IDLE[idle]()
    rules = {
        "task_vector": TaskVectorEarlyStopping(0.2, 3, min_rounds, observe_only=True),
        "consensus": ConsensusEarlyStopping(0.2, 3, min_rounds=min_rounds, observe_only=True),
        "val_loss": ValidationEarlyStopping("val_loss", 0.05, 3, min_rounds=min_rounds, observe_only=True),
    }
    loop, _ = fit(tmp_path, *rules.values(), module=module, max_rounds=45, **arguments)
    rows = read_rounds(f"{loop.log_dir}/metrics.csv")
    assert [int(row["trained"]) for row in rows] == [2, 0, 0] * 15
    assert [bool(row["growth_rate"]) for row in rows] == [True, False, False] * 15
    record = read_record(loop.log_dir)
    for name, rule in rules.items():
        assert rule.criterion.round == 15, name
        assert max(3, min_rounds) <= rule.stop_round < 15, name
        assert rule.stopped_epoch == 3 * (rule.stop_round - 1), name
        threshold = rule.criterion.threshold
        assert replay(record, name, threshold, 3, min_rounds).stop_round == rule.stopped_epoch + 1, name


def test_a_run_that_no_client_trains_does_not_stop_as_not_moving(tmp_path):
    rule = TaskVectorEarlyStopping(0.01, 2)
    loop, _ = fit(tmp_path, rule, data=ToyData([0, 0, 6]), cohort=ScheduledCohort([[0, 1]]), max_rounds=6)
    assert (loop.current_epoch, rule.criterion.round, rule.stopped) == (6, 0, False)
    assert [row["distance"] for row in read_rounds(f"{loop.log_dir}/metrics.csv")] == ["0"] * 6


@pytest.mark.parametrize("round", [1, 2, 3, 4])
def test_idle_rounds_stay_no_checks_in_a_resumed_run(tmp_path, round):
    def run(root, max_rounds, **arguments):
        rule = TaskVectorEarlyStopping(1e-9, 20)
        given = {"data": ToyData([6, 4, 0]), "cohort": ScheduledCohort([[0, 1], [2], [2]])}
        loop, _ = fit(root, rule, max_rounds=max_rounds, **given | arguments)
        rows = read_rounds(f"{loop.log_dir}/metrics.csv")
        return (rule.criterion.round, rule.criterion.distance), [
            (row["trained"], row["distance"], row["growth_rate"]) for row in rows
        ]

    whole = run(tmp_path / "whole", 8)
    run(tmp_path, round)
    assert run(tmp_path, 8, ckpt_path="last") == whole
