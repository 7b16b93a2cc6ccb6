import io

import pytest
import torch
from rich.console import Console

from lightning_fedstop.progress import RoundProgressBar, status_of, wants_progress_bar
from lightning_fedstop.stopping import TaskVectorEarlyStopping
from tests.helpers import ToyModule, fit, make_loop


@pytest.mark.parametrize(
    ("enable", "terminal", "ci", "drawn"),
    [
        (True, False, "1", True),
        (False, True, "", False),
        (None, True, "", True),
        (None, True, "true", False),
        (None, False, "", False),
    ],
)
def test_the_bar_is_drawn_as_asked_else_in_a_terminal_outside_ci(monkeypatch, tmp_path, enable, terminal, ci, drawn):
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setenv("CI", ci)
    assert wants_progress_bar(enable) is drawn
    loop = make_loop(tmp_path, enable_progress_bar=enable)
    assert isinstance(loop.progress_bar_callback, RoundProgressBar) is drawn


def run(tmp_path, **arguments):
    console = Console(file=io.StringIO(), width=160, force_terminal=True)
    bar = RoundProgressBar(console)
    fit(tmp_path, bar, TaskVectorEarlyStopping(threshold=9.0, patience=9), **arguments)
    return bar, console.file.getvalue()


def test_the_bar_says_round_loss_growth_and_count(tmp_path):
    bar, text = run(tmp_path)
    for part in ("3/3", "train_loss 0.", "growth ", "saturated 2 of 9", "left to the budget"):
        assert part in text
    assert bar._progress is None  # the terminal is given back


def test_a_disabled_bar_is_silent(tmp_path):
    console = Console(file=io.StringIO())
    bar = RoundProgressBar(console)
    bar.disable()
    fit(tmp_path, bar)
    assert not bar.is_enabled
    assert console.file.getvalue() == ""
    bar.enable()
    assert bar.is_enabled


def test_an_exception_gives_the_terminal_back(tmp_path):
    class Breaks(ToyModule):
        def training_step(self, batch, batch_idx):
            raise KeyError

    bar = RoundProgressBar(Console(file=io.StringIO(), force_terminal=True))
    with pytest.raises(KeyError):
        fit(tmp_path, bar, module=Breaks())
    assert bar._progress is None


def test_print_goes_above_the_bar():
    console = Console(file=io.StringIO())
    bar = RoundProgressBar(console)

    class Loop:
        is_global_zero, max_rounds, current_round = True, 3, 0
        callback_metrics, progress_bar_metrics, callbacks = {}, {}, []

    bar.on_train_start(Loop, None)
    bar.print("hello")
    bar.on_train_end(Loop, None)
    assert "hello" in console.file.getvalue()


def test_status_shows_what_the_module_marks_and_hides_the_rules_own_numbers():
    class Loop:
        callback_metrics = {"train_loss": torch.tensor(0.5), "growth_rate": torch.tensor(0.0123)}
        progress_bar_metrics = {"acc": 0.25, "task_vector/distance": 3.0}
        callbacks = []

    assert status_of(Loop) == "train_loss 0.5  acc 0.25  growth 1.23%"
