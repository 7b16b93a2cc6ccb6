"""Same seed, same bits: whatever is evaluated, interrupted and resumed."""

import copy
import pickle

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, OnExceptionCheckpoint

from lightning_fedstop.records import read_rounds
from lightning_fedstop.stopping import StoppingReason, TaskVectorEarlyStopping
from tests.helpers import Deep, ToyData, ToyModule, bits, fit, flat, make_loop, same


def deep(root, *callbacks, **arguments):
    return fit(root, *callbacks, module=Deep(), **{"max_rounds": 6, "clients_per_round": 3} | arguments)


@pytest.fixture(scope="module", autouse=True)
def no_seed_left():
    """Other tests' `seed_everything` leaves its seed in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PL_GLOBAL_SEED", raising=False)
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    _, module = deep(tmp_path_factory.mktemp("reference"))
    return bits(module)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"check_val_every_n_round": None},
        {"check_val_every_n_round": 3},
        {"limit_val_batches": 0},
        {"logger": False},
        {"max_rounds": 6, "min_rounds": 6},
    ],
)
def test_nothing_but_the_seed_decides_the_bits(tmp_path, reference, arguments):
    torch.manual_seed(torch.seed() % 1000)  # whatever the global generators hold
    _, module = deep(tmp_path, **arguments)
    assert same(bits(module), reference)


def test_other_seeds_and_lightnings_own(tmp_path, reference, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    seeded = [bits(deep(tmp_path, seed=seed)[1]) for seed in (None, 3, 0)]
    assert same(seeded[0], seeded[1])
    assert not same(seeded[1], reference)
    assert same(seeded[2], reference)


class SavesAt(Callback):
    """Saves a checkpoint at one hook of one round (from 1)."""

    def __init__(self, hook, round, path):
        self.round, self.path, self.saved = round, path, False
        setattr(self, hook, self.save)

    def save(self, loop, module, *args):
        if loop.current_epoch == self.round - 1 and not self.saved:
            loop.save_checkpoint(self.path)
            self.saved = True


@pytest.mark.parametrize("round", [1, 2, 5, 6])
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_end", "on_client_end", "on_train_batch_end"])
def test_resumed_runs_end_with_the_same_bits_and_the_same_record(tmp_path, reference, hook, round):
    if round == 1 and hook.startswith(("on_client", "on_train_batch")):
        pytest.skip("before the first round's end there is nothing to resume")
    path = tmp_path / "saved.ckpt"
    stop = {"threshold": 0.3, "patience": 9}
    # The record of the whole run is the one to meet; the resumed one begins with the rows of the run it continues.
    whole, module = deep(tmp_path, SavesAt(hook, round, path), TaskVectorEarlyStopping(**stop))
    assert same(bits(module), reference)
    rule = TaskVectorEarlyStopping(**stop)
    loop, module = deep(tmp_path, rule, ckpt_path=path)
    assert same(bits(module), reference)
    assert loop.current_epoch == 6
    rows = [read_rounds(f"{run.log_dir}/metrics.csv") for run in (whole, loop)]
    for row in [*rows[0], *rows[1]]:
        for name in [name for name in row if name.startswith("seconds")]:
            del row[name]
    assert rows[1] == rows[0]
    assert loop.record.version == whole.record.version + 1


def test_a_resumed_run_stops_at_the_same_round(tmp_path):
    def run(*others, **arguments):
        rule = TaskVectorEarlyStopping(threshold=0.5, patience=4)
        loop, module = deep(tmp_path, rule, *others, max_rounds=20, **arguments)
        return loop, rule, bits(module)

    class SavesAll(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    whole, rule, expected = run(SavesAll())
    assert 4 < rule.stop_round == whole.current_epoch < 20
    for round in (1, 3, rule.stop_round - 1, rule.stop_round):
        loop, again, got = run(ckpt_path=tmp_path / f"{round}.ckpt")
        assert (loop.current_epoch, again.stop_round, again.wait_count) == (rule.stop_round, rule.stop_round, 4)
        assert same(got, expected)


def test_the_rule_needs_no_data(tmp_path):
    rounds = []
    for evaluated in (True, False):
        rule = TaskVectorEarlyStopping(threshold=0.5, patience=2)
        loop, module = deep(tmp_path, rule, data=ToyData(evaluated=evaluated), max_rounds=20)
        rounds.append((rule.stop_round, loop.current_epoch, flat(module).tolist()))
        assert rule.stopping_reason is StoppingReason.SATURATED
        assert loop.summary["stop_reason"] == rule.stopping_reason_message
        row = read_rounds(f"{loop.log_dir}/metrics.csv")[-1]
        assert float(row["growth_rate"]) < 0.5
        assert row["wait_count"] == "2"
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize(
    "rule", [lambda: TaskVectorEarlyStopping(0.5, 2), lambda: EarlyStopping("val_loss", patience=1)]
)
def test_resuming_a_stopped_run_trains_nothing(tmp_path, rule):
    loop, module = deep(tmp_path, rule(), max_rounds=20)
    assert loop.current_epoch < 20
    again, resumed = deep(tmp_path, rule(), max_rounds=20, ckpt_path="last")
    assert again.current_epoch == loop.current_epoch
    assert same(bits(resumed), bits(module))
    longer, _ = deep(tmp_path, max_rounds=loop.current_epoch + 2, ckpt_path=loop.summary["checkpoint"])
    assert longer.current_epoch == loop.current_epoch + 2  # without the rule it goes on


def test_resuming_at_the_budget_trains_nothing_and_a_larger_one_goes_on(tmp_path, reference):
    deep(tmp_path, max_rounds=4)
    loop, _ = deep(tmp_path, max_rounds=4, ckpt_path="last")
    assert loop.current_epoch == 4
    _, module = deep(tmp_path, max_rounds=6, ckpt_path="last")
    assert same(bits(module), reference)


def test_an_interrupted_run_leaves_the_global_model_and_a_checkpoint_to_continue(tmp_path, reference):
    class Breaks(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.current_epoch == 3 and trainer.broken is False:
                trainer.broken = True
                raise KeyboardInterrupt

    loop = make_loop(tmp_path, OnExceptionCheckpoint(tmp_path / "here"), Breaks(), max_rounds=6, clients_per_round=3)
    loop.broken = False
    module = Deep()
    with pytest.raises(KeyboardInterrupt):
        loop.fit(module, ToyData())
    assert loop.interrupted
    saved = torch.load(tmp_path / "here/on_exception.ckpt", weights_only=True)
    assert same(bits(module), saved["state_dict"])
    assert len(read_rounds(f"{loop.log_dir}/metrics.csv")) == 3
    for path in (tmp_path / "here/on_exception.ckpt", f"{loop.log_dir}/checkpoints/last.ckpt"):
        assert same(bits(deep(tmp_path, ckpt_path=path)[1]), reference)


def test_an_exception_is_told_to_all_and_leaves_teardown_out(tmp_path):
    told = []

    class Told(Callback):
        def on_exception(self, trainer, pl_module, exception):
            told.append(("callback", type(exception)))

        def teardown(self, trainer, pl_module, stage):
            told.append("teardown")

    class Data(ToyData):
        def on_exception(self, exception):
            told.append(("data", type(exception)))

        def teardown(self, stage):
            told.append("teardown")

    class Breaks(ToyModule):
        def validation_step(self, batch, batch_idx):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, Told(), module=(module := Breaks()), data=Data())
    assert told == [("callback", ZeroDivisionError), ("data", ZeroDivisionError)]
    assert all(p.untyped_storage().nbytes() == p.numel() * 4 for p in module.parameters())
    told.clear()
    fit(tmp_path, Told(), data=Data())
    assert told == ["teardown", "teardown"]


@pytest.mark.parametrize("saved", [2, 4])
def test_two_rules_live_side_by_side_through_a_resume(tmp_path, saved):
    def rules():
        return TaskVectorEarlyStopping(0.5, 4), TaskVectorEarlyStopping(0.05, 3)

    first = rules()
    whole, module = deep(tmp_path, *first, SavesAt("on_train_epoch_end", saved, tmp_path / "x.ckpt"), max_rounds=20)
    second = rules()
    loop, resumed = deep(tmp_path, *second, max_rounds=20, ckpt_path=tmp_path / "x.ckpt")
    assert whole.current_epoch == min(rule.stop_round or 20 for rule in first) < 20
    assert [(rule.stop_round, rule.wait_count) for rule in second] == [(r.stop_round, r.wait_count) for r in first]
    assert loop.current_epoch == whole.current_epoch
    assert same(bits(resumed), bits(module))
    assert {"task_vector/distance", "task_vector_2/distance"} <= loop.callback_metrics.keys()


def test_the_fitted_module_is_an_ordinary_one(tmp_path):
    loop, module = fit(tmp_path)
    for parameter in module.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
        assert parameter.grad is None
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert same(bits(twin), bits(module))
    assert "log" not in vars(module)
    assert torch.equal(flat(module), loop.server.theta)
    Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(
        module, ToyData()
    )
