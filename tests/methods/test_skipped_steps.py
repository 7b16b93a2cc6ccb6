"""Batches that give no step: the module or a gradient scaler skips them."""

from itertools import pairwise

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_fedstop.methods import SCAFFOLD
from tests.helpers import ToyData, ToyModule, Trace, flat, make_loop
from tests.methods.problems import TEN, same_bits, toy


class FullBatchesAlone(ToyData):
    def client_dataloader(self, client, generator):
        return DataLoader(self.client_dataset(client), 4, shuffle=True, generator=generator, drop_last=True)


@pytest.mark.parametrize("make", TEN.values(), ids=TEN)
def test_a_batch_that_the_module_skips_is_no_step(tmp_path, make):
    class Skips(ToyModule):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if len(batch[0]) == 4 else None

    options = {"schedule": [[0], [0]], "local_epochs": 2}
    _, skipped = toy(make, tmp_path, module=Skips(), data=ToyData((6,), evaluated=False), **options)
    _, absent = toy(make, tmp_path, data=FullBatchesAlone((6,), evaluated=False), **options)
    assert all(map(same_bits, skipped, absent))


@pytest.mark.parametrize("update", ["delta", "grad_mean"])
def test_a_step_that_a_gradient_scaler_skips_is_no_step(tmp_path, update):
    """The scale starts so high that the first gradients overflow; float16 itself needs an accelerator."""

    class Models(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            models.append(flat(module))

        def on_client_start(self, trainer, module, client):
            models.append(flat(module))

    models, taken = [], []

    class Notes(SCAFFOLD):
        def finish(self, client, delta, steps):
            taken.append(steps)
            super().finish(client, delta, steps)

    trace = Trace()
    loop = make_loop(
        tmp_path,
        trace,
        Models(),
        method=Notes(control_update=update),
        precision="bf16-mixed",
        max_rounds=1,
        clients_per_round=1,
        local_epochs=6,
        enable_checkpointing=False,
    )
    loop.fabric.strategy.precision.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    loop.fit(HugeLoss(), ToyData((4,), evaluated=False))
    moved = sum(not torch.equal(a, b) for a, b in pairwise(models))
    assert 0 < moved < 6
    assert taken == [moved]
    assert torch.isfinite(trace.rounds[0]["states"]["c", 0]).all()


class HugeLoss(ToyModule):
    def loss(self, batch):
        return 20 * super().loss(batch)
