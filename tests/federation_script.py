"""Fits with two processes, run as a script: ``python -m tests.federation_script <root> <processes>``.

Writes ``<root>/<processes>-<case>.pt`` (the state and the metrics) from the first process of each case.
"""

import sys

import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_fedstop.core.client_states import ClientStates
from lightning_fedstop.methods import SCAFFOLD, FedAvg, FedLESAM, FedSAM, FedWMSAM
from lightning_fedstop.stopping import TaskVectorEarlyStopping
from tests.core.test_state_mean import Teacher
from tests.helpers import ToyData, ToyModule, make_loop
from tests.module.test_loss_scale import Large, float16_loop


class Logs(ToyModule):
    """BatchNorm, dropout, a metric object, and numbers of every reduction."""

    def __init__(self):
        super().__init__(net=nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 2)))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        self.accuracy = MulticlassAccuracy(2)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for reduce_fx in ("sum", "min", "max"):
            self.log(reduce_fx, float(len(batch[0])), reduce_fx=reduce_fx)
        return loss

    def validation_step(self, batch, batch_idx):
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("val_acc", self.accuracy)
        super().validation_step(batch, batch_idx)


class Noise(Callback):
    """Adds noise to the weights after each round, other noise on each process."""

    def on_train_epoch_end(self, trainer, pl_module):
        generator = torch.Generator().manual_seed(10 * trainer.global_rank + trainer.current_epoch)
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def diverging():
    module = Logs()
    module.loss = lambda batch: nn.functional.cross_entropy(module.net(batch[0]) * float("nan"), batch[1])
    return module


CASES = {
    "fedavg": lambda: (Logs(), FedAvg(), [TaskVectorEarlyStopping(0.2, 2)], {}),
    "scaffold": lambda: (Logs(), SCAFFOLD(), [EarlyStopping("val_loss", patience=2)], {"weighting": "samples"}),
    "fedlesam": lambda: (Logs(), FedLESAM(0.1), [], {"client_states": ClientStates("disk"), "max_rounds": 3}),
    "fedwmsam": lambda: (Logs(), FedWMSAM(0.1, alpha_rate=0.3), [], {"clients_per_round": 3, "max_rounds": 3}),
    "one client": lambda: (Logs(), FedAvg(), [], {"clients_per_round": 1, "max_rounds": 2}),
    "noise": lambda: (Logs(), FedAvg(), [Noise(), TaskVectorEarlyStopping(1e-9, 9)], {"max_rounds": 2}),
    "diverging": lambda: (diverging(), FedAvg(), [], {}),
    "teacher": lambda: (Teacher().float(), FedSAM(0.1), [], {"max_rounds": 3, "weighting": "samples"}),
    "stacked": lambda: (ToyModule(), SCAFFOLD(), [], {"client_backend": "stacked"}),
}


def main(root, processes):
    options = {"devices": processes, "strategy": "ddp" if processes > 1 else "auto"}
    for name, case in CASES.items():
        module, method, callbacks, arguments = case()
        given = {"clients_per_round": 4, "max_rounds": 6, "method": method} | arguments | options
        loop = make_loop(f"{root}/{processes}-{name}", *callbacks, **given)
        loop.fit(module, ToyData())
        if loop.is_global_zero:
            metrics = {k: float(v) for k, v in loop.callback_metrics.items()}
            reason = loop.summary["stop_reason"]
            found = {"state": module.state_dict(), "metrics": metrics, "round": loop.current_epoch, "reason": reason}
            torch.save(found, f"{root}/{processes}-{name}.pt")
        if name == "scaffold":
            module = Logs()
            more = make_loop(f"{root}/{processes}-{name}", **given | {"max_rounds": loop.current_epoch + 2})
            more.fit(module, ToyData(), ckpt_path="last")
            if loop.is_global_zero:
                torch.save({"state": module.state_dict()}, f"{root}/{processes}-resumed.pt")

    scaled(root, processes, options)


def scaled(root, processes, options):
    """A run whose loss scale changes in each round, whole and resumed after round 3."""
    found = {}
    for name, stops in {"whole": [6], "resumed": [3, 6]}.items():
        for rounds in stops:
            given = {"clients_per_round": 4, "max_rounds": rounds, "local_epochs": 2} | options
            loop = float16_loop(f"{root}/{processes}-{name}", growth_interval=3, **given)
            loop.fit(module := Large(), ToyData(), ckpt_path="last" if rounds > stops[0] else None)
        found[name] = module.state_dict()
    if loop.is_global_zero:
        torch.save(found, f"{root}/{processes}-scaled.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
