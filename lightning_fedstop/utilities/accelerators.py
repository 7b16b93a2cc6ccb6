"""AMD GPUs under a name of their own: ``accelerator: rocm``.

PyTorch for ROCm answers to the ``cuda`` device API, so that ``accelerator: cuda`` trains on an AMD GPU too. The name
``rocm`` refuses to train on anything else, says what is missing, and asks no NVIDIA tool for figures.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.accelerators import ACCELERATOR_REGISTRY, CUDAAccelerator
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fedstop.utilities.environment import torch_build

HIDING = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""The environment variables that choose which GPUs a program on ROCm sees."""

DRIVER = Path("/dev/kfd")
"""What every program on ROCm opens first."""


class ROCmAccelerator(CUDAAccelerator):
    """Accelerator for AMD GPUs, registered in Fabric as ``"rocm"``.

    Devices are called ``cuda:0`` and so on, as PyTorch calls them; several processes talk through RCCL, which PyTorch
    calls ``nccl``.

    ``FederatedLoop(accelerator="rocm")`` needs nothing more. ``Fabric(accelerator="rocm")`` takes the CPU for a single
    device, because Lightning tells GPUs by the names it knows: pass ``Fabric(accelerator=ROCmAccelerator())`` there.

    Raises:
        MisconfigurationException: if this torch is not built for HIP, or sees no GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        if (trouble := rocm_trouble()) is not None:
            raise MisconfigurationException(trouble)

    def setup_device(self, device: torch.device) -> None:
        """Make ``device`` the present one.

        Raises:
            ValueError: if it is no GPU.
        """
        if device.type != "cuda":
            raise ValueError(
                f"ROCmAccelerator needs a `cuda` device, which is what torch calls an AMD GPU, got '{device}'; with a "
                f"Fabric of your own, pass `accelerator=ROCmAccelerator()` instead of its name."
            )
        torch.cuda.set_device(device)

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, float]:
        """Figures on the memory of ``device``: torch's allocator, free and total bytes."""
        free, total = torch.cuda.mem_get_info(device)
        return {**torch.cuda.memory_stats(device), "free_bytes": free, "total_bytes": total}

    @staticmethod
    def auto_device_count() -> int:
        """The GPUs that are visible."""
        return visible_gpus()[0]

    @staticmethod
    def is_available() -> bool:
        """True if this torch is built for HIP and sees a GPU."""
        return rocm_trouble() is None

    @staticmethod
    def name() -> str:
        """Name in a configuration."""
        return "rocm"


def rocm_trouble() -> str | None:
    """Why this process cannot train on an AMD GPU, a sentence; ``None`` if it can."""
    build = torch_build()
    if torch.version.hip is None:
        others = "'cuda', 'cpu' or 'auto'" if torch.version.cuda else "'cpu' or 'auto'"
        return (
            f"torch {torch.__version__} is built for {build}, not for HIP: install a build of torch for ROCm, or "
            f"choose {others}."
        )
    count, failure = visible_gpus()
    if failure is not None:
        return f"torch {torch.__version__}, built for {build}, cannot count the GPUs ({failure}){nvml_hint()}."
    if count:
        return None
    hidden = [f"{name} is {os.environ[name]!r}" for name in HIDING if name in os.environ]
    reasons = " and ".join(hidden) or f"neither {HIDING[0]} nor {HIDING[1]} is set"
    return f"torch {torch.__version__}, built for {build}, sees no GPU: {reasons}, and {_driver()}."


def visible_gpus() -> tuple[int, str | None]:
    """Number of GPUs that torch sees, and the error of counting them, if any."""
    try:
        return torch.cuda.device_count(), None
    except Exception as error:  # `NameError: amdsmi` where pynvml is installed, of all things
        return 0, f"{type(error).__name__}: {error}"


def nvml_hint() -> str:
    """Advice on pynvml, the end of a sentence; empty without it."""
    if find_spec("pynvml") is None:
        return ""
    return "; pynvml is installed, which breaks that on ROCm: uninstall the packages pynvml and nvidia-ml-py"


def _driver() -> str:
    if not DRIVER.exists():
        return f"there is no {DRIVER}, so the amdgpu driver is not loaded, or the container was started without it"
    if not os.access(DRIVER, os.R_OK | os.W_OK):
        return f"{DRIVER} cannot be opened by this user, who has to be in the group `render`"
    return f"{DRIVER} is there, so see what `rocminfo` lists"


def accelerator_for_fabric(accelerator: Any) -> Any:
    """Translate a loop's ``accelerator`` for ``Fabric``, which knows no ``"rocm"``.

    Given a name, Fabric holds only ``"cuda"``, ``"gpu"`` and ``"mps"`` for GPUs, and puts one device of any other on
    the CPU; given the accelerator, it goes by its class.

    Raises:
        MisconfigurationException: for ``"rocm"`` where it cannot be had.
    """
    return ROCmAccelerator() if accelerator == ROCmAccelerator.name() else accelerator


ACCELERATOR_REGISTRY.register(
    ROCmAccelerator.name(), ROCmAccelerator, description="AMD GPUs (torch built for HIP)", override=True
)
