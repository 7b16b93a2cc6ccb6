import csv
import shlex
import subprocess
import sys

import pytest

from experiments.paper import Choice, Run, launch, runs_of
from experiments.paper.__main__ import main
from tests.cli_tools import ROOT
from tests.experiments.paper.runs import write_run

TINY = ["--scale", "tiny", "--datasets", "bloodmnist", "--skews", "dirichlet", "--seeds", "0"]


def paper(*args):
    main(list(map(str, args)))


def refusal(capsys, *args):
    """The one line on stderr with which the command ends."""
    with pytest.raises(SystemExit) as exit:
        main(list(args))
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("python -m experiments.paper: error: ")


def commands(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("fedstop ")]


@pytest.mark.process
def test_a_table_runs_end_to_end_and_goes_on_where_it_was_left(tmp_path, capsys):
    args = ["table1", "--root", tmp_path / "runs", *TINY, "--methods", "FedAvg", "SCAFFOLD", "--jobs", 2]
    run_on = ["--", "--trainer.accelerator", "cpu"]
    paper(*args, *run_on)
    out, err = capsys.readouterr()
    assert "2 of 2 runs are finished" in out
    assert "Scale tiny" in out
    assert "97.44" in out
    assert err.count(": done (") == 2
    folders = sorted((tmp_path / "runs").iterdir())
    assert [folder.name for folder in folders] == [
        "tiny-published-bloodmnist-dirichlet-0.1-FedAvg-lr-0.001-seed-0",
        "tiny-published-bloodmnist-dirichlet-0.1-SCAFFOLD-lr-0.001-seed-0",
    ]
    first = folders[1] / "lightning_logs" / "version_0"
    rows = (first / "metrics.csv").read_text()
    # As if it had been killed after its last checkpoint, in round 10.
    (first / "summary.json").unlink()
    paper(*args, *run_on)
    assert "Resumed after round 10" in (folders[1] / "output.txt").read_text()
    again = (folders[1] / "lightning_logs" / "version_1" / "metrics.csv").read_text()
    columns = ("round", "distance", "val_loss", "test_acc", "consensus/shift")
    one, two = (
        [[row[name] for name in columns] for row in csv.DictReader(text.splitlines())] for text in (rows, again)
    )
    assert one == two
    assert len(one) == 12
    assert "[1/1]" in capsys.readouterr().err


def test_a_failing_run_is_named_and_the_table_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch, "COMMAND", [sys.executable, "-c", "import sys; sys.exit(sys.argv[-1])"])
    with pytest.raises(SystemExit) as exit:
        paper("table1", "--root", tmp_path, *TINY, "--methods", "FedAvg", "--jobs", 1, "--", "--trainer.x", "why")
    assert exit.value.code == 1
    out, err = capsys.readouterr()
    assert "failed with exit code 1, see " in err
    assert "1 of 1 runs failed: tiny-published-bloodmnist-dirichlet-0.1-FedAvg-lr-0.001-seed-0." in err
    assert "0 of 1 runs are finished" in out
    assert next(tmp_path.rglob("output.txt")).read_text() == "why\n"


def test_dry_run_lists_exactly_the_papers_runs(tmp_path, capsys):
    paper("table1", "--root", tmp_path, "--dry-run")
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("fedstop ")]
    assert len(set(lines)) == len(lines) == 702
    folders = {shlex.split(line)[shlex.split(line).index("--trainer.default_root_dir") + 1] for line in lines}
    assert folders == {str(tmp_path / run.name) for run in runs_of("table1")}
    assert out.endswith("# table1: 702 runs: 0 done, 0 unfinished, 702 missing.\n")


def test_dry_run_tells_what_is_there(tmp_path, capsys):
    done, unfinished, *_ = runs_of("figure5")
    write_run(tmp_path, done)
    folder = write_run(tmp_path, unfinished, summary=False)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "last.ckpt").touch()
    paper("figure5", "--root", tmp_path, "--dry-run")
    out = capsys.readouterr().out
    assert f"# done: {done.name}\n" in out
    assert "# figure5: 9 runs: 1 done, 1 unfinished, 7 missing.\n" in out
    lines = [line for line in out.splitlines() if line.startswith("fedstop ")]
    assert len(lines) == 8
    assert [line for line in lines if line.endswith(" --ckpt_path last")] == lines[:1]
    assert unfinished.name in lines[0]


def test_a_part_of_the_runs_in_another_form(tmp_path, capsys):
    paper("all", "--root", tmp_path, "--dry-run", "--form", "released_code", "--methods", "FedSMOO", "--seeds", 5)
    lines = commands(capsys)
    assert len(lines) == len(runs_of("all", Choice("released_code", methods=["FedSMOO"], seeds=[5])))
    assert all("released_code/fedsmoo.yaml" in line and "--seed_everything 5" in line for line in lines)


def test_a_table_is_printed_from_what_is_finished(tmp_path, capsys):
    choice = Choice("published", "full", ["dermamnist"])
    for run in runs_of("figure5", choice)[:2]:
        write_run(tmp_path, run, test_acc=[0.5] * 4)
    paper("figure5", "--root", tmp_path, "--datasets", "dermamnist", "--format", "csv")
    out = capsys.readouterr().out.splitlines()
    assert any("2 of 3 runs are finished" in line for line in out)
    assert any("Some runs have a budget of 4 rounds instead of 500." in line for line in out)
    row, *_ = csv.DictReader(line for line in out if not line.startswith("#"))
    assert (row["rule"], float(row["round"]), row["round paper"], row["runs"]) == ("task_vector", 4, "79.0", "2/3")


def test_a_seed_given_twice_counts_once(tmp_path, capsys):
    paper("figure5", "--root", tmp_path, "--datasets", "bloodmnist", "bloodmnist", "--seeds", 3, 3)
    assert "0 of 1 runs are finished; means over seeds 3." in capsys.readouterr().out


def test_all_tables_are_printed_one_after_the_other(tmp_path, capsys):
    paper("all", "--root", tmp_path, "--datasets", "bloodmnist", "--methods", "FedAvg")
    out = capsys.readouterr().out
    assert [out.count(f"{name}:") for name in ("Table I", "Table IV", "Figure 5", "Figure 8")] == [1, 1, 1, 1]


def test_slurm_has_what_is_not_finished(tmp_path, capsys):
    done, *_ = runs_of("figure5")
    write_run(tmp_path, done)
    script = tmp_path / "job.sh"
    paper("figure5", "--root", tmp_path, "--emit", "slurm", "--out", script, "--slurm", "partition=gpu", "gres=")
    assert "9 runs: 1 done, 0 unfinished, 8 missing." in capsys.readouterr().out
    text = script.read_text()
    assert "--array=0-7" in text
    assert "--partition=gpu" in text
    assert "gres" not in text
    assert done.name not in text
    assert "--ckpt_path last " not in text.replace("(--ckpt_path last)", "")
    assert f"python -m experiments.paper figure5 --root {tmp_path} --scale full --prepare" in text


@pytest.mark.process
def test_neither_listing_nor_printing_imports_torch(tmp_path):
    run = Run("bloodmnist", "FedAvg", "dirichlet", 0.1)
    write_run(tmp_path, run)
    code = (
        "import sys; from experiments.paper.__main__ import main\n"
        "main(['figure5', '--root', sys.argv[1], '--dry-run'])\n"
        "main(['all', '--root', sys.argv[1]])\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'lightning', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    command = f"{shlex.quote(sys.executable)} -m experiments.paper all --root {shlex.quote(str(tmp_path))} --dry-run"
    done = subprocess.run(["sh", "-c", f"{command} | head -1"], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("# missing\n", "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["table9", "--root", "x"], "argument TABLE: invalid choice: 'table9'"),
        (["table1"], "the following arguments are required: --root"),
        (["table1", "--root", "x", "--jobs", "0"], "argument --jobs: must be a whole number of at least 1, got '0'"),
        (["table1", "--root", "x", "--seeds", "-1"], "argument --seeds: "),
        (["table2", "--root", "x", "--skews", "quantity"], "Nothing of table2 is left by"),
        (["figure5", "--root", "x", "--emit", "slurm", "--slurm", "gpu"], "--slurm: options are KEY=VALUE"),
        (["figure5", "--root", "x", "--methods", "FedNova"], "argument --methods: invalid choice: 'FedNova'"),
    ],
)
def test_a_wrong_argument_is_one_sentence(capsys, args, message):
    assert message in refusal(capsys, *args)
