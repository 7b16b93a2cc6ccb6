import pytest
import torch

from lightning_fedstop import training_check
from lightning_fedstop.training_check import train_briefly


@pytest.fixture
def small(monkeypatch):
    """A smaller model and smaller batches: what is tested is the clock."""
    monkeypatch.setattr(training_check, "BATCH_SIZE", 2)
    monkeypatch.setattr(training_check, "ImageClassifier", lambda *arguments, **named: Linear())


class Linear(training_check.ImageClassifier):
    def __init__(self):
        super().__init__("convnextv2_atto", 8, backbone_kwargs={"depths": [1, 1, 1, 1], "dims": [4, 4, 4, 4]})


def test_it_trains_and_writes_nothing(small, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    check = train_briefly("cpu", seconds=0.0)
    assert check.steps == 3
    assert check.first_step_seconds > 0
    assert check.steps_per_second > 0
    assert not list(tmp_path.iterdir())


def test_it_goes_on_until_the_time_is_up(monkeypatch):
    ticks = iter([0.0, 10.0, 11.0, 13.0, 14.0, 15.0, 99.0])
    monkeypatch.setattr(training_check.time, "perf_counter", lambda: next(ticks))
    waited = []
    batches = training_check._TimedBatches(14.5, lambda: waited.append(1))
    assert [len(list(batches)) for _ in range(8)] == [1, 1, 1, 1, 1, 0, 0, 0]
    assert len(waited) == 6
    result = batches.result()
    assert (result.steps, result.first_step_seconds, result.steps_per_second) == (5, 10.0, 4 / 5)


def test_weights_that_are_not_finite_are_an_error(small, monkeypatch):
    class Broken(Linear):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * torch.nan

    monkeypatch.setattr(training_check, "ImageClassifier", lambda *arguments, **named: Broken())
    with pytest.raises(FloatingPointError, match="not finite"):
        train_briefly("cpu", seconds=0.0)
