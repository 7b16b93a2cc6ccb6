"""What this machine can train with: the facts behind ``fedstop doctor``.

Nothing heavy is imported before it is needed, so that a broken installation is described rather than tripped over.
"""

import os
import platform
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_fedstop.utilities.environment import device_name, package_versions, torch_build
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
    """The findings.

    Attributes:
        facts: Plain values by topic.
        problems: Reasons why the machine cannot train as it is, a sentence each.
        warnings: Reasons why it may not.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def diagnose(
    accelerator: str = "auto",
    data_root: str | os.PathLike[str] | None = None,
    default_root_dir: str | os.PathLike[str] | None = None,
) -> Diagnosis:
    """Look at everything a run needs, without training.

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
    """All that could train, the CPU first: accelerator, name, free memory in bytes, and its error."""
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
    """Train one batch of a small ConvNeXtV2 in a :class:`~lightning_fedstop.loop.FederatedLoop`, writing nothing.

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
    """Try to write to a folder, or to the one it would be made in; leaves nothing behind."""
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
