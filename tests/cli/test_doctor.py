import json

import pytest

from lightning_fedstop.cli import diagnosis
from lightning_fedstop.cli.main import main
from tests.cli_tools import refusal
from tests.rocm_fakes import fake_rocm


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

    monkeypatch.setattr(diagnosis, "dry_run", train)
    fake_rocm(monkeypatch, gpus=1)
    monkeypatch.setenv("MIOPEN_FIND_MODE", "FAST")
    monkeypatch.setattr("lightning_fedstop.cli.diagnosis.find_spec", lambda name: None)
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

    monkeypatch.setattr(diagnosis, "dry_run", fail)
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
    monkeypatch.setattr("lightning_fedstop.cli.diagnosis.find_spec", lambda name: None)
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
