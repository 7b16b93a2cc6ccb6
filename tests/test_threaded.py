"""Several clients at once, each in a thread: the bits of one after the other, or one after the other with a reason."""

import gc
import random
import threading
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryAccuracy

from lightning_fedstop import backends, methods, threaded
from lightning_fedstop.backends import client_threads
from lightning_fedstop.data import Digits, NpzImages
from lightning_fedstop.memory import ALONE, TOGETHER
from lightning_fedstop.methods import FedAvg
from lightning_fedstop.models import ImageClassifier, _compiled
from lightning_fedstop.threaded import ThreadedTrainer
from lightning_fedstop.worker import Shared, Trained, Worker
from tests.helpers import ToyData, ToyModule, fit, flat, make_loop

TEN = [name for name in methods.__all__ if name not in ("Client", "FederatedMethod", "Federation", "LocalStep")]
SIZES = (6, 4, 7, 8, 0, 3, 11)


@pytest.fixture(autouse=True)
def threads():
    """Three threads of torch, which clients are dealt to."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


class Normed(ToyModule):
    """With running statistics and a frozen layer."""

    def __init__(self):
        super().__init__(net=nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        self.net[0].weight.requires_grad_(False)


class Counted(Callback):
    """Notes the client hooks, with the model that the module holds in them."""

    def __init__(self):
        self.seen = []

    def on_client_start(self, trainer, module, client):
        self.seen.append(("start", client))

    def on_client_end(self, trainer, module, client):
        self.seen.append(("end", client, flat(module).tolist()))


def reason(caplog):
    """Why the clients were trained one after the other, ``None`` if they were not."""
    said = [record.getMessage() for record in caplog.records if "`devices='auto'` trains" in record.getMessage()]
    return said[0].partition("because ")[2] if said else None


def both(tmp_path, make=ToyModule, data=ToyData, **arguments):
    """The same fit on one thread, one client after the other, and dealt to threads."""
    runs = []
    for folder, devices in (("one", 1), ("auto", "auto")):
        torch.set_num_threads(1 if devices == 1 else 3)
        torch.manual_seed(0)
        chosen = {"clients_per_round": 5, "local_epochs": 2, "devices": devices}
        fresh = {name: value() if callable(value) else value for name, value in arguments.items()}
        callbacks = fresh.pop("callbacks", [])
        runs.append((*fit(tmp_path / folder, *callbacks, module=make(), data=data(), **(chosen | fresh)), callbacks))
    return runs


def assert_same(one, auto):
    loop, module, _ = one
    other, copied, _ = auto
    assert other.summary["parameters_hash"] == loop.summary["parameters_hash"]
    for buffer, same in zip(module.buffers(), copied.buffers(), strict=True):
        assert torch.equal(buffer, same)
    for row, like in zip(loop.record.rows(), other.record.rows(), strict=True):
        times = {name for name in row if name.startswith("seconds")}
        assert {k: v for k, v in row.items() if k not in times} == {k: v for k, v in like.items() if k not in times}


@pytest.mark.parametrize("name", TEN)
def test_ten_methods_give_the_bits_of_one_client_after_the_other(tmp_path, caplog, name):
    method = getattr(methods, name)
    with caplog.at_level("INFO"):
        one, auto = both(tmp_path, data=lambda: ToyData(SIZES), method=method, gradient_clip_val=0.5)
    assert isinstance(auto[0].server.trainer, ThreadedTrainer)
    assert reason(caplog) is None
    assert_same(one, auto)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"weighting": "samples"},
        {"limit_train_batches": 1},
        {"limit_train_batches": 0.5},
        {"drop_single_sample_batches": True},
        {"method": lambda: methods.SCAFFOLD(control_update="option_I")},
        {"method": lambda: methods.FedSMOO(alpha=0.1, rho=0.1)},
    ],
)
def test_running_statistics_and_frozen_parameters(tmp_path, caplog, arguments):
    with caplog.at_level("INFO"):
        one, auto = both(tmp_path, Normed, lambda: ToyData((6, 4, 7, 8, 3)), **arguments)
    assert reason(caplog) is None
    assert_same(one, auto)


def test_callbacks_see_each_client_once_and_its_local_model_at_its_end(tmp_path, caplog):
    with caplog.at_level("INFO"):
        one, auto = both(tmp_path, callbacks=lambda: [Counted()], clients_per_round=4)
    assert reason(caplog) is None
    (before,), (seen,) = one[2], auto[2]
    assert [entry for entry in seen.seen if entry[0] == "end"] == [entry for entry in before.seen if entry[0] == "end"]
    assert sorted(e[1] for e in seen.seen if e[0] == "start") == sorted(e[1] for e in before.seen if e[0] == "start")


class Scheduled(ToyModule):
    """Sets an attribute each round, which the steps of the clients depend on."""

    def on_train_epoch_start(self):
        self.factor = 1 + self.current_epoch

    def training_step(self, batch, batch_idx):
        loss = self.factor * self.loss(batch)
        self.log("train_loss", loss)
        self.log("largest", loss, reduce_fx="max")
        return loss


class Scaled(ToyModule):
    """Its own gradient hooks."""

    def on_after_backward(self):
        self.net.weight.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer):
        self.net.bias.grad.add_(optimizer.param_groups[0]["lr"])


class Rated(ToyModule):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Shallow(ToyModule):
    """Refers to what must not be copied along."""

    def setup(self, stage):
        self.data = self.trainer.datamodule
        self.loop = self.trainer


class Caching(ToyModule):
    """Sets in its first step what it uses in all."""

    def __init__(self):
        super().__init__()
        self.cache = {}
        self.scale = None

    def training_step(self, batch, batch_idx):
        if self.scale is None:
            self.scale = float(batch[0].abs().max())
        self.cache.setdefault(batch[0].shape[1:], 1 / self.scale)
        return super().training_step(batch, batch_idx) * self.cache[batch[0].shape[1:]]


def test_the_classifier_on_images_that_it_resizes(tmp_path, caplog):
    sizes = {"img_size": 16, "patch_size": 8, "depth": 1, "embed_dim": 8, "num_heads": 1}
    model = ImageClassifier("vit_tiny_patch16_224", 10, 1, image_size=16, backbone_kwargs=sizes)
    with caplog.at_level("INFO"):
        fit(tmp_path, module=model, data=Digits(num_clients=5), devices="auto", max_rounds=2)
    assert reason(caplog) is None


class Keeping(ToyModule):
    """Keeps its optimizer and changes its rate, which is each copy's own."""

    def configure_optimizers(self):
        self.kept = super().configure_optimizers()
        return self.kept

    def training_step(self, batch, batch_idx):
        self.kept.param_groups[0]["lr"] = 0.1 / (1 + batch_idx)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("make", [Scheduled, Scaled, Rated, Shallow, Caching, Keeping])
def test_modules_of_all_kinds(tmp_path, caplog, make):
    with caplog.at_level("INFO"):
        one, auto = both(tmp_path, make)
    assert reason(caplog) is None
    assert_same(one, auto)


class Dropping(ToyModule):
    def __init__(self):
        super().__init__(net=nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)))
        with torch.no_grad():
            self.net[0].weight.fill_(0.1)
            self.net[0].bias.zero_()


class Measuring(ToyModule):
    def __init__(self):
        super().__init__()
        self.accuracy = BinaryAccuracy()

    def training_step(self, batch, batch_idx):
        self.accuracy(self.net(batch[0]).argmax(1), batch[1])
        self.log("train_acc", self.accuracy)
        return super().training_step(batch, batch_idx)


class Counting(ToyModule):
    steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx) * (1 + self.steps / 100)


class Accumulating(ToyModule):
    def __init__(self):
        super().__init__()
        self.total = torch.zeros(1)

    def training_step(self, batch, batch_idx):
        self.total += 0.01
        return super().training_step(batch, batch_idx) * (1 + float(self.total))


class Locked(ToyModule):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Hooked(ToyModule):
    def __init__(self):
        super().__init__()
        self.net.weight.register_hook(lambda grad: grad * 0.5)


class Lazy(ToyModule):
    """Draws from the second round on, where nothing is tried any more."""

    def training_step(self, batch, batch_idx):
        factor = 1.0
        if self.current_epoch == 1:
            factor = self.draw()
        return super().training_step(batch, batch_idx) * factor

    def draw(self):
        return float(torch.rand(()))


class LazyPython(Lazy):
    def draw(self):
        return random.random()


class LazyNumpy(Lazy):
    def draw(self):
        return np.random.rand()  # noqa: NPY002 - what user code does


class LateCounting(Counting):
    """Changes an attribute from the second round on."""

    def training_step(self, batch, batch_idx):
        return (Counting if self.current_epoch else ToyModule).training_step(self, batch, batch_idx)


class Warming(ToyModule):
    """Sets the rate of the optimizer that a ``Trainer`` gives it."""

    def training_step(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = 0.1 / (1 + batch_idx)
        return super().training_step(batch, batch_idx)


class LateWarming(Warming):
    """The same from the second round on."""

    def training_step(self, batch, batch_idx):
        return (Warming if self.current_epoch else ToyModule).training_step(self, batch, batch_idx)


def test_lightnings_own_callbacks_may_ask_for_the_optimizer(tmp_path, caplog):
    with caplog.at_level("INFO"):
        one, auto = both(
            tmp_path, callbacks=lambda: [LearningRateMonitor()], logger=lambda: CSVLogger(tmp_path), max_rounds=2
        )
    assert reason(caplog) is None
    assert torch.allclose(flat(one[1]), flat(auto[1]), rtol=1e-6)


class Stashing(FedAvg):
    """Keeps something on itself between two calls of a step."""

    def gradient(self, step):
        self.kept = step.backward().clone()

    def correct(self, step):
        step.grad.add_(self.kept)


class Watching(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        pass


class Fetching(ToyData):
    def client_dataloader(self, client, generator):
        return DataLoader(self.client_dataset(client), self.batch_size, generator=generator, num_workers=1)


class Noisy(ToyData):
    """Draws an augmentation while a batch is fetched."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + torch.rand(()), batch[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"make": Dropping}, "the `training_step` of Dropping draws from the global random generators"),
        ({"make": Lazy}, "the training of Lazy draws from the global random generators"),
        ({"make": LazyPython}, "the training of LazyPython draws"),
        ({"make": LazyNumpy}, "the training of LazyNumpy draws"),
        ({"make": Measuring}, "the `training_step` of Measuring changes `accuracy."),
        ({"make": Counting}, "the `training_step` of Counting changes `steps`"),
        ({"make": LateCounting}, "the `training_step` of LateCounting changes `steps`"),
        ({"make": Accumulating}, "the `training_step` of Accumulating changes `total`"),
        ({"make": Warming}, "the training of Warming asks for the optimizer"),
        ({"make": LateWarming}, "the training of LateWarming asks for the optimizer"),
        ({"make": Locked}, "Locked cannot be copied (TypeError: cannot pickle '_thread.lock' object)"),
        ({"make": Hooked}, "the parameter net.weight has a gradient hook"),
        ({"method": Stashing}, "Stashing changes what it holds during a client's steps"),
        ({"data": Noisy}, "the training of ToyModule draws"),
        ({"callbacks": lambda: [Watching()]}, "Watching has `on_train_batch_end`, which sees a single client"),
    ],
)
def test_what_threads_cannot_train_is_trained_one_after_the_other(tmp_path, caplog, arguments, says):
    with caplog.at_level("INFO"):
        one, auto = both(tmp_path, **arguments)
    assert reason(caplog).startswith(says)
    assert_same(one, auto)
    assert getattr(one[1], "steps", 0) == getattr(auto[1], "steps", 0)


@pytest.mark.parametrize(
    "saver", [ModelCheckpoint(every_n_train_steps=1), ModelCheckpoint(train_time_interval=timedelta(hours=1))]
)
def test_checkpoints_within_rounds_need_one_client_after_the_other(tmp_path, caplog, saver):
    with caplog.at_level("INFO"):
        fit(tmp_path, saver, devices="auto")
    assert reason(caplog) == "ModelCheckpoint saves within rounds."


def test_loaders_that_start_processes(tmp_path, caplog):
    with caplog.at_level("INFO"):
        fit(tmp_path, data=Fetching(), devices="auto", max_rounds=1)
    assert reason(caplog) == "the loaders of the clients start 1 processes each."


@pytest.mark.parametrize("how", ["module", "blocks"])
def test_a_compiled_module(tmp_path, caplog, monkeypatch, how):
    module = ToyModule()
    if how == "module":
        module.net.compile(backend="eager")
    else:
        monkeypatch.setattr(_compiled, "BACKEND", "eager")
        _compiled.compile_blocks(module.net)
    with caplog.at_level("INFO"):
        fit(tmp_path, module=module, devices="auto", max_rounds=1)
    assert reason(caplog) == "net is compiled."


class Failing(ToyModule):
    """Fails once in the second round."""

    fails = True

    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1 and len(batch[1]) == 3 and Failing.fails:
            Failing.fails = False
            raise ZeroDivisionError("client trouble")
        return super().training_step(batch, batch_idx)


class Alone(ToyData):
    """Notes how many threads fetch a batch at once."""

    inside = largest = 0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        Alone.inside += 1
        Alone.largest = max(Alone.largest, Alone.inside)
        time.sleep(0.002)
        Alone.inside -= 1
        return batch


def test_a_dataset_is_in_one_thread_at_a_time(tmp_path):
    fit(tmp_path, data=Alone(), devices="auto", clients_per_round=5)
    assert Alone.largest == 1


def test_a_data_module_may_say_that_it_is_thread_safe(tmp_path):
    shared = Shared.now(NpzImages.__new__(NpzImages))
    assert shared.fetching is not shared.lock
    other = Shared.now(ToyData())
    assert other.fetching is other.lock


def test_an_exception_in_a_thread_ends_the_run_with_it_and_all_threads(tmp_path):
    before = threading.active_count()
    loop = make_loop(tmp_path, devices="auto", clients_per_round=5)
    module = Failing()
    with pytest.raises(ZeroDivisionError, match="client trouble"):
        loop.fit(module, ToyData())
    assert threading.active_count() == before
    assert loop.current_epoch == 1
    last = loop.checkpoint_callback.best_model_path
    resumed, _ = fit(tmp_path / "more", module=Failing(), ckpt_path=last, clients_per_round=5)
    whole, _ = fit(tmp_path / "whole", module=Failing(), devices=1, clients_per_round=5)
    assert resumed.summary["parameters_hash"] == whole.summary["parameters_hash"]


class Interrupting(Callback):
    """Ctrl-C when the first client of the second round has come back."""

    def on_client_end(self, trainer, module, client):
        if trainer.current_epoch == 1:
            raise KeyboardInterrupt


def test_an_interrupt_in_mid_round_ends_all_threads_and_leaves_the_global_model(tmp_path):
    before = threading.active_count()
    module = ToyModule()
    loop = make_loop(tmp_path, Interrupting(), devices="auto", clients_per_round=5)
    with pytest.raises(KeyboardInterrupt):
        loop.fit(module, ToyData())
    assert threading.active_count() == before
    _, after_one = fit(tmp_path / "one", max_rounds=1, clients_per_round=5)
    assert torch.equal(flat(module), flat(after_one))


class Diverging(ToyModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if len(batch[1]) == 3 and self.current_epoch == 1 else loss


@pytest.mark.parametrize("on_nonfinite", ["stop", "drop", "keep"])
def test_updates_that_are_not_finite(tmp_path, on_nonfinite):
    one, auto = both(tmp_path, Diverging, on_nonfinite=on_nonfinite)
    assert_same(one, auto)
    assert one[0].summary["stop_reason"] == auto[0].summary["stop_reason"]


def test_the_record_has_the_time_that_threads_waited(tmp_path):
    loop, _ = fit(tmp_path, devices="auto", clients_per_round=5)
    for row in loop.record.rows():
        assert 0 < float(row["seconds_idle"]) < float(row["seconds_train"])
    loop, _ = fit(tmp_path, devices=1, clients_per_round=5)
    assert [float(row["seconds_idle"]) for row in loop.record.rows()] == [0, 0, 0]


def test_the_threads_of_torch_are_as_before(tmp_path):
    fit(tmp_path, devices="auto")
    assert torch.get_num_threads() == 3
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [3]


def test_each_thread_has_its_share_of_torchs_threads(tmp_path):
    torch.set_num_threads(6)
    shares = set()

    class Sharing(ToyModule):
        def training_step(self, batch, batch_idx):
            shares.add((threading.current_thread().name.startswith("client"), torch.get_num_threads()))
            return super().training_step(batch, batch_idx)

    fit(tmp_path, module=Sharing(), devices="auto", clients_per_round=2, max_rounds=2)
    assert shares == {(True, 3)}


def test_frozen_parameters_are_shared_by_the_copies(tmp_path):
    held = []

    class Looking(Callback):
        def on_client_end(self, trainer, module, client):
            source = trainer.server.trainer
            worker = Worker(source, Shared.now(), source._options)
            held.append((worker.module.net[0].weight is module.net[0].weight, worker.module.trainer is trainer))

    fit(tmp_path, Looking(), module=Normed(), data=ToyData((6, 4)), devices="auto", max_rounds=1)
    assert held == [(True, True)] * 2


def test_what_was_taken_is_kept_no_longer(tmp_path):
    alive = []

    class Looking(Callback):
        def on_client_end(self, trainer, module, client):
            alive.append(sum(type(item) is Trained for item in gc.get_objects()))

    fit(tmp_path, Looking(), data=ToyData((6, 4, 7, 8, 3)), devices="auto", clients_per_round=5, max_rounds=1)
    assert alive[-1] == 0


def test_large_blocks_go_back_to_the_system_sooner_where_threads_train(tmp_path, monkeypatch):
    told = []
    for module in (backends, threaded):
        monkeypatch.setattr(module, "return_large_blocks", told.append)
    fit(tmp_path, devices="auto", max_rounds=1)
    assert told == [ALONE, TOGETHER]
    told.clear()
    fit(tmp_path, module=Dropping(), devices="auto", max_rounds=1)
    assert told == [ALONE, TOGETHER, ALONE]


@pytest.mark.parametrize("returns_blocks", [True, False])
def test_pools_are_emptied_between_clients_where_blocks_stay_in_them(tmp_path, monkeypatch, returns_blocks):
    asked = []
    monkeypatch.setattr(threaded, "return_large_blocks", lambda pools: returns_blocks)
    monkeypatch.setattr(threaded, "release_memory", lambda last: asked.append(last) or 0.0)
    fit(tmp_path, data=ToyData((6, 4, 7)), devices="auto", clients_per_round=3, max_rounds=1)
    assert len(asked) == (1 if returns_blocks else 4)


def test_who_gets_threads(tmp_path):
    fabric = make_loop(tmp_path).fabric
    assert client_threads("auto", fabric) == 3
    assert client_threads(1, fabric) == 1
    torch.set_num_threads(1)
    assert client_threads("auto", fabric) == 1
