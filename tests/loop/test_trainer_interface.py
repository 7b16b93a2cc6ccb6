"""What callbacks and modules read of a Trainer, read of the loop."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from tests.helpers import ToyData, ToyModule, fit, make_loop

NOT_THERE = {
    *("distributed_sampler_kwargs", "enable_autolog_hparams", "init_module", "limit_predict_batches"),
    *("predict_loop", "test_loop", "validate_loop", "val_check_batch"),
}
"""Of what a Trainer has; all are parts of its own loops or of what it does beside `fit`, `validate` and `test`."""


def public(one):
    return {name for name in dir(one) if not name.startswith("_")}


def test_the_loop_has_what_a_trainer_has(tmp_path):
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    loop = make_loop(tmp_path)
    assert public(trainer) - public(loop) == NOT_THERE
    for name in ("min_steps", "scaler", "device_ids", "num_sanity_val_batches", "is_last_batch", "num_predict_batches"):
        assert getattr(loop, name) == getattr(trainer, name), name
    for name in ("train_dataloader", "val_dataloaders", "test_dataloaders", "predict_dataloaders"):
        assert getattr(loop, name) is None
        assert getattr(trainer, name) is None


class Reads(Callback):
    """Notes what the loop says of loaders and batches."""

    def __init__(self):
        self.seen = {}

    def note(self, hook, trainer):
        epoch_loop = trainer.fit_loop.epoch_loop
        samples = len(trainer.train_dataloader.dataset)
        self.seen.setdefault(hook, []).append((samples, epoch_loop.batch_idx, trainer.is_last_batch))

    def on_train_epoch_start(self, trainer, pl_module):
        self.note("on_train_epoch_start", trainer)

    def on_client_start(self, trainer, pl_module, client):
        self.note("on_client_start", trainer)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.note("on_train_batch_start", trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.note("on_train_batch_end", trainer)

    def on_client_end(self, trainer, pl_module, client):
        self.note("on_client_end", trainer)

    def on_validation_end(self, trainer, pl_module):
        self.seen["shapes"] = [tuple(x.shape) for x, _ in trainer.val_dataloaders]
        assert trainer.num_sanity_val_batches == [0]
        assert trainer.enable_validation

    def on_train_epoch_end(self, trainer, pl_module):
        self.note("on_train_epoch_end", trainer)
        assert trainer.train_dataloader is trainer.train_dataloader


def test_loaders_and_batches_are_those_of_the_client_in_its_training_and_of_all_outside_of_it(tmp_path):
    reads, data = Reads(), ToyData([6, 4])
    loop, _ = fit(tmp_path, reads, data=data, max_rounds=1, local_epochs=2)
    six, four = [(6, 0, False), (6, 1, True)] * 2, [(4, 0, True)] * 2
    assert reads.seen == {
        "on_train_epoch_start": [(10, -1, False)],
        "on_client_start": [(6, -1, False), (4, -1, False)],
        "on_train_batch_start": six + four,
        "on_train_batch_end": six + four,
        "on_client_end": [(6, 1, True), (4, 0, True)],
        "on_train_epoch_end": [(10, -1, False)],
        "shapes": [(4, 4), (4, 4), (2, 4)],
    }
    assert isinstance(loop.test_dataloaders, DataLoader)


@pytest.mark.parametrize(("limit", "expected"), [(1, [True]), (0.5, [True]), (2, [False, True]), (None, [False, True])])
def test_the_last_batch_is_the_last_that_is_trained_on(tmp_path, limit, expected):
    reads = Reads()
    fit(tmp_path, reads, data=ToyData([8, 8]), max_rounds=1, limit_train_batches=limit)
    assert [is_last for *_, is_last in reads.seen["on_train_batch_start"]] == expected * 2


def test_modules_trained_in_threads_see_their_clients_loader(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    class Looks(ToyModule):
        def training_step(self, batch, batch_idx):
            self.log("samples", float(len(self.trainer.train_dataloader.dataset)), on_epoch=True)
            return super().training_step(batch, batch_idx)

    loop, _ = fit(tmp_path, module=Looks(), data=ToyData([8, 4]), max_rounds=1, client_backend="threads")
    assert loop.callback_metrics["samples"] == (8 * 8 + 4 * 4) / 12


def test_a_client_that_fails_leaves_no_loader_behind(tmp_path):
    class Fails(ToyModule):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("broken off")

    loop = make_loop(tmp_path)
    with pytest.raises(RuntimeError, match="broken off"):
        loop.fit(Fails(), data := ToyData())
    assert not loop.is_last_batch
    assert len(loop.train_dataloader.dataset) == sum(data.client_sizes)


def test_predict_names_the_trainer(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"use `lightning\.pytorch\.Trainer\(\)\.predict\(model"):
        make_loop(tmp_path).predict(ToyModule())
