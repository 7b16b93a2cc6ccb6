"""What rules say: a Trainer has epochs counted from 0, a federation rounds counted from 1, and growth is in percent."""

import logging

import pytest
import torch

from lightning_fedstop.stopping import ConsensusEarlyStopping, TaskVectorEarlyStopping, ValidationEarlyStopping
from tests.helpers import Scripted, ToyModule, fit

from .walkers import Walker, trainer

LOGGER = "lightning.pytorch.fedstop"


class Still(ToyModule):
    """Trains at a rate of 0."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def said(caplog):
    return [record.message for record in caplog.records if record.name == LOGGER]


def test_a_federation_speaks_of_rounds_from_1(tmp_path, caplog, capsys):
    rule = TaskVectorEarlyStopping(0.4, 4, verbose=True)
    with caplog.at_level(logging.INFO, LOGGER):
        loop, _ = fit(tmp_path, rule, max_rounds=40)
    first, *_, last = said(caplog)
    assert first.startswith("Round 1: distance ")
    assert last == f"TaskVectorEarlyStopping stops the fit in round {rule.stop_round}. {rule.stopping_reason_message}"
    assert rule.stop_round == rule.stopped_epoch + 1 == loop.current_epoch
    assert rule.stopping_reason_message.endswith("has grown by less than 40 % a round, 4 rounds in a row.")
    assert loop.summary["stop_reason"] == rule.stopping_reason_message
    assert not [line for line in said(caplog) if "epoch" in line or "check" in line]


def test_a_stopped_run_that_is_resumed_names_the_round(tmp_path):
    loop, _ = fit(tmp_path, TaskVectorEarlyStopping(0.4, 4), max_rounds=40)
    with pytest.warns(UserWarning, match=rf"already stopped in round {loop.current_epoch} \(saturated\)"):
        fit(tmp_path, TaskVectorEarlyStopping(0.4, 4), max_rounds=40, ckpt_path="last")


def test_a_rule_of_other_arguments_says_from_where_it_counts(tmp_path, caplog):
    fit(tmp_path, max_rounds=6)
    with caplog.at_level(logging.INFO, LOGGER):
        fit(tmp_path, TaskVectorEarlyStopping(1e9, 1), max_rounds=8, ckpt_path="last")
    counts, stops = said(caplog)
    assert counts.startswith("TaskVectorEarlyStopping counts from here on, since ")
    assert stops.startswith("TaskVectorEarlyStopping stops the fit in round 8. ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "1 % an epoch, 3 epochs in a row."),
        ({"patience": 1}, "1 % an epoch, 1 epoch in a row."),
        ({"threshold": 0.005}, "0.5 % an epoch, 3 epochs in a row."),
        ({"check_every_n_epochs": 2, "threshold": 0.1}, "10 % a check, 3 checks in a row."),
    ],
)
def test_growth_is_in_percent_of_what_lies_between_checks(arguments, words):
    rule = TaskVectorEarlyStopping(**{"threshold": 0.01, "patience": 3} | arguments)
    trainer(rule, max_epochs=30).fit(Walker())
    assert rule.stopping_reason_message.endswith(f"has grown by less than {words}")


def test_standing_still_is_counted_in_rounds(tmp_path):
    rule = TaskVectorEarlyStopping(patience=2)
    fit(tmp_path, rule, module=Still(), max_rounds=9)
    assert rule.stopping_reason_message.startswith("No parameter has moved in 3 rounds;")


def test_other_rules_name_the_round_too(tmp_path, caplog):
    rules = ConsensusEarlyStopping(1e9, 2, verbose=True), ValidationEarlyStopping("val_loss", 0.1, 9, verbose=True)
    with caplog.at_level(logging.INFO, LOGGER):
        fit(tmp_path, *rules, module=Scripted([1.0, 0.5, 0.5, 0.5, 0.5]), max_rounds=5)
    lines = said(caplog)
    assert any(line.startswith("Round 1: consensus ") for line in lines)
    assert "Round 2: val_loss 0.5, best 0.5, not improved 0 of 9." in lines
    (stop,) = [line for line in lines if "stops" in line]
    assert stop.startswith("ConsensusEarlyStopping stops the fit in round ")
    assert stop.endswith("has changed by less than 1e+11 % a round, 2 rounds in a row.")
