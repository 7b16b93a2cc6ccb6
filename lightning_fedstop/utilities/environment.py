"""The environment of a run: versions, the build of torch, devices.

torch is imported only where it is asked, so that an installation without a working one can still be described.
"""

import functools
import platform
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PACKAGES = ("lightning-fedstop", "lightning", "torch", "torchvision", "timm", "medmnist", "torchmetrics", "numpy")
"""The packages whose versions a record holds."""


@functools.cache
def package_versions() -> dict[str, str]:
    """The versions of :data:`PACKAGES`; those not installed are left out."""
    found = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def versions() -> dict[str, str]:
    """Versions of Python, the packages, and the CUDA or HIP of torch."""
    import torch

    found = {"python": platform.python_version(), **package_versions()}
    backends = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return found | {name: version for name, version in backends.items() if version}


def torch_build() -> str:
    """Target that torch is built for: ``"CUDA 12.8"``, ``"HIP 6.4"`` or ``"the CPU alone"``."""
    import torch

    if torch.version.hip:
        return f"HIP {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"


def device_name(device: "torch.device") -> str:
    """The accelerator's own name, on ROCm with its architecture; else the processor's architecture."""
    import torch

    if device.type != "cuda":
        return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
    name = torch.cuda.get_device_name(device)
    if not torch.version.hip:
        return f"{name} ({device})"
    # Some releases of ROCm know no other name of a GPU than its architecture, such as `gfx90a:sramecc+:xnack-`.
    architecture = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "").partition(":")[0]
    return f"{name or 'AMD GPU'} ({', '.join(filter(None, (architecture, str(device))))})"
