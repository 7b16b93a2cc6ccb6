"""``fedstop doctor``: the facts on this machine, and a dry run on each of its devices.

Nothing heavy is imported before it is needed, so that a broken installation is described rather than tripped over.
"""

import json
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_fedstop.cli.parser import SentenceParser
from lightning_fedstop.utilities.environment import device_name, package_versions, torch_build
from lightning_fedstop.utilities.files import atomic_file
from lightning_fedstop.utilities.paths import local_path

ROCM_SETTINGS = {
    "MIOPEN_FIND_MODE": "how MIOpen, the library of convolutions, chooses a kernel for a shape it has not seen: NORMAL "
    "tries them all, which takes minutes in the first batch; FAST takes what is on file, else a guess",
    "MIOPEN_USER_DB_PATH": "where it keeps what it found (else ~/.config/miopen): keep it from job to job",
    "MIOPEN_CUSTOM_CACHE_DIR": "where it keeps compiled kernels (else ~/.cache/miopen): keep it too, not on a disk "
    "shared by nodes",
    "HSA_OVERRIDE_GFX_VERSION": "lets a GPU pass for one of another architecture, such as 10.3.0; a wrong one crashes "
    "or computes nonsense",
    "PYTORCH_HIP_ALLOC_CONF": "settings of torch's allocator against fragmented memory; PYTORCH_ALLOC_CONF from torch "
    "2.9 on",
    "PYTORCH_TUNABLEOP_ENABLED": "1 searches the fastest matrix product for each shape, once",
    "HIP_VISIBLE_DEVICES": "which GPUs HIP shows; it counts those that ROCR_VISIBLE_DEVICES leaves, from 0",
    "ROCR_VISIBLE_DEVICES": "which GPUs ROCm shows; the order may not be that of rocm-smi",
}
"""Environment variables that matter on ROCm, and what each does."""


@dataclass
class Diagnosis:
    """Findings about a machine.

    Attributes:
        facts: Plain values by topic.
        problems: Reasons why the machine cannot train as it is, a sentence each.
        warnings: Reasons why it may not.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def _parser() -> SentenceParser:
    parser = SentenceParser(
        prog="fedstop doctor",
        description="Look at all that training needs, train one batch on each device, and say what is wrong. The exit "
        "code is 0 if this machine can train and 1 if not.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--accelerator", default="auto", metavar="NAME", help="one that has to be there, such as cuda or rocm")
    add("--data_root", metavar="DIR", help="the folder of MedMNIST's files (default: ~/.medmnist)")
    add("--default_root_dir", metavar="DIR", help="the folder that runs are written to (default: the present one)")
    add("--no_training", action="store_true", help="leave out the dry runs")
    add("--json", metavar="FILE", help="write the facts to a file as well, or to the screen alone if it is `-`")
    return parser


def main(argv: list[str]) -> None:
    """Print the facts, train one batch on each device, and print what is wrong.

    Args:
        argv: The arguments after ``fedstop doctor``.

    Raises:
        SystemExit: With code 1, after a sentence for each problem on stderr; with 2 for an error in the arguments.
    """
    args = _parser().parse_args(argv)
    # A file that cannot be written is better refused before the dry runs.
    if args.json not in (None, "-") and not (parent := local_path(args.json, "--json").absolute().parent).is_dir():
        raise FileNotFoundError(f"--json {args.json}: there is no folder '{parent}'.")
    console = Console(highlight=False, markup=False, quiet=args.json == "-", width=None if sys.stdout.isatty() else 120)
    found = diagnose(args.accelerator, args.data_root, args.default_root_dir)
    console.print(_table(found.facts))
    if not args.no_training:
        _try_devices(console, found)
    if args.json is not None:
        _write_json(args.json, found)
    for warning in found.warnings:
        sys.stderr.write(f"fedstop doctor: warning: {warning}\n")
    for problem in found.problems:
        sys.stderr.write(f"fedstop doctor: error: {problem}\n")
    if found.problems:
        raise SystemExit(1)
    console.print("This machine can train.")


def _try_devices(console: Console, found: Diagnosis) -> None:
    for device in found.facts.get("devices", []):
        name = device["device"]
        if device["error"]:
            continue
        console.print(f"Dry run on {name}: ", end="")
        sys.stdout.flush()  # what is seen of a device that takes the process down with it
        try:
            device["seconds"] = dry_run(device["accelerator"], int(name.partition(":")[2] or 0))
            console.print(f"one batch in {device['seconds']:.1f} s")
        except Exception as error:
            device["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(".")
            console.print("failed")
            found.problems.append(f"Training on {name} failed: {device['error']}.")


def _table(facts: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    settings = {
        name: f"{'not set' if value is None else repr(value)}: {ROCM_SETTINGS[name]}"
        for name, value in facts.get("rocm_settings", {}).items()
    }
    devices = {device["device"]: _device(device) for device in facts.get("devices", [])}
    devices |= {"GPU": "none is visible"} if list(devices) == ["cpu"] else {}
    folders = {"runs": _folder(facts["runs"]), "MedMNIST": _folder(facts["data"]), **facts.get("archives", {})}
    _add_topic(table, "Versions", facts["versions"])
    _add_topic(table, "Machine", facts.get("machine", {}))
    _add_topic(table, "Devices", devices)
    _add_topic(table, "ROCm settings", settings)
    _add_topic(table, "Folders", folders)
    return table


def _add_topic(table: Table, topic: str, lines: dict[str, Any]) -> None:
    for number, (name, value) in enumerate(lines.items()):
        # As `Text`, because a string's square brackets would be read as markup.
        table.add_row(*map(Text, ("" if number else topic, name, str(value))))


def _device(device: dict[str, Any]) -> str:
    if device["error"]:
        return f"cannot be used: {device['error']}"
    free = "" if device["memory_free"] is None else f", {device['memory_free'] / 2**30:.1f} GiB free"
    return f"{device['name']}{free}, accelerator {device['accelerator']}"


def _folder(folder: dict[str, Any]) -> str:
    there = "" if folder["exists"] else ", not there yet"
    access = "writable" if folder["refusal"] is None else f"not writable ({folder['refusal']})"
    return f"{folder['path']}{there}, {access}, {folder['free_bytes'] / 2**30:.1f} GiB free"


def _write_json(path: str, found: Diagnosis) -> None:
    text = json.dumps({"can_train": not found.problems, **asdict(found)}, indent=2, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    with atomic_file(local_path(path, "--json")) as temporary:
        temporary.write_text(text, encoding="utf-8")


def diagnose(
    accelerator: str = "auto",
    data_root: str | os.PathLike[str] | None = None,
    default_root_dir: str | os.PathLike[str] | None = None,
) -> Diagnosis:
    """Examine everything a run needs, without training.

    Args:
        accelerator: One that has to be there; ``"auto"`` takes any.
        data_root: The folder of MedMNIST's files; ``~/.medmnist`` by default.
        default_root_dir: The folder that runs are written to; the present one by default.
    """
    found = Diagnosis()
    facts = found.facts
    facts["versions"] = {"python": platform.python_version(), **package_versions()}
    found.problems += unmet_requirements()
    facts["runs"] = folder(local_path(default_root_dir or ".", "default_root_dir").absolute())
    if (reason := facts["runs"]["refusal"]) is not None:
        path = facts["runs"]["path"]
        found.problems.append(f"Nothing can be written to '{path}' ({reason}): set `default_root_dir` to another one.")
    facts["data"] = folder(local_path("~/.medmnist" if data_root is None else data_root, "data_root").absolute())
    try:
        import torch

        import lightning_fedstop.loop.federated_loop  # noqa: F401  (all that training needs)
        from lightning_fedstop.data.archives.archive import ImageArchive
    except Exception as error:
        found.problems.append(f"What training needs cannot be imported: {type(error).__name__}: {_one_line(error)}.")
        return found
    paths = sorted(Path(facts["data"]["path"]).glob("*.npz"))
    facts["archives"] = {path.name: _archive(ImageArchive, path) for path in paths}
    facts["machine"] = {"torch built for": torch_build(), "torch threads": torch.get_num_threads(), **_environment()}
    if torch.version.hip:
        facts["rocm_settings"] = {name: os.environ.get(name) for name in ROCM_SETTINGS}
    facts["devices"] = devices()
    _check_accelerators(found, accelerator, bool(torch.version.hip))
    return found


def _environment() -> dict[str, str]:
    """The short facts that torch collects for reports of errors."""
    from torch.utils.collect_env import get_env_info

    try:
        collected: Any = get_env_info()  # type: ignore[no-untyped-call]
    except Exception as error:  # a driver that does not answer, which the dry runs will name
        return {"not collected": f"{type(error).__name__}: {_one_line(error)}"}
    found = {name: str(value) for name, value in collected._asdict().items() if name != "pip_packages"}
    models = [line.partition(":")[2].strip() for line in found.pop("cpu_info").splitlines() if "odel name" in line]
    found |= {"cpu": models[0]} if models else {}
    unknown = ("", "{}", "None", "N/A", "Could not collect")
    return {name.replace("_", " "): " ".join(text.split()) for name, text in found.items() if text not in unknown}


def _check_accelerators(found: Diagnosis, accelerator: str, is_hip: bool) -> None:
    from lightning_fedstop.loop.arguments import make_fabric
    from lightning_fedstop.utilities.accelerators import nvml_hint, rocm_trouble, visible_gpus

    failure = visible_gpus()[1]
    if failure is not None:
        found.problems.append(f"torch cannot count the GPUs ({failure}){nvml_hint()}.")
    elif is_hip and find_spec("pynvml") is not None:
        found.warnings.append(
            "pynvml is installed, and with some releases of torch for ROCm it breaks the count of GPUs: uninstall the "
            "packages pynvml and nvidia-ml-py."
        )
    found.problems += [
        f"{device['device']} cannot be used: {device['error']}." for device in found.facts["devices"] if device["error"]
    ]
    if accelerator != "auto":
        try:
            make_fabric(accelerator=accelerator, devices=1)
        except Exception as error:
            found.problems.append(_one_line(error))
    elif failure is None and is_hip and (trouble := rocm_trouble()) is not None:
        found.warnings.append(f"Only the CPU can train: {trouble}")


def unmet_requirements() -> list[str]:
    """A sentence for each required package that is missing or too old or too new."""
    try:
        from packaging.requirements import Requirement

        required = [Requirement(line) for line in metadata.requires("lightning-fedstop") or []]
    except (ImportError, metadata.PackageNotFoundError):
        return []
    unmet = []
    for requirement in required:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            unmet.append(f"The package {requirement.name} is missing.")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            unmet.append(
                f"{requirement.name} {version} is installed, but {requirement.name}{requirement.specifier} is needed."
            )
    return unmet


def devices() -> list[dict[str, Any]]:
    """Devices that could train, the CPU first: accelerator, name, free bytes, and error."""
    import torch

    from lightning_fedstop.utilities.accelerators import visible_gpus

    names = {"cpu": "cpu"}
    names |= {f"cuda:{index}": "rocm" if torch.version.hip else "cuda" for index in range(visible_gpus()[0])}
    names |= {"mps:0": "mps"} if torch.backends.mps.is_available() else {}
    return [{"device": name, "accelerator": accelerator, **_described(name)} for name, accelerator in names.items()]


def _described(name: str) -> dict[str, Any]:
    import torch

    device = torch.device(name)
    try:
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        return {"name": device_name(device), "memory_free": free, "error": None}
    except Exception as error:
        return {"name": "", "memory_free": None, "error": f"{type(error).__name__}: {_one_line(error)}"}


def dry_run(accelerator: str, index: int = 0) -> float:
    """Train one batch of a small ConvNeXtV2, writing nothing.

    Args:
        accelerator: As the loop takes it.
        index: One of its devices; of no meaning on a CPU.

    Returns:
        Seconds, with the search for kernels on an accelerator.

    Raises:
        FloatingPointError: If the update is not finite. What else the device raises is passed on.
    """
    import torch
    from lightning.pytorch import LightningDataModule
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_fedstop import Federated, FederatedLoop, ImageClassifier

    images = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    data = LightningDataModule()
    data.train_dataloader = lambda: DataLoader(TensorDataset(images, torch.arange(16) % 8), batch_size=16)  # type: ignore[method-assign]
    loop = FederatedLoop(
        accelerator=accelerator,
        devices=1 if accelerator == "cpu" else [index],
        clients_per_round=1,
        check_val_every_n_round=None,
        logger=False,
        enable_progress_bar=False,
        fast_dev_run=True,
    )
    began = time.perf_counter()
    loop.fit(ImageClassifier("convnextv2_atto", num_classes=8), Federated(data, num_clients=1))
    if loop.nonfinite_reason is not None:
        raise FloatingPointError("the weights are not finite after a step of training")
    return time.perf_counter() - began


def folder(path: Path) -> dict[str, Any]:
    """Test writing to a folder, or to its nearest parent, and leave nothing behind."""
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    refusal = None
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        refusal = error.strerror or type(error).__name__
    return {"path": str(path), "exists": path.is_dir(), "refusal": refusal, "free_bytes": shutil.disk_usage(there).free}


def _archive(reader: Any, path: Path) -> str:
    """The figures in an archive's headers; its arrays are not read."""
    try:
        archive = reader(path)
    except (ValueError, TypeError, OSError) as error:
        return _one_line(error)
    sizes = ", ".join(f"{size} {split}" for split, size in archive.sizes.items())
    return f"{archive.width} x {archive.height} px, {sizes}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).removesuffix(".") or type(error).__name__
