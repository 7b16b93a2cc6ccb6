import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.nn.functional import cross_entropy

from lightning_fedstop.methods import FedAvg, FedProx, FedSAM
from lightning_fedstop.records.reader import Record, read_record
from lightning_fedstop.records.replay import RULES, available_rules, in_percent, replay, replay_table
from lightning_fedstop.stopping import (
    ConsensusCriterion,
    ConsensusEarlyStopping,
    TaskVectorCriterion,
    TaskVectorEarlyStopping,
    ValidationCriterion,
    ValidationEarlyStopping,
)
from tests.helpers import ToyData, ToyModule, fit
from tests.oracles import read_oracles


def oracle(kind):
    return pytest.mark.parametrize("case", read_oracles(kind))


def make_record(budget=None, rounds=None, **columns):
    columns = {name.replace("__", "/"): [float(value) for value in values] for name, values in columns.items()}
    rounds = rounds or list(range(1, len(next(iter(columns.values()))) + 1))
    nans = {name: frozenset(rounds) for name in columns}
    return Record("run", Path(), rounds, columns, {}, {}, budget or rounds[-1], nan_rounds=nans)


def with_gaps(**columns):
    """A record whose NaNs are empty fields."""
    record = make_record(**columns)
    return Record(**{**vars(record), "nan_rounds": {}})


@oracle("stopping")
def test_the_task_vector_rule_meets_the_oracles(case):
    record = make_record(distance=case["delta"])
    for variant, expected in (("paper", "paper_round"), ("released_code", "authors_code_round_1based")):
        stop = replay(record, "task_vector", case["tau"], case["patience"], variant=variant)
        assert stop.stop_round == case[expected]


@oracle("validation_stopping")
def test_the_validation_rules_meet_the_oracles(case):
    record = make_record(val_loss=case["loss"], val_acc=case["acc_percent"])
    for rule, expected in (("val_loss", "loss"), ("val_acc", "acc")):
        assert replay(record, rule, case["tau"], case["patience"]).stop_round == case["expected_round_1based"][expected]


@oracle("validation_stopping")
def test_accuracies_as_fractions_are_compared_in_percentage_points(case):
    record = make_record(val_acc=[value / 100 for value in case["acc_percent"]])
    assert replay(record, "val_acc", case["tau"], case["patience"]).stop_round == case["expected_round_1based"]["acc"]


@oracle("sibling_criterion")
def test_the_consensus_rule_meets_the_oracles(case):
    theta_0 = torch.tensor(case["theta0"], dtype=torch.float64)
    vectors = [torch.tensor(models, dtype=torch.float64) - theta_0 for models in case["rounds"]]
    record = make_record(
        consensus__shift=[v.mean(0).norm() for v in vectors],
        consensus__mean_norm=[v.norm(dim=1).mean() for v in vectors],
        consensus__dispersion=[(v - v.mean(0)).norm(dim=1).mean() for v in vectors],
    )
    shift = "mean_vector" if case["variant"] == "readme" else "mean_norm"
    stop = replay(record, "consensus", case["tau"], case["patience"], shift=shift)
    assert stop.stop_round == case["expected"]["stop_round_1based"]


# --- what a stop says


def test_share_and_accuracy_belong_to_the_round_of_the_stop():
    record = make_record(budget=20, distance=[1, 2, 2, 2, 3], test_acc=[0.1, 0.2, 0.3, 0.4, 0.5])
    stop = replay(record, "task_vector", 0.01, 2)
    assert (stop.run, stop.rule, stop.threshold, stop.patience) == ("run", "task_vector", 0.01, 2)
    assert (stop.stop_round, stop.share_used, stop.accuracy) == (4, 4 / 20, 40.0)
    assert stop.reason == "saturated"


def test_without_a_stop_a_whole_record_used_its_budget_and_a_shorter_one_says_nothing():
    columns = {"distance": [1, 2, 4], "test_acc": [0.1, 0.2, 0.3]}
    whole = replay(make_record(**columns), "task_vector", 0.01, 1)
    assert (whole.stop_round, whole.share_used, whole.accuracy, whole.reason) == (None, 1.0, 30.0, "not_stopped")
    killed = replay(make_record(**columns, budget=4), "task_vector", 0.01, 1)
    assert (killed.stop_round, killed.accuracy) == (None, None)
    assert math.isnan(killed.share_used)


def test_an_accuracy_that_was_not_measured_in_the_round_is_none():
    assert replay(with_gaps(distance=[1, 1, 2], test_acc=[0.5, math.nan, 0.6]), "task_vector", 1, 1).accuracy is None
    assert replay(make_record(distance=[1, 1]), "task_vector", 0.01, 1).accuracy is None
    in_percents = make_record(distance=[1, 1], test_acc=[0.5, 62.5])
    assert replay(in_percents, "task_vector", 0.01, 1).accuracy == 62.5


def test_fractions_become_percent_and_percent_stays():
    assert in_percent([0.0, 0.25, 1.0000001]) == [0.0, 25.0, 100.00001]
    assert in_percent([0.5, 1.5]) == [0.5, 1.5]
    assert in_percent([math.nan, 0.5])[1] == 50.0


@pytest.mark.parametrize(
    ("rule", "columns", "round", "reason"),
    [
        ("task_vector", {"distance": [1, 2, math.nan, 3]}, 3, "diverged"),
        ("task_vector", {"distance": [math.inf]}, 1, "diverged"),
        ("task_vector", {"distance": [0, 0, 0]}, 3, "not_moving"),
        ("val_loss", {"val_loss": [1, math.nan, math.nan, 0.5]}, 3, "not_improving"),
        ("val_acc", {"val_acc": [0.5, 0.5, math.nan]}, 3, "not_improving"),
        ("consensus", {"consensus__shift": [1, math.nan], "consensus__dispersion": [1, 1]}, 2, "diverged"),
    ],
)
def test_numbers_that_are_not_finite_stop_a_run_as_they_do_live(rule, columns, round, reason):
    stop = replay(make_record(**columns), rule, 0.01, 2)
    assert (stop.stop_round, stop.reason) == (round, reason)


def test_the_released_code_never_stops_on_divergence():
    record = make_record(distance=[1, 2, math.nan, math.nan])
    assert replay(record, "task_vector", 0.01, 1, variant="released_code").stop_round is None


# --- gaps


def test_evaluations_are_counted_where_not_every_round_is_evaluated():
    nan = math.nan
    record = with_gaps(val_loss=[nan, 1.0, nan, 1.0, nan, 1.0, nan, 1.0])
    assert replay(record, "val_loss", 0.01, 2).stop_round == 6
    assert replay(record, "val_loss", 0.01, 4).stop_round is None


def test_rounds_without_a_row_are_stepped_over():
    record = make_record(rounds=[5, 10, 15], distance=[1.0, 1.0, 1.0])
    stop = replay(record, "task_vector", 0.01, 2)
    assert (stop.stop_round, stop.share_used) == (15, 1.0)


def test_the_consensus_needs_both_numbers_of_a_round():
    record = with_gaps(consensus__shift=[1, 1, math.nan, 1], consensus__dispersion=[math.nan, 1, 1, 1])
    assert replay(record, "consensus", 0.01, 1).stop_round == 4


@pytest.mark.parametrize(("least", "round"), [(0, 4), (4, 4), (5, 6), (6, 6), (7, 8), (9, None)])
def test_min_rounds_counts_rounds_and_not_evaluations(least, round):
    record = with_gaps(val_loss=[math.nan, 1.0] * 4)
    assert replay(record, "val_loss", 0.01, 1, min_rounds=least).stop_round == round


# --- which rules


def test_a_record_allows_the_rules_whose_columns_have_values():
    nan = math.nan
    assert available_rules(make_record(distance=[1])) == ["task_vector"]
    assert available_rules(with_gaps(distance=[1], val_loss=[nan], val_acc=[0.5])) == ["task_vector", "val_acc"]
    consensus = make_record(consensus__shift=[1], consensus__dispersion=[1])
    assert available_rules(consensus) == ["consensus"]
    assert available_rules(consensus, shift="mean_norm") == []
    assert available_rules(make_record(lr=[0.1])) == []


@pytest.mark.parametrize(
    ("rule", "shift", "column"),
    [
        ("task_vector", "mean_vector", "distance"),
        ("val_loss", "mean_vector", "val_loss"),
        ("val_acc", "mean_vector", "val_acc"),
        ("consensus", "mean_vector", "consensus/shift"),
        ("consensus", "mean_norm", "consensus/mean_norm"),
    ],
)
def test_a_rule_asked_for_without_its_column_is_refused_by_name(rule, shift, column):
    record = make_record(lr=[0.1], consensus__dispersion=[1])
    with pytest.raises(ValueError, match=f"The rule '{rule}' needs the column '{column}'.* run has no column"):
        replay(record, rule, 0.01, 1, shift=shift)
    empty = with_gaps(**{column.replace("/", "__"): [math.nan], "consensus__dispersion": [1]})
    with pytest.raises(ValueError, match=f"needs the column '{column}', which is empty in run"):
        replay_table([empty], [rule], shift=shift)


def test_a_column_that_cannot_be_read_is_complained_about_and_not_passed_over(tmp_path):
    (tmp_path / "log.csv").write_text("round,distance,val_loss,test_acc\n1,1,0.5,0.5\n2,oops,0.5,\n")
    record = read_record(tmp_path / "log.csv")
    with pytest.raises(ValueError, match=r"needs the column 'distance': .*log.csv, column 'distance': line 3, 'oops'"):
        replay_table([record])
    assert replay_table([record], ["val_loss"], patiences=[1])[0].stop_round == 2
    (tmp_path / "log.csv").write_text("round,distance,test_acc\n1,1,high\n2,1,high\n")
    with pytest.raises(ValueError, match="column 'test_acc': line 2, 'high' is not a number"):
        replay(read_record(tmp_path / "log.csv"), "task_vector", 0.01, 1)


def test_a_record_that_allows_no_rule_is_refused_with_what_it_lacks():
    with pytest.raises(ValueError, match="run allows no rule: it has values in none of the columns distance, val_loss"):
        replay_table([make_record(lr=[0.1])])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"threshold": 0.0}, "`threshold` must be a finite number above 0"),
        ({"threshold": math.nan}, "`threshold` must be"),
        ({"patience": 0}, "`patience` must be an integer of at least 1"),
        ({"min_rounds": -1}, "`min_rounds` must be"),
        ({"rule": "val_f1"}, "`rule` must be one of 'task_vector', 'val_loss', 'val_acc', 'consensus', got 'val_f1'"),
        ({"variant": "mine"}, "`variant` must be one of"),
        ({"shift": "mine"}, "`shift` must be one of"),
    ],
)
def test_wrong_arguments_are_refused(wrong, message):
    arguments = {"rule": "task_vector", "threshold": 0.01, "patience": 1} | wrong
    with pytest.raises(ValueError, match=message):
        replay(make_record(distance=[1, 1], val_loss=[1, 1]), **arguments)


def test_a_negative_distance_is_refused_with_the_run_s_name():
    with pytest.raises(ValueError, match=r"run: `distance` must be at least 0, got -1\.0"):
        replay(make_record(distance=[-1]), "task_vector", 0.01, 1)


def test_a_table_goes_by_run_rule_threshold_and_patience():
    records = [make_record(distance=[1, 1], val_loss=[1, 1]), make_record(distance=[1, 2])]
    stops = replay_table(records, None, [0.1, 0.01], [2, 1])
    assert len(stops) == 8 + 4
    assert [(s.rule, s.threshold, s.patience) for s in stops[:5]] == [
        ("task_vector", 0.1, 2),
        ("task_vector", 0.1, 1),
        ("task_vector", 0.01, 2),
        ("task_vector", 0.01, 1),
        ("val_loss", 0.1, 2),
    ]
    assert [s.rule for s in replay_table(records, ["task_vector"])] == ["task_vector"] * 2


# --- as a live run decides


VALUES = st.lists(st.floats(0, 3, width=16) | st.sampled_from([0.0, 1.0, math.nan, math.inf]), min_size=1, max_size=25)
ARGUMENTS = {
    "values": VALUES,
    "threshold": st.sampled_from([0.001, 0.05, 0.3, 2.0]),
    "patience": st.integers(1, 4),
    "least": st.integers(0, 8),
}


@settings(max_examples=150, deadline=None)
@given(**ARGUMENTS, variant=st.sampled_from(["paper", "released_code"]))
def test_replay_is_deciding_round_by_round(values, threshold, patience, least, variant):
    record = make_record(
        distance=values, val_loss=values, val_acc=values, consensus__shift=values, consensus__dispersion=values[::-1]
    )
    criteria = {
        "task_vector": TaskVectorCriterion(threshold, patience, least, variant=variant),
        "val_loss": ValidationCriterion(threshold, patience, "min", least),
        "val_acc": ValidationCriterion(threshold, patience, "max", least),
        "consensus": ConsensusCriterion(threshold, patience, least),
    }
    seen = {
        "task_vector": values,
        "val_loss": values,
        "val_acc": in_percent(values),
        "consensus": list(zip(values, values[::-1], strict=True)),
    }
    for rule, criterion in criteria.items():
        update = criterion.update_distance if rule == "task_vector" else criterion.update
        live = [update(value).should_stop for value in seen[rule]]
        expected = live.index(True) + 1 if True in live else None
        assert replay(record, rule, threshold, patience, least, variant).stop_round == expected


@settings(max_examples=80, deadline=None)
@given(values=VALUES, threshold=st.floats(0.001, 1), patience=st.integers(1, 5))
def test_rounds_grow_with_patience_and_shrink_with_the_threshold(values, threshold, patience):
    record = make_record(distance=[value for value in values if math.isfinite(value)] or [1.0])

    def end(threshold, patience):
        return replay(record, "task_vector", threshold, patience).stop_round or math.inf

    assert end(threshold, patience + 1) >= end(threshold, patience)
    assert end(threshold * 2, patience) <= end(threshold, patience)


class Evaluated(ToyModule):
    """Logs losses and accuracies of both evaluations."""

    def _log(self, stage, batch):
        output = self.net(batch[0])
        self.log(f"{stage}_loss", cross_entropy(output, batch[1]))
        self.log(f"{stage}_acc", (output.argmax(1) == batch[1]).float().mean())

    def validation_step(self, batch, batch_idx):
        self._log("val", batch)

    def test_step(self, batch, batch_idx):
        self._log("test", batch)


def observers(settings):
    """A callback a rule for each setting, none of which stops the run."""
    made = {}
    for threshold, patience in settings:
        common = {"threshold": threshold, "patience": patience, "observe_only": True}
        made["task_vector", threshold, patience] = TaskVectorEarlyStopping(**common)
        made["consensus", threshold, patience] = ConsensusEarlyStopping(**common)
        for rule in ("val_loss", "val_acc"):
            made[rule, threshold, patience] = ValidationEarlyStopping(rule, **common)
    return made


def check_against_live(folder, callbacks):
    record = read_record(folder)
    ends = set()
    for (rule, threshold, patience), callback in callbacks.items():
        stop = replay(record, rule, threshold, patience)
        live = callback.stopped_epoch + 1 if callback.stopped else None
        assert stop.stop_round == live, (rule, threshold, patience)
        assert stop.reason == callback.stopping_reason.value
        ends.add((rule, live))
    return ends


@pytest.mark.parametrize(("method", "lr", "seed"), [(FedAvg(), 0.5, 0), (FedProx(0.1), 0.1, 1), (FedSAM(0.05), 2.0, 2)])
def test_replay_stops_where_live_runs_do(tmp_path, method, lr, seed):
    draw = random.Random(seed)
    settings = [(10 ** draw.uniform(-3, -0.3), draw.randint(1, 8)) for _ in range(20)]
    callbacks = observers(settings)
    module = Evaluated(lr=lr)
    loop, _ = fit(tmp_path, *callbacks.values(), module=module, method=method, max_rounds=25, seed=seed)
    ends = check_against_live(loop.log_dir, callbacks)
    assert {rule for rule, _ in ends} == set(RULES)
    assert len(ends) > 20  # they differ enough to tell right from wrong


def test_replay_stops_where_a_live_run_does_that_is_evaluated_every_third_round(tmp_path):
    callbacks = observers([(0.01, 1), (0.05, 2), (0.5, 3)])
    loop, _ = fit(tmp_path, *callbacks.values(), module=Evaluated(), max_rounds=16, check_val_every_n_round=3)
    ends = check_against_live(loop.log_dir, callbacks)
    rounds = {round for rule, round in ends if rule == "val_loss" and round}
    assert rounds
    assert all(round % 3 == 0 for round in rounds)


def test_replay_stops_where_a_diverging_run_does(tmp_path):
    class Exploding(Evaluated):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * math.nan if self.current_epoch == 4 else loss

    callbacks = observers([(0.01, 2), (0.1, 3)])
    loop, _ = fit(tmp_path, *callbacks.values(), module=Exploding(), max_rounds=9, on_nonfinite="keep")
    ends = check_against_live(loop.log_dir, callbacks)
    assert ("task_vector", 5) in ends


def test_replay_stops_where_a_run_was_stopped(tmp_path):
    callback = TaskVectorEarlyStopping(threshold=0.2, patience=2)
    loop, _ = fit(tmp_path, callback, module=Evaluated(), max_rounds=40)
    stop = replay(read_record(loop.log_dir), "task_vector", 0.2, 2)
    assert 3 <= stop.stop_round == callback.stop_round < 40
    assert stop.share_used == stop.stop_round / 40


@pytest.mark.parametrize("every", [2, 3])
def test_replay_stops_where_a_live_rule_does_that_checks_every_few_rounds(tmp_path, every):
    callback = TaskVectorEarlyStopping(0.3, 2, check_every_n_epochs=every, observe_only=True)
    loop, _ = fit(tmp_path, callback, module=Evaluated(), max_rounds=24)
    stop = replay(read_record(loop.log_dir), "task_vector", 0.3, 2, check_every_n_rounds=every)
    assert stop.stop_round == callback.stopped_epoch + 1 == every * callback.stop_round > 0


def test_replay_stops_where_a_plain_trainer_does_from_the_file_of_lightning_s_csv_logger(tmp_path):
    callback = TaskVectorEarlyStopping(threshold=0.3, patience=2, observe_only=True)
    logger = CSVLogger(tmp_path)
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_epochs=8, logger=logger, callbacks=[callback], log_every_n_steps=1, **quiet)
    trainer.fit(ToyModule(), ToyData())
    columns = {"round": "epoch", "distance": "task_vector/distance"}
    record = read_record(logger.log_dir, columns, zero_based=True)
    assert record.rounds == list(range(1, 9))
    assert 1 < replay(record, "task_vector", 0.3, 2).stop_round == callback.stop_round < 8


def test_the_accuracy_is_that_of_the_test_in_the_round(tmp_path):
    loop, _ = fit(tmp_path, module=Evaluated(), data=ToyData(), max_rounds=4, check_test_every_n_round=1)
    record = read_record(loop.log_dir)
    stop = replay(record, "val_loss", 1e9, 1)
    assert stop.stop_round == 2
    assert stop.accuracy == 100 * record.columns["test_acc"][1]
