"""Every pass through the model is one that was asked for; a rule that decides adds none."""

import pytest

from lightning_fedstop.federation.cohort import ScheduledCohort
from lightning_fedstop.stopping import ConsensusEarlyStopping, TaskVectorEarlyStopping, ValidationEarlyStopping
from tests.helpers import ToyModule, fit

# Clients 0 and 1 have 6 and 4 samples, the validation and the test set 10 each, in batches of 4.
TRAIN, EVALUATED = 3, 3
ROUNDS = 4


class Counts(ToyModule):
    """Counts passes of the model, in training and otherwise."""

    def __init__(self):
        super().__init__()
        self.trained = self.evaluated = 0
        self.net.register_forward_hook(self._count)

    def _count(self, net, inputs, output):
        self.trained += net.training
        self.evaluated += not net.training


def passes(root, *rules, **arguments):
    given = {"cohort": ScheduledCohort([[0, 1]]), "max_rounds": ROUNDS} | arguments
    _, module = fit(root, *rules, module=Counts(), **given)
    return module.trained, module.evaluated


@pytest.mark.parametrize(
    ("arguments", "trained", "evaluated"),
    [
        ({}, TRAIN * ROUNDS, EVALUATED * (ROUNDS + 1)),
        ({"local_epochs": 2}, 2 * TRAIN * ROUNDS, EVALUATED * (ROUNDS + 1)),
        ({"check_val_every_n_round": 3}, TRAIN * ROUNDS, EVALUATED * 2),
        ({"check_val_every_n_round": None}, TRAIN * ROUNDS, EVALUATED),
        ({"check_test_every_n_round": 2}, TRAIN * ROUNDS, EVALUATED * (ROUNDS + 2 + 1)),
        ({"check_val_every_n_round": None, "limit_test_batches": 0}, TRAIN * ROUNDS, 0),
        ({"limit_train_batches": 1}, 2 * ROUNDS, EVALUATED * (ROUNDS + 1)),
        ({"limit_train_batches": 0.5}, 2 * ROUNDS, EVALUATED * (ROUNDS + 1)),
        ({"limit_val_batches": 1, "limit_test_batches": 2}, TRAIN * ROUNDS, ROUNDS + 2),
        ({"limit_val_batches": 0, "limit_test_batches": 0}, TRAIN * ROUNDS, 0),
        ({"fast_dev_run": True}, 2, 1),
    ],
    ids=str,
)
def test_passes_are_those_that_were_asked_for(tmp_path, arguments, trained, evaluated):
    assert passes(tmp_path, **arguments) == (trained, evaluated)


@pytest.mark.parametrize("arguments", [{}, {"check_val_every_n_round": None, "limit_test_batches": 0}], ids=str)
@pytest.mark.parametrize("observe_only", [False, True])
def test_a_rule_evaluates_nothing(tmp_path, arguments, observe_only):
    rules = [rule(1e-9, 100, observe_only=observe_only) for rule in (TaskVectorEarlyStopping, ConsensusEarlyStopping)]
    assert passes(tmp_path / "with", *rules, **arguments) == passes(tmp_path / "without", **arguments)


def test_a_rule_that_stops_saves_all_that_would_follow(tmp_path):
    rule = TaskVectorEarlyStopping(threshold=1e9, patience=1)
    trained, evaluated = passes(tmp_path, rule)
    stopped = rule.stopped_epoch + 1
    assert stopped < ROUNDS
    assert (trained, evaluated) == (TRAIN * stopped, EVALUATED * (stopped + 1))


def test_a_rule_on_validation_adds_no_pass_either(tmp_path):
    rule = ValidationEarlyStopping(monitor="val_loss", threshold=1e-9, patience=100, mode="min")
    assert passes(tmp_path / "with", rule) == passes(tmp_path / "without")
