"""The table of ``docs/hooks.md``: every hook with every change, in a ``Trainer`` and in a ``FederatedLoop``.

``python -m tests.test_hook_table`` writes it.
"""

import sys
import tempfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import QUIET, make_loop

DOCS = Path(__file__).resolve().parents[1] / "docs" / "hooks.md"
MARK = "<!-- table -->\n"
RATE = 0.1

HOOKS = (
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_client_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_client_end",
    "on_validation_start",
    "on_validation_end",
    "on_train_epoch_end",
)


class Module(LightningModule):
    """A linear model of 3 numbers with a buffer that scales its output, in float64."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1, dtype=torch.float64)
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        with torch.no_grad():
            self.net.weight.copy_(torch.tensor([[0.1, -0.2, 0.3]]))
            self.net.bias.fill_(0.5)

    def training_step(self, batch, batch_idx):
        return ((self.net(batch[0]) * self.scale - batch[1]) ** 2).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


class Data(LightningDataModule):
    """One client with all the data, in the batches of a Trainer."""

    num_clients, client_sizes = 1, [9]

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(9, 3, generator=generator, dtype=torch.float64)
        return DataLoader(TensorDataset(x, x[:, :1] - 2 * x[:, 1:2] + 1), batch_size=3)

    def client_dataloader(self, client, generator):
        return self.train_dataloader()

    def val_dataloader(self):
        return self.train_dataloader()


def weights_of(module):
    """All parameters as one vector, the bias last."""
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in module.parameters()])


def set_weights(module):
    with torch.no_grad():
        module.net.weight.fill_(1.0)


def set_rate(module):
    for optimizer in module.trainer.optimizers:
        optimizer.param_groups[0]["lr"] = RATE / 4


def set_buffer(module):
    module.scale.fill_(2.0)


def freeze(module):
    module.net.bias.requires_grad_(False)


CHANGES = {"weights": set_weights, "learning rate": set_rate, "buffers": set_buffer, "`requires_grad`": freeze}


class Once(Callback):
    """Makes a change in the first call of one hook."""

    def __init__(self, hook, change):
        self.change, self.done = change, False
        setattr(self, hook, self.do)

    def do(self, trainer, module, *args, **kwargs):
        if not self.done:
            self.done = True
            self.change(module)


def hooked(hook, change):
    """A module that makes a change in the first call of its own hook."""
    done = []

    def do(self, *args, **kwargs):
        if not done:
            done.append(True)
            change(self)

    return type("Hooked", (Module,), {hook: do})()


class Way(Callback):
    """Notes the weights after each epoch, hooks of its end included."""

    def __init__(self):
        self.weights = []

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch:
            self.weights.append(weights_of(module))

    def on_train_end(self, trainer, module):
        self.weights.append(weights_of(module))


class Undo(Callback):
    """Puts the rate back at the start of later epochs."""

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch:
            trainer.optimizers[0].param_groups[0]["lr"] = RATE


def trained(kind, owner, hook, change, *more):
    """The weights after each of three epochs, or the error that refuses the change and the weights then held."""
    way = Way()
    module = hooked(hook, change) if owner == "module" else Module()
    callbacks = [*([Once(hook, change)] if owner == "callback" else []), *more, way]
    with tempfile.TemporaryDirectory() as root:
        if kind == "Trainer":
            quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
            trainer = Trainer(
                max_epochs=3, callbacks=callbacks, default_root_dir=root, num_sanity_val_steps=0, **QUIET | quiet
            )
        else:
            trainer = make_loop(root, *callbacks, clients_per_round=1, enable_checkpointing=False)
        try:
            trainer.fit(module, datamodule=Data())
        except ValueError as error:
            return way.weights, str(error), weights_of(module)
    return way.weights


def equal(one, other):
    return len(one) == len(other) and all(
        torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(one, other, strict=True)
    )


def outcome(owner, hook, name):
    """What a ``Trainer`` and a loop make of a change, each in a few words."""
    change = CHANGES[name]
    of_loop = trained("loop", owner, hook, change)
    untouched = trained("Trainer", None, hook, change)
    if hook in ("on_client_start", "on_client_end"):
        # With one client it starts where a Trainer's epoch does.
        alike = trained("Trainer", owner, "on_train_epoch_start", change)
        said = "none"
    else:
        alike = trained("Trainer", owner, hook, change)
        said = "no optimizer yet" if equal(alike, untouched) else "counts"
        assert (said == "counts") is not (hook == "setup" and name == "learning rate")
    if isinstance(of_loop, tuple):
        weights, error, held = of_loop
        assert "must stay the same during a fit" in error
        assert "net.bias" in error
        assert error.count("\n") == 0
        # Nothing of the round in which it is refused has been trained, or nothing of it is left.
        start = weights_of(Module())
        finished = hook in ("on_client_end", "on_validation_start", "on_validation_end", "on_train_epoch_end")
        assert weights == []
        assert torch.equal(held[-1:], start[-1:]) is not finished
        return said, "refused"
    if hook == "on_client_end":
        assert equal(of_loop, untouched)
        return said, "lost"
    in_a_client = hook in ("on_client_start", "on_train_batch_start", "on_train_batch_end")
    if in_a_client and name == "learning rate":
        where = "on_train_epoch_start" if hook == "on_client_start" else hook
        assert equal(of_loop, trained("Trainer", owner, where, change, Undo()))
        return said, "for this client"
    assert equal(of_loop, alike)
    return said, "in this client's update" if in_a_client and name != "`requires_grad`" else "the same"


def line(hook):
    """A row of the table; callback and module get the same."""
    cells = []
    for name in CHANGES:
        found = {outcome(owner, hook, name) for owner in ("callback", "module")}
        assert len(found) == 1
        cells.append(" / ".join(found.pop()))
    return f"| `{hook}` | {' | '.join(cells)} |"


HEADER = f"| Trainer / loop | {' | '.join(CHANGES)} |\n|{' --- |' * (1 + len(CHANGES))}\n"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hook", HOOKS)
def test_the_row_of_a_hook_in_the_documentation_is_what_is_found(hook):
    assert line(hook) in DOCS.read_text().splitlines()


def test_the_table_has_no_other_rows():
    text, _, table = DOCS.read_text().partition(MARK)
    assert table.startswith(HEADER)
    assert len(table.splitlines()) == 2 + len(HOOKS)
    assert "as in a `Trainer`" in text


if __name__ == "__main__":
    text = DOCS.read_text().partition(MARK)[0]
    DOCS.write_text(text + MARK + HEADER + "".join(f"{line(hook)}\n" for hook in HOOKS))
    sys.stdout.write(f"{DOCS} is written.\n")
