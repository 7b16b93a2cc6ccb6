import pytest
import torch

from lightning_fedstop.records.summary import peak_memory, summarize
from lightning_fedstop.utilities.environment import device_name, torch_build, versions
from tests.rocm_fakes import fake_rocm, forbid_processes


@pytest.mark.parametrize(
    ("cuda", "hip", "build", "recorded"),
    [
        (None, None, "the CPU alone", {}),
        ("12.8", None, "CUDA 12.8", {"cuda": "12.8"}),
        (None, "6.4.43482", "HIP 6.4.43482", {"hip": "6.4.43482"}),
    ],
)
def test_the_build_of_torch_is_recorded(monkeypatch, cuda, hip, build, recorded):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = versions()
    assert torch_build() == build
    assert {name: found[name] for name in ("cuda", "hip") if name in found} == recorded
    assert {"python", "torch", "lightning"} <= found.keys()


@pytest.mark.parametrize("name", ["AMD Instinct MI250X", ""])
def test_a_gpu_is_named_with_its_architecture_on_rocm(monkeypatch, name):
    fake_rocm(monkeypatch, gpus=1, name=name)
    assert device_name(torch.device("cuda", 0)) == f"{name or 'AMD GPU'} (gfx90a, cuda:0)"
    monkeypatch.setattr(torch.version, "hip", None)
    assert device_name(torch.device("cuda", 0)) == f"{name} (cuda:0)"


def test_the_summary_of_a_run_on_rocm_starts_no_process(monkeypatch):
    fake_rocm(monkeypatch, gpus=1)
    forbid_processes(monkeypatch)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 11)
    device = torch.device("cuda", 0)
    summary = summarize(3, "Done.", 5, {}, None, None, device, 1.0, torch.zeros(2))
    assert summary["device"] == "AMD Instinct MI250X (gfx90a, cuda:0)"
    assert summary["versions"]["hip"] == "6.4.43482"
    assert summary["peak_memory_bytes"]["accelerator"] == peak_memory(device)["accelerator"] == 11
