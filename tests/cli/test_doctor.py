import importlib.machinery
import json
import sys

import numpy as np
import pytest
import torch

from lightning_fedstop.cli import doctor as command
from lightning_fedstop.cli.doctor import devices, diagnose, dry_run, folder, unmet_requirements
from lightning_fedstop.cli.main import main
from lightning_fedstop.utilities import accelerators
from tests.cli_tools import refusal
from tests.rocm_fakes import GIB, fake_rocm, forbid_processes


@pytest.fixture
def doctor(capsys, monkeypatch, tmp_path):
    """Runs the command in an empty folder; gives its exit code and what it wrote to the screen, lines of one space."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        code = 0
        try:
            main(["doctor", "--data_root", str(tmp_path / "[data]"), *args])
        except SystemExit as exit:
            code = exit.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


def squeezed(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_machine_that_can_train(doctor, monkeypatch, tmp_path):
    calls = []

    def train(*arguments):
        calls.append(arguments)
        return 2.5

    monkeypatch.setattr(command, "dry_run", train)
    fake_rocm(monkeypatch, gpus=1)
    monkeypatch.setenv("MIOPEN_FIND_MODE", "FAST")
    monkeypatch.setattr("lightning_fedstop.cli.doctor.find_spec", lambda name: None)
    code, out, err = doctor("--json", "found.json")
    lines = squeezed(out)
    assert (code, err, lines[-1]) == (0, "", "This machine can train.")
    assert calls == [("cpu", 0), ("rocm", 0)]
    assert lines[-2] == "Dry run on cuda:0: one batch in 2.5 s"
    text = " ".join(lines)
    assert "torch built for HIP 6.4.43482" in text
    assert "cuda:0 AMD Instinct MI250X (gfx90a, cuda:0), 60.0 GiB free, accelerator rocm" in text
    assert "ROCm settings MIOPEN_FIND_MODE 'FAST': how MIOpen" in text
    assert "MIOPEN_USER_DB_PATH not set: where" in text
    assert "none is visible" not in text
    # Square brackets are part of a path and no markup.
    assert f"MedMNIST {tmp_path}/[data], not there yet, writable" in text
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["can_train"]
    assert found["facts"]["devices"][1] == {
        "device": "cuda:0",
        "accelerator": "rocm",
        "name": "AMD Instinct MI250X (gfx90a, cuda:0)",
        "memory_free": 60 * 2**30,
        "error": None,
        "seconds": 2.5,
    }


def test_json_on_the_screen_is_alone_there(doctor, tmp_path):
    code, out, _ = doctor("--json", "-", "--no_training")
    found = json.loads(out)
    assert code == 0
    assert found["can_train"]
    assert "seconds" not in found["facts"]["devices"][0]
    assert not list(tmp_path.iterdir())


def test_a_device_that_does_not_train_is_named(doctor, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("HIP error: invalid device function.\nCompile with TORCH_USE_HIP_DSA")

    monkeypatch.setattr(command, "dry_run", fail)
    code, out, err = doctor()
    assert code == 1
    assert "can train" not in out
    assert err == (
        "fedstop doctor: error: Training on cpu failed: RuntimeError: HIP error: invalid device function. Compile with "
        "TORCH_USE_HIP_DSA.\n"
    )


def test_problems_are_told_after_the_facts_even_without_torch(doctor, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    code, out, err = doctor()
    assert code == 1
    assert "versions" in out.lower()
    assert err.startswith("fedstop doctor: error: What training needs cannot be imported: ModuleNotFoundError: ")
    assert len(err.splitlines()) == 1


def test_an_accelerator_that_has_to_be_there(doctor, monkeypatch):
    fake_rocm(monkeypatch)
    monkeypatch.setattr("lightning_fedstop.cli.doctor.find_spec", lambda name: None)
    code, _, err = doctor("--no_training")
    assert code == 0
    assert err.startswith("fedstop doctor: warning: Only the CPU can train")
    code, out, err = doctor("--no_training", "--accelerator", "rocm")
    assert code == 1
    assert err.startswith("fedstop doctor: error: `accelerator='rocm'` cannot be used: torch")
    assert "GPU none is visible" in squeezed(out)


def test_arguments_are_checked_first(capsys, tmp_path):
    assert "there is no folder" in refusal(capsys, "doctor", "--json", str(tmp_path / "absent" / "found.json"))
    assert "unrecognized arguments: --jsn" in refusal(capsys, "doctor", "--jsn", "x")


# The facts


@pytest.fixture
def look(tmp_path):
    return lambda accelerator="auto": diagnose(accelerator, tmp_path / "data", tmp_path)


def without_pynvml(monkeypatch, is_installed=False):
    spec = importlib.machinery.ModuleSpec("pynvml", None) if is_installed else None
    for module in (accelerators, command):
        monkeypatch.setattr(module, "find_spec", lambda name: spec)


def test_the_facts_of_a_machine_that_can_train(look, tmp_path):
    found = look()
    assert not found.problems
    cpu = found.facts["devices"][0]
    assert (cpu["device"], cpu["accelerator"], cpu["error"]) == ("cpu", "cpu", None)
    assert found.facts["versions"]["torch"]
    assert found.facts["runs"] | {"free_bytes": 0} == {
        "path": str(tmp_path),
        "exists": True,
        "refusal": None,
        "free_bytes": 0,
    }
    assert not found.facts["data"]["exists"]
    assert not list(tmp_path.iterdir())


def test_archives_are_listed_with_what_is_wrong(look, tmp_path):
    (tmp_path / "data").mkdir()
    images, labels = np.zeros((5, 28, 28, 3), np.uint8), np.zeros((5, 1), np.int64)
    np.savez(tmp_path / "data" / "bloodmnist.npz", train_images=images, train_labels=labels)
    (tmp_path / "data" / "pathmnist.npz").write_bytes(b"PK truncated")
    archives = look().facts["archives"]
    assert archives["bloodmnist.npz"] == "28 x 28 px, 5 train, 0 val, 0 test"
    assert "truncated, damaged" in archives["pathmnist.npz"]


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path):
    (tmp_path / "file").touch()
    found = diagnose(default_root_dir=tmp_path / "file" / "runs")
    (problem,) = found.problems
    assert problem.startswith(f"Nothing can be written to '{tmp_path / 'file' / 'runs'}' (Not a directory)")


def test_a_folder_is_looked_for_upwards(tmp_path):
    found = folder(tmp_path / "a" / "b")
    assert (found["exists"], found["refusal"]) == (False, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", ["lightning_fedstop.loop.federated_loop", "torch"])
def test_what_cannot_be_imported_is_a_problem(look, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    found = look()
    (problem,) = found.problems
    assert problem.startswith("What training needs cannot be imported: ModuleNotFoundError:")
    assert "devices" not in found.facts


def test_requirements_are_compared_with_what_is_installed(monkeypatch):
    lines = ["torch>=99,!=99.1", "torch>=1", "a-package-that-is-not-there>=1", 'another; extra == "test"']
    monkeypatch.setattr(command.metadata, "requires", lambda name: lines)
    assert unmet_requirements() == [
        f"torch {command.metadata.version('torch')} is installed, but torch!=99.1,>=99 is needed.",
        "The package a-package-that-is-not-there is missing.",
    ]


def test_torch_s_own_facts_are_short_and_known(look):
    machine = look().facts["machine"]
    assert machine["torch built for"] in machine.values()
    assert machine["torch threads"] == torch.get_num_threads()
    assert machine["is debug build"] == "False"
    assert not {"", "N/A", "Could not collect", "None"}.intersection(machine.values())
    assert all(len(str(value)) < 200 for value in machine.values())


def test_facts_that_torch_cannot_collect_are_no_problem(look, monkeypatch):
    def fail():
        raise RuntimeError("no driver\n at all")

    monkeypatch.setattr("torch.utils.collect_env.get_env_info", fail)
    found = look()
    assert not found.problems
    assert found.facts["machine"]["not collected"] == "RuntimeError: no driver at all"


def test_a_dry_run_trains_and_writes_nothing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert dry_run("cpu") > 0
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite_are_an_error(monkeypatch):
    from lightning_fedstop import ImageClassifier

    step = ImageClassifier.training_step
    monkeypatch.setattr(ImageClassifier, "training_step", lambda self, *batch: step(self, *batch) * torch.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        dry_run("cpu")


def test_rocm_without_a_gpu_is_a_warning_unless_it_is_asked_for(look, monkeypatch):
    fake_rocm(monkeypatch)
    without_pynvml(monkeypatch)
    monkeypatch.setenv("MIOPEN_FIND_MODE", "FAST")
    found = look()
    assert not found.problems
    (warning,) = found.warnings
    assert warning.startswith("Only the CPU can train: torch")
    assert found.facts["machine"]["torch built for"] == "HIP 6.4.43482"
    assert found.facts["rocm_settings"]["MIOPEN_FIND_MODE"] == "FAST"
    assert found.facts["rocm_settings"]["MIOPEN_USER_DB_PATH"] is None
    (problem,) = look("rocm").problems
    assert problem.startswith("`accelerator='rocm'` cannot be used: torch")


def test_gpus_are_described_without_a_process(look, monkeypatch):
    fake_rocm(monkeypatch, gpus=2)
    without_pynvml(monkeypatch)
    found = look("rocm")
    assert not found.problems + found.warnings
    forbid_processes(monkeypatch)
    assert found.facts["devices"] == devices()
    assert devices()[2] == {
        "device": "cuda:1",
        "accelerator": "rocm",
        "name": "AMD Instinct MI250X (gfx90a, cuda:1)",
        "memory_free": 60 * GIB,
        "error": None,
    }
    monkeypatch.setattr(torch.version, "hip", None)
    assert [device["accelerator"] for device in look().facts["devices"][1:]] == ["cuda"] * 2


def test_a_gpu_that_does_not_answer_is_a_problem(look, monkeypatch):
    def fail(device):
        raise RuntimeError("HIP error: invalid\n device ordinal.")

    fake_rocm(monkeypatch, gpus=1)
    without_pynvml(monkeypatch)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert look().problems == ["cuda:0 cannot be used: RuntimeError: HIP error: invalid device ordinal."]


def test_pynvml_on_rocm(look, monkeypatch):
    def fail():
        raise NameError("name 'amdsmi' is not defined")

    fake_rocm(monkeypatch, gpus=1)
    without_pynvml(monkeypatch, is_installed=True)
    (warning,) = look().warnings
    assert warning.startswith("pynvml is installed")
    monkeypatch.setattr(torch.cuda, "device_count", fail)
    found = look()
    assert not found.warnings
    (problem,) = found.problems
    assert problem.startswith("torch cannot count the GPUs (NameError: name 'amdsmi' is not defined); pynvml is inst")
