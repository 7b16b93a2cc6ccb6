"""The loss scale of 16-mixed, with float16 emulated on a CPU."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader

from lightning_fedstop.methods import SCAFFOLD, FedAvg
from lightning_fedstop.module.loss_scale import LossScale
from lightning_fedstop.stopping import TaskVectorEarlyStopping
from tests.helpers import QUIET, ToyData, ToyModule, Trace, flat, make_loop, same

FIRST = 2.0**16


class Large(ToyModule):
    """A loss whose gradients overflow float16 at the first scale and several below it."""

    def loss(self, batch):
        return 100 * super().loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def as_float16(precision, **scaler):
    precision.precision = "16-mixed"
    precision._desired_input_dtype = torch.float16
    precision.scaler = torch.amp.GradScaler("cpu", **scaler)


def float16_loop(root, *callbacks, growth_interval=2000, **arguments):
    loop = make_loop(root, *callbacks, precision="bf16-mixed", **arguments)
    as_float16(loop.fabric.strategy.precision, growth_interval=growth_interval)
    return loop


def skipped(loop):
    return [int(row["skipped_steps"]) for row in loop.record.rows()]


def test_it_goes_on_from_client_to_client_and_round_to_round(tmp_path):
    loop = float16_loop(tmp_path, trace := Trace(), max_rounds=6)
    with pytest.warns(UserWarning, match="Round 1 skipped 2 of 2 local steps") as warned:
        loop.fit(Large(), ToyData((4, 4, 4)))
    scale = loop.fabric.strategy.precision.scaler.get_scale()
    assert sum(skipped(loop)) == torch.log2(torch.tensor(FIRST / scale)) > 2
    assert skipped(loop)[-1] == 0
    assert len([one for one in warned if "local steps" in str(one.message)]) == 1
    assert not torch.equal(trace.rounds[-1]["theta"], trace.rounds[-2]["theta"])


def test_one_client_is_scaled_as_in_a_trainer(tmp_path):
    data = ToyData((4,), evaluated=False)
    loop = float16_loop(tmp_path, clients_per_round=1, max_rounds=12)
    loop.fit(module := Large(), data)
    plugin = MixedPrecision("bf16-mixed", "cpu")
    as_float16(plugin)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=12, plugins=[plugin], default_root_dir=tmp_path, **QUIET | quiet)
    trainer.fit(other := Large(), DataLoader(data.client_dataset(0), 4))
    assert plugin.scaler.get_scale() == loop.fabric.strategy.precision.scaler.get_scale() < FIRST
    torch.testing.assert_close(flat(module), flat(other))
    assert not torch.equal(flat(module), flat(Large()))


def test_a_module_that_steps_itself_is_scaled_too(tmp_path):
    class Own(Large):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step(closure=optimizer_closure)

    runs = []
    for module in (Large(), Own()):
        loop = float16_loop(tmp_path, trace := Trace(), max_rounds=8, growth_interval=3)
        loop.fit(module, ToyData((4, 4, 4)))
        runs.append((skipped(loop), [one["theta"].tolist() for one in trace.rounds]))
    assert runs[0] == runs[1]
    assert sum(runs[0][0]) > 2


class Scales(Callback):
    """The state of the scaler after each round."""

    def __init__(self):
        self.of = {}

    def on_train_epoch_end(self, trainer, module):
        self.of[trainer.current_epoch] = trainer.fabric.strategy.precision.state_dict()


@pytest.mark.parametrize("within_round", [False, True])
def test_resuming_gives_the_same_bits(tmp_path, within_round):
    """The scale grows every third step: the growth tracker counts as well."""
    when = {"every_n_train_steps": 1} if within_round else {"every_n_epochs": 1}
    name = "step={step}" if within_round else "epoch={epoch}"
    saver = ModelCheckpoint(tmp_path / "saved", filename=name, auto_insert_metric_name=False, save_top_k=-1, **when)
    settings = {"max_rounds": 8, "growth_interval": 3, "local_epochs": 2}
    traces, scales = (Trace(), Trace()), (Scales(), Scales())
    float16_loop(tmp_path / "a", traces[0], scales[0], saver, **settings).fit(Large(), ToyData((4, 4, 4)))
    path = sorted((tmp_path / "saved").glob("*=3*.ckpt"))[-1]
    float16_loop(tmp_path / "b", traces[1], scales[1], **settings).fit(Large(), ToyData((4, 4, 4)), ckpt_path=path)
    first = len(traces[0].rounds) - len(traces[1].rounds)
    assert first in (3, 4)
    assert scales[1].of == {epoch: state for epoch, state in scales[0].of.items() if epoch >= first}
    assert len({state["_growth_tracker"] for state in scales[0].of.values()}) > 1
    for whole, resumed in zip(traces[0].rounds[first:], traces[1].rounds, strict=True):
        assert torch.equal(whole["theta"], resumed["theta"])


def test_a_second_fit_starts_with_the_first_scale(tmp_path):
    loop = float16_loop(tmp_path, trace := Trace())
    for _ in range(2):
        loop.fit(Large(), ToyData((4, 4, 4)))
    assert skipped(loop)[0] > 0
    first, second = trace.rounds[:3], trace.rounds[3:]
    assert all(same(a["client_models"], b["client_models"]) for a, b in zip(first, second, strict=True))


def test_a_round_of_skipped_steps_trains_nobody(tmp_path):
    class Notes(FedAvg):
        taken = []

        def finish(self, client, delta, steps):
            self.taken.append((client.round, steps))

    trace, method = Trace(), Notes()
    loop = float16_loop(tmp_path, trace, method=method, max_rounds=4, clients_per_round=1)
    loop.fit(Large(), ToyData((4,)))
    assert skipped(loop)[:2] == [1, 1]
    assert all(round > 2 for round, _ in method.taken)
    assert torch.equal(trace.rounds[1]["theta"], trace.rounds[0]["theta_0"])


def test_a_run_whose_steps_are_all_skipped_says_so_at_its_end(tmp_path):
    class Broken(ToyModule):
        def loss(self, batch):
            return super().loss(batch) * float("inf")

    rule = TaskVectorEarlyStopping(patience=2)
    loop = float16_loop(tmp_path, rule, max_rounds=6)
    loop.fit(module := Broken(), ToyData((4, 4)))
    assert loop.current_epoch == 6
    assert not rule.stopped
    assert torch.equal(flat(module), flat(Broken()))
    end = "The budget of 6 rounds is used up. The last one skipped all its local steps: no gradient is finite."
    assert loop.summary["stop_reason"] == end
    assert skipped(loop) == [2] * 6


def test_a_gradient_outside_of_a_step_lowers_the_scale_until_it_is_finite(tmp_path):
    trace = Trace()
    loop = float16_loop(tmp_path, trace, method=SCAFFOLD(control_update="option_I"), clients_per_round=2)
    loop.fit(Large(), ToyData((4, 4)))
    exact = Trace()
    make_loop(tmp_path, exact, method=SCAFFOLD(control_update="option_I")).fit(Large(), ToyData((4, 4)))
    for one, other in zip(trace.rounds, exact.rounds, strict=True):
        torch.testing.assert_close(one["states"], other["states"], rtol=1e-2, atol=1e-2)
    assert skipped(loop) == [0, 0, 0]


def test_other_precisions_have_no_such_column(tmp_path):
    loop = make_loop(tmp_path, max_rounds=1)
    loop.fit(ToyModule(), ToyData((4, 4)))
    assert "skipped_steps" not in loop.record.rows()[0]


@pytest.mark.parametrize(("rank", "count"), [(0, 2), (1, 2), (2, 2), (1, 1)])
def test_each_process_takes_its_own_scale_back(rank, count):
    precision = MixedPrecision("bf16-mixed", "cpu")
    as_float16(precision)
    scale = LossScale(precision)
    states = [{**scale.state_dict(), "scale": 2.0**index} for index in range(count)]
    scale.load_state_dicts(states, rank)
    assert precision.scaler.get_scale() == 2.0 ** (rank % count)
