"""The floor: federated averaging in plain PyTorch, with nothing of the package.

``python -m benchmarks.bare_loop WORK.npz`` reads the images, the clients' indices and the cohort of each round, and
then trains one round for each line on standard input, answering with the seconds that it took and the peak memory.
"""

import itertools
import resource
import sys
import time
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def build_model(name: str, num_classes: int) -> nn.Module:
    """A timm model, or the two-layer CNN of 5,000 parameters."""
    if name != "cnn":
        model: nn.Module = timm.create_model(name, num_classes=num_classes)
        return model
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(144, num_classes),
    )


def load_batch(images: Tensor, size: int) -> Tensor:
    """uint8 images as normalised floats of ``size`` pixels."""
    batch = images.permute(0, 3, 1, 2).float().div_(127.5).sub_(1)
    return batch if batch.shape[-1] == size else F.interpolate(batch, (size, size), mode="bilinear")


class BareLoop:
    """One model, into which each client's start is copied, and one running sum of updates."""

    def __init__(self, work: Any) -> None:
        self.images, self.labels = torch.from_numpy(work["images"]), torch.from_numpy(work["labels"])
        bounds = work["offsets"]
        self.clients = [work["indices"][a:b] for a, b in itertools.pairwise(bounds)]
        self.cohorts = work["cohorts"]
        self.epochs, self.batch_size, self.size = (int(work[name]) for name in ("epochs", "batch_size", "size"))
        torch.manual_seed(0)
        self.model = build_model(str(work["model"]), int(self.labels.max()) + 1)
        self.parameters = list(self.model.parameters())
        self.theta = [parameter.detach().clone() for parameter in self.parameters]
        self.lr = float(work["lr"])

    def train_client(self, indices: np.ndarray) -> int:
        """SGD with momentum from the global model; the module then holds the local one."""
        with torch.no_grad():
            for parameter, start in zip(self.parameters, self.theta, strict=True):
                parameter.copy_(start)
        optimizer = torch.optim.SGD(self.parameters, self.lr, momentum=0.9, weight_decay=1e-3)
        steps = 0
        for _ in range(self.epochs):
            order = torch.from_numpy(indices)[torch.randperm(len(indices))]
            for chosen in order.split(self.batch_size):
                loss = F.cross_entropy(self.model(load_batch(self.images[chosen], self.size)), self.labels[chosen])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.parameters, 10.0)
                optimizer.step()
                steps += 1
        return steps

    def round(self, number: int) -> None:
        """Train the cohort and average."""
        total = [torch.zeros_like(start) for start in self.theta]
        trained = 0
        self.model.train()
        for client in self.cohorts[number]:
            if self.train_client(self.clients[client]):
                trained += 1
                for part, parameter in zip(total, self.parameters, strict=True):
                    part += parameter.detach()
        if trained:
            self.theta = [part / trained for part in total]


def main(path: str, threads: int) -> None:
    """Train a round for each line on standard input."""
    torch.set_num_threads(threads)
    with np.load(path) as work:
        loop = BareLoop(work)
    for number, _ in enumerate(sys.stdin):
        began = time.perf_counter()
        loop.round(number)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(time.perf_counter() - began, peak, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
