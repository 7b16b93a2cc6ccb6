"""Updates that are not finite."""

import json

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_fedstop.federation.cohort import ScheduledCohort
from lightning_fedstop.stopping import StoppingReason, TaskVectorEarlyStopping
from tests.helpers import Deep, ToyData, bits, fit, flat, make_loop, same


class Diverges(Deep):
    """Client 2 returns NaN in round 2."""

    def on_client_start(self, client):
        self.client = client

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.client == 2 and self.current_epoch == 1 else loss


def diverge(root, on_nonfinite, schedule, **arguments):
    module = Diverges()
    loop, _ = fit(
        root,
        *arguments.pop("callbacks", []),
        module=module,
        data=ToyData([4, 4, 4]),
        cohort=ScheduledCohort(schedule),
        on_nonfinite=on_nonfinite,
        **{"max_rounds": 3} | arguments,
    )
    return loop, module


@pytest.mark.parametrize("min_rounds", [0, 3])
def test_stop_ends_the_run_with_the_last_finite_model(tmp_path, min_rounds):
    saver = ModelCheckpoint(tmp_path / "best", monitor="val_loss", filename="best")
    callbacks = [saver, EarlyStopping("val_loss")]
    _, module = diverge(tmp_path, "stop", [[0, 1, 2]], min_rounds=min_rounds, callbacks=callbacks)
    summary = json.loads((tmp_path / "lightning_logs/version_0/summary.json").read_text())
    assert summary["stop_round"] == 2
    assert summary["stop_reason"] == (
        "The update of client 2 in round 2 is not finite; the global model before it is kept."
    )
    _, before = diverge(tmp_path, "stop", [[0, 1, 2]], max_rounds=1)
    assert same(bits(module), bits(before))
    assert same(torch.load(summary["checkpoint"], weights_only=True)["state_dict"], bits(before))


def test_a_run_that_stopped_so_stays_stopped_and_another_choice_goes_on(tmp_path):
    diverge(tmp_path, "stop", [[0, 1, 2]])
    loop, _ = diverge(tmp_path, "stop", [[0, 1, 2]], **{"max_rounds": 3})
    again = make_loop(tmp_path, max_rounds=3, cohort=ScheduledCohort([[0, 1, 2]]))
    again.fit(Diverges(), ToyData([4, 4, 4]), ckpt_path="last")
    assert again.current_epoch == loop.current_epoch == 2
    assert "client 2 in round 2" in again.summary["stop_reason"]
    other = make_loop(tmp_path, max_rounds=3, cohort=ScheduledCohort([[0, 1, 2]]), on_nonfinite="drop")
    other.fit(Diverges(), ToyData([4, 4, 4]), ckpt_path=loop.summary["checkpoint"])
    assert other.current_epoch == 3


def test_drop_leaves_the_update_out(tmp_path):
    with pytest.warns(UserWarning, match="client 2 in round 2 is not finite and was left out"):
        _, module = diverge(tmp_path, "drop", [[0, 1], [0, 1, 2], [0, 1]])
    _, without = diverge(tmp_path, "drop", [[0, 1]])
    assert same(bits(module), bits(without))


def test_when_all_are_dropped_nothing_changes(tmp_path):
    _, module = diverge(tmp_path, "drop", [[0, 1], [2]], max_rounds=2)
    _, before = diverge(tmp_path, "drop", [[0, 1]], max_rounds=1)
    assert same(bits(module), bits(before))


def test_keep_lets_it_in(tmp_path):
    with pytest.warns(UserWarning, match="not finite and was kept"):
        loop, module = diverge(tmp_path, "keep", [[0, 1, 2]])
    assert loop.current_epoch == 3
    assert flat(module).isnan().any()


def test_the_rule_names_a_diverged_run(tmp_path):
    rule = TaskVectorEarlyStopping()
    loop, _ = diverge(tmp_path, "keep", [[0, 1, 2]], callbacks=[rule])
    assert loop.current_epoch == 2
    assert rule.stopping_reason is StoppingReason.DIVERGED
