"""What a run leaves behind."""

import csv
import json
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_fedstop.methods import SCAFFOLD
from lightning_fedstop.records import read_rounds
from lightning_fedstop.stopping import TaskVectorEarlyStopping
from tests.helpers import Deep, ToyData, ToyModule, bits, fit, make_loop, same


def files(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def dealt(digest):
    """Clients' data whose partition is known."""
    data = ToyData()
    data.partition = SimpleNamespace(digest=digest)
    return data


def without_bias():
    module = ToyModule()
    module.net.bias.requires_grad_(False)
    return module


VERSION = "lightning_logs/version_0"


def test_a_run_leaves_a_record_a_summary_and_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "runs"
    loop, _ = fit(root)
    names = ("checkpoints/last.ckpt", "config.yaml", "metrics.csv", "partition.json", "summary.json")
    assert files(tmp_path) == [f"runs/{VERSION}/{name}" for name in names]
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


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seed": 5}, ValueError, "comes from seed 0, this run uses 5"),
        ({"method": SCAFFOLD()}, ValueError, "comes from FedAvg, this run uses SCAFFOLD"),
        ({"data": ToyData([4, 4])}, ValueError, "a federation of 5 clients, this one has 2"),
        ({"data": dealt("other")}, ValueError, "comes from another partition"),
        ({"max_rounds": 2}, ValueError, "`max_rounds` must be at least 3, as in .*, got 2"),
        ({"module": Deep()}, ValueError, r"comes from another run .model was 'ToyModule' and is 'Deep'."),
        ({"module": without_bias()}, ValueError, "10 trainable parameters, this one has 8"),
        ({"ckpt_path": "nowhere.ckpt"}, FileNotFoundError, "There is no checkpoint at 'nowhere.ckpt'"),
    ],
)
def test_checkpoints_of_another_run_are_refused(tmp_path, change, error, message):
    fit(tmp_path)
    with pytest.raises(error, match=message):
        fit(tmp_path, **{"ckpt_path": "last"} | change)


def test_the_same_partition_is_resumed_and_a_checkpoint_that_lacks_an_entry_is_refused(tmp_path):
    loop, _ = fit(tmp_path, data=dealt("one"))
    path = loop.summary["checkpoint"]
    loop, _ = fit(tmp_path, data=dealt("one"), ckpt_path=path)
    assert loop.summary["checkpoint"] == path  # nothing was left to train
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["federated"]["row"]
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match="written by another version of this package: it has no 'row'"):
        fit(tmp_path, data=dealt("one"), ckpt_path=path)
    torch.save({**checkpoint, "state_dict": [1]}, path)
    with pytest.raises(ValueError, match="is no Lightning checkpoint"):
        fit(tmp_path, data=dealt("one"), ckpt_path=path)


def test_last_without_any_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="`ckpt_path='last'` found no checkpoint"):
        fit(tmp_path, ckpt_path="last")


@pytest.mark.parametrize("enable", [None, False, True])
def test_the_summary_is_printed_with_and_without_a_bar(tmp_path, capsys, enable):
    fit(tmp_path, enable_progress_bar=enable)
    assert "Stopped at round 3 of 3" in capsys.readouterr().out


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


def test_a_rule_that_only_observes_is_not_the_reason(tmp_path):
    observer = TaskVectorEarlyStopping(threshold=1e9, patience=1, observe_only=True)
    stopper = TaskVectorEarlyStopping(threshold=1e8, patience=3)
    loop, _ = fit(tmp_path, observer, stopper, max_rounds=20)
    assert observer.stop_round < stopper.stop_round == loop.current_epoch
    assert loop.summary["stop_reason"] == stopper.stopping_reason_message != observer.stopping_reason_message


@pytest.mark.parametrize("inside", [True, False])
def test_what_a_killed_run_has_spilled_is_cleared_away_within_the_root(tmp_path, inside):
    loop, _ = fit(tmp_path / "runs")
    left = tmp_path / "runs/lightning_logs/version_0/.client_states.abc"
    left.touch()
    fit(tmp_path / ("runs" if inside else "others"), max_rounds=4, ckpt_path=loop.summary["checkpoint"])
    assert left.exists() is not inside
