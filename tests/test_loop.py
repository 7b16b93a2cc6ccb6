"""Whole fits: what is trained, when it ends, what is left behind."""

import copy
import csv
import json
import pickle

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_fedstop.cohort import ScheduledCohort
from lightning_fedstop.methods import SCAFFOLD, FedAvg
from lightning_fedstop.records import read_rounds
from lightning_fedstop.stopping import StoppingReason, TaskVectorEarlyStopping
from tests.helpers import ToyData, ToyModule, check_case, fit, flat, make_loop, run_case

ONE_DIMENSION = {  # by hand: two clients, gradients A (x - b), two steps of .1 from 1
    "input": {"A": [1.0, 2.0], "b": [2.0, -1.0], "rounds_selected": [[0, 1]] * 2, "theta0": 1.0, "K": 2, "lr": 0.1},
    "expected": [
        {"client_models": {"0": [1.19], "1": [0.28]}, "theta": [0.735]},
        {"client_models": {"0": [0.97535], "1": [0.1104]}, "theta": [0.542875]},
    ],
}


def test_two_rounds_of_federated_averaging_by_hand(tmp_path):
    check_case(ONE_DIMENSION, run_case(ONE_DIMENSION, FedAvg(), tmp_path))


@pytest.mark.parametrize(("weighting", "weights"), [("uniform", [1, 1]), ("samples", [8, 3])])
def test_weighting(tmp_path, weighting, weights):
    models = {}
    note = LambdaCallback()
    note.on_client_end = lambda loop, module, client: models.update({client: flat(module).double()})
    _, module = fit(tmp_path, note, data=ToyData([8, 3]), max_rounds=1, weighting=weighting)
    expected = (weights[0] * models[0] + weights[1] * models[1]) / sum(weights)
    torch.testing.assert_close(flat(module).double(), expected, rtol=0, atol=1e-7)


# ---- same seed, same bits


class Deep(ToyModule):
    """Everything a resume could lose: momentum-free Adam, a schedule, dropout, BatchNorm."""

    def __init__(self):
        super().__init__(net=nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2)))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


def bits(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def deep(root, *callbacks, **arguments):
    return fit(root, *callbacks, module=Deep(), **{"max_rounds": 6, "clients_per_round": 3} | arguments)


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


# ---- cohorts, empty clients


@pytest.mark.parametrize(("sizes", "clients", "expected"), [([6], 1, 1), ([4, 4, 4], 3, 3), ([4] * 5, 0.1, 1)])
def test_numbers_of_clients(tmp_path, sizes, clients, expected):
    loop, _ = fit(tmp_path, data=ToyData(sizes), clients_per_round=clients)
    assert [row["clients"] for row in read_rounds(f"{loop.log_dir}/metrics.csv")] == [str(expected)] * 3


def test_more_clients_than_there_are_are_refused_before_training(tmp_path):
    module = ToyModule()
    with pytest.raises(ValueError, match="at most the number of clients, 3, got 5"):
        fit(tmp_path, module=module, data=ToyData([2, 2, 2]), clients_per_round=5)
    assert same(bits(module), bits(ToyModule()))


def test_clients_without_samples_take_no_part(tmp_path):
    runs = []
    for sizes, schedule in (([0, 6, 0, 4], [[0, 1, 2, 3]]), ([6, 4], [[0, 1]])):
        data = ToyData(sizes)
        _, module = fit(
            tmp_path, module=(m := ToyModule()), data=data, cohort=ScheduledCohort(schedule), local_epochs=1
        )
        assert module is m
        runs.append(read_rounds(f"{m.trainer.log_dir}/metrics.csv")[0])
    assert runs[0]["clients"] == "2"
    assert runs[0]["samples"] == "10"


def test_a_round_of_empty_clients_changes_nothing(tmp_path):
    module = Deep()
    loop, _ = fit(tmp_path, module=module, data=ToyData([0, 0, 6]), cohort=ScheduledCohort([[0, 1]]), max_rounds=2)
    assert same(bits(module), bits(Deep()))
    rows = read_rounds(f"{loop.log_dir}/metrics.csv")
    assert [(row["clients"], row["samples"], row["train_loss"]) for row in rows] == [("0", "0", "")] * 2


# ---- not finite


class Diverges(Deep):
    """Client 2 returns NaN in round 2."""

    def on_client_start(self, client):
        self.client = client

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.client == 2 and self.current_epoch == 1 else loss


def diverge(root, on_nonfinite, schedule, **arguments):
    module = Diverges()
    loop, _ = fit(
        root,
        *arguments.pop("callbacks", []),
        module=module,
        data=ToyData([4, 4, 4]),
        cohort=ScheduledCohort(schedule),
        on_nonfinite=on_nonfinite,
        **{"max_rounds": 3} | arguments,
    )
    return loop, module


@pytest.mark.parametrize("min_rounds", [0, 3])
def test_stop_ends_the_run_with_the_last_finite_model(tmp_path, min_rounds):
    saver = ModelCheckpoint(tmp_path / "best", monitor="val_loss", filename="best")
    callbacks = [saver, EarlyStopping("val_loss")]
    _, module = diverge(tmp_path, "stop", [[0, 1, 2]], min_rounds=min_rounds, callbacks=callbacks)
    summary = json.loads((tmp_path / "lightning_logs/version_0/summary.json").read_text())
    assert summary["stop_round"] == 2
    assert summary["stop_reason"] == (
        "The update of client 2 in round 2 is not finite; the global model before it is kept."
    )
    _, before = diverge(tmp_path, "stop", [[0, 1, 2]], max_rounds=1)
    assert same(bits(module), bits(before))
    assert same(torch.load(summary["checkpoint"], weights_only=True)["state_dict"], bits(before))


def test_a_run_that_stopped_so_stays_stopped_and_another_choice_goes_on(tmp_path):
    diverge(tmp_path, "stop", [[0, 1, 2]])
    loop, _ = diverge(tmp_path, "stop", [[0, 1, 2]], **{"max_rounds": 3})
    again = make_loop(tmp_path, max_rounds=3, cohort=ScheduledCohort([[0, 1, 2]]))
    again.fit(Diverges(), ToyData([4, 4, 4]), ckpt_path="last")
    assert again.current_epoch == loop.current_epoch == 2
    assert "client 2 in round 2" in again.summary["stop_reason"]
    other = make_loop(tmp_path, max_rounds=3, cohort=ScheduledCohort([[0, 1, 2]]), on_nonfinite="drop")
    other.fit(Diverges(), ToyData([4, 4, 4]), ckpt_path=loop.summary["checkpoint"])
    assert other.current_epoch == 3


def test_drop_leaves_the_update_out(tmp_path):
    with pytest.warns(UserWarning, match="client 2 in round 2 is not finite and was left out"):
        _, module = diverge(tmp_path, "drop", [[0, 1], [0, 1, 2], [0, 1]])
    _, without = diverge(tmp_path, "drop", [[0, 1]])
    assert same(bits(module), bits(without))


def test_when_all_are_dropped_nothing_changes(tmp_path):
    _, module = diverge(tmp_path, "drop", [[0, 1], [2]], max_rounds=2)
    _, before = diverge(tmp_path, "drop", [[0, 1]], max_rounds=1)
    assert same(bits(module), bits(before))


def test_keep_lets_it_in(tmp_path):
    with pytest.warns(UserWarning, match="not finite and was kept"):
        loop, module = diverge(tmp_path, "keep", [[0, 1, 2]])
    assert loop.current_epoch == 3
    assert flat(module).isnan().any()


def test_the_rule_names_a_diverged_run(tmp_path):
    rule = TaskVectorEarlyStopping()
    loop, _ = diverge(tmp_path, "keep", [[0, 1, 2]], callbacks=[rule])
    assert loop.current_epoch == 2
    assert rule.stopping_reason is StoppingReason.DIVERGED


# ---- evaluation


@pytest.mark.parametrize(("every", "rounds"), [(None, []), (1, [1, 2, 3, 4]), (2, [2, 4]), (9, [])])
def test_check_val_every_n_round(tmp_path, every, rounds):
    loop, _ = fit(tmp_path, max_rounds=4, check_val_every_n_round=every)
    rows = read_rounds(f"{loop.log_dir}/metrics.csv")
    assert [int(row["round"]) for row in rows if row["val_loss"]] == rounds


@pytest.mark.parametrize(("limit", "batches"), [(None, 3), (1, 1), (0.67, 2), (0, 0)])
def test_limits_of_evaluation(tmp_path, limit, batches):
    seen = {"val": 0, "test": 0}

    class Counts(ToyModule):
        def validation_step(self, batch, batch_idx):
            seen["val"] += 1

        def test_step(self, batch, batch_idx):
            seen["test"] += 1

    fit(tmp_path, module=Counts(), max_rounds=2, limit_val_batches=limit, limit_test_batches=limit)
    assert seen == {"val": 2 * batches, "test": batches}


class NoData(LightningDataModule):
    """Clients alone: nothing else of a data module is defined."""

    def __init__(self):
        super().__init__()
        self.toy = ToyData(evaluated=False)
        self.client_sizes, self.num_clients = self.toy.client_sizes, self.toy.num_clients

    def client_dataloader(self, client, generator):
        return self.toy.client_dataloader(client, generator)


class TrainsOnly(LightningModule):
    def __init__(self):
        super().__init__()
        self.toy = ToyModule()

    def training_step(self, batch, batch_idx):
        return self.toy.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("module", [ToyModule, TrainsOnly])
@pytest.mark.parametrize("data", [NoData, ToyData])
def test_evaluation_needs_data_and_a_step(tmp_path, module, data):
    loop, _ = fit(tmp_path, module=module(), data=data())
    assert bool(loop.summary["test"]) is (module is ToyModule and data is ToyData)


def test_the_modules_own_loaders_serve_where_the_data_module_has_none(tmp_path):
    class Owns(ToyModule):
        def val_dataloader(self):
            return ToyData().val_dataloader()

    loop, _ = fit(tmp_path, module=Owns(), data=NoData())
    assert "val_loss" in loop.callback_metrics


def test_validate_and_test(tmp_path, capsys):
    loop, module = fit(tmp_path)
    expected = loop.summary["test"]["test_loss"]
    alone = make_loop(tmp_path / "alone")
    assert alone.test(module, ToyData())[0]["test_loss"] == pytest.approx(expected)
    assert "test_loss" in capsys.readouterr().out
    assert alone.validate(module, ToyData(), verbose=False) == [{"val_loss": pytest.approx(expected)}]
    assert capsys.readouterr().out == ""
    assert loop.test(verbose=False)[0]["test_loss"] == pytest.approx(expected)
    for path in ("last", "best", loop.summary["checkpoint"]):
        assert loop.test(ToyModule(), ToyData(), ckpt_path=path)[0]["test_loss"] == pytest.approx(expected)
    assert not (tmp_path / "alone").exists()
    with pytest.raises(FileNotFoundError, match="needs a ModelCheckpoint that has saved"):
        alone.test(module, ToyData(), ckpt_path="best")


@pytest.mark.parametrize(
    "arguments", [(TrainsOnly(), ToyData()), (ToyModule(), ToyData(evaluated=False)), (ToyModule(),)]
)
def test_nothing_to_evaluate_is_an_error(tmp_path, arguments):
    with pytest.raises(MisconfigurationException, match=r"There is nothing to evaluate: .* needs a `test_step`"):
        make_loop(tmp_path).test(*arguments)
    with pytest.raises(TypeError, match="got NoneType"):
        make_loop(tmp_path).test()


# ---- what is left behind


def files(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


VERSION = "lightning_logs/version_0"


def test_a_run_leaves_a_record_a_summary_and_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs"
    loop, _ = fit(root)
    assert files(tmp_path) == [f"runs/{VERSION}/{n}" for n in ("checkpoints/last.ckpt", "metrics.csv", "summary.json")]
    summary = json.loads((root / VERSION / "summary.json").read_text())
    assert summary == json.loads(json.dumps(loop.summary))
    expected = {"stop_round": 3, "budget": 3, "share_used": 1.0, "stop_reason": "The budget of 3 rounds is used up."}
    assert expected.items() <= summary.items()
    assert summary["test"] == {"test_loss": pytest.approx(float(loop.callback_metrics["test_loss"]))}
    assert summary["checkpoint"] == str(root / VERSION / "checkpoints/last.ckpt")
    assert summary["num_parameters"] == 10
    assert summary["seconds"] > 0
    assert summary["peak_memory_bytes"]["resident"] > 1e7
    assert {"python", "torch", "lightning"} <= summary["versions"].keys()
    assert "cpu" in summary["device"]
    with open(root / VERSION / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == ["1", "2", "3"]
    assert all(float(row[name]) > 0 for row in rows for name in ("train_loss", "val_loss", "lr", "seconds_train"))


def test_runs_never_collide(tmp_path):
    loops = [fit(tmp_path)[0] for _ in range(2)]
    loops[0].fit(ToyModule(), ToyData())
    assert sorted(path.name for path in (tmp_path / "lightning_logs").iterdir()) == [
        "version_0",
        "version_1",
        "version_2",
    ]
    assert [len(read_rounds(path)) for path in tmp_path.rglob("metrics.csv")] == [3, 3, 3]
    assert len(list(tmp_path.rglob("last.ckpt"))) == 3


def test_a_second_fit_of_the_same_loop_starts_clean(tmp_path):
    stop, saver = EarlyStopping("val_loss", patience=1, mode="max"), ModelCheckpoint(monitor="val_loss")
    rule = TaskVectorEarlyStopping(0.9, 9)
    loop, first = fit(tmp_path, stop, saver, rule, max_rounds=8)
    summary = loop.summary
    loop.fit(second := ToyModule(), ToyData())
    assert same(bits(first), bits(second))
    assert loop.summary["stop_round"] == summary["stop_round"] < 8
    assert loop.summary["checkpoint"].startswith(loop.log_dir)
    assert summary["checkpoint"].startswith(summary["log_dir"]) is True


@pytest.mark.parametrize("dry", [True, 2])
def test_fast_dev_run_writes_nothing(tmp_path, dry, monkeypatch):
    monkeypatch.chdir(tmp_path)
    batches = []

    class Counts(ToyModule):
        def training_step(self, batch, batch_idx):
            batches.append(batch_idx)
            return super().training_step(batch, batch_idx)

    loop, _ = fit(
        tmp_path,
        ModelCheckpoint(),
        EarlyStopping("val_loss"),
        TaskVectorEarlyStopping(),
        module=Counts(),
        data=ToyData([9, 9]),
        fast_dev_run=dry,
        logger=CSVLogger("logs"),
    )
    assert loop.current_epoch == int(dry)
    assert len(batches) == 2 * int(dry) ** 2
    assert files(tmp_path) == []
    assert loop.log_dir is None


LOGGERS = {
    "none": (lambda root: None, []),
    "true": (lambda root: True, []),
    "false": (lambda root: False, []),
    "csv": (lambda root: CSVLogger(root / "csv"), ["csv"]),
    "tensorboard": (lambda root: TensorBoardLogger(root / "tb"), ["tb"]),
    "both": (lambda root: [CSVLogger(root / "csv"), TensorBoardLogger(root / "tb")], ["csv", "tb"]),
}


@pytest.mark.parametrize(("logger", "folders"), LOGGERS.values(), ids=LOGGERS)
def test_loggers(tmp_path, logger, folders):
    if "tb" in folders:
        pytest.importorskip("tensorboard")
    loop, _ = fit(tmp_path, logger=logger(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["lightning_logs", *folders])
    assert len(read_rounds(f"{loop.log_dir}/metrics.csv")) == 3
    if "csv" in folders:
        rows = read_rounds(tmp_path / "csv/lightning_logs/version_0/metrics.csv")
        assert [(row["step"], row["epoch"]) for row in rows if row["train_loss"]] == [
            ("1", "0"),
            ("2", "1"),
            ("3", "2"),
        ]
        assert [row["step"] for row in rows if row["test_loss"]] == ["3"]
        assert "lr: 0.1" in (tmp_path / "csv/lightning_logs/version_0/hparams.yaml").read_text()
    assert len(list(tmp_path.rglob("events.out*"))) == ("tb" in folders)


def test_checkpoints_are_ordinary_lightning_ones(tmp_path):
    loop, module = fit(tmp_path, module=ToyModule(lr=0.05))
    path = loop.summary["checkpoint"]
    loaded = ToyModule.load_from_checkpoint(path)
    assert loaded.lr == 0.05
    assert same(bits(loaded), bits(module))
    assert torch.load(path, weights_only=True)["epoch"] == 2
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path)
    got = trainer.validate(ToyModule(), ToyData(), ckpt_path=path, verbose=False)
    expected = make_loop(tmp_path).validate(module, ToyData(), verbose=False)
    assert got == [{"val_loss": pytest.approx(expected[0]["val_loss"])}]


def test_no_checkpoints_if_not_wanted(tmp_path):
    loop, _ = fit(tmp_path, enable_checkpointing=False)
    assert loop.summary["checkpoint"] is None
    assert not list(tmp_path.rglob("*.ckpt"))


def test_save_checkpoint_works_after_a_fit_too(tmp_path):
    loop = make_loop(tmp_path, method=SCAFFOLD())
    with pytest.raises(RuntimeError, match="needs a trained model"):
        loop.save_checkpoint(tmp_path / "early.ckpt")
    loop.fit(module := ToyModule(), ToyData())
    loop.save_checkpoint(tmp_path / "late.ckpt")
    loop.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    late, weights = (torch.load(tmp_path / f"{n}.ckpt", weights_only=True) for n in ("late", "weights"))
    assert same(late["state_dict"], bits(module))
    assert same(weights["state_dict"], bits(module))
    with pytest.raises(ValueError, match="holds weights only: resuming needs"):
        fit(tmp_path, ckpt_path=tmp_path / "late.ckpt")
    with pytest.raises(ValueError, match="`storage_options` must be None"):
        loop.save_checkpoint(tmp_path / "x.ckpt", storage_options={})


def test_hyperparameters_that_are_objects_are_left_out_with_a_warning(tmp_path):
    class Holds(ToyModule):
        def __init__(self, lr=0.1, loss_fn=None):
            super().__init__(lr)
            self.save_hyperparameters({"lr": lr, "loss_fn": loss_fn})

    with pytest.warns(UserWarning, match=r"plain values only; left out: hyper_parameters\.loss_fn"):
        loop, _ = fit(tmp_path, module=Holds(loss_fn=nn.MSELoss()))
    assert torch.load(loop.summary["checkpoint"], weights_only=True)["hyper_parameters"] == {"lr": 0.1}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seed": 5}, ValueError, "comes from seed 0, this run uses 5"),
        ({"method": SCAFFOLD()}, ValueError, "comes from FedAvg, this run uses SCAFFOLD"),
        ({"data": ToyData([4, 4])}, ValueError, "a federation of 5 clients, this one has 2"),
        ({"module": Deep()}, ValueError, "holds another model than Deep"),
        ({"ckpt_path": "nowhere.ckpt"}, FileNotFoundError, "There is no checkpoint at 'nowhere.ckpt'"),
    ],
)
def test_checkpoints_of_another_run_are_refused(tmp_path, change, error, message):
    fit(tmp_path)
    with pytest.raises(error, match=message):
        fit(tmp_path, **{"ckpt_path": "last"} | change)


def test_last_without_any_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="`ckpt_path='last'` found no checkpoint"):
        fit(tmp_path, ckpt_path="last")


@pytest.mark.parametrize(("enable", "printed"), [(None, True), (False, False)])
def test_the_summary_is_printed_unless_asked_to_be_quiet(tmp_path, capsys, enable, printed):
    fit(tmp_path, enable_progress_bar=enable)
    assert ("Stopped at round 3 of 3" in capsys.readouterr().out) is printed


def test_a_plateau_schedule_survives_a_first_round_that_diverges(tmp_path):
    class Plateau(ToyModule):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * float("nan")

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}

    loop, _ = fit(tmp_path, module=Plateau())
    assert "in round 1 is not finite" in loop.summary["stop_reason"]
