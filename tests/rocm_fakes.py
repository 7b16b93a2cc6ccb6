"""A torch that says it is built for ROCm: as far as that can be had without such a device."""

from types import SimpleNamespace

import pytest
import torch

GIB = 2**30


def fake_rocm(monkeypatch: pytest.MonkeyPatch, gpus: int = 0, name: str = "AMD Instinct MI250X") -> list[torch.device]:
    """Fake the build flags and ``gpus`` devices; gives the list that `torch.cuda.set_device` is recorded in."""
    chosen: list[torch.device] = []
    properties = SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-", major=9, minor=0)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.version, "cuda", None)
    for variable in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"):
        monkeypatch.delenv(variable, raising=False)
    fakes = {
        "device_count": lambda: gpus,
        "is_available": lambda: gpus > 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: name,
        "mem_get_info": lambda device=None: (60 * GIB, 64 * GIB),
        "memory_stats": lambda device=None: {"allocated_bytes.all.peak": 7},
        "set_device": chosen.append,
    }
    for function, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, function, fake)
    return chosen


def forbid_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every attempt to start a process fail."""

    def refuse(*arguments, **named):
        raise AssertionError(f"a process was started: {arguments}")

    for path in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.execv"):
        monkeypatch.setattr(path, refuse)
