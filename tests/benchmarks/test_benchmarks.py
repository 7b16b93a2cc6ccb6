"""The benchmarks run and measure the same work; no figure is judged here."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import COMMANDS, main
from benchmarks.bare_loop import BareLoop
from benchmarks.workloads import WORKLOADS, write_work
from lightning_fedstop.core.parameters import FlatParameters
from lightning_fedstop.federation.cohort import ScheduledCohort
from tests.helpers import make_loop

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]


def test_round_gives_both_sides_and_the_ratio_on_top(tmp_path, capsys):
    main(["round", "--workload", "tiny", "--rounds", "1", "--json", "-"])
    result = json.loads(capsys.readouterr().out)
    assert next(iter(result)) == "ratio"
    assert result["ratio"] == pytest.approx(result["ours"]["seconds"][0] / result["bare"]["seconds"][0])
    assert result["ours"]["peak_gib"] > 0.05
    assert 0 <= result["idle"] < 1


def test_both_sides_start_from_one_model_and_move_alike(tmp_path):
    """The order of a client's batches differs, so the models agree roughly, not bit for bit."""
    from benchmarks.our_loop import Classifier, WorkData

    workload = WORKLOADS["tiny"]
    path = write_work(tmp_path, workload, 2)
    with np.load(path) as work:
        bare, cohorts = BareLoop(work), work["cohorts"].tolist()
        module = Classifier("cnn", 8, float(work["lr"]))
    start = FlatParameters(module).vector.clone()
    assert start.tolist() == [value for part in bare.theta for value in part.flatten().tolist()]
    for number in range(2):
        bare.round(number)
    data = WorkData(path, workload.num_clients, workload.batch_size, workload.size)
    loop = make_loop(tmp_path, max_rounds=2, cohort=ScheduledCohort(cohorts), clients_per_round=3, gradient_clip_val=10)
    loop.fit(module, data)
    ours = FlatParameters(module).vector - start
    theirs = np.concatenate([part.flatten().numpy() for part in bare.theta]) - start.numpy()
    assert np.linalg.norm(ours.detach().numpy() - theirs) < 0.2 * np.linalg.norm(theirs)


def test_the_bare_loop_stays_bare():
    text = (ROOT / "benchmarks" / "bare_loop.py").read_text()
    assert len(text.splitlines()) < 120
    assert "lightning" not in text


@pytest.mark.parametrize("arguments", [["criterion"], ["steps", "--backbone", "resnet18", "--ways", "timm", "bf16"]])
def test_the_other_commands_write_their_figures(tmp_path, arguments):
    arguments = [*arguments, "--workload", "tiny"] if arguments[0] == "criterion" else [*arguments, "--batch_size", "2"]
    main([*arguments, "--rounds", "1", "--json", str(tmp_path / "figures.json")])
    assert json.loads((tmp_path / "figures.json").read_text())


def test_norm_gives_ratio_and_error_of_each_way(capsys):
    main(["norm", "--sizes", "300000", "--rounds", "1", "--json", "-"])
    ways = json.loads(capsys.readouterr().out)["300000"]
    assert ways["plain"]["ratio"] == 1
    assert abs(ways["ours"]["error"]) < 1e-12


def test_the_help_names_all_commands():
    text = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert all(name in text for name in COMMANDS)
