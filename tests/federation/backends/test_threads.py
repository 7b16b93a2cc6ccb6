"""Several clients at once, each in a thread: the bits of one after the other, where that is declared or asked for."""

import gc
import threading
from collections import deque
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import BinaryAccuracy

from lightning_fedstop import methods
from lightning_fedstop.data import Digits, Federated, FederatedDataModule
from lightning_fedstop.federation.backends.sequential import Sequential
from lightning_fedstop.federation.backends.threads import Threads
from lightning_fedstop.federation.backends.worker import Worker
from lightning_fedstop.federation.local_training import ClientResult
from lightning_fedstop.methods import FedAvg
from lightning_fedstop.models import ImageClassifier
from tests.helpers import ToyData, ToyModule, bits, fit, flat, make_loop, same
from tests.methods.problems import public_methods

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


def both(tmp_path, make=ToyModule, data=ToyData, **arguments):
    """The same fit on one thread, one client after the other, and dealt to threads."""
    runs = []
    for backend, threads in (("sequential", 1), ("threads", 3)):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        chosen = {"clients_per_round": 5, "local_epochs": 2, "client_backend": backend}
        fresh = {name: value() if callable(value) else value for name, value in arguments.items()}
        callbacks = fresh.pop("callbacks", [])
        runs.append((*fit(tmp_path / backend, *callbacks, module=make(), data=data(), **(chosen | fresh)), callbacks))
    return runs


def assert_same(one, many):
    loop, module, _ = one
    other, copied, _ = many
    assert other.summary["parameters_hash"] == loop.summary["parameters_hash"]
    for buffer, other_buffer in zip(module.buffers(), copied.buffers(), strict=True):
        assert torch.equal(buffer, other_buffer)
    for row, like in zip(loop.record.rows(), other.record.rows(), strict=True):
        times = {name for name in row if name.startswith("seconds")}
        assert {k: v for k, v in row.items() if k not in times} == {k: v for k, v in like.items() if k not in times}


@pytest.mark.parametrize("name", public_methods())
def test_ten_methods_give_the_bits_of_one_client_after_the_other(tmp_path, name):
    method = getattr(methods, name)
    one, many = both(tmp_path, data=lambda: ToyData(SIZES), method=method, gradient_clip_val=0.5)
    assert isinstance(many[0].server.backend, Threads)
    assert_same(one, many)


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
def test_running_statistics_and_frozen_parameters(tmp_path, arguments):
    one, many = both(tmp_path, Normed, lambda: ToyData((6, 4, 7, 8, 3)), **arguments)
    assert_same(one, many)


def test_callbacks_see_each_client_once_and_its_local_model_at_its_end(tmp_path):
    one, many = both(tmp_path, callbacks=lambda: [Counted()], clients_per_round=4)
    (before,), (seen,) = one[2], many[2]
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


def test_the_classifier_says_once_that_it_resizes_images(tmp_path, caplog):
    small = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
    model = ImageClassifier("convnextv2_atto", 10, 1, backbone_kwargs=small)
    with caplog.at_level("INFO"):
        fit(tmp_path, module=model, data=Digits(num_clients=40), devices="auto", limit_val_batches=0)
    assert sum("are resized" in record.getMessage() for record in caplog.records) == 1


class Keeping(ToyModule):
    """Keeps its optimizer and changes its rate, which is each copy's own."""

    def configure_optimizers(self):
        self.kept = super().configure_optimizers()
        return self.kept

    def training_step(self, batch, batch_idx):
        self.kept.param_groups[0]["lr"] = 0.1 / (1 + batch_idx)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("make", [Scheduled, Scaled, Rated, Shallow, Keeping])
def test_modules_of_all_kinds(tmp_path, make):
    one, many = both(tmp_path, make)
    assert_same(one, many)


class Warming(ToyModule):
    """Sets the rate of the optimizer that a ``Trainer`` gives it."""

    def training_step(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = 0.1 / (1 + batch_idx)
        return super().training_step(batch, batch_idx)


def test_lightnings_own_callbacks_may_ask_for_the_optimizer(tmp_path):
    one, many = both(
        tmp_path, callbacks=lambda: [LearningRateMonitor()], logger=lambda: CSVLogger(tmp_path), max_rounds=2
    )
    assert torch.allclose(flat(one[1]), flat(many[1]), rtol=1e-6)


class Watching(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        pass


class Fetching(ToyData):
    def client_dataloader(self, client, generator):
        return DataLoader(self.client_dataset(client), self.batch_size, generator=generator, num_workers=1)


def hooked():
    module = ToyModule()
    module.net.weight.register_hook(lambda grad: grad * 0.5)
    return module


def compiled():
    module = ToyModule()
    module.net.compile(backend="eager")
    return module


REFUSED = [
    ({"module": hooked}, "the parameter net.weight has a gradient hook"),
    ({"module": compiled}, "net is compiled"),
    ({"data": Fetching}, "the loaders of the clients start 1 processes each"),
    ({"callbacks": lambda: [Watching()]}, "Watching has `on_train_batch_end`, which sees a single client"),
    (
        {"callbacks": lambda: [LambdaCallback(on_after_backward=lambda *_: None)]},
        "LambdaCallback has `on_after_backward`, which sees a single client",
    ),
    ({"callbacks": lambda: [ModelCheckpoint(every_n_train_steps=1)]}, "ModelCheckpoint saves within rounds"),
    (
        {"callbacks": lambda: [ModelCheckpoint(train_time_interval=timedelta(hours=1))]},
        "ModelCheckpoint saves within rounds",
    ),
]


@pytest.mark.parametrize(("arguments", "says"), REFUSED)
def test_what_is_known_not_to_work_is_refused_before_any_training(tmp_path, arguments, says):
    made = {name: make() for name, make in arguments.items()}
    with pytest.raises(MisconfigurationException, match=f"^`client_backend='threads'` cannot be used: {says}"):
        fit(tmp_path, *made.pop("callbacks", []), client_backend="threads", **made)


def test_a_scaler_several_processes_and_accelerators_are_refused(tmp_path):
    loop, _ = fit(tmp_path, client_backend="threads", max_rounds=1)
    backend = loop.server.backend
    trainer = backend.trainer
    trainer.scaler = torch.amp.GradScaler("cpu")
    assert backend.refusal().startswith("the precision '32-true' scales the loss")
    for count, device in ((2, "cpu"), (1, "cuda")):
        trainer.fabric = SimpleNamespace(world_size=count, device=torch.device(device))
        assert backend.refusal() == f"it needs one process on a CPU, not {count} on '{device}'"


class Late(Callback):
    """Adds in a hook, after the set-up, what threads cannot train."""

    def on_train_start(self, trainer, module):
        module.net.weight.register_hook(lambda grad: grad * 0.5)


def test_what_a_hook_adds_is_refused_in_the_next_round(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"the parameter net\.weight has a gradient hook"):
        fit(tmp_path, Late(), client_backend="threads")


class Measuring(ToyModule):
    def __init__(self):
        super().__init__()
        self.accuracy = BinaryAccuracy()

    def training_step(self, batch, batch_idx):
        self.accuracy(self.net(batch[0]).argmax(1), batch[1])
        self.log("train_acc", self.accuracy)
        return super().training_step(batch, batch_idx)


class Locked(ToyModule):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Warming, "Warming asks for the optimizer in a step"),
        (Measuring, "Measuring logs the Metric 'accuracy' in `training_step`, of which each thread has a copy"),
        (Locked, "Locked cannot be copied, as training of several clients at once needs it .*'_thread.lock' object"),
    ],
)
def test_what_shows_in_training_ends_the_run_with_a_sentence(tmp_path, make, says):
    before = threading.active_count()
    with pytest.raises(MisconfigurationException, match=says):
        fit(tmp_path, module=make(), client_backend="threads")
    assert threading.active_count() == before


class Declared(ToyModule):
    """Keeps the contract and says so; notes the threads that train it."""

    is_thread_safe = True
    seen = set()

    def training_step(self, batch, batch_idx):
        Declared.seen.add(threading.current_thread().name.partition("_")[0])
        return super().training_step(batch, batch_idx)


class DeclaredData(ToyData):
    is_thread_safe = True


class Inherits(Declared):
    pass


class InheritsData(DeclaredData):
    pass


class OnlyWhen(Declared):
    """Declares it of some instances."""

    def __init__(self, is_safe):
        super().__init__()
        self.is_safe = is_safe

    @property
    def is_thread_safe(self):
        return self.is_safe


class OwnMethod(FedAvg):
    pass


class DeclaredMethod(FedAvg):
    is_thread_safe = True


class AtStart(Callback):
    def on_client_start(self, trainer, module, client):
        pass


class AtEnd(Callback):
    def on_client_end(self, trainer, module, client):
        pass


def trained_by(tmp_path, *callbacks, **arguments):
    """The threads in which ``devices="auto"`` trains."""
    Declared.seen.clear()
    chosen = {"module": Declared(), "data": DeclaredData(), "devices": "auto", "max_rounds": 1}
    fit(tmp_path, *callbacks, **chosen | arguments)
    return Declared.seen.copy()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"module": lambda: OnlyWhen(True)},
        {"method": DeclaredMethod},
        {"method": methods.SCAFFOLD},
        {"devices": 1, "client_backend": "threads", "module": Inherits, "data": ToyData},
    ],
)
def test_threads_train_what_declares_it_or_is_asked_to(tmp_path, arguments):
    made = {name: value() if callable(value) else value for name, value in arguments.items()}
    assert trained_by(tmp_path, **made) == {"client"}


@pytest.mark.parametrize(
    "arguments",
    [
        {"module": Inherits},
        {"module": lambda: OnlyWhen(False)},
        {"data": ToyData},
        {"data": InheritsData},
        {"method": OwnMethod},
        {"callbacks": AtStart},
        {"callbacks": AtEnd},
        {"callbacks": Watching},
        {"callbacks": Late},
        {"callbacks": lambda: LambdaCallback(on_train_batch_end=lambda *_: None)},
        {"callbacks": lambda: ModelCheckpoint(every_n_train_steps=1)},
        {"devices": 1},
        {"client_backend": "sequential"},
    ],
)
def test_all_else_is_trained_one_client_after_the_other(tmp_path, arguments):
    made = {name: value() if callable(value) else value for name, value in arguments.items()}
    callbacks = [made.pop("callbacks")] if "callbacks" in made else []
    assert trained_by(tmp_path, *callbacks, **made) == {"MainThread"}


def test_a_declared_module_that_cannot_be_copied_is_trained_one_client_after_the_other(tmp_path):
    module = Declared()
    module.lock = threading.Lock()
    assert trained_by(tmp_path, module=module) == {"MainThread"}


@pytest.mark.parametrize("wraps", [False, True])
def test_the_classifier_and_our_images_are_trained_in_threads_to_the_bits_of_one_device(tmp_path, wraps):
    small = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
    runs = []
    for devices, threads in ((1, 1), ("auto", 3)):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        model = ImageClassifier("convnextv2_atto", 10, 1, lr=0.1, backbone_kwargs=small)
        data = Federated(Digits(), num_clients=40) if wraps else Digits(num_clients=40)
        loop, _ = fit(tmp_path, module=model, data=data, devices=devices, max_rounds=2, clients_per_round=3)
        runs.append((loop, bits(model)))
    assert type(runs[0][0].server.backend) is Sequential
    chosen = runs[1][0].server.backend
    assert isinstance(chosen, Threads)
    assert chosen.suits()
    assert all(float(row["seconds_idle"]) > 0 for row in runs[1][0].record.rows())
    assert same(runs[0][1], runs[1][1])


class Meter:
    """An average as many write it: an attribute of an attribute."""

    total = count = 0

    def update(self, value):
        self.total += value
        self.count += 1


class Stateful(ToyModule):
    """Divides the loss by what one of its attributes has gathered in all steps so far."""

    def __init__(self):
        super().__init__()
        self.meter = Meter()
        self.window = deque(maxlen=7)
        self.array = np.zeros(2)
        self.nested = {"losses": {"sum": 0.0, "count": 0}}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss / self.gathered(loss.item())


class WithMeter(Stateful):
    def gathered(self, value):
        self.meter.update(value)
        return self.meter.total / self.meter.count


class WithDeque(Stateful):
    def gathered(self, value):
        self.window.append(value)
        return sum(self.window) / len(self.window)


class WithArray(Stateful):
    def gathered(self, value):
        self.array += (value, 1)
        return float(self.array[0] / self.array[1])


class WithNestedDicts(Stateful):
    def gathered(self, value):
        sums = self.nested["losses"]
        sums["sum"] += value
        sums["count"] += 1
        return sums["sum"] / sums["count"]


class WithGenerator(ToyModule):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def training_step(self, batch, batch_idx):
        noise = torch.from_numpy(self.rng.normal(0, 0.5, tuple(batch[0].shape))).float()
        return super().training_step((batch[0] + noise, batch[1]), batch_idx)


class Tanh(nn.Module):
    def forward(self, weight):
        return weight.tanh()


class Cached(ToyModule):
    """Uses a parametrization twice, whose value torch caches for all threads together."""

    def __init__(self):
        super().__init__()
        parametrize.register_parametrization(self.net, "weight", Tanh())

    def training_step(self, batch, batch_idx):
        with parametrize.cached():
            return nn.functional.cross_entropy(self.net(batch[0]) + self.net(2 * batch[0]), batch[1])


class Marked(ToyModule):
    """Adds a shift of the client that a callback has marked."""

    client = 0

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.arange(10.0).reshape(5, 2))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]) + self.shift[self.client], batch[1])


class Marks(Callback):
    def on_client_start(self, trainer, module, client):
        module.client = client


class Augmented(Dataset):
    """Draws from a generator of its own."""

    def __init__(self, dataset):
        self.dataset, self.rng = dataset, np.random.default_rng(0)

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        x, y = self.dataset[index]
        return x + torch.from_numpy(self.rng.normal(0, 0.5, 4)).float(), y


class AugmentedData(ToyData):
    def __init__(self):
        super().__init__()
        self.augmented = Augmented(self.dataset(0, sum(self.client_sizes)))

    def train_dataloader(self):
        return DataLoader(self.augmented, self.batch_size, shuffle=True)


@pytest.mark.parametrize(
    ("make", "data", "callbacks"),
    [
        (WithMeter, ToyData, []),
        (WithDeque, ToyData, []),
        (WithArray, ToyData, []),
        (WithNestedDicts, ToyData, []),
        (WithGenerator, ToyData, []),
        (Cached, ToyData, []),
        (Marked, ToyData, [Marks()]),
        (ToyModule, lambda: FederatedDataModule.from_datamodule(AugmentedData(), num_clients=5), []),
    ],
    ids=["meter", "deque", "array", "nested dicts", "own generator", "cached", "marked", "data's own generator"],
)
def test_state_that_nothing_can_see_gives_one_result(tmp_path, make, data, callbacks):
    results = []
    for devices in (1, "auto", "auto", "auto"):
        _, module = fit(tmp_path, *callbacks, module=make(), data=data(), devices=devices, clients_per_round=5)
        results.append(bits(module))
    assert all(same(result, results[0]) for result in results[1:])


class Failing(ToyModule):
    """Fails once in the second round."""

    fails = True

    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1 and len(batch[1]) == 3 and Failing.fails:
            Failing.fails = False
            raise ZeroDivisionError("client trouble")
        return super().training_step(batch, batch_idx)


def test_an_exception_in_a_thread_ends_the_run_with_it_and_all_threads(tmp_path):
    before = threading.active_count()
    loop = make_loop(tmp_path, client_backend="threads", clients_per_round=5)
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
    loop = make_loop(tmp_path, Interrupting(), client_backend="threads", clients_per_round=5)
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
    one, many = both(tmp_path, Diverging, on_nonfinite=on_nonfinite)
    assert_same(one, many)
    assert one[0].summary["stop_reason"] == many[0].summary["stop_reason"]


def test_the_record_has_the_time_that_threads_waited(tmp_path):
    loop, _ = fit(tmp_path, client_backend="threads", clients_per_round=5)
    for row in loop.record.rows():
        assert 0 < float(row["seconds_idle"]) < float(row["seconds_train"])
    loop, _ = fit(tmp_path, devices=1, clients_per_round=5)
    assert [float(row["seconds_idle"]) for row in loop.record.rows()] == [0, 0, 0]


def test_the_threads_of_torch_are_as_before(tmp_path):
    fit(tmp_path, client_backend="threads")
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

    fit(tmp_path, module=Sharing(), client_backend="threads", clients_per_round=2, max_rounds=2)
    assert shares == {(True, 3)}


def test_copies_share_the_loop_and_neither_buffers_nor_frozen_parameters(tmp_path):
    held = []

    class Looking(Callback):
        def on_client_end(self, trainer, module, client):
            source = trainer.server.trainer
            worker = Worker(source, threading.Lock(), threading.Event())
            copied = worker.trainer.module
            own = (*copied.parameters(), *copied.buffers())
            theirs = {tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())}
            held.append((theirs.isdisjoint(tensor.data_ptr() for tensor in own), copied.trainer is trainer))

    fit(tmp_path, Looking(), module=Normed(), data=ToyData((6, 4)), client_backend="threads", max_rounds=1)
    assert held == [(True, True)] * 2


def test_what_was_taken_is_kept_no_longer(tmp_path):
    alive = []

    class Looking(Callback):
        def on_client_end(self, trainer, module, client):
            alive.append(sum(type(item) is ClientResult for item in gc.get_objects()))

    fit(tmp_path, Looking(), data=ToyData((6, 4, 7, 8, 3)), client_backend="threads", clients_per_round=5, max_rounds=1)
    assert alive[-1] == 1  # its own
