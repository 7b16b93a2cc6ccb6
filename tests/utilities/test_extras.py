"""Without the packages of the extras the rest works, and what needs one names it."""

import subprocess
import sys

import pytest

EXTRAS = ("timm", "torchvision", "medmnist", "sklearn", "matplotlib", "safetensors")


BLOCKED = f"""
import importlib.metadata as metadata, sys
sys.modules.update(dict.fromkeys({EXTRAS}))
real = metadata.distribution
def distribution(name):  # which other packages ask before they import
    if name in ({EXTRAS}):
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.distribution = distribution
"""


def run_without_extras(code):
    return subprocess.run([sys.executable, "-c", BLOCKED + code], capture_output=True, text=True)


def test_the_rules_the_loop_and_the_methods_need_none_of_them(tmp_path):
    code = f"""
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import TensorDataset
from lightning_fedstop import *

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 2)
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

data = LightningDataModule.from_datasets(TensorDataset(torch.randn(12, 3), torch.arange(12) % 2), batch_size=2)
rule = TaskVectorEarlyStopping(threshold=10.0, patience=1)
loop = FederatedLoop(method=FedAvg(), max_rounds=5, clients_per_round=2, callbacks=[rule], accelerator="cpu",
                     default_root_dir={str(tmp_path)!r}, enable_progress_bar=False)
loop.fit(Net(), Federated(data, num_clients=3))
print(loop.current_epoch, ImageClassifier.__name__)
"""
    done = run_without_extras(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["2", "ImageClassifier"]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("ImageClassifier(num_classes=2)", "`ImageClassifier` needs timm, which is not installed: `pip install"),
        ("MedMNIST()", '`MedMNIST` needs medmnist, which is not installed: `pip install "lightning-fedstop[images]"`.'),
        ("Digits()", '`Digits` needs sklearn, which is not installed: `pip install "lightning-fedstop[images]"`.'),
        ("Partition.create(Iid(), [0, 1], 2).plot('x.png')", '`pip install "lightning-fedstop[report]"`.'),
        ("write_report([])", 'A report needs matplotlib, which is not installed: `pip install "lightning-fedstop[rep'),
    ],
)
def test_what_needs_one_names_it(call, sentence):
    imports = "from lightning_fedstop import *; from lightning_fedstop.records.report import write_report\n"
    last = run_without_extras(imports + call).stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ")
    assert sentence in last
