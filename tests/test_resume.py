"""Every method, with every stopping rule in mid-count: cut at any moment and resumed, a run gives the same bits."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_fedstop.methods import SCAFFOLD, FedDyn, FedGamma, FedLESAM, FedSMOO, FedSpeed, FedWMSAM
from lightning_fedstop.records.run_record import read_rounds
from lightning_fedstop.stopping import ConsensusEarlyStopping, TaskVectorEarlyStopping, ValidationEarlyStopping
from tests.helpers import Deep, fit
from tests.methods.problems import public_methods

SHORT = (SCAFFOLD, FedWMSAM)  # states of clients and of the server; the others are as the slow tests show
METHODS = [
    pytest.param(method, marks=[] if method in SHORT else pytest.mark.slow, id=name)
    for name, method in public_methods().items()
]
ROUNDS = 6
HOOKS = ["on_train_epoch_start", "on_client_start", "on_client_end", "on_validation_start", "on_validation_end"]
TIMES = {"seconds_train", "seconds_idle", "seconds_eval", "seconds_criterion"}


def rules():
    """All rules at once, with thresholds that have them count, and restart, within a few rounds."""
    return [
        TaskVectorEarlyStopping(0.3, 2, observe_only=True, average="saturation"),
        ConsensusEarlyStopping(0.3, 3, observe_only=True),
        ValidationEarlyStopping("val_loss", 0.05, 2, observe_only=True),
        EarlyStopping("val_loss", patience=50),
    ]


class Cut(Callback):
    """Breaks the run off in one hook of one round, at the second client where there are several."""

    def __init__(self, hook, round):
        self.round, self.calls = round, 0
        setattr(self, hook, self._cut)

    def _cut(self, trainer, *_):
        if trainer.current_epoch + 1 == self.round and not trainer.sanity_checking:
            self.calls += 1
            if self.calls == 2 or not trainer.training:
                raise RuntimeError("cut")
            if trainer.training and _ and len(_) == 1:
                raise RuntimeError("cut")


def run(root, method, *callbacks, **arguments):
    found = rules()
    arguments = {"max_rounds": ROUNDS, "clients_per_round": 3} | arguments
    loop, _ = fit(root, *found, *callbacks, module=Deep(), method=method(), **arguments)
    return loop, found


def story(loop, found):
    """Everything that must be the same: bits, record but for the times, and what each rule has said."""
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in read_rounds(f"{loop.log_dir}/metrics.csv")]
    said = [(rule.stop_round, rule.wait_count, rule.stopping_reason_message) for rule in found[:3]]
    mean = found[0].saturation_average
    average = {name: value.tolist() for name, value in mean.mean().items()} if mean.rounds else {}
    return loop.summary["parameters_hash"], rows, said, found[3].wait_count, average, loop.summary["best"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    known = {}

    def of(method):
        if method not in known:
            known[method] = story(*run(tmp_path_factory.mktemp("whole"), method))
        return known[method]

    return of


@pytest.mark.parametrize("method", METHODS)
def test_cut_after_any_round(tmp_path, whole, method):
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    run(tmp_path / "saving", method, saver)
    for epoch in range(ROUNDS - 1):
        again = run(tmp_path / str(epoch), method, ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
        assert story(*again) == whole(method), epoch


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(
    "method", [SCAFFOLD, *[pytest.param(m, marks=pytest.mark.slow) for m in (FedSMOO, FedLESAM, FedWMSAM)]]
)
def test_cut_in_the_middle_of_a_round_with_the_loops_own_checkpoint(tmp_path, whole, method, hook):
    with pytest.raises(RuntimeError, match="cut"):
        run(tmp_path, method, Cut(hook, 4))
    again = run(tmp_path, method, ckpt_path="last")
    assert story(*again) == whole(method)


@pytest.mark.parametrize("method", [SCAFFOLD, FedGamma, FedDyn, FedSpeed, FedSMOO])
def test_a_round_ended_by_a_client_that_is_not_finite_leaves_no_state_behind(tmp_path, method):
    """c_m and h_m of the clients before it are void too: resumed with "drop", the run is one that dropped it."""

    class Exploding(Deep):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.client == 4 else loss

        def on_client_start(self, client):
            self.client = client

    given = {"method": method(), "clients_per_round": 5, "max_rounds": 4}
    wanted, _ = fit(tmp_path / "drop", module=Exploding(), **given, on_nonfinite="drop")
    fit(tmp_path / "stop", module=Exploding(), **given | {"method": method()})
    given["method"] = method()
    again, module = fit(tmp_path / "stop", module=Exploding(), **given, on_nonfinite="drop", ckpt_path="last")
    assert again.current_epoch == 4
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
    _first, *rest = read_rounds(Path(wanted.log_dir) / "metrics.csv")
    assert len(read_rounds(Path(again.log_dir) / "metrics.csv")) == len(rest) + 1


def test_resuming_what_has_ended_trains_nothing_and_says_so(tmp_path, capsys):
    loop, _ = fit(tmp_path, TaskVectorEarlyStopping(0.4, 3), max_rounds=30)
    stopped = loop.current_epoch
    assert stopped < 30
    with pytest.warns(UserWarning, match="already stopped in round .* nothing more is trained"):
        again, _ = fit(tmp_path, TaskVectorEarlyStopping(0.4, 3), max_rounds=30, ckpt_path="last")
    assert again.current_epoch == stopped
    assert again.summary["parameters_hash"] == loop.summary["parameters_hash"]
