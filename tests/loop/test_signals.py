"""Signals during a fit: what is being written is finished, and the run says where to go on."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from lightning_fedstop.loop.signals import SIGNALS, SignalGuard, Terminated
from lightning_fedstop.records.run_record import read_rounds
from tests.helpers import ToyModule, bits, fit, same

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def not_ignored():
    """A program started by ``nohup`` ignores SIGHUP, which a run would leave so."""
    ignored = [one for one in SIGNALS if signal.getsignal(one) == signal.SIG_IGN]
    for one in ignored:
        signal.signal(one, signal.SIG_DFL)
    yield
    for one in ignored:
        signal.signal(one, signal.SIG_IGN)


def send(signum):
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize(
    ("signum", "error"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated), (signal.SIGUSR1, Terminated)],
)
def test_a_signal_raises_after_the_shielded_part_and_handlers_are_put_back(signum, error):
    before = [signal.getsignal(one) for one in SIGNALS]
    seen = []

    def shielded():
        with SignalGuard() as guard, guard.shielded():
            with guard.shielded():
                send(signum)
                seen.append("inner")
            seen.append("outer")
        seen.append("never")

    with pytest.raises(error):
        shielded()
    assert seen == ["inner", "outer"]
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_an_exception_in_the_shielded_part_comes_first():
    def failing():
        with SignalGuard() as guard, guard.shielded():
            send(signal.SIGTERM)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()


def test_a_handler_of_the_program_itself_stays():
    calls = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append(1))
    try:
        with SignalGuard():
            send(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert calls == [1]


class Signals(Callback):
    """Sends a signal in one hook of one round."""

    def __init__(self, signum, hook, round):
        self.signum, self.round = signum, round
        setattr(self, hook, self._send)

    def _send(self, trainer, *_):
        if trainer.current_epoch + 1 == self.round:
            send(self.signum)


HOOKS = ["on_train_epoch_start", "on_client_end", "on_train_batch_start", "on_validation_end", "on_train_epoch_end"]


@pytest.mark.parametrize("signum", SIGNALS)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_run_ended_by_a_signal_goes_on_with_the_same_bits(tmp_path, capsys, hook, signum):
    whole, expected = fit(tmp_path / "whole", max_rounds=4)
    with pytest.raises(KeyboardInterrupt if signum == signal.SIGINT else Terminated):
        fit(tmp_path / "cut", Signals(signum, hook, 3), max_rounds=4)
    finished = 3 if hook == "on_train_epoch_end" else 2
    said = capsys.readouterr().err
    path = re.search(rf"Interrupted after round {finished} of 4: go on with `ckpt_path=(.*)`\.", said)[1]
    assert [row["round"] for row in read_rounds(Path(path).parents[1] / "metrics.csv")] == list("123"[:finished])
    again, module = fit(tmp_path / "cut", max_rounds=4, ckpt_path=path)
    assert same(bits(module), bits(expected))
    assert again.summary["parameters_hash"] == whole.summary["parameters_hash"]


def test_before_the_first_round_there_is_nothing_to_go_on_from(tmp_path, capsys):
    with pytest.raises(Terminated):
        fit(tmp_path, Signals(signal.SIGTERM, "on_train_start", 1))
    assert "Interrupted after round 0 of 3, with no checkpoint to go on from." in capsys.readouterr().err


SCRIPT = """
import os, signal, sys
from tests.helpers import fit
from tests.loop.test_signals import Signals
fit(sys.argv[1], Signals(int(sys.argv[2]), "on_client_end", 2), max_rounds=3)
"""


@pytest.mark.process
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_process_ends_with_the_signals_code(tmp_path, signum):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(int(signum))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 128 + signum
    assert "Interrupted after round 1 of 3: go on with" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_signal_in_the_training_step_is_not_lost(tmp_path):
    class Sends(ToyModule):
        def training_step(self, batch, batch_idx):
            send(signal.SIGTERM)
            raise AssertionError("the signal should have come first")

    with pytest.raises(Terminated):
        fit(tmp_path, module=Sends())
