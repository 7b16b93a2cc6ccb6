import hashlib
import json
import struct

import pytest
import torch

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
        "val_loss": {"value": 1.0, "round": 2},
        "val_acc": {"value": 0.5, "round": 1},
        "test_acc": {"value": 0.3, "round": 2},
    }
    assert found["final"] == {"val_acc": 0.5}
    assert extremes([]) == {"best": {}, "final": {}}


def test_an_average_is_described_beside_the_last_model():
    average = {"rounds": 10, "checkpoint": "a.ckpt", "test": {"test_acc": 0.97}}
    assert "Test, mean of the last 10 models: test_acc 0.9700" in describe(summary(rules=[{"average": average}]))
    assert "mean of" not in describe(summary(rules=[{"average": average | {"test": {}}}, {"rule": "x"}]))
