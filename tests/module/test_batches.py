import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core import hooks

from lightning_fedstop.module.batches import BatchTransfer


def noting(parent, hooks, log, who):
    def make(name):
        def hook(self, batch, *args):
            log.append((who, name, args[-1]))
            return getattr(parent, name)(self, batch, *args)

        return hook

    return type(who, (parent,), {name: make(name) for name in hooks})()


ALL = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@pytest.mark.parametrize("of_data", [(), ALL, ALL[2:]])
def test_hooks_of_the_data_module_win_and_are_called_in_order(of_data):
    log = []
    module = noting(LightningModule, ALL, log, "module")
    data = noting(LightningDataModule, of_data, log, "data")
    transfer = BatchTransfer(module, data, Fabric(accelerator="cpu", devices=1).strategy)
    batch = {"x": torch.ones(2), "name": ["a", "b"]}
    assert transfer(batch, 3)["x"].device == transfer.device
    assert log == [("data" if name in of_data else "module", name, 3) for name in ALL]


def test_without_a_data_module_the_modules_own_hooks_serve():
    log = []
    transfer = BatchTransfer(noting(LightningModule, ALL, log, "m"), None, Fabric(accelerator="cpu").strategy)
    transfer([torch.ones(1)])
    assert [name for _, name, _ in log] == list(ALL)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [(None, torch.float64), ("bf16-mixed", torch.float64), ("bf16-true", torch.bfloat16), ("64-true", torch.float64)],
)
def test_a_true_precision_converts_floats_alone(precision, expected):
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    batch = BatchTransfer(LightningModule(), None, fabric.strategy)((torch.ones(1).double(), torch.ones(1).long()))
    assert [tensor.dtype for tensor in batch] == [expected, torch.int64]


@pytest.mark.parametrize(
    ("batch", "looked_at"),
    [
        ((torch.ones(2), torch.ones(2).long()), False),
        ([torch.ones(2)], False),
        ((torch.ones(2), ["a", "b"]), True),
        ({"x": torch.ones(2)}, True),
        ((torch.ones(2), (torch.ones(2),)), True),
        ((torch.ones(2, device="meta"), torch.ones(2)), True),
    ],
)
def test_tensors_that_are_on_the_device_are_passed_on_as_they_are(monkeypatch, batch, looked_at):
    moved = []
    monkeypatch.setattr(hooks, "move_data_to_device", lambda batch, device: moved.append(device) or batch)
    transfer = BatchTransfer(LightningModule(), None, Fabric(accelerator="cpu", devices=1).strategy)
    assert transfer(batch) is batch
    assert moved == [transfer.device] * looked_at
