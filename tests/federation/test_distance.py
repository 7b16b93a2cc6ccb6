"""The distance of the global model from its start, which the server measures in every round."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from lightning_fedstop.records import read_rounds
from lightning_fedstop.records.reader import read_record
from lightning_fedstop.records.replay import replay
from lightning_fedstop.stopping import ConsensusEarlyStopping, TaskVectorEarlyStopping, growth_rate
from tests.helpers import ToyModule, Trace, checkpoint_without_callbacks, fit, flat


def rows(loop):
    return read_rounds(Path(loop.log_dir) / "metrics.csv")


def column(loop, name):
    return [float(row[name]) for row in rows(loop)]


@pytest.mark.parametrize("rule", [None, {}, {"check_every_n_epochs": 4}, {"start_weights_on_cpu": True}])
def test_every_round_of_any_run_records_its_distance_and_growth(tmp_path, rule):
    trace = Trace()
    callbacks = [] if rule is None else [TaskVectorEarlyStopping(1e-9, 50, **rule)]
    loop, _ = fit(tmp_path, trace, *callbacks, max_rounds=6)
    start = trace.rounds[0]["theta_0"].double()
    distances = [float(torch.linalg.vector_norm(one["theta"].double() - start)) for one in trace.rounds]
    assert column(loop, "distance") == pytest.approx(distances, rel=1e-14)
    growth = column(loop, "growth_rate")
    assert math.isnan(growth[0])
    assert growth[1:] == [growth_rate(now, then) for then, now in pairwise(column(loop, "distance"))]
    assert loop.callback_metrics["distance"] == pytest.approx(distances[-1])
    assert bool(loop.summary["rules"]) is (rule is not None)


def test_the_start_of_the_server_is_the_one_copy_and_lies_where_the_rule_wants_it(tmp_path):
    rule = TaskVectorEarlyStopping(1e-9, 50, start_weights_on_cpu=True)
    loop, _ = fit(tmp_path, rule, ConsensusEarlyStopping())
    assert rule.criterion.theta_0 is None
    assert rule.state_dict()["criterion"]["start"] is None
    assert loop.start_weights.device.type == "cpu"
    assert torch.equal(loop.start_weights, flat(ToyModule()))


@pytest.mark.parametrize("precision", [None, "bf16-true"])
def test_the_rule_decides_on_the_servers_distance_so_a_replay_stops_where_it_did(tmp_path, precision):
    """A module in bfloat16 holds a rounded model, whose distance is another one."""
    rule = TaskVectorEarlyStopping(0.1, 3, observe_only=True)
    loop, _ = fit(tmp_path, rule, max_rounds=25, precision=precision)
    assert 4 < rule.stop_round < 25
    distances = column(loop, "distance")
    assert rule.criterion.distance == distances[-1]
    assert replay(read_record(loop.log_dir), "task_vector", 0.1, 3).stop_round == rule.stop_round
    theta, start = loop.server.theta, loop.start_weights
    assert theta.dtype == start.dtype == torch.float32
    expected = float(torch.linalg.vector_norm(theta.double() - start.double()))
    assert distances[-1] == pytest.approx(expected, rel=1e-14)


def test_resumed_without_its_rule_a_run_is_measured_from_the_same_start_and_nothing_is_warned(tmp_path, recwarn):
    fit(tmp_path / "rule", TaskVectorEarlyStopping(1e-9), max_rounds=2)
    loop, _ = fit(tmp_path / "rule", max_rounds=4, ckpt_path="last")
    whole, _ = fit(tmp_path / "whole", max_rounds=4)
    for name in ("distance", "growth_rate"):
        assert [row[name] for row in rows(loop)] == [row[name] for row in rows(whole)]
    assert not [warning for warning in recwarn if "holds no" in str(warning.message)]


@pytest.mark.parametrize("round", [0, 1, 2])
def test_a_rule_that_is_added_later_measures_from_the_runs_start(tmp_path, round, caplog):
    whole, _ = fit(tmp_path / "whole", max_rounds=5)
    fit(tmp_path, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1), max_rounds=4)
    later = TaskVectorEarlyStopping(1e-9)
    with caplog.at_level("INFO"):
        fit(tmp_path, later, max_rounds=5, ckpt_path=tmp_path / f"epoch={round}.ckpt")
    assert (later.criterion.round, later.criterion.distance) == (4 - round, column(whole, "distance")[-1])
    assert "TaskVectorEarlyStopping counts from here on" in caplog.text


def test_without_the_start_the_record_says_from_where_it_measures(tmp_path):
    path = checkpoint_without_callbacks(tmp_path)
    with pytest.warns(UserWarning, match="holds no weights that the run began with: distances are measured from those"):
        fit(tmp_path, max_rounds=3, ckpt_path=path)


def test_without_the_start_a_round_whose_end_is_to_come_ends(tmp_path):
    """Saved in an evaluation, by a version that had no start in its checkpoints."""
    save = LambdaCallback(on_validation_end=lambda loop, module: loop.save_checkpoint(tmp_path / "x.ckpt"))
    fit(tmp_path, save, max_rounds=2)
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    del checkpoint["federated"]["distance"], checkpoint["federated"]["row"]["trained"]
    assert checkpoint["federated"]["pending"]
    torch.save(checkpoint, tmp_path / "x.ckpt")
    with pytest.warns(UserWarning, match="distances are measured from those"):
        loop, _ = fit(tmp_path, TaskVectorEarlyStopping(0.1, 3), max_rounds=4, ckpt_path=tmp_path / "x.ckpt")
    assert column(loop, "distance")[1] == 0
    assert math.isnan(column(loop, "growth_rate")[2])


@pytest.mark.parametrize("of", ["TaskVectorEarlyStopping", "ConsensusEarlyStopping"])
def test_a_checkpoint_that_has_the_start_among_the_states_of_rules_goes_on_from_it(tmp_path, of):
    """As checkpoints were written when rules held the start."""
    module = ToyModule()
    start = dict(module.named_parameters())
    rule = TaskVectorEarlyStopping(1e-9) if of == "TaskVectorEarlyStopping" else ConsensusEarlyStopping(1e-9)
    path = next(Path(fit(tmp_path, rule, module=ToyModule(), max_rounds=2)[0].log_dir).rglob("last.ckpt"))
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["federated"]["distance"]
    (state,) = [state for key, state in checkpoint["callbacks"].items() if key.startswith(of)]
    if of == "TaskVectorEarlyStopping":
        state["parameter_names"] = list(start)
        state["criterion"]["start"] = [parameter.detach() for parameter in start.values()]
    else:
        state["theta_0"] = flat(module)
    torch.save(checkpoint, path)
    loop, _ = fit(tmp_path, type(rule)(1e-9), max_rounds=4, ckpt_path=path)
    whole, _ = fit(tmp_path / "whole", max_rounds=4)
    for name in ("distance", "growth_rate"):
        assert [row[name] for row in rows(loop)][2:] == [row[name] for row in rows(whole)][2:]


class Adds(Callback):
    """Adds 1 to every weight in one hook of the first round, or before it."""

    def __init__(self, hook):
        self.done = False
        setattr(self, hook, self.add)

    def add(self, trainer, module, *args):
        if not self.done:
            self.done = True
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(1.0)


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
@pytest.mark.parametrize("first", [True, False])
def test_what_hooks_before_round_1_set_is_the_start_and_no_movement(tmp_path, hook, first):
    rule, adds = TaskVectorEarlyStopping(0.1, 3, observe_only=True), Adds(hook)
    loop, _ = fit(tmp_path, *([adds, rule] if first else [rule, adds]), max_rounds=2)
    assert torch.equal(loop.start_weights, flat(ToyModule()) + 1)
    assert column(loop, "distance")[0] < 0.5
    assert rule.criterion.distance == column(loop, "distance")[-1]


def test_what_hooks_change_at_the_end_of_a_round_is_in_its_distance(tmp_path):
    rule, adds = TaskVectorEarlyStopping(0.1, 3, observe_only=True), Adds("on_train_epoch_end")
    loop, _ = fit(tmp_path, rule, adds, max_rounds=1)
    assert column(loop, "distance")[0] > 2
    assert rule.criterion.distance == column(loop, "distance")[-1]


def test_a_checkpoint_written_before_the_rules_have_decided_holds_the_whole_row(tmp_path):
    note = LambdaCallback(on_train_epoch_end=lambda loop, module: loop.save_checkpoint(tmp_path / "x.ckpt"))
    whole, _ = fit(tmp_path / "whole", Adds("on_train_epoch_end"), note, max_rounds=2)
    row = torch.load(tmp_path / "x.ckpt", weights_only=True)["federated"]
    assert row["distance"]["now"] == column(whole, "distance")[1]
    again, _ = fit(tmp_path, max_rounds=2, ckpt_path=tmp_path / "x.ckpt")
    assert [row["distance"] for row in rows(again)] == [row["distance"] for row in rows(whole)]
