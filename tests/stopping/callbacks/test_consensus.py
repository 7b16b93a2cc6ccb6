from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fedstop.records.run_record import read_rounds
from lightning_fedstop.stopping import ConsensusEarlyStopping, StoppingReason, consensus_stopping_round
from tests.helpers import ToyData, ToyModule, Trace, checkpoint_without_callbacks, fit, make_loop
from tests.oracles import read_oracles
from tests.stopping.walkers import Walker, trainer


class Pulled(ToyModule):
    """Every client ends a round where a table says, whatever its data."""

    def __init__(self, theta_0, rounds):
        super().__init__(lr=1.0)
        self.net = torch.nn.Linear(len(theta_0), 1, bias=False).double()
        with torch.no_grad():
            self.net.weight.copy_(torch.tensor([theta_0], dtype=torch.float64))
        self.rounds = rounds
        self.client = None

    def training_step(self, batch, batch_idx):
        goal = torch.tensor(self.rounds[self.current_epoch][self.client], dtype=torch.float64)
        # A step at rate 1 along the gradient x - goal leads to the goal.
        return (self.net.weight[0] - goal).square().sum() / 2

    def validation_step(self, batch, batch_idx):
        pass

    test_step = validation_step

    def on_client_start(self, client):
        self.client = client


@pytest.mark.parametrize("index", [0, 1])
def test_oracles_through_the_loop(tmp_path, index):
    case = read_oracles("sibling_criterion")[index]
    shift = "mean_vector" if case["variant"] == "readme" else "mean_norm"
    callback = ConsensusEarlyStopping(case["tau"], case["patience"], shift, observe_only=True)
    fit(
        tmp_path,
        callback,
        module=Pulled(case["theta0"], case["rounds"]),
        data=ToyData((4, 4), evaluated=False),
        max_rounds=len(case["rounds"]),
    )
    assert callback.stop_round == case["expected"]["stop_round_1based"]
    rows = read_rounds(next(tmp_path.glob("lightning_logs/version_0/metrics.csv")))
    for row, wanted in zip(rows, case["expected"]["per_round"], strict=True):
        named = "consensus/shift" if shift == "mean_vector" else "consensus/mean_norm"
        assert float(row[named]) == pytest.approx(wanted["shift"], rel=1e-9)
        assert float(row["consensus/dispersion"]) == pytest.approx(wanted["disp"], rel=1e-9)


def test_what_it_logs_comes_from_the_local_models(tmp_path):
    trace, callback = Trace(), ConsensusEarlyStopping(0.1, 3)
    fit(tmp_path, trace, callback, clients_per_round=3, max_rounds=2)
    rows = read_rounds(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")
    start = trace.rounds[0]["theta_0"].double()
    for row, seen in zip(rows, trace.rounds, strict=True):
        vectors = torch.stack(list(seen["client_models"].values())).double() - start
        mean = vectors.mean(0)
        assert float(row["consensus/shift"]) == pytest.approx(float(mean.norm()), rel=1e-5)
        assert float(row["consensus/mean_norm"]) == pytest.approx(float(vectors.norm(dim=1).mean()), rel=1e-5)
        assert float(row["consensus/dispersion"]) == pytest.approx(float((vectors - mean).norm(dim=1).mean()), rel=1e-5)


def test_it_stops_where_its_record_says_and_counts_on_when_resumed(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole = ConsensusEarlyStopping(0.2, 3)
    loop, _ = fit(tmp_path / "whole", whole, saver, max_rounds=30)
    assert whole.stop_round == loop.current_epoch < 30
    assert whole.stopping_reason is StoppingReason.SATURATED
    rows = read_rounds(Path(loop.log_dir) / "metrics.csv")
    shifts, spreads = ([float(row[f"consensus/{name}"]) for row in rows] for name in ("shift", "dispersion"))
    assert consensus_stopping_round(shifts, spreads, 0.2, 3) == whole.stop_round
    again = ConsensusEarlyStopping(0.2, 3)
    resumed, _ = fit(tmp_path / "again", again, max_rounds=30, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert again.stop_round == whole.stop_round
    assert read_rounds(Path(resumed.log_dir) / "metrics.csv")[-1]["consensus/shift"] == rows[-1]["consensus/shift"]


def test_added_later_it_measures_from_the_runs_start_and_says_from_where_it_counts(tmp_path, caplog):
    fit(tmp_path / "whole", ConsensusEarlyStopping(1e-9), max_rounds=4)
    fit(tmp_path, max_rounds=2)
    with caplog.at_level("INFO"):
        fit(tmp_path, ConsensusEarlyStopping(1e-9), max_rounds=4, ckpt_path="last")
    assert "ConsensusEarlyStopping counts from here on" in caplog.text
    whole, later = (
        read_rounds(root / "lightning_logs" / name / "metrics.csv")
        for root, name in ((tmp_path / "whole", "version_0"), (tmp_path, "version_1"))
    )
    for name in ("shift", "dispersion"):
        assert [row[f"consensus/{name}"] for row in later[2:]] == [row[f"consensus/{name}"] for row in whole[2:]]


def test_without_the_runs_start_it_says_from_where_it_measures(tmp_path):
    path = checkpoint_without_callbacks(tmp_path)
    with pytest.warns(UserWarning, match="holds no weights that the run began with: distances are measured from those"):
        fit(tmp_path, ConsensusEarlyStopping(0.2, 3), max_rounds=3, ckpt_path=path)


class Exploding(ToyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.client == 0 else loss

    def on_client_start(self, client):
        self.client = client


@pytest.mark.parametrize(("on_nonfinite", "stops"), [("drop", False), ("keep", True)])
def test_a_local_model_that_is_not_finite(tmp_path, on_nonfinite, stops):
    callback = ConsensusEarlyStopping(1e-9, 5)
    fit(tmp_path, callback, module=Exploding(), clients_per_round=5, on_nonfinite=on_nonfinite, max_rounds=2)
    assert callback.stopped is stops
    assert callback.stopping_reason is (StoppingReason.DIVERGED if stops else StoppingReason.NOT_STOPPED)


def test_a_trainer_has_no_clients():
    with pytest.raises(MisconfigurationException, match="only a FederatedLoop has"):
        trainer(ConsensusEarlyStopping()).fit(Walker())


def test_a_round_without_clients_decides_nothing_and_a_dry_run_keeps_nothing(tmp_path):
    callback = ConsensusEarlyStopping()
    fit(tmp_path, callback, data=ToyData((0, 0, 4)), clients_per_round=1, max_rounds=3, seed=0)
    assert callback.criterion.round < 3
    callback = ConsensusEarlyStopping()
    make_loop(tmp_path, callback, fast_dev_run=True).fit(ToyModule(), ToyData())
    assert callback.criterion.round == 0
