"""A user's own callbacks, and those that a module configures."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LambdaCallback,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_model, save_model

from lightning_fedstop import TaskVectorEarlyStopping
from tests.helpers import Scripted, ToyData, ToyModule, fit, flat


class OutputReader(Callback):
    """Reads what a Trainer hands to ``on_train_batch_end``."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append((outputs["loss"].item(), outputs["loss"].requires_grad))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        assert outputs is None


def test_outputs_come_as_in_a_trainer(tmp_path):
    reader = OutputReader()
    fit(tmp_path, reader, max_rounds=1)
    assert len(reader.losses) == 3  # clients of 6 and 4 or of 4 and 8 samples, batches of 4
    assert not any(requires_grad for _, requires_grad in reader.losses)


def test_callbacks_of_the_module_replace_those_of_their_class(tmp_path):
    mine = EarlyStopping("val_loss", patience=1)

    class Configured(Scripted):
        def configure_callbacks(self):
            return [mine]

    theirs = EarlyStopping("val_loss", patience=99)
    loop, _ = fit(tmp_path, theirs, module=Configured([0.1, 0.2, 0.3]))
    assert loop.current_epoch == 2
    assert theirs not in loop.callbacks
    assert mine in loop.callbacks
    fit_again = Scripted([0.1, 0.2, 0.3])
    loop.fit(fit_again, ToyData())
    assert theirs in loop.callbacks


def test_what_callbacks_log_can_be_monitored_in_the_same_hook(tmp_path):
    class Logs(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            pl_module.log("score", float(trainer.current_epoch))

        def on_train_start(self, trainer, pl_module):
            pl_module.log("begun", 1.0)

    stop = EarlyStopping("score", patience=1, check_on_train_epoch_end=True)
    loop, _ = fit(tmp_path, stop, Logs(), max_rounds=5)
    assert loop.current_epoch == 2
    assert loop.callback_metrics["begun"] == 1


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_end"])
def test_logging_where_a_trainer_refuses_it_is_refused_in_its_words(tmp_path, hook):
    callback = LambdaCallback(**{hook: lambda loop, module: module.log("x", 1.0)})
    with pytest.raises(MisconfigurationException, match="result collection is not registered"):
        fit(tmp_path, callback)


def test_hooks_may_export_the_module(tmp_path):
    class Exports(Callback):
        def save(self, loop, module):
            save_model(module, str(tmp_path / f"{loop.current_epoch}.safetensors"))
            torch.save(module.net.weight, tmp_path / "weight.pt")

        def on_train_epoch_end(self, trainer, module):
            self.save(trainer, module)

        def on_client_end(self, trainer, module, client):
            self.save(trainer, module)

    _, module = fit(tmp_path, Exports())
    other = ToyModule()
    load_model(other, str(tmp_path / "2.safetensors"))
    assert torch.equal(flat(other), flat(module))
    assert torch.equal(torch.load(tmp_path / "weight.pt"), module.net.weight)


def test_client_hooks_frame_each_clients_training(tmp_path):
    seen = []

    class Clients(Callback):
        def on_client_start(self, trainer, module, client):
            seen.append(("start", client, flat(module)))

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append("batch")

        def on_client_end(self, trainer, module, client):
            seen.append(("end", client, flat(module)))

    module = ToyModule()
    start = flat(module)
    fit(tmp_path, Clients(), module=module, data=ToyData([4, 4]), max_rounds=1)
    assert [item if item == "batch" else item[:2] for item in seen] == [
        *[("start", 0), "batch", ("end", 0)],
        *[("start", 1), "batch", ("end", 1)],
    ]
    assert torch.equal(seen[0][2], start)
    models = torch.stack([seen[2][2], seen[5][2]]).double()
    torch.testing.assert_close(flat(module), models.mean(0).float(), rtol=0, atol=1e-7)


def test_a_stopping_rule_of_ones_own_has_its_batch_hooks_called(tmp_path):
    class Watching(TaskVectorEarlyStopping):
        batches = 0

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            self.batches += 1

    rule = Watching(0.1, 10)
    fit(tmp_path, rule, max_rounds=2)
    assert rule.batches > 0
