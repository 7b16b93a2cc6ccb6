import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import ACCELERATOR_REGISTRY, CUDAAccelerator
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_fedstop import FederatedLoop
from lightning_fedstop.cli.main import main
from lightning_fedstop.utilities import accelerators
from lightning_fedstop.utilities.accelerators import ROCmAccelerator, rocm_trouble
from tests.cli_tools import TINY, refusal
from tests.rocm_fakes import GIB, fake_rocm, forbid_processes

ROCM = ["fit", *TINY, "--trainer.accelerator", "rocm"]


@pytest.mark.parametrize(("cuda", "build", "others"), [(None, "the CPU alone", ""), ("12.8", "CUDA 12.8", "'cuda', ")])
def test_a_torch_without_hip_is_named(monkeypatch, cuda, build, others):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(MisconfigurationException) as error:
        FederatedLoop(accelerator="rocm", devices=1)
    assert str(error.value) == (
        f"`accelerator='rocm'` cannot be used: torch {torch.__version__} is built for {build}, not for HIP: install a "
        f"build of torch for ROCm, or choose {others}'cpu' or 'auto'."
    )
    assert not ROCmAccelerator.is_available()


def test_the_command_line_says_it_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.version, "hip", None)
    assert "is built for" in refusal(capsys, *ROCM)
    fake_rocm(monkeypatch)
    assert "sees no GPU" in refusal(capsys, *ROCM)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("hiding", "said"),
    [
        ({}, "neither HIP_VISIBLE_DEVICES nor ROCR_VISIBLE_DEVICES is set, and "),
        ({"HIP_VISIBLE_DEVICES": "7"}, "HIP_VISIBLE_DEVICES is '7', and "),
        ({"HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "0,1"}, "HIP_VISIBLE_DEVICES is '' and ROCR_VISIBLE_DEV"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES is '-1', and "),
    ],
)
def test_without_a_visible_gpu_what_hides_it_is_named(monkeypatch, hiding, said):
    fake_rocm(monkeypatch)
    for name, value in hiding.items():
        monkeypatch.setenv(name, value)
    assert rocm_trouble().startswith(f"torch {torch.__version__}, built for HIP 6.4.43482, sees no GPU: {said}")


def test_without_a_visible_gpu_the_driver_is_looked_at(monkeypatch, tmp_path):
    fake_rocm(monkeypatch)
    monkeypatch.setattr(accelerators, "DRIVER", tmp_path / "kfd")
    assert rocm_trouble().endswith(
        f"there is no {tmp_path / 'kfd'}, so the amdgpu driver is not loaded, or the container was started without it."
    )
    (tmp_path / "kfd").touch()
    assert rocm_trouble().endswith("is there, so see what `rocminfo` lists.")
    monkeypatch.setattr("os.access", lambda *arguments: False)
    assert "has to be in the group `render`" in rocm_trouble()


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_count_that_fails_is_no_crash(monkeypatch, is_installed):
    def count():
        raise NameError("name 'amdsmi' is not defined")

    fake_rocm(monkeypatch, gpus=1)
    monkeypatch.setattr(torch.cuda, "device_count", count)
    monkeypatch.setattr(accelerators, "find_spec", lambda name: is_installed or None)
    trouble = rocm_trouble()
    assert "cannot count the GPUs (NameError: name 'amdsmi' is not defined)" in trouble
    assert ("uninstall the packages pynvml and nvidia-ml-py." in trouble) == is_installed
    assert ROCmAccelerator.auto_device_count() == 0


def test_one_gpu_is_trained_on(monkeypatch):
    chosen = fake_rocm(monkeypatch, gpus=1)
    loop = FederatedLoop(accelerator="rocm", precision="bf16-mixed")
    strategy = loop.fabric.strategy
    assert isinstance(loop.accelerator, ROCmAccelerator)
    # An accelerator of a name that Lightning does not know would get the CPU here.
    assert (type(strategy), strategy.root_device) == (SingleDeviceStrategy, torch.device("cuda", 0))
    assert (type(strategy.precision), strategy.precision.device) == (MixedPrecision, "cuda")
    loop.fabric.launch()
    assert chosen == [torch.device("cuda", 0)]


@pytest.mark.parametrize(("devices", "indices"), [("auto", [0, 1]), (2, [0, 1]), ("1", [0]), ([1], [1]), (-1, [0, 1])])
def test_devices_are_parsed_as_for_cuda(monkeypatch, devices, indices):
    fake_rocm(monkeypatch, gpus=2)
    strategy = FederatedLoop(accelerator="rocm", strategy="ddp", devices=devices).fabric.strategy
    assert isinstance(strategy, DDPStrategy)
    assert strategy.parallel_devices == [torch.device("cuda", index) for index in indices]
    assert strategy._get_process_group_backend() == "nccl"


def test_devices_that_are_not_there_are_refused(monkeypatch):
    fake_rocm(monkeypatch, gpus=1)
    with pytest.raises(MisconfigurationException, match=r"`accelerator='rocm'`, `devices=3` cannot be used"):
        FederatedLoop(accelerator="rocm", devices=3)


def test_several_gpus_are_shared_by_processes_unasked(monkeypatch):
    fake_rocm(monkeypatch, gpus=2)
    assert isinstance(FederatedLoop(accelerator="rocm").fabric.strategy, DDPStrategy)


def test_the_other_names_stay_lightnings(monkeypatch):
    fake_rocm(monkeypatch, gpus=1)
    for name in ("cuda", "gpu", "auto"):
        assert type(FederatedLoop(accelerator=name, devices=1).accelerator) is CUDAAccelerator


def test_a_fabric_of_ones_own(monkeypatch):
    fake_rocm(monkeypatch, gpus=1)
    assert ACCELERATOR_REGISTRY["rocm"]["accelerator"] is ROCmAccelerator
    assert Fabric(accelerator=ROCmAccelerator(), devices=1).device == torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"got 'cpu'; with a Fabric of your own, pass `accelerator=ROCmAccelerator"):
        Fabric(accelerator="rocm", devices=1).launch()
    fake_rocm(monkeypatch)
    with pytest.raises(MisconfigurationException, match="sees no GPU"):
        Fabric(accelerator="rocm", devices=1)


def test_statistics_are_torchs_and_start_no_process(monkeypatch):
    fake_rocm(monkeypatch, gpus=1)
    forbid_processes(monkeypatch)
    stats = ROCmAccelerator().get_device_stats(torch.device("cuda", 0))
    assert stats == {"allocated_bytes.all.peak": 7, "free_bytes": 60 * GIB, "total_bytes": 64 * GIB}


def test_the_overlay_asks_for_it(capsys):
    overlay = TINY[1].replace("tests/conf/tiny.yaml", "configs/accelerator/rocm.yaml")
    with pytest.raises(SystemExit):
        main(["fit", *TINY, "--config", overlay, "--print_config"])
    assert "\n  accelerator: rocm\n" in capsys.readouterr().out
