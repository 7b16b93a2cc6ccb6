"""Federations to compare methods on: quadratics and a small ConvNeXtV2 in float64, a linear classifier in float32."""

import timm
import torch

from lightning_fedstop import methods
from lightning_fedstop.federation.cohort import ScheduledCohort
from lightning_fedstop.loop.federated_loop import FederatedLoop
from lightning_fedstop.methods import FederatedMethod
from tests.helpers import QUIET, ToyData, ToyModule, Trace, fit, run_case

PARTIAL = [[0, 1], [1, 2], [0, 2], [0, 1]]
ALL = [[0, 1, 2]] * 3


def quadratic(method, root, schedule=PARTIAL, **settings):
    """The oracles' 2-d clients with momentum, weight decay and an active clip; gives a dict a round."""
    given = {
        "A": [[[2.0, 0.5], [0.5, 1.0]], [[1.0, 0.0], [0.0, 3.0]], [[1.5, -0.5], [-0.5, 2.0]]],
        "b": [[1.0, 0.0], [-1.0, 2.0], [0.5, -1.5]],
        "theta0": [0.3, -0.2],
        "K": [1, 2, 3],
        "lr": 0.05,
        "lr_decay": 0.998,
        "momentum": 0.9,
        "wd": 1e-3,
        "clip": 0.5,
        "rounds_selected": schedule,
    }
    return run_case({"input": given | settings}, method, root)


class Images(ToyData):
    """Three clients of a few random images in two classes."""

    def __init__(self, sizes=(5, 7, 2), batch_size=4):
        super().__init__(sizes, batch_size, evaluated=False)
        self.x = torch.randn(len(self.x), 3, 32, 32, generator=torch.Generator().manual_seed(1))


class SmallConvNeXt(ToyModule):
    def __init__(self, dtype=torch.float64):
        torch.manual_seed(0)
        net = timm.create_model("convnextv2_atto", num_classes=2, depths=(1, 1, 1, 1), dims=(4, 4, 8, 8))
        super().__init__(net=net.to(dtype))
        self.dtype_in = dtype

    def loss(self, batch):
        return super().loss((batch[0].to(self.dtype_in), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.998)]


def convnext(method, root, schedule=PARTIAL, clip=0.5, data=None, module=None, **arguments):
    """A small ConvNeXtV2 with momentum, weight decay and an active clip; gives a dict a round."""
    trace = Trace()
    loop = FederatedLoop(
        method,
        max_rounds=len(schedule),
        local_epochs=2,
        cohort=ScheduledCohort(schedule),
        clients_per_round=1,
        gradient_clip_val=clip,
        seed=0,
        callbacks=[trace],
        enable_checkpointing=False,
        default_root_dir=root,
        **QUIET | arguments,
    )
    loop.fit(SmallConvNeXt() if module is None else module, Images() if data is None else data)
    return trace.rounds


def public_methods(module=methods):
    """The methods that a module shows, by name."""
    shown = {name: getattr(module, name) for name in module.__all__}
    found = {name: shown[name] for name in sorted(shown) if isinstance(shown[name], type)}
    return {n: c for n, c in found.items() if issubclass(c, FederatedMethod) and c is not FederatedMethod}


SHOWING = {
    "FedProx": lambda: methods.FedProx(0.5),
    "FedDyn": lambda: methods.FedDyn(0.5),
    "FedSAM": lambda: methods.FedSAM(0.1),
    "FedSpeed": lambda: methods.FedSpeed(0.5, 0.1),
    "FedSMOO": lambda: methods.FedSMOO(0.5, 0.1),
    "FedGamma": lambda: methods.FedGamma(0.1),
    "FedLESAM": lambda: methods.FedLESAM(0.1),
    "FedWMSAM": lambda: methods.FedWMSAM(0.1, alpha_init=0.5, alpha_rate=0.3),
}
"""Hyperparameters that show in a few rounds, where those by default do not."""

METHODS = {name: SHOWING.get(name, method) for name, method in public_methods().items()}
"""Every public method."""


def toy(make, root, *callbacks, schedule=((0, 1), (1, 2), (0, 2), (0, 1)), **arguments):
    """A few rounds of the linear classifier on 3 clients; gives the loop and a dict a round."""
    trace = Trace()
    given = {
        "max_rounds": len(schedule),
        "clients_per_round": 1,
        "cohort": ScheduledCohort([list(cohort) for cohort in schedule]),
    }
    given |= {"data": ToyData((6, 4, 7), evaluated=False), "enable_checkpointing": False, "seed": 0, "method": make()}
    loop, _ = fit(root, trace, *callbacks, **given | arguments)
    return loop, trace.rounds


def same_bits(first, second):
    """Whether two rounds' global models, server states and clients' states agree in all bits."""
    assert first["state"].keys() == second["state"].keys()
    assert first["states"].keys() == second["states"].keys()
    pairs = [(first["theta"], second["theta"])]
    pairs += [(first[kind][key], second[kind][key]) for kind in ("state", "states") for key in first[kind]]
    return all(equal(a, b) for a, b in pairs)


def equal(first, second):
    """Equality of nested dicts, lists and numbers that may hold tensors."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    return torch.equal(first, second) if torch.is_tensor(first) else first == second
