"""The contract of every public rule, known by being there, and the rule of the documentation."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fedstop.records import read_record
from lightning_fedstop.records.reader import Record
from lightning_fedstop.records.replay import RULES, available_rules, replay
from lightning_fedstop.stopping import CriterionEarlyStopping
from lightning_fedstop.stopping.criteria.decision import Criterion, criteria_of_rules
from tests.helpers import fit

PAGE = Path(__file__).resolve().parents[2] / "docs/add_a_rule.md"
ROUNDS = 40
rules = pytest.mark.parametrize("rule", RULES)


def criterion_of(rule, threshold=0.05, patience=3, min_rounds=0):
    return criteria_of_rules()[rule].for_rule(rule, threshold, patience, min_rounds)


def rows_of(rule):
    """A figure that levels off in every column: every rule stops amid these rows."""
    return [dict.fromkeys(criterion_of(rule).columns, 50 - 40 * 0.7**round_) for round_ in range(1, ROUNDS)]


def stop_of(criterion, rows):
    return next((decision.round for decision in map(criterion.decide, rows) if decision.should_stop), None)


@rules
def test_it_decides_the_same_live_and_replayed(rule):
    rows, criterion = rows_of(rule), criterion_of(rule)
    columns = {name: [row[name] for row in rows] for name in criterion.columns}
    record = Record("run", Path(), list(range(1, ROUNDS)), columns, {}, {}, budget=ROUNDS)
    expected = stop_of(criterion, rows)
    assert 3 < expected < ROUNDS - 1
    assert rule in available_rules(record)
    assert replay(record, rule, 0.05, 3).stop_round == expected
    late = expected + 2
    assert replay(record, rule, 0.05, 3, late).stop_round == stop_of(criterion_of(rule, min_rounds=late), rows) >= late


@rules
def test_its_state_counts_on_and_loads_with_weights_only(rule, tmp_path):
    rows, whole, first, second = rows_of(rule), criterion_of(rule), criterion_of(rule), criterion_of(rule)
    decisions = [whole.decide(row) for row in rows]
    assert [first.decide(row) for row in rows[:9]] == decisions[:9]
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [second.decide(row) for row in rows[9:]] == decisions[9:]
    second.load_state_dict(criterion_of(rule).state_dict())
    assert [second.decide(row) for row in rows] == decisions
    with pytest.raises(KeyError):
        second.load_state_dict({})


@rules
@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"threshold": 0}, ValueError),
        ({"threshold": "1"}, TypeError),
        ({"patience": 0}, ValueError),
        ({"patience": 2.0}, TypeError),
        ({"min_rounds": -1}, ValueError),
        ({"min_rounds": None}, TypeError),
    ],
)
def test_it_refuses_bad_arguments_by_name(rule, arguments, kind):
    with pytest.raises(kind, match=f"`{next(iter(arguments))}` must be"):
        criterion_of(rule, **arguments)


@rules
def test_its_docstring_begins_with_a_short_sentence(rule):
    kind = criteria_of_rules()[rule]
    first = inspect.getdoc(kind).split("\n\n")[0]
    assert len(first.split()) <= 15
    assert first.endswith(".")
    assert "Args:" in kind.__doc__
    assert kind.rules[rule][0].isupper()


@pytest.fixture
def documented(monkeypatch):
    monkeypatch.setattr(Criterion, "_named", dict(Criterion._named))
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), flags=re.DOTALL)
    names = {"__name__": "steady_loss"}
    exec(compile(code, PAGE.name, "exec"), names)
    return names


def test_the_documented_rule_passes_its_own_test(documented):
    documented["test_the_count_restarts_when_the_loss_moves"]()


def test_the_documented_rule_stops_a_federation_where_its_record_says(documented, tmp_path):
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    rule = documented["SteadyLossEarlyStopping"](0.2, 3)
    loop, _ = fit(tmp_path / "whole", rule, saver, max_rounds=30)
    assert 4 < rule.stop_round == loop.current_epoch < 30
    assert replay(read_record(loop.log_dir), "steady_loss", 0.2, 3).stop_round == rule.stop_round
    again = documented["SteadyLossEarlyStopping"](0.2, 3)
    fit(tmp_path / "again", again, max_rounds=30, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert again.stop_round == rule.stop_round


def test_it_names_a_figure_that_is_not_logged(documented, tmp_path):
    documented["SteadyLossCriterion"].columns = ("loss",)
    with pytest.raises(Exception, match=r"needs loss, which was not logged; there are .*train_loss"):
        fit(tmp_path, documented["SteadyLossEarlyStopping"]())


def test_a_configuration_names_the_criterion_of_the_callback():
    parser = ArgumentParser()
    parser.add_subclass_arguments(CriterionEarlyStopping, "rule")
    criterion = {
        "class_path": "lightning_fedstop.stopping.ValidationCriterion",
        "init_args": {"threshold": 0.5, "column": "train_loss"},
    }
    path = "lightning_fedstop.stopping.CriterionEarlyStopping"
    given = parser.parse_object({"rule": {"class_path": path, "init_args": {"criterion": criterion}}})
    rule = parser.instantiate_classes(given).rule
    assert (rule.criterion.threshold, rule.criterion.columns) == (0.5, ("train_loss",))
