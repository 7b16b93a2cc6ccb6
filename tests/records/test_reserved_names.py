"""Metrics of a module that are named like the loop's own columns."""

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_fedstop.records import read_record, read_rounds
from lightning_fedstop.records.replay import replay
from lightning_fedstop.records.run_record import COLUMNS, METRICS, RESERVED
from lightning_fedstop.stopping import TaskVectorEarlyStopping
from tests.helpers import ToyModule, fit

LOGGED = 0.375  # in all of a float32


class Names(ToyModule):
    """Logs a number under each of the loop's own names."""

    def training_step(self, batch, batch_idx):
        self.log_dict(dict.fromkeys(RESERVED, LOGGED))
        return super().training_step(batch, batch_idx)


class Seen(Callback):
    def on_train_epoch_end(self, trainer, module):
        self.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}


def rule():
    return TaskVectorEarlyStopping(0.3, 2, check_every_n_epochs=2, observe_only=True)


def ours(loop):
    rows = read_rounds(f"{loop.log_dir}/metrics.csv")
    return [{k: v for k, v in row.items() if k in COLUMNS and not k.startswith("seconds_")} for row in rows]


def test_columns_are_the_loops_own_and_what_is_logged_stands_beside_them(tmp_path):
    with pytest.warns(UserWarning, match="bytes_down, .* trained, wait_count: what the module logs") as warned:
        loop, _ = fit(tmp_path / "a", seen := Seen(), rule(), module=Names(), max_rounds=6)
    plain, _ = fit(tmp_path / "b", rule(), module=ToyModule(), max_rounds=6)
    assert ours(loop) == ours(plain)
    rows = read_rounds(f"{loop.log_dir}/metrics.csv")
    assert all(row[f"logged/{name}"] == str(LOGGED) for row in rows for name in RESERVED)
    assert all("logged/" not in name for name in ours(plain)[0])
    assert {seen.metrics[name] for name in RESERVED} == {LOGGED}
    assert len([one for one in warned if "logged/<name>" in str(one.message)]) == 1
    assert loop.summary["best"]["logged/distance"] == {"value": LOGGED, "round": 1, "mode": "max"}


def test_replay_decides_on_the_loops_own_column(tmp_path):
    stops = []
    for module in (Names(), ToyModule()):
        loop, _ = fit(tmp_path, module=module, max_rounds=12)
        stops.append(replay(read_record(loop.log_dir, name="run"), "task_vector", 0.3, 2))
    assert stops[0] == stops[1]
    assert stops[0].stop_round is not None


def test_loggers_keep_the_modules_own_names(tmp_path):
    logger = CSVLogger(tmp_path / "csv")

    class Some(ToyModule):
        def training_step(self, batch, batch_idx):
            self.log_dict(dict.fromkeys(("distance", "lr", "epoch"), LOGGED))
            return super().training_step(batch, batch_idx)

    fit(tmp_path, module=Some(), logger=logger, max_rounds=2)
    rows = [row for row in read_rounds(f"{logger.log_dir}/metrics.csv") if row["train_loss"]]
    assert [[float(row[name]) for name in ("distance", "lr", "epoch")] for row in rows] == [[LOGGED] * 3] * 2


def test_a_resumed_record_has_the_same_columns(tmp_path):
    fit(tmp_path, module=Names(), max_rounds=2)
    loop, _ = fit(tmp_path, module=Names(), max_rounds=4, ckpt_path="last")
    rows = read_rounds(f"{loop.log_dir}/metrics.csv")
    assert len(rows) == 4
    assert {row["logged/distance"] for row in rows} == {str(LOGGED)}
    assert not set(METRICS) & RESERVED
