import io
import logging
import re

import pytest
import torch
from rich.console import Console

from lightning_fedstop.loop.progress import RoundProgressBar, shown_metrics, wants_progress_bar
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


def run(tmp_path, width=160, **arguments):
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    bar = RoundProgressBar(console)
    fit(tmp_path, bar, TaskVectorEarlyStopping(threshold=9.0, patience=9), **arguments)
    return bar, console.file.getvalue()


def test_the_bar_says_round_loss_growth_and_count(tmp_path):
    bar, text = run(tmp_path)
    for part in ("3/3", "train_loss 0.", "growth ", "saturated 2 of 9", "elapsed", "left to the budget"):
        assert part in text
    assert bar._progress is None  # the terminal is given back


class ManyMetrics(ToyModule):
    def validation_step(self, batch, batch_idx):
        for number in range(8):
            self.log(f"val_metric_{number}", 0.123, prog_bar=True)


@pytest.mark.parametrize("width", [80, 100, 145])
def test_round_bar_and_count_are_kept_on_a_narrow_terminal_and_metrics_are_cut(tmp_path, width):
    _, text = run(tmp_path, width, module=ManyMetrics())
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").split("\n")
    (*_, last) = [line for line in lines if "3/3" in line]
    assert re.match(r"round 3/3 +━{12} saturated 2 of 9 elapsed 0:00:\d\d 0:00:00 left to t", last), last
    assert len(last.rstrip()) <= width
    assert last.rstrip().endswith("…")


@pytest.mark.parametrize(("max_rounds", "said"), [(3, [1, 2, 3]), (30, list(range(3, 31, 3))), (25, [3, 5, 8])])
def test_without_a_bar_there_is_a_line_every_tenth_of_the_rounds(tmp_path, caplog, monkeypatch, max_rounds, said):
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        fit(tmp_path, TaskVectorEarlyStopping(9.0, 99), max_rounds=max_rounds, enable_progress_bar=None)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Round ")]
    assert [int(line.split()[1]) for line in lines][: len(said)] == said
    assert re.match(rf"Round {said[0]} of {max_rounds}  saturated \d of 99  .*train_loss 0\.\d", lines[0])
    assert len(lines) <= 10


@pytest.mark.parametrize("enable", [True, False])
def test_no_lines_beside_a_bar_or_where_none_is_wished(tmp_path, caplog, enable):
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        fit(tmp_path, enable_progress_bar=enable)
    assert not [record for record in caplog.records if record.getMessage().startswith("Round ")]


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

    assert shown_metrics(Loop) == "growth 1.23%  train_loss 0.5  acc 0.25"
