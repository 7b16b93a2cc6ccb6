"""Every command in README.md and docs/ runs as it is written."""

import re
import shlex
import shutil
import sys

import numpy as np
import pytest

from experiments.paper.__main__ import main as paper
from lightning_fedstop.cli.main import main
from lightning_fedstop.loop.reporting import Reporter
from tests.cli_tools import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
START = r"(?:[A-Z_]+=\S+ )*(?:fedstop|pip|python -m) "

# For a run: seconds instead of hours, of the same classes as far as the command names them.
BRIEF = "--trainer.max_rounds 1 --trainer.clients_per_round 2 --trainer.local_epochs 1 --trainer.limit_train_batches 1"
BRIEF += " --trainer.limit_val_batches 1 --trainer.limit_test_batches 1 --trainer.devices 1"
SMALL = f"{BRIEF} --model.backbone test_vit --model.pretrained false"
ARCHIVE = "--data.root archives --data.download false --data.num_clients 12 --data.batch_size 16"
STARTS = "starts"  # all is built and read, but no round is trained

# The command as it is written: what is added to it, and how it ends (None: well).
COMMANDS = {
    'pip install ".[all]"': ("not run", None),
    'pip install -e ".[test]"': ("not run", None),
    "python -m pytest": ("not run", None),
    "fedstop fit --config configs/quickstart.yaml": (SMALL, None),
    "fedstop fit --config configs/bloodmnist.yaml --config configs/skew/quantity.yaml --trainer.method SCAFFOLD": (
        f"{SMALL} {ARCHIVE}",
        None,
    ),
    "fedstop fit --data Digits --model.backbone resnet18 --trainer.callbacks+=TaskVectorEarlyStopping"
    " --trainer.drop_single_sample_batches true": (BRIEF, None),
    "fedstop fit --data Federated --data.datamodule your_module.YourData --model your_module.YourModule"
    " --optimizer AdamW --optimizer.lr 1e-3": (BRIEF, None),
    "fedstop test --config lightning_logs/version_0/config.yaml"
    " --ckpt_path lightning_logs/version_0/checkpoints/last.ckpt": ("", None),
    "fedstop partition --config configs/quickstart.yaml --picture clients.png": ("", None),
    "fedstop replay lightning_logs/version_0 --threshold 0.005 0.01 0.05 0.1 --patience 1 5 10": ("", None),
    "fedstop report lightning_logs/version_0 --out report.html": ("", None),
    "fedstop doctor": ("--no_training", None),
    "fedstop replay runs/seed0 --threshold 0.1 --patience 1 5 --rule task_vector val_loss": ("", None),
    "fedstop replay log.csv --column round=t distance=dist --budget 500 --patience 3": ("", None),
    "fedstop replay lightning_logs/version_0/metrics.csv --zero_based"
    " --column round=epoch distance=task_vector/distance": ("in other_tool", None),
    "fedstop report RUN... --out report.html": ("", None),
    "fedstop doctor --accelerator rocm": ("--no_training", "ROCm"),
    "fedstop fit --config configs/bloodmnist.yaml --config configs/accelerator/rocm.yaml": (ARCHIVE, "ROCm"),
    "THP_MEM_ALLOC_ENABLE=1 MALLOC_MMAP_THRESHOLD_=1048576 MALLOC_TRIM_THRESHOLD_=8388608 fedstop fit ...": (
        STARTS,
        None,
    ),
    "fedstop fit --config x.yaml": (STARTS, None),
    "fedstop fit --config x.yaml --data.cache_dir cache": (STARTS, None),
    "fedstop fit --config x.yaml --trainer.client_backend stacked --trainer.stack_chunk_size 25": (STARTS, None),
    "fedstop fit --config x.yaml --data.skew my_skew.GeometricSkew --data.skew.factor 0.9": (STARTS, None),
    "fedstop fit --data my_data.Bars --data.skew DirichletSkew": (SMALL, None),
    "fedstop fit --trainer.method my_method.FedCM --trainer.method.alpha 0.1": (f"{SMALL} {ARCHIVE}", None),
    "python -m experiments.paper table3 --root runs --dry-run": ("", None),
    "python -m experiments.paper table3 --root runs --jobs 4 --gpus 0 1 2 3": ("--dry-run", None),
    "python -m experiments.paper table3 --root runs": ("", None),
    "python -m experiments.paper table3 --root runs --format latex": ("", None),
    "python -m experiments.paper table3 --root runs --emit slurm --out job.sh --slurm partition=mi300x time=12:00:00": (
        "",
        None,
    ),
}

EXAMPLES = {"add_a_method.md": "my_method", "add_a_skew.md": "my_skew", "add_a_dataset.md": "my_data"}

YOURS = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class YourData(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(400, 4), torch.arange(400) % 3), batch_size=8, shuffle=True)


class YourModule(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def commands_of(page):
    """The commands in blocks of code and in indented lines; a lone `fedstop fit` with arguments in a sentence too."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip().removeprefix("$ ") for line in text.splitlines() if re.match(rf"(?:    |\$ )?{START}", line)]
    lines += [line for line in re.findall(r"`(fedstop \w+ --[^`]*)`", text) if "json" not in line]
    for line in lines:
        for command in re.split(r" && ", re.sub(r"\s+#.*$", "", line)):
            yield re.sub(r"\s+", " ", command).strip()


def test_the_table_holds_what_is_written():
    written = {command for page in PAGES for command in commands_of(page)}
    assert written == set(COMMANDS)


class Started(Exception):
    """Everything was accepted, and the first round would begin."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a reader of the documents has: the repository's configurations, data, modules and a run of their own."""
    root = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "configs", root / "configs")
    (root / "your_module.py").write_text(YOURS)
    for page, module in EXAMPLES.items():
        codes = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text("utf-8"), flags=re.DOTALL)
        (root / f"{module}.py").write_text(codes[0])
    draw = np.random.default_rng(0)
    (root / "archives").mkdir()
    for size, suffix in ((28, ""), (64, "_64")):
        arrays = {}
        for split, count in (("train", 400), ("val", 20), ("test", 20)):
            arrays[f"{split}_images"] = draw.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
            arrays[f"{split}_labels"] = np.arange(count, dtype=np.uint8)[:, None] % 8
        np.savez(root / "archives" / f"bloodmnist{suffix}.npz", **arrays)
    (root / "x.yaml").write_text(
        "trainer: {max_rounds: 1, clients_per_round: 2, devices: 1}\n"
        "data: {class_path: MedMNIST, init_args: {root: archives, size: 28, num_clients: 12}}\n"
        "model: {class_path: ImageClassifier, init_args: {backbone: convnextv2_atto}}\n"
    )
    (root / "log.csv").write_text("t,dist\n1,1.0\n2,1.5\n3,1.6\n4,1.605\n5,1.609\n")
    logs = root / "other_tool" / "lightning_logs" / "version_0"
    logs.mkdir(parents=True)
    (logs / "metrics.csv").write_text("epoch,task_vector/distance\n0,1.0\n1,1.5\n2,1.6\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        main(shlex.split(f"fit --config configs/quickstart.yaml {SMALL} --trainer.max_rounds 5"))
    shutil.copytree(root / "lightning_logs" / "version_0", root / "runs" / "seed0")
    return root


@pytest.fixture(autouse=True)
def modules():
    """Modules of the folder are imported by each test for itself."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in ("your_module", *EXAMPLES.values()):
        sys.modules.pop(name, None)


def run(command):
    """Run the command in this process; gives the exit code."""
    words = shlex.split(command)
    program, rest = (paper, words[3:]) if words[0] == "python" else (main, words[1:])
    try:
        program(rest)
    except SystemExit as exit:
        return exit.code
    return 0


RUN = [command for command, (added, _) in COMMANDS.items() if added != "not run"]


@pytest.mark.parametrize("command", RUN)
def test_the_command_runs_as_it_is_written(folder, monkeypatch, capsys, command):
    added, refusal = COMMANDS[command]
    monkeypatch.chdir(folder / added.removeprefix("in ") if added.startswith("in ") else folder)
    monkeypatch.syspath_prepend(str(folder))
    written = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", command)
    written = written.replace("RUN...", "lightning_logs/version_0").replace("...", "--config x.yaml")
    if added == STARTS:

        def start(reporter):
            raise Started

        monkeypatch.setattr(Reporter, "log_hyperparameters", start)
        with pytest.raises(Started):
            run(written)
        return
    code = run(written if added.startswith("in ") else f"{written} {added}")
    said = capsys.readouterr()
    if refusal is None:
        assert code in (0, None), said.err
        assert "Traceback" not in said.err
    else:
        assert code in (1, 2)
        (sentence,) = [line for line in said.err.splitlines() if ": error: " in line]
        assert refusal in sentence


@pytest.mark.parametrize("accelerator", [[], ["--config", "configs/accelerator/cpu.yaml"]])
def test_without_network_and_data_a_run_says_so(folder, monkeypatch, capsys, accelerator):
    monkeypatch.chdir(folder)
    args = ["--config configs/bloodmnist.yaml --data.download false --data.root nothing --model.pretrained false"]
    assert run(" ".join(["fedstop fit", *args, *accelerator])) == 2
    (sentence,) = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    assert "bloodmnist_64.npz" in sentence
    assert "download" in sentence


def test_the_replay_of_the_quickstart_knows_the_accuracy_of_each_round(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert run("fedstop replay lightning_logs/version_0 --threshold 0.005 0.01 0.05 0.1 --patience 1 5 10") == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert len(rows) == 36
    assert not [row for row in rows if row.split()[-1] == "-"]
