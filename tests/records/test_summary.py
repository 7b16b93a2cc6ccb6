import hashlib
import json
import struct

import pytest
import torch

from lightning_fedstop.records.run_record import RESERVED
from lightning_fedstop.records.summary import (
    describe,
    extremes,
    parameters_hash,
    print_metrics,
    summarize,
    versions,
)


def summary(**changes):
    given = {
        "stop_round": 26,
        "stop_reason": "Saturated.",
        "budget": 100,
        "test": {"test_acc": 0.95},
        "checkpoint": "x.ckpt",
        "log_dir": "runs",
        "device": torch.device("cpu"),
        "seconds": 13.0,
        "theta": torch.tensor([1.0, 2.0]),
    }
    return summarize(**given | changes)


def test_summary_is_plain_json_with_shares():
    content = summary()
    assert json.loads(json.dumps(content)) == content
    assert (content["share_used"], content["seconds_per_round"], content["num_parameters"]) == (0.26, 0.5, 2)
    assert content["device"].startswith("cpu (")
    assert content["peak_memory_bytes"].keys() == {"resident"}
    assert content["versions"]["torch"] == versions()["torch"]


def test_a_run_of_no_rounds():
    content = summary(stop_round=0)
    assert content["seconds_per_round"] is None
    assert "round 0 of 100 (100 % of the budget saved)" in describe(content)


def test_equal_hashes_mean_equal_bits():
    # sha256 of the eight bytes of two little-endian floats
    expected = hashlib.sha256(struct.pack("<2f", 1.0, 2.0)).hexdigest()
    assert parameters_hash(torch.tensor([1.0, 2.0])) == expected
    assert parameters_hash(torch.tensor([0.0])) != parameters_hash(torch.tensor([-0.0]))
    assert parameters_hash(torch.ones(4).bfloat16()[::2]) == parameters_hash(torch.ones(2).bfloat16())


@pytest.mark.parametrize(("part", "line"), [("test", "Test:"), ("checkpoint", "Checkpoint:")])
def test_what_there_is_not_is_not_described(part, line):
    assert line in describe(summary())
    assert line not in describe(summary(**{part: {} if part == "test" else None}))


def test_print_metrics(capsys):
    print_metrics({"val_loss": 0.123456})
    assert "0.1235" in capsys.readouterr().out


def test_the_best_figures_have_their_rounds_and_what_is_not_finite_is_none():
    rows = [
        {"round": "1", "val_loss": "2.0", "val_acc": "0.5", "test_acc": "", "distance": "1.0", "samples": "7"},
        {"round": "2", "val_loss": "1.0", "val_acc": "0.4", "test_acc": "0.3", "distance": "2.0", "samples": "7"},
        {"round": "3", "val_loss": "nan", "val_acc": "0.5", "test_acc": "", "distance": "inf", "samples": "7"},
    ]
    found = extremes(rows)
    assert found["best"] == {
        "val_loss": {"value": 1.0, "round": 2, "mode": "min"},
        "val_acc": {"value": 0.5, "round": 1, "mode": "max"},
        "test_acc": {"value": 0.3, "round": 2, "mode": "max"},
    }
    assert found["final"] == {"val_acc": 0.5}
    assert extremes([]) == {"best": {}, "final": {}}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("val/acc", "max"),
        ("val/loss", "min"),
        ("valid.top1.accuracy", "max"),
        ("val_loss/dataloader_idx_1", "min"),
        ("val-CrossEntropyLoss", "min"),
        ("val_MeanSquaredError", "min"),
        ("val_BinaryF1Score", "max"),
        ("test_RMSE_epoch", "min"),
        ("Genauigkeit", "max"),
        ("logged/distance", "max"),
    ],
)
def test_every_name_that_a_user_may_log_has_a_best_figure(name, mode):
    rows = [
        {"round": str(r), name: value, "lr": "0.1"} for r, value in ((1, "2.0"), (2, "1.0"), (3, "3.0"), (4, "2.5"))
    ]
    value, round = (1.0, 2) if mode == "min" else (3.0, 3)
    found = extremes(rows)
    assert found["best"] == {name: {"value": value, "round": round, "mode": mode}}
    assert found["final"] == {name: 2.5, "lr": 0.1}


def test_figures_of_the_loop_and_of_its_rules_have_no_best():
    row = {**dict.fromkeys(RESERVED, "1"), "task_vector_2/distance": "1", "consensus/shift": "1", "consensus": "1"}
    found = extremes([row], ["task_vector", "task_vector_2", "consensus"])
    assert list(found["best"]) == ["consensus"]
    assert found["final"] == {"consensus": 1.0, "distance": 1.0, "growth_rate": 1.0, "lr": 1.0}


def test_an_average_is_described_beside_the_last_model():
    average = {"rounds": 10, "checkpoint": "a.ckpt", "test": {"test_acc": 0.97}}
    assert "Test, mean of the last 10 models: test_acc 0.9700" in describe(summary(rules=[{"average": average}]))
    assert "mean of" not in describe(summary(rules=[{"average": average | {"test": {}}}, {"rule": "x"}]))
