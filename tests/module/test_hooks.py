import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_fedstop.module.hooks import Hooks
from tests.helpers import ToyModule


class Loop:
    def __init__(self, *callbacks):
        self.callbacks = list(callbacks)


class Answers(Callback):
    def __init__(self, answer):
        self.answer = answer

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        return self.answer, trainer, pl_module, batch, batch_idx, pl_module._current_fx_name

    def on_client_start(self, trainer, pl_module, client):
        return self.answer, client


class Module(ToyModule):
    def on_train_batch_start(self, batch, batch_idx):
        return "module", batch, batch_idx

    def on_client_start(self, client):
        return "module", client


def test_callbacks_come_first_in_their_order_then_the_module():
    loop, module = Loop(Answers(1), Callback(), Answers(2)), Module()
    hooks = Hooks(loop, module)
    name = "on_train_batch_start"
    expected = [(answer, loop, module, "batch", 0, name) for answer in (1, 2)]
    assert hooks(name, "batch", 0) == [*expected, ("module", "batch", 0)]
    assert hooks("on_client_start", 7) == [(1, 7), (2, 7), ("module", 7)]
    assert module._current_fx_name is None


def test_what_nobody_overrides_is_not_called():
    assert Hooks(Loop(Callback()), ToyModule())("on_train_start") == []
    assert Hooks(Loop(Callback()), ToyModule())("on_client_start", 0) == []


def test_a_hook_set_on_the_instance_counts():
    callback = Callback()
    callback.on_train_start = lambda trainer, pl_module: "mine"
    assert Hooks(Loop(callback), ToyModule())("on_train_start") == ["mine"]


def test_the_name_of_the_hook_is_put_back_after_an_error():
    class Breaks(Callback):
        def on_train_start(self, trainer, pl_module):
            raise KeyError

    module = ToyModule()
    with pytest.raises(KeyError):
        Hooks(Loop(Breaks()), module)("on_train_start")
    assert module._current_fx_name is None


def test_monitoring_callbacks_see_the_end_of_the_epoch_last():
    order = []

    def noting(callback, name):
        callback.on_train_epoch_end = lambda trainer, pl_module: order.append(name)
        return callback

    class Ends(ToyModule):
        def on_train_epoch_end(self):
            order.append("module")

    callbacks = [noting(EarlyStopping("x"), "stop"), noting(ModelCheckpoint(), "save"), noting(Callback(), "other")]
    hooks = Hooks(Loop(*callbacks), Ends())
    hooks("on_train_epoch_end")
    assert order == ["other", "module"]
    hooks.monitoring("on_train_epoch_end")
    assert order == ["other", "module", "stop", "save"]
