import math

import pytest

from lightning_fedstop.stopping import StoppingReason, ValidationCriterion, validation_stopping_round
from tests.oracles import read_oracles

CASES = read_oracles("validation_stopping")


@pytest.mark.parametrize("case", CASES, ids=[f"{case['name']}, patience {case['patience']}" for case in CASES])
def test_oracles(case):
    expected = case["expected_round_1based"]
    assert validation_stopping_round(case["loss"], case["tau"], case["patience"]) == expected["loss"]
    assert validation_stopping_round(case["acc_percent"], case["tau"], case["patience"], "max") == expected["acc"]


def test_an_improvement_of_exactly_the_threshold_is_none():
    # 1.2 - 0.01 is 1.19 in floating point, and 1.2 - 1.19 is more than 0.01: the rule compares the former.
    assert validation_stopping_round([1.2, 1.19, 1.19], threshold=0.01, patience=2) == 3
    assert validation_stopping_round([1.2, 1.1899, 1.19], threshold=0.01, patience=2) is None
    assert validation_stopping_round([50.0, 50.5, 50.5], threshold=0.5, patience=2, mode="max") == 3


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_does_not_improve_twice(value, mode):
    criterion = ValidationCriterion(0.01, 3, mode)
    decisions = [criterion.update(value) for _ in range(4)]
    assert decisions[-1].should_stop
    assert decisions[-1].reason is StoppingReason.NOT_IMPROVING


def test_a_loss_improves_in_round_1_and_an_accuracy_of_0_does_not():
    assert ValidationCriterion(mode="min").update(1e9).count == 0
    assert ValidationCriterion(mode="max").update(0.0).count == 1
    assert ValidationCriterion(mode="max").update(0.02).count == 0


def test_min_rounds_decides_anew():
    values = [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    assert validation_stopping_round(values, 0.01, 2) == 3
    assert validation_stopping_round(values, 0.01, 2, min_rounds=4) == 6


def test_state_counts_on():
    whole, first = ValidationCriterion(0.01, 3), ValidationCriterion(0.01, 3)
    values = [2.0, 1.0, 1.0, 1.0, 1.0]
    for value in values[:3]:
        first.update(value)
    second = ValidationCriterion(0.01, 3)
    second.load_state_dict(first.state_dict())
    assert [second.update(v) for v in values[3:]] == [whole.update(v) for v in values][3:]
    second.start()
    assert second.state_dict() == ValidationCriterion().state_dict()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"threshold": 0}, ValueError, "`threshold` must be a finite number above 0, got 0"),
        ({"patience": 0}, ValueError, "`patience` must be an integer of at least 1, got 0"),
        ({"mode": "auto"}, ValueError, "`mode` must be one of 'min', 'max', got 'auto'"),
        ({"min_rounds": 1.5}, TypeError, "`min_rounds` must be an integer of at least 0, got 1.5"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        ValidationCriterion(**arguments)
