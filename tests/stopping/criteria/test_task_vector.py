import io
import math
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import lightning_fedstop.stopping.criteria.task_vector as criterion_module
from lightning_fedstop.stopping import (
    StoppingReason,
    TaskVectorCriterion,
    growth_rate,
    saturation_count,
    stopping_round,
    zero_based_round,
)
from tests.oracles import read_oracles

ROOT = Path(__file__).resolve().parents[3]


def oracle_cases():
    found = []
    for case in read_oracles("stopping"):
        for variant, key in (("paper", "paper_round"), ("released_code", "authors_code_round_1based")):
            found.append(pytest.param(case, variant, case[key], id=f"{case['name']}-{case['patience']}-{variant}"))
    return found


def feed(criterion, distances):
    return [criterion.update_distance(distance) for distance in distances]


def along(distances, **arguments):
    """Decisions on a model of two parameters that walks through these distances."""
    criterion = TaskVectorCriterion(**arguments)
    criterion.start([torch.ones(2), torch.ones(1)])
    walk = [[torch.tensor([1.0 + 0.6 * d, 1.0]), torch.tensor([1.0 + 0.8 * d])] for d in distances]
    return criterion, [criterion.update(parameters) for parameters in walk]


@pytest.mark.parametrize(("case", "variant", "expected"), oracle_cases())
def test_oracles(case, variant, expected):
    rule = {"threshold": case["tau"], "patience": case["patience"], "variant": variant}
    assert stopping_round(case["delta"], **rule) == expected
    criterion = TaskVectorCriterion(**rule)
    feed(criterion, case["delta"])
    assert criterion.stop_round == expected
    criterion, decisions = along(case["delta"], **rule)
    assert criterion.stop_round == expected
    assert next((d.round for d in decisions if d.should_stop), None) == expected


def test_growth_rate():
    assert growth_rate(1.5, 1.0) == 0.5
    assert growth_rate(0.5, 1.0) == 0.5
    assert growth_rate(0.5, 1.0, "released_code") == -0.5
    assert growth_rate(0.0, 0.0) == 0.0
    assert growth_rate(1e-300, 0.0) == math.inf
    assert growth_rate(2e-9, 1e-9) == pytest.approx(1.0)  # no absolute scale
    assert growth_rate(5e-7, 1e-6, "released_code") == 1.0
    assert growth_rate(2e-6, 1.1e-6, "released_code") == pytest.approx(0.9 / 1.1)


@pytest.mark.parametrize(("distance", "previous"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf), (1.0, math.nan)])
def test_growth_rate_of_what_is_not_finite(distance, previous):
    assert math.isnan(growth_rate(distance, previous))
    released = growth_rate(distance, previous, "released_code")
    assert released == 1.0 if math.isnan(previous) else math.isnan(released)


def test_saturation_count():
    assert saturation_count(2, 0.0099, 0.01) == 3
    assert saturation_count(2, 0.01, 0.01) == 0
    assert saturation_count(2, math.nan, 0.01) == 0
    assert saturation_count(2, 0.0, 0.01, "released_code") == 2
    assert saturation_count(2, -0.5, 0.01, "released_code") == 3


def test_decision_fields():
    criterion = TaskVectorCriterion(threshold=0.1, patience=1)
    first, second, third = feed(criterion, [1.0, 2.0, 2.1])
    assert (first.round, first.growth_rate, first.count, first.should_stop) == (1, None, 0, False)
    assert (second.growth_rate, second.count, second.reason) == (1.0, 0, StoppingReason.NOT_STOPPED)
    assert (third.distance, third.count, third.should_stop, third.reason) == (2.1, 1, True, StoppingReason.SATURATED)


def test_round_1_never_counts():
    assert stopping_round([0.0, 5.0], threshold=0.01, patience=1) is None
    assert stopping_round([5.0, 5.0], threshold=0.01, patience=1) == 2
    assert stopping_round([5.0, 5.01, 5.02], threshold=0.01, patience=1, variant="released_code") == 3


def test_a_model_that_never_moves():
    criterion, decisions = along([0.0] * 4, patience=3)
    assert criterion.stop_round == 4
    assert decisions[-1].reason is criterion.stop_reason is StoppingReason.NOT_MOVING


def test_a_model_that_moved_and_stands_still_is_saturated():
    _, decisions = along([1.0] * 4, patience=3)
    assert decisions[-1].reason is StoppingReason.SATURATED
    criterion = TaskVectorCriterion(threshold=2.0, patience=2)
    assert feed(criterion, [1.0, 0.0, 0.0])[-1].reason is StoppingReason.SATURATED


def test_first_move_after_standing_still_resets():
    assert [d.count for d in feed(TaskVectorCriterion(), [0, 0, 0, 1, 1])] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_diverged_stops_at_once(bad):
    criterion = TaskVectorCriterion(patience=5, min_rounds=50)
    first, second = feed(criterion, [1.0, bad])
    assert not first.should_stop
    assert second.should_stop
    assert second.reason is criterion.stop_reason is StoppingReason.DIVERGED
    assert math.isnan(second.growth_rate)
    assert feed(TaskVectorCriterion(), [bad])[0].reason is StoppingReason.DIVERGED


def test_diverged_parameters():
    assert along([1.0, math.nan])[1][-1].reason is StoppingReason.DIVERGED


def test_check_finite_off_resets():
    criterion = TaskVectorCriterion(patience=2, check_finite=False)
    decisions = feed(criterion, [1.0, 1.0, math.nan, 1.0, 1.0, 1.0])
    assert [d.count for d in decisions] == [0, 1, 0, 0, 1, 2]
    assert criterion.stop_round == 6


def test_released_code_never_stops_on_nan():
    assert stopping_round([1.0] + [math.nan] * 50, 0.01, 3, variant="released_code") is None
    assert stopping_round([1.0, 1.001, 1.002, math.inf, 1.0, 1.0], 0.01, 2, variant="released_code") is None


def test_released_code_neither_counts_nor_resets_on_zero_growth():
    criterion = TaskVectorCriterion(patience=5, variant="released_code")
    assert [d.count for d in feed(criterion, [1, 1.5, 1.501, 1.501, 1.502, 3.0])] == [0, 0, 1, 1, 2, 0]


def test_a_stop_wished_before_min_rounds_is_not_kept():
    distances = [1.0, 2.0]
    for growth in [0.001] * 5 + [0.1] * 30:  # rounds 3 to 7 stand still
        distances.append(distances[-1] * (1 + growth))
    assert stopping_round(distances, threshold=0.01, patience=3) == 5
    assert stopping_round(distances, threshold=0.01, patience=3, min_rounds=20) is None


def test_min_rounds_itself_may_stop():
    assert stopping_round([1.0] * 30, threshold=0.01, patience=3, min_rounds=20) == 20


def test_the_first_stop_is_kept_and_later_rounds_are_decided_anew():
    criterion = TaskVectorCriterion(patience=1)
    decisions = feed(criterion, [1.0, 1.0, 2.0, 2.0, math.nan])
    assert [d.should_stop for d in decisions] == [False, True, False, True, True]
    assert (criterion.stop_round, criterion.stop_reason) == (2, StoppingReason.SATURATED)


def test_zero_based_round():
    assert zero_based_round(1) == 0
    assert zero_based_round(None) is None


@pytest.mark.parametrize("form", ["flat", "list", "iterator", "arrays", "array"])
def test_forms_of_parameters(form):
    make = {
        "flat": lambda x: torch.tensor([x, 0.0]),
        "list": lambda x: [torch.tensor([[x]]), torch.tensor(0.0)],
        "iterator": lambda x: iter([torch.tensor([[x]]), torch.tensor(0.0)]),
        "arrays": lambda x: [np.array([[x]]), np.array(0.0, np.float16)],
        "array": lambda x: np.array([x, 0.0], np.float32),
    }[form]
    criterion = TaskVectorCriterion()
    criterion.start(make(1.0))
    assert criterion.update(make(3.0)).distance == 2.0
    assert criterion.update(make(4.0)).growth_rate == 0.5


def test_the_start_is_a_copy():
    parameter = torch.zeros(2)
    criterion = TaskVectorCriterion()
    criterion.start(parameter)
    parameter += 3
    assert criterion.update(parameter).distance == pytest.approx(3 * math.sqrt(2))


def test_start_forgets_the_run_before():
    criterion, _ = along([1.0] * 4, patience=3)
    criterion.start(torch.zeros(1))
    assert (criterion.round, criterion.count, criterion.distance, criterion.stop_round) == (0, 0, None, None)
    assert criterion.stop_reason is StoppingReason.NOT_STOPPED
    assert criterion.update(torch.zeros(1)).reason is StoppingReason.NOT_STOPPED
    assert [criterion.update(torch.zeros(1)).reason for _ in range(3)][-1] is StoppingReason.NOT_MOVING


def test_extend_watches_from_there():
    criterion = TaskVectorCriterion()
    criterion.start([torch.zeros(1)])
    criterion.extend([torch.full((2,), 7.0)])
    assert criterion.update([torch.tensor([3.0]), torch.tensor([7.0, 11.0])]).distance == 5.0
    with pytest.raises(ValueError, match="holds 1 tensors or arrays, but the start holds 2"):
        criterion.update([torch.tensor([3.0])])


@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_start_moves_to_its_parameters_unless_it_has_a_device(monkeypatch, device):
    asked = []
    monkeypatch.setattr(criterion_module, "beside", lambda start, now: asked.append(now) or start)
    criterion = TaskVectorCriterion(start_device=device)
    criterion.start(torch.zeros(1))
    criterion.update(torch.ones(1))
    assert len(asked) == (device is None)


def test_needs_a_start():
    with pytest.raises(RuntimeError, match="Call `start`"):
        TaskVectorCriterion().update(torch.zeros(1))
    with pytest.raises(RuntimeError, match="Call `start`"):
        TaskVectorCriterion().extend(torch.zeros(1))


def test_refuses_a_negative_distance():
    with pytest.raises(ValueError, match="`distance` must be at least 0"):
        TaskVectorCriterion().update_distance(-1.0)


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["torch", "numpy"])
@pytest.mark.parametrize("interrupted", [0, 1, 3, 6])
def test_state_survives_weights_only_loading(make, interrupted):
    walk = [make([d, 0.5]) for d in (1.0, 1.5, 1.6, 1.605, 1.609, 1.612, 1.614)]
    whole, first, second = (TaskVectorCriterion(0.01, 3) for _ in range(3))
    whole.start(make([0.0, 0.5]))
    first.start(make([0.0, 0.5]))
    expected = [whole.update(p) for p in walk]
    seen = [first.update(p) for p in walk[:interrupted]]
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    assert seen + [second.update(p) for p in walk[interrupted:]] == expected
    assert (second.stop_round, second.stop_reason) == (6, StoppingReason.SATURATED)


def test_state_keeps_that_it_never_moved():
    first, second = TaskVectorCriterion(patience=2), TaskVectorCriterion(patience=2)
    feed(first, [1.0, 1.0])
    second.load_state_dict(first.state_dict())
    assert feed(second, [1.0])[0].reason is StoppingReason.SATURATED


@pytest.mark.parametrize("other", [{"threshold": 0.1}, {"variant": "released_code"}])
def test_a_count_under_another_rule_is_refused(other):
    with pytest.raises(ValueError, match=f"The state was counted with {next(iter(other))}="):
        TaskVectorCriterion(**other).load_state_dict(TaskVectorCriterion().state_dict())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"threshold": 0}, ValueError, "`threshold` must be a finite number above 0, got 0"),
        ({"threshold": -0.1}, ValueError, "`threshold` must be a finite number above 0"),
        ({"threshold": math.nan}, ValueError, "`threshold` must be a finite number above 0"),
        ({"threshold": math.inf}, ValueError, "`threshold` must be a finite number above 0"),
        ({"threshold": "0.1"}, TypeError, "`threshold` must be a finite number above 0"),
        ({"threshold": True}, TypeError, "`threshold` must be a finite number above 0"),
        ({"patience": 0}, ValueError, "`patience` must be an integer of at least 1, got 0"),
        ({"patience": 2.0}, TypeError, "`patience` must be an integer of at least 1"),
        ({"patience": True}, TypeError, "`patience` must be an integer of at least 1"),
        ({"min_rounds": -1}, ValueError, "`min_rounds` must be an integer of at least 0"),
        ({"min_rounds": None}, TypeError, "`min_rounds` must be an integer of at least 0"),
        ({"check_finite": "no"}, TypeError, "`check_finite` must be True or False"),
        ({"variant": "README"}, ValueError, "`variant` must be one of 'paper', 'released_code', got 'README'"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        TaskVectorCriterion(**arguments)
    with pytest.raises(error, match=message):
        stopping_round([1.0], **{"threshold": 0.1, "patience": 1} | arguments)


def test_numbers_of_other_libraries_are_taken():
    criterion = TaskVectorCriterion(np.float32(1.5), np.int64(3))
    assert (criterion.threshold, criterion.patience) == (1.5, 3)


def test_needs_neither_torch_nor_lightning():
    code = f"""
import sys, types
for name in ("torch", "lightning", "pytorch_lightning"):
    sys.modules[name] = None  # an import of it raises
package = types.ModuleType("lightning_fedstop")
package.__path__ = [{str(Path(criterion_module.__file__).parents[2])!r}]
sys.modules["lightning_fedstop"] = package
import numpy as np
from lightning_fedstop.stopping.criteria.task_vector import TaskVectorCriterion
criterion = TaskVectorCriterion(patience=1)
criterion.start(np.zeros(2))
decisions = [criterion.update(np.ones(2)).should_stop for _ in range(2)]
print(decisions, criterion.state_dict()["start"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, True] [array([0., 0.])]"


def test_unknown_names_are_refused():
    import lightning_fedstop.stopping as package

    assert isinstance(package, types.ModuleType)
    with pytest.raises(AttributeError, match="has no attribute 'Misspelt'"):
        _ = package.Misspelt
    assert all(hasattr(package, name) for name in package.__all__)
