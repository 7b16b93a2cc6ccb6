import math

import pytest

from lightning_fedstop.records.reader import read_record
from lightning_fedstop.records.replay import replay
from lightning_fedstop.records.report.runs import Run, grouped, without_beginnings
from tests.records.report.made import config, rows, summary, write_run


def read(folder, name="run", **made):
    return Run(read_record(write_run(folder, **made), name=name))


def test_a_run_that_is_over(tmp_path):
    run = read(tmp_path / "a", rounds=30, made_config=config(), made_summary=summary(30, 60, 0.7, "It saturated."))
    assert (run.is_over, run.stop_round, run.last_round, run.share_used, run.reason) == (
        True,
        30,
        30,
        50,
        "It saturated.",
    )
    assert run.test_accuracy == pytest.approx(70)


def test_a_run_that_was_killed(tmp_path):
    run = read(tmp_path / "a", rounds=30, made_config=config(max_rounds=60))
    assert (run.is_over, run.stop_round, run.share_used) == (False, 30, 50)
    assert "No summary" in run.reason
    assert run.test_accuracy == pytest.approx(list(run.series("test_acc").values())[-1])


def test_series_are_finite_and_accuracies_in_percent(tmp_path):
    made = rows(rounds=4)
    made[1]["test_acc"], made[2]["test_acc"], made[3]["test_acc"] = "", "nan", "0.5"
    run = read(tmp_path / "a", made_rows=made)
    assert list(run.series("test_acc")) == [1, 4]
    assert run.series("test_acc")[4] == 50
    assert run.series("nowhere") == {}


def test_the_growth_rate_is_computed_where_it_was_not_recorded(tmp_path):
    made = rows(rounds=3)
    for row, distance in zip(made, (2.0, 3.0, 3.0), strict=True):
        row |= {"distance": distance, "growth_rate": ""}
    # A growth rate of 0 cannot be drawn on a logarithmic scale.
    assert read(tmp_path / "a", made_rows=made).series("growth_rate") == {2: 0.5}


def test_stops_are_those_of_replay(tmp_path):
    run = read(tmp_path / "a")
    assert run.rules == ["task_vector", "val_loss", "val_acc", "consensus"]
    for rule in run.rules:
        assert run.stop(rule, 0.01, 5) == replay(run.record, rule, 0.01, 5)


def test_rules_without_their_columns(tmp_path):
    run = read(tmp_path / "a", validation=False, consensus=False)
    assert run.rules == ["task_vector"]
    assert run.stop("val_loss", 0.01, 5) is None


def test_a_column_that_cannot_be_read_is_a_note(tmp_path):
    made = rows(rounds=5)
    made[3]["val_loss"] = "oops"
    run = read(tmp_path / "a", made_rows=made)
    assert "val_loss" not in run.rules
    assert any("oops" in note for note in run.notes)


def test_totals(tmp_path):
    run = read(tmp_path / "a", rounds=3)
    assert run.total("bytes_down") == 3e6
    assert run.total("nowhere", "seconds_eval") == 9
    assert run.total("nowhere") is None


def test_seeds_are_one_group_and_labels_tell_groups_apart(tmp_path):
    made = [
        config(seed=0), config(seed=1), config(seed=0, method="FedDyn"), config(seed=0, method="FedDyn", lr=0.1),
    ]  # fmt: skip
    groups = grouped([read(tmp_path / str(n), made_config=c, rounds=3) for n, c in enumerate(made)])
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("FedAvg, lr\xa0=\xa00.001", 2), ("FedDyn, lr\xa0=\xa00.001", 1), ("FedDyn, lr\xa0=\xa00.1", 1),
    ]  # fmt: skip


def test_one_group_is_named_in_full_and_c_is_sorted_as_a_number(tmp_path):
    one = read(tmp_path / "one", made_config=config(), rounds=3)
    assert grouped([one])[0].label == "FedAvg, Digits, Dirichlet, c\xa0=\xa00.1"
    runs = [read(tmp_path / str(c), made_config=config(c=c), rounds=3) for c in (10.0, 0.5, 2.0)]
    assert [group.label for group in grouped(runs)] == [f"Dirichlet, c\xa0=\xa0{c}" for c in ("0.5", "2", "10")]


def test_runs_without_a_configuration_stand_alone(tmp_path):
    runs = [read(tmp_path / name, name=name, rounds=3) for name in ("a", "b")]
    assert [group.label for group in grouped(runs)] == ["a", "b"]


def test_a_summary_of_odd_values(tmp_path):
    odd = {"stop_round": None, "test": {"test_acc": math.nan}, "budget": 10}
    run = read(tmp_path / "a", rounds=4, made_summary=odd)
    assert (run.stop_round, run.share_used) == (4, 40)
    assert run.test_accuracy == pytest.approx(run.series("test_acc")[4])


def test_one_seed_run_twice_is_said(tmp_path):
    runs = [read(tmp_path / name, name=name, made_config=config(seed=0), rounds=3) for name in ("a", "b")]
    runs.append(read(tmp_path / "c", name="c", made_config=config(seed=1), rounds=3))
    (group,) = grouped(runs)
    (sentence,) = group.repeated_seeds()
    assert sentence.startswith("a, b have one configuration and the same seed 0")


def test_a_killed_run_is_left_out_where_its_continuation_is_there(tmp_path):
    made = rows(rounds=9)
    killed = read(tmp_path / "a", name="a", made_rows=made[:4], made_config=config())
    resumed = read(tmp_path / "b", name="b", made_rows=made, made_config=config(), made_summary=summary(9, 9))
    other = read(tmp_path / "c", name="c", rounds=4, seed=7)
    kept, notes = without_beginnings([killed, resumed, other])
    assert kept == [resumed, other]
    assert notes == ["a is left out: b is its continuation."]
