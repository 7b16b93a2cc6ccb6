from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_fedstop.stopping import SaturationAverage, TaskVectorEarlyStopping
from tests.helpers import Deep, ToyData, Trace, fit, make_loop

from .walkers import Walker, trainer


def norm(weight, mean, tracked):
    module = nn.BatchNorm1d(1)
    module.weight.data.fill_(weight)
    module.running_mean.fill_(mean)
    module.num_batches_tracked.fill_(tracked)
    return module


def test_it_restarts_when_the_count_does_and_treats_buffers_as_aggregation_does():
    average = SaturationAverage()
    for weight, count in ((9, 1), (9, 0), (1, 1), (2, 2)):
        average.update(norm(weight, 10 * weight, 3 - weight), count)
    mean = average.mean()
    assert average.rounds == 2
    assert (mean["weight"].item(), mean["running_mean"].item(), mean["num_batches_tracked"].item()) == (1.5, 15, 2)
    assert mean["num_batches_tracked"].dtype == torch.int64
    average.reset()
    with pytest.raises(RuntimeError, match="no round"):
        average.mean()


def test_a_module_holds_the_mean_only_inside_the_block():
    average, module = SaturationAverage(), norm(1, 1, 1)
    average.update(module, 1)
    module.weight.data.fill_(3)
    average.update(module, 2)
    with average.held_by(module):
        assert module.weight.item() == 2
    assert module.weight.item() == 3


def test_float32_sums_lose_nothing():
    average, module = SaturationAverage(), nn.Linear(1, 1, bias=False)
    for _ in range(1000):
        module.weight.data.fill_(0.1)
        average.update(module, 1)
    assert torch.equal(average.mean()["weight"], module.weight)


def test_what_is_frozen_is_left_alone():
    module = nn.Linear(1, 1)
    module.bias.requires_grad_(False)
    average = SaturationAverage()
    average.update(module, 1)
    assert set(average.mean()) == {"weight"}


RULE = {"threshold": 0.4, "patience": 4, "average": "saturation"}


def test_a_federation_saves_and_tests_both(tmp_path):
    trace, rule = Trace(), TaskVectorEarlyStopping(**RULE)
    loop, module = fit(tmp_path, trace, rule, max_rounds=40)
    rounds = rule.saturation_average.rounds
    assert rule.stopped
    assert rounds == rule.wait_count == 4
    wanted = torch.stack([one["theta"].double() for one in trace.rounds[-rounds:]]).mean(0).float()
    saved = torch.load(rule.average_path, weights_only=True)["state_dict"]
    assert torch.equal(torch.cat([value.flatten() for value in saved.values()]), wanted)
    assert Path(rule.average_path) == Path(loop.log_dir) / "checkpoints" / "task_vector_average.ckpt"
    (told,) = loop.summary["rules"]
    assert told["average"]["rounds"] == rounds
    assert told["average"]["checkpoint"] == rule.average_path
    assert told["average"]["test"] == loop.test(module, ToyData(), ckpt_path=rule.average_path)[0]
    assert told["average"]["test"] != loop.summary["test"]
    assert torch.equal(torch.cat([p.detach().flatten() for p in module.parameters()]), wanted)  # loaded by `test`


def test_the_last_model_is_what_the_fit_leaves_and_the_average_decides_nothing(tmp_path):
    with_it, module = fit(tmp_path / "a", TaskVectorEarlyStopping(**RULE), max_rounds=40)
    without, other = fit(tmp_path / "b", TaskVectorEarlyStopping(0.4, 4), max_rounds=40)
    assert with_it.current_epoch == without.current_epoch
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_resumed_in_mid_count_it_is_the_same_mean(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole = TaskVectorEarlyStopping(**RULE)
    loop, _ = fit(tmp_path / "whole", whole, saver, module=Deep(), max_rounds=40)
    again = TaskVectorEarlyStopping(**RULE)
    path = tmp_path / f"epoch={loop.current_epoch - 3}.ckpt"
    fit(tmp_path / "again", again, module=Deep(), max_rounds=40, ckpt_path=path)
    mean, other = whole.saturation_average.mean(), again.saturation_average.mean()
    assert again.stop_round == whole.stop_round
    assert all(torch.equal(mean[name], other[name]) for name in mean)


def test_observing_it_keeps_the_mean_of_the_round_it_would_have_stopped_in(tmp_path):
    trace, rule = Trace(), TaskVectorEarlyStopping(**RULE, observe_only=True)
    fit(tmp_path, trace, rule, max_rounds=40)
    models = [one["theta"].double() for one in trace.rounds[rule.stop_round - 4 : rule.stop_round]]
    mean = rule.saturation_average.mean()
    assert torch.equal(torch.cat([value.flatten() for value in mean.values()]), torch.stack(models).mean(0).float())


def test_last_is_never_the_average(tmp_path):
    rule = TaskVectorEarlyStopping(**RULE)
    loop, _ = fit(tmp_path, rule, max_rounds=40)
    Path(rule.average_path).touch()
    again, _ = fit(tmp_path, TaskVectorEarlyStopping(**RULE), max_rounds=40, ckpt_path="last")
    assert again.ckpt_path.endswith("last.ckpt")
    assert again.current_epoch == loop.current_epoch


def test_a_plain_trainer_saves_it_too(tmp_path):
    rule = TaskVectorEarlyStopping(0.01, 3, average="saturation")
    ran = trainer(rule, ModelCheckpoint(tmp_path), default_root_dir=tmp_path, enable_checkpointing=True)
    module = Walker()
    ran.fit(module)
    # The distances of epochs 4 to 6 are 1.605, 1.609 and 1.612, from 5.
    saved = torch.load(rule.average_path, weights_only=True)["state_dict"]
    assert saved["moving"][0, 0].item() == pytest.approx(5 + (1.605 + 1.609 + 1.612) / 3)
    assert module.moving[0, 0].item() == pytest.approx(6.612)


def test_where_nothing_is_saved_no_file_is_written_and_bad_words_are_refused(tmp_path):
    rule = TaskVectorEarlyStopping(**RULE)
    make_loop(tmp_path, rule, max_rounds=40, enable_checkpointing=False).fit(Deep(), ToyData())
    assert rule.average_path is None
    assert not list(tmp_path.glob("**/*.ckpt"))
    with pytest.raises(ValueError, match="`average` must be one of 'saturation', got 'ema'"):
        TaskVectorEarlyStopping(average="ema")
