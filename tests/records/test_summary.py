import hashlib
import json
import struct

import pytest
import torch

from lightning_fedstop.records.summary import describe, parameters_hash, print_metrics, summarize, versions


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
