import logging
from pathlib import Path

import torch

from lightning_fedstop.records.distance import DistanceRecorder
from lightning_fedstop.records.run_record import read_rounds
from lightning_fedstop.stopping import TaskVectorEarlyStopping
from tests.helpers import ToyModule, Trace, fit


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
