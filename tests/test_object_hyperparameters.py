"""Modules in the manner of project templates, whose network, optimizer and schedule are arguments."""

import functools
import pickle

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_fedstop.loop import checkpoint as checkpoints
from lightning_fedstop.methods import SCAFFOLD
from tests.helpers import ToyData, bits, fit, same

pytestmark = pytest.mark.filterwarnings("ignore:.*is already saved during checkpointing.*")


class TemplateModule(LightningModule):
    def __init__(self, net, optimizer, scheduler, compile, criterion=None):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net
        self.restored_from = None

    def training_step(self, batch, batch_idx):
        return (self.hparams.criterion or nn.functional.cross_entropy)(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(self.parameters())
        return [optimizer], [self.hparams.scheduler(optimizer)] if self.hparams.scheduler else []

    def on_load_checkpoint(self, checkpoint):
        self.restored_from = checkpoint["hyper_parameters"]


def make_net():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return net


PARTS = {
    "partials": {
        "optimizer": functools.partial(torch.optim.Adam, lr=0.02),
        "scheduler": functools.partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[1, 3]),
        "compile": False,
    },
    "a class": {"optimizer": torch.optim.AdamW, "scheduler": None, "compile": False},
    "a loss": {
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
        "scheduler": None,
        "compile": True,
        "criterion": nn.CrossEntropyLoss(label_smoothing=0.1),
    },
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_its_checkpoints_load_as_a_trainers_do(tmp_path, parts):
    loop, module = fit(tmp_path, module=TemplateModule(make_net(), **parts))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, **quiet)
    trainer.fit(TemplateModule(make_net(), **parts), ToyData())
    trainer.save_checkpoint(tmp_path / "trainer.ckpt")
    path = loop.summary["checkpoint"]
    theirs, ours = (torch.load(p, weights_only=False)["hyper_parameters"] for p in (tmp_path / "trainer.ckpt", path))
    assert {key: type(value) for key, value in ours.items()} == {key: type(value) for key, value in theirs.items()}
    for one in (path, tmp_path / "trainer.ckpt"):
        with pytest.raises(pickle.UnpicklingError):
            TemplateModule.load_from_checkpoint(one, weights_only=True)
    again = TemplateModule.load_from_checkpoint(path, weights_only=False)
    assert same(bits(again), bits(module))
    x = torch.ones(5, 4)
    assert torch.equal(again.eval().net(x), module.eval().net(x))
    assert [(type(o), o.defaults["lr"]) for o in again.configure_optimizers()[0]] == [
        (type(o), o.defaults["lr"]) for o in module.configure_optimizers()[0]
    ]


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_it_is_resumed_without_unpickling(tmp_path, monkeypatch, parts):
    _, first = fit(tmp_path / "whole", module=TemplateModule(make_net(), **parts), method=SCAFFOLD(), max_rounds=4)
    fit(tmp_path / "parts", module=TemplateModule(make_net(), **parts), method=SCAFFOLD(), max_rounds=2)
    module = TemplateModule(make_net(), **parts)
    unpickled = []
    monkeypatch.setattr(pickle, "loads", unpickled.append)
    checkpoints.read_checkpoint(path := checkpoints.find_last(tmp_path / "parts"))
    assert unpickled == []
    monkeypatch.undo()
    fit(tmp_path / "parts", module=module, method=SCAFFOLD(), max_rounds=4, ckpt_path=path)
    assert same(bits(first), bits(module))
    assert module.restored_from == module.hparams


def test_objects_are_said_once(tmp_path, caplog):
    with caplog.at_level("INFO"):
        fit(tmp_path, module=TemplateModule(make_net(), **PARTS["partials"]))
    assert caplog.text.count("`load_from_checkpoint(path, weights_only=False)` builds the module") == 1


def test_a_function_without_a_name_is_left_out_as_is_said(tmp_path):
    parts = PARTS["a loss"] | {"criterion": lambda y, t: nn.functional.cross_entropy(y, t)}
    with pytest.warns(UserWarning, match=r"can be pickled; left out: hyper_parameters\.criterion"):
        loop, module = fit(tmp_path, module=TemplateModule(make_net(), **parts))
    again = TemplateModule.load_from_checkpoint(loop.summary["checkpoint"], weights_only=False, criterion=None)
    assert same(bits(again), bits(module))
