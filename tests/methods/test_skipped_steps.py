"""Batches that give no step: the module or a gradient scaler skips them."""

from itertools import pairwise

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_fedstop.methods import SCAFFOLD, FedWMSAM
from tests.helpers import ToyData, ToyModule, Trace, flat, make_loop
from tests.methods.problems import METHODS, same_bits, toy


class FullBatchesAlone(ToyData):
    def client_dataloader(self, client, generator):
        return DataLoader(self.client_dataset(client), 4, shuffle=True, generator=generator, drop_last=True)


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS)
def test_a_batch_that_the_module_skips_is_no_step(tmp_path, make):
    class Skips(ToyModule):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if len(batch[0]) == 4 else None

    options = {"schedule": [[0], [0]], "local_epochs": 2}
    _, skipped = toy(make, tmp_path, module=Skips(), data=ToyData((6,), evaluated=False), **options)
    _, absent = toy(make, tmp_path, data=FullBatchesAlone((6,), evaluated=False), **options)
    assert all(map(same_bits, skipped, absent))


class EverySecond(ToyModule):
    """Steps with every second batch, as in Lightning's example."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class EverySecondApart(ToyModule):
    """The same, with the gradient taken before the step."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()
        if batch_idx % 2 == 0:
            optimizer.step()


class SkipsEverySecond(ToyModule):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if batch_idx % 2 == 0 else None


MEANS = {
    "SCAFFOLD grad_mean": lambda: SCAFFOLD(control_update="grad_mean"),
    "FedWMSAM grad_mean": lambda: FedWMSAM(0.1, alpha_init=0.5, control_update="grad_mean"),
}


@pytest.mark.parametrize("kind", [EverySecond, EverySecondApart])
@pytest.mark.parametrize("make", (METHODS | MEANS).values(), ids=METHODS | MEANS)
def test_a_batch_that_the_module_takes_no_step_with_leaves_nothing(tmp_path, make, kind):
    options = {"schedule": [[0], [0]], "local_epochs": 2}
    rounds = [
        toy(make, tmp_path, module=module, data=ToyData((11,), evaluated=False), **options)[1]
        for module in (kind(), SkipsEverySecond())
    ]
    assert all(map(same_bits, *rounds))


def taken(tmp_path, module):
    """The steps that the method counts for a client of three batches, and how far its model went."""
    counts = []

    class Counts(SCAFFOLD):
        def finish(self, client, delta, steps):
            counts.append((steps, client.motion.steps))
            super().finish(client, delta, steps)

    _, (round,) = toy(Counts, tmp_path, module=module, data=ToyData((11,), evaluated=False), schedule=[[0]])
    ((steps, noted),) = counts
    assert steps == noted
    return steps, round["theta"] - round["theta_0"]


def test_steps_are_those_of_the_optimizer(tmp_path):
    class Twice(ToyModule):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step(closure=optimizer_closure)
            optimizer.step()

    class ByHand(ToyModule):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer_closure()
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter -= 0.1 * parameter.grad

    assert taken(tmp_path, EverySecond())[0] == 2
    assert taken(tmp_path, Twice())[0] == 6
    steps, moved = taken(tmp_path, ByHand())
    assert steps == 3
    assert moved.any()


def test_gradients_that_add_up_over_batches_are_refused(tmp_path):
    class Accumulates(EverySecond):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            if batch_idx % 2 == 0:
                optimizer.zero_grad()

    with pytest.raises(MisconfigurationException, match="optimizer_zero_grad leaves gradients for the next"):
        taken(tmp_path, Accumulates())


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
