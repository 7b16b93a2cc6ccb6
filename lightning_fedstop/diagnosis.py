"""Whether this machine can train, and with what: the facts behind ``fedstop doctor``.

Nothing heavy is imported before it is needed, so that a broken installation is described rather than tripped over.
"""

import os
import platform
import shutil
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_fedstop.environment import device_name, package_versions, torch_build

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
    """What was found.

    Attributes:
        facts: plain values by topic.
        problems: why the machine cannot train as it is, a sentence each.
        warnings: what may become one.
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
        accelerator: the one that has to be there; ``"auto"`` takes what there is.
        data_root: the folder of MedMNIST's files; ``None`` is ``~/.medmnist``.
        default_root_dir: the folder that runs are written to; ``None`` is the present one.
    """
    found = Diagnosis()
    facts = found.facts
    facts["python"] = platform.python_version()
    facts["platform"] = platform.platform()
    facts["versions"] = package_versions()
    found.problems += unmet_requirements()
    facts["machine"] = machine()
    facts["default_root_dir"] = folder(Path(default_root_dir or ".").absolute())
    if (reason := facts["default_root_dir"]["refusal"]) is not None:
        path = facts["default_root_dir"]["path"]
        found.problems.append(f"Nothing can be written to '{path}' ({reason}): set `default_root_dir` to another one.")
    facts["data"] = folder(Path("~/.medmnist" if data_root is None else data_root).expanduser().absolute())
    try:
        import torch

        import lightning_fedstop.loop  # noqa: F401  (all that training needs)
        from lightning_fedstop.data.archive import ImageArchive
    except Exception as error:
        found.problems.append(f"What training needs cannot be imported: {type(error).__name__}: {_one_line(error)}.")
        return found
    facts["data"]["archives"] = [
        _archive(ImageArchive, path) for path in sorted(Path(facts["data"]["path"]).glob("*.npz"))
    ]
    facts["torch"] = {"version": torch.__version__, "build": torch_build(), "threads": torch.get_num_threads()}
    if torch.version.hip:
        facts["rocm_settings"] = {name: os.environ.get(name) for name in ROCM_SETTINGS}
    facts["devices"] = devices(facts["machine"])
    _check_accelerators(found, accelerator, bool(torch.version.hip))
    return found


def _check_accelerators(found: Diagnosis, accelerator: str, is_hip: bool) -> None:
    from lightning_fedstop.accelerators import nvml_hint, rocm_trouble, visible_gpus
    from lightning_fedstop.arguments import make_fabric

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
    """A sentence for each required package that is missing or of a version that does not do."""
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


def machine() -> dict[str, Any]:
    """Cores and memory: those of the machine, and what this process may have of them; bytes, ``None`` if unknown."""
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    total = available = None
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limits = [int(text) for path in _MEMORY_LIMITS for text in _lines(path)[:1] if text.strip().isdigit()]
    limit = min((limit for limit in limits if total is None or limit < total), default=None)
    return {
        "cores": cores,
        "usable_cores": usable,
        "memory_total": total,
        "memory_available": available,
        "memory_limit": limit,
        "bf16": _processor_has_bf16(),
    }


# Of the control group that a container or a batch system puts a process into.
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _processor_has_bf16() -> bool | None:
    """Whether the processor has instructions for bfloat16, ``None`` where it does not say."""
    flags = next(
        (line.split() for line in _lines("/proc/cpuinfo") if line.lower().startswith(("flags", "features"))), None
    )
    return None if flags is None else not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def devices(cpu: dict[str, Any]) -> list[dict[str, Any]]:
    """All that could train, the CPU first: name, accelerator, memory in bytes, bfloat16, and what is wrong with it."""
    import torch

    from lightning_fedstop.accelerators import visible_gpus

    found = [
        {
            "device": "cpu",
            "accelerator": "cpu",
            "name": device_name(torch.device("cpu")),
            "memory_free": cpu["memory_available"],
            "memory_total": cpu["memory_limit"] or cpu["memory_total"],
            "bf16": cpu["bf16"],
            "error": None,
        }
    ]
    accelerator = "rocm" if torch.version.hip else "cuda"
    found += [_gpu(torch.device("cuda", index), accelerator) for index in range(visible_gpus()[0])]
    if torch.backends.mps.is_available():
        unknown = {"memory_free": None, "memory_total": None, "bf16": None, "error": None}
        found.append({"device": "mps:0", "accelerator": "mps", "name": f"Apple GPU ({platform.machine()})", **unknown})
    return found


def _gpu(device: Any, accelerator: str) -> dict[str, Any]:
    import torch

    found = {"device": str(device), "accelerator": accelerator, "name": "", "memory_free": None, "memory_total": None}
    try:
        free, total = torch.cuda.mem_get_info(device)
        # All GPUs that ROCm supports have bfloat16, NVIDIA's from compute capability 8 on.
        bf16 = bool(torch.version.hip) or torch.cuda.get_device_properties(device).major >= 8
        name = device_name(device)
    except Exception as error:
        return found | {"bf16": None, "error": f"{type(error).__name__}: {_one_line(error)}"}
    return found | {"name": name, "memory_free": free, "memory_total": total, "bf16": bf16, "error": None}


def folder(path: Path) -> dict[str, Any]:
    """Whether files can be written to a folder, or to the one it would be made in; leaves nothing behind."""
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    refusal = None
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        refusal = error.strerror or type(error).__name__
    return {"path": str(path), "exists": path.is_dir(), "refusal": refusal, "free_bytes": shutil.disk_usage(there).free}


def _archive(reader: Any, path: Path) -> dict[str, Any]:
    """What an archive's headers say; its arrays are not read."""
    try:
        archive = reader(path)
    except (ValueError, TypeError, OSError) as error:
        return {"file": path.name, "error": _one_line(error)}
    return {"file": path.name, "height": archive.height, "width": archive.width, **archive.sizes, "error": None}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).removesuffix(".") or type(error).__name__
