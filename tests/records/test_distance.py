import logging
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fedstop.records.distance import DistanceRecorder
from lightning_fedstop.records.run_record import read_rounds
from lightning_fedstop.stopping import TaskVectorEarlyStopping
from tests.helpers import ToyModule, Trace, checkpoint_without_callbacks, fit


def rows(loop):
    return read_rounds(Path(loop.log_dir) / "metrics.csv")


def test_every_run_records_its_distance(tmp_path, caplog):
    trace = Trace()
    with caplog.at_level(logging.INFO):
        loop, _ = fit(tmp_path, trace, max_rounds=15, module=ToyModule(lr=1e-9))
    start = trace.rounds[0]["theta_0"].double()
    for row, one in zip(rows(loop), trace.rounds, strict=True):
        assert float(row["distance"]) == float(torch.linalg.vector_norm(one["theta"].double() - start))
    assert loop.current_epoch == 15
    assert "DistanceRecorder" not in caplog.text


def test_a_run_with_the_rule_needs_no_recorder(tmp_path):
    loop, _ = fit(tmp_path, TaskVectorEarlyStopping(1e-9, 5))
    assert not any(isinstance(callback, DistanceRecorder) for callback in loop.callbacks)
    other, _ = fit(tmp_path)
    assert [row["distance"] for row in rows(loop)] == [row["distance"] for row in rows(other)]
    assert loop.summary["rules"]
    assert not other.summary["rules"]


RULE = {"threshold": 0.3, "patience": 2}


def test_resumed_without_its_rule_a_run_is_measured_from_the_same_start_and_nothing_is_warned(tmp_path, recwarn):
    fit(tmp_path / "rule", TaskVectorEarlyStopping(1e-9), max_rounds=2)
    loop, _ = fit(tmp_path / "rule", max_rounds=4, ckpt_path="last")
    whole, _ = fit(tmp_path / "whole", max_rounds=4)
    for column in ("distance", "growth_rate"):
        assert [row[column] for row in rows(loop)] == [row[column] for row in rows(whole)]
    assert not [warning for warning in recwarn if "DistanceRecorder" in str(warning.message)]
    assert not [warning for warning in recwarn if "holds no" in str(warning.message)]


@pytest.mark.parametrize("round", [0, 1, 2])
def test_a_rule_that_is_added_later_stops_where_it_would_have_from_the_start(tmp_path, round, caplog):
    whole = TaskVectorEarlyStopping(**RULE)
    fit(tmp_path / "whole", whole, max_rounds=20)
    assert 3 < whole.stop_round < 20
    fit(tmp_path, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1), max_rounds=4)
    later = TaskVectorEarlyStopping(**RULE)
    with caplog.at_level("INFO"):
        loop, _ = fit(tmp_path, later, max_rounds=20, ckpt_path=tmp_path / f"epoch={round}.ckpt")
    assert (later.stop_round, loop.current_epoch) == (whole.stop_round, whole.stop_round)
    assert later.stopping_reason_message == whole.stopping_reason_message
    assert "TaskVectorEarlyStopping counts on from " in caplog.text


def test_without_the_start_the_record_says_from_where_it_measures(tmp_path):
    path = checkpoint_without_callbacks(tmp_path)
    with pytest.warns(UserWarning, match="holds no weights that the run began with: distances are measured from those"):
        fit(tmp_path, max_rounds=3, ckpt_path=path)
