import io
import warnings
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


def holding(tensor, trainable=False):
    """A layer with one more tensor, ``odd``."""
    module = nn.Linear(1, 1)
    if trainable:
        module.odd = nn.Parameter(tensor)
    else:
        module.register_buffer("odd", tensor)
    return module


def twice(first, second, trainable=False):
    """The average of two rounds of a module in which a tensor has two values, and the module."""
    average, module = SaturationAverage(), holding(first, trainable)
    average.update(module, 1)
    if trainable:
        module.odd.data = second
    else:
        module.odd = second
    average.update(module, 2)
    return average, module


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("kind", [torch.complex64, torch.complex128])
def test_complex_tensors_are_averaged(kind, trainable):
    average, module = twice(torch.tensor([1 + 2j], dtype=kind), torch.tensor([3 - 2j], dtype=kind), trainable)
    assert torch.equal(average.mean()["odd"], torch.tensor([2 + 0j], dtype=kind))
    loaded = SaturationAverage()
    loaded.load_state_dict(torch.load(saved(average.state_dict()), weights_only=True))
    with loaded.held_by(module):
        assert module.odd.item() == 2 + 0j
    assert module.odd.item() == 3 - 2j


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize(
    ("kind", "first", "second", "largest"),
    [(torch.bool, [True, False], [False, False], [True, False]), (torch.int8, [1, 5], [2, 4], [2, 5])],
)
def test_of_integers_and_masks_the_largest_is_taken(kind, first, second, largest):
    average, _ = twice(torch.tensor(first, dtype=kind), torch.tensor(second, dtype=kind))
    assert torch.equal(average.mean()["odd"], torch.tensor(largest, dtype=kind))


def quantised(value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.tensor([value]), 0.1, 0, torch.qint8)


ODD = {
    "sparse_coo": lambda value: torch.tensor([value]).to_sparse(),
    "qint8": quantised,
    "float8_e4m3fn": lambda value: torch.tensor([value]).to(torch.float8_e4m3fn),
    "uint16": lambda value: torch.tensor([value]).to(torch.uint16),
    "another shape or type": lambda value: torch.ones(int(value)),
}


@pytest.mark.parametrize(("reason", "make"), ODD.items(), ids=ODD)
def test_what_cannot_be_averaged_keeps_its_last_value(reason, make):
    average, module = twice(make(1.0), make(2.0))
    assert average.left_out == {"odd": reason}
    assert set(average.mean()) == {"weight", "bias"}
    last = module.odd
    with average.held_by(module):
        assert module.odd is last
    loaded = SaturationAverage()
    loaded.load_state_dict(torch.load(saved(average.state_dict()), weights_only=True))
    loaded.update(module, 3)
    assert loaded.left_out == average.left_out
    average.reset()
    assert not average.left_out


@pytest.mark.parametrize("present_first", [False, True])
def test_a_tensor_of_some_rounds_alone_is_left_out(present_first):
    average = SaturationAverage()
    modules = [nn.Linear(1, 1), holding(torch.ones(1))]
    for module in modules[::-1] if present_first else modules:
        average.update(module, 1)
    assert average.left_out == {"odd": "not in all of the rounds"}
    assert set(average.mean()) == {"weight", "bias"}


def test_a_fit_says_once_what_is_left_out(caplog):
    class Sparse(Walker):
        def __init__(self):
            super().__init__()
            self.register_buffer("graph", torch.eye(2).to_sparse())
            self.register_buffer("scale", ODD["float8_e4m3fn"](1.0))

    rule = TaskVectorEarlyStopping(0.01, 3, average="saturation")
    with caplog.at_level("INFO", logger="lightning.pytorch.fedstop"):
        trainer(rule).fit(Sparse())
    (line,) = [record.message for record in caplog.records if "average" in record.message]
    told = "graph (sparse_coo), scale (float8_e4m3fn)."
    assert line == "The saturation average leaves out what cannot be averaged: " + told
    assert rule.stopped
    assert rule.saturation_average.rounds == 3


def test_sums_from_another_device_go_on():
    """A checkpoint's sums lie on the CPU: what is added on the model's device must not be lost."""
    average, module = SaturationAverage(), nn.Linear(1, 1, bias=False, device="meta")
    average.update(nn.Linear(1, 1, bias=False), 1)
    average.update(module, 2)
    assert average.mean()["weight"].device.type == "meta"


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
