import math

import numpy as np
import pytest

from lightning_fedstop.stopping import (
    ConsensusCriterion,
    StoppingReason,
    consensus_potential,
    consensus_stopping_round,
)
from tests.oracles import read_oracles

CASES = read_oracles("sibling_criterion")


@pytest.mark.parametrize("case", CASES, ids=[case["variant"] for case in CASES])
def test_oracles(case):
    expected = case["expected"]
    criterion = ConsensusCriterion(case["tau"], case["patience"])
    stops = []
    for local, wanted in zip(case["rounds"], expected["per_round"], strict=True):
        vectors = np.array(local, float) - np.array(case["theta0"], float)
        mean = vectors.mean(0)
        shift = np.linalg.norm(mean) if case["variant"] == "readme" else np.linalg.norm(vectors, axis=1).mean()
        dispersion = np.linalg.norm(vectors - mean, axis=1).mean()
        assert (shift, dispersion) == pytest.approx((wanted["shift"], wanted["disp"]), rel=1e-12)
        decision = criterion.update((shift, dispersion))
        assert decision.potential == pytest.approx(wanted["phi"], rel=1e-12)
        assert decision.smoothed == pytest.approx(wanted["ema"], rel=1e-12)
        assert decision.change == (None if wanted["delta"] is None else pytest.approx(wanted["delta"], rel=1e-9))
        stops += [decision.round] * decision.should_stop
    assert (stops or [None])[0] == expected["stop_round_1based"]


def test_potential_of_clients_that_agree_and_of_those_that_cancel():
    assert consensus_potential(2.0, 0.0) == 2.0
    assert consensus_potential(0.0, 5.0) == 0.0


def test_patience_1_smooths_nothing():
    criterion = ConsensusCriterion(threshold=0.5, patience=1)
    assert [criterion.update((x, 0.0)).smoothed for x in (1.0, 3.0, 2.0)] == [1.0, 3.0, 2.0]


def test_a_change_of_exactly_0_counts():
    assert consensus_stopping_round([1.0] * 5, [0.0] * 5, 0.1, 3) == 4
    assert consensus_stopping_round([0.0] * 5, [0.0] * 5, 0.1, 3) == 4


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stops_at_once_or_begins_anew(value):
    decision = ConsensusCriterion().update((value, 1.0))
    assert decision.should_stop
    assert decision.reason is StoppingReason.DIVERGED
    criterion = ConsensusCriterion(0.1, 2, check_finite=False)
    counts = [criterion.update((x, 0.0)).count for x in (1.0, 1.0, value, 1.0, 1.0, 1.0)]
    assert counts == [0, 1, 0, 0, 1, 2]


def test_state_counts_on():
    rounds = [(1.0, 1.0), (1.3, 1.1), (1.31, 1.1), (1.32, 1.1)]
    whole, first, second = (ConsensusCriterion(0.1, 3) for _ in range(3))
    for one in rounds[:2]:
        first.update(one)
    second.load_state_dict(first.state_dict())
    assert [second.update(one) for one in rounds[2:]] == [whole.update(one) for one in rounds][2:]


def test_bad_input():
    with pytest.raises(ValueError, match="Shift and dispersion must be at least 0"):
        ConsensusCriterion().update((-1.0, 0.0))
    with pytest.raises(ValueError, match="`threshold`"):
        ConsensusCriterion(threshold=math.nan)
    with pytest.raises(ValueError, match="shorter"):
        consensus_stopping_round([1.0, 2.0], [1.0], 0.1, 1)
