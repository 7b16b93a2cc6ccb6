import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fedstop.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
# The columns, and a run that saturates in round 5 (tau 0.01, rho 2) of 10.
HEADER = "round,distance,val_loss,val_acc,test_acc\n"
ROWS = HEADER + "1,1,2,0.1,0.11\n2,2,1,0.2,0.22\n3,3,1,0.3,0.33\n4,3,1,0.4,0.44\n5,3,1,0.5,{}\n"
SETTING = ["--threshold", "0.01", "--patience", "2"]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder with two runs, to work in."""
    monkeypatch.chdir(tmp_path)
    for name, last in (("a_1", "0.61803398875"), ("b", "")):
        folder = tmp_path / name / "lightning_logs" / "version_0"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text(ROWS.format(last))
        (folder / "summary.json").write_text(json.dumps({"budget": 10}))
    return tmp_path


@pytest.fixture
def printed(root, capsys):
    """What a command prints."""

    def run(*args):
        main(["replay", *map(str, args)])
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(root, capsys):
    """The one sentence with which a command is refused."""

    def run(*args):
        with pytest.raises(SystemExit) as exit:
            main(["replay", *map(str, args)])
        output = capsys.readouterr()
        assert exit.value.code == 2
        assert output.out == ""
        assert output.err.count("\n") == 1
        assert output.err.startswith("fedstop replay: error: ")
        return output.err.removeprefix("fedstop replay: error: ")

    return run


def test_csv_has_every_digit(printed):
    rows = list(csv.DictReader(io.StringIO(printed(".", *SETTING, "--rule", "task_vector", "--format", "csv"))))
    assert rows == [
        {
            "run": "a_1",
            "rule": "task_vector",
            "threshold": "0.01",
            "patience": "2",
            "stop_round": "5",
            "share_used": "0.5",
            "accuracy": repr(100 * 0.61803398875),
        },
        {
            "run": "b",
            "rule": "task_vector",
            "threshold": "0.01",
            "patience": "2",
            "stop_round": "5",
            "share_used": "0.5",
            "accuracy": "",
        },
    ]


def test_the_table_is_rounded_and_aligned(printed):
    assert printed("a_1", *SETTING) == (
        "run  rule         threshold  patience  stop_round  share_used  accuracy\n"
        "a_1  task_vector       0.01         2           5       0.500      61.8\n"
        "a_1  val_loss          0.01         2           4       0.400      44.0\n"
        "a_1  val_acc           0.01         2           -           -         -\n"
    )


def test_without_a_stop_a_whole_record_has_used_its_budget(printed):
    line = printed("a_1", *SETTING, "--rule", "val_acc", "--budget", 5).splitlines()[1]
    assert line.split() == ["a_1", "val_acc", "0.01", "2", "-", "1.000", "61.8"]


def test_markdown(printed):
    assert printed("a_1", "b", *SETTING, "--rule", "task_vector", "--format", "markdown") == (
        "| run | rule | threshold | patience | stop_round | share_used | accuracy |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| a_1 | task_vector | 0.01 | 2 | 5 | 0.500 | 61.8 |\n"
        "| b | task_vector | 0.01 | 2 | 5 | 0.500 | - |\n"
    )


def test_latex(printed):
    lines = printed("a_1", *SETTING, "--rule", "task_vector", "--format", "latex").splitlines()
    assert lines[0] == r"\begin{tabular}{llrrrrr}"
    assert lines[4] == r"a\_1 & task\_vector & 0.01 & 2 & 5 & 0.500 & 61.8 \\"
    assert lines[-1] == r"\end{tabular}"


def test_the_names_of_runs_do_not_break_a_table(printed, root):
    names = [r"50%_&$#{x}~^\y", "a|b"]
    for name in names:
        (root / name).mkdir()
        (root / name / "metrics.csv").write_text(ROWS.format(""))
    latex = printed(*names, "--rule", "task_vector", "--format", "latex")
    assert r"50\%\_\&\$\#\{x\}\textasciitilde{}\^{}\textbackslash{}y & task" in latex
    markdown = printed(*names, "--rule", "task_vector", "--format", "markdown").splitlines()
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in markdown] == [8] * 4


def test_all_thresholds_with_all_patiences(printed):
    table = printed("a_1", "--threshold", 0.005, 0.01, "--patience", 1, 2, 3, "--rule", "task_vector", "val_loss")
    assert len(table.splitlines()) == 1 + 2 * 2 * 3


def test_the_defaults_are_the_paper_s(printed):
    assert printed("a_1").splitlines()[1].split()[2:4] == ["0.01", "10"]


def test_options_of_the_rules(printed):
    def stop(*args):
        return printed("a_1", "--patience", 1, "--rule", "task_vector", *args).splitlines()[1].split()[4]

    assert stop() == "4"
    assert stop("--min_rounds", 5) == "5"
    assert stop("--variant", "released_code") == "-"  # a growth of exactly 0 is not counted there


def test_files_of_other_tools(printed, root):
    (root / "log.csv").write_text("t;dist;consensus/mean_norm;spread\n0;1,5;1;1\n1;1,5;1;1\n")
    common = ["log.csv", "--patience", 1, "--zero_based", "--budget", 8, "--column", "round=t"]
    rows = printed(
        *common, "distance=dist", "--column", "consensus/dispersion=spread", "--shift", "mean_norm"
    ).splitlines()[1:]
    assert [row.split()[1:] for row in rows] == [
        ["task_vector", "0.01", "1", "2", "0.250", "-"],
        ["consensus", "0.01", "1", "2", "0.250", "-"],
    ]


@pytest.mark.parametrize(
    ("name", "start"), [("x.csv", "run,rule"), ("x.md", "| run"), ("x.TEX", r"\begin"), ("x", "run ")]
)
def test_a_file_is_written_in_the_format_of_its_name(printed, root, name, start):
    assert printed("a_1", "--out", name) == ""
    assert (root / name).read_text().startswith(start)
    printed("a_1", "--out", name, "--format", "csv")
    assert (root / name).read_text().startswith("run,rule")


def test_a_record_is_never_written_over(refused, root):
    file = root / "a_1/lightning_logs/version_0/metrics.csv"
    (root / "log.csv").write_bytes(file.read_bytes())
    for run, out in (("a_1", file), ("log.csv", "log.csv")):
        assert "this is a record that was read" in refused(run, "--out", out)
    assert file.read_text() == (root / "log.csv").read_text() == ROWS.format("0.61803398875")


@pytest.mark.parametrize(("header", "is_told"), [("round,distance,val_loss", True), ("round,distance,test_acc", False)])
def test_a_run_without_test_figures_is_told_how_to_have_them(tmp_path, capsys, header, is_told):
    (tmp_path / "metrics.csv").write_text(f"{header}\n1,1.0,0.5\n2,1.5,0.6\n")
    (tmp_path / "config.yaml").write_text("trainer: {max_rounds: 2}\n")
    main(["replay", str(tmp_path), "--rule", "task_vector"])
    output = capsys.readouterr()
    assert ("no test accuracy in it; `check_test_every_n_round: 1` records it" in output.err) is is_told
    assert output.out.splitlines()[1].endswith("-") is is_told


def test_what_is_odd_is_told_on_stderr(root, capsys):
    file = root / "a_1/lightning_logs/version_0/metrics.csv"
    file.write_text(file.read_text() + "6,3.0")
    (root / "b/lightning_logs/version_0/metrics.csv").write_text("")
    main(["replay", ".", "--rule", "task_vector"])
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 2
    assert output.err == (
        "fedstop replay: note: b/lightning_logs/version_0 is left out: b/lightning_logs/version_0/metrics.csv "
        "is empty; a run killed in its first round leaves nothing to read.\n"
        "fedstop replay: note: a_1: line 7, the last one, is cut short and was left out.\n"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "There is no file or folder 'nowhere'."),
        ([], "the following arguments are required: RUN"),
        (["a_1", "--threshold", "0"], "`threshold` must be a finite number above 0, got 0.0."),
        (["a_1", "--threshold", "nan"], "`threshold` must be a finite number above 0, got nan."),
        (["a_1", "--threshold", "-1"], "`threshold` must be a finite number above 0, got -1.0."),
        (["a_1", "--threshold", "x"], "argument --threshold: must be a number, got 'x'; see"),
        (["--threshold", "0.1", "a_1"], "must be a number, got 'a_1'; runs come before the options; see"),
        (["a_1", "--patience", "0"], "`patience` must be an integer of at least 1, got 0."),
        (["a_1", "--patience", "1.5"], "argument --patience: must be a whole number, got '1.5'; see"),
        (["a_1", "--min_rounds", "-1"], "`min_rounds` must be an integer of at least 0, got -1."),
        (["a_1", "--budget", "0"], "`budget` must be an integer of at least 1, got 0."),
        (["a_1", "--rule", "val_f1"], "argument --rule: invalid choice: 'val_f1'"),
        (["a_1", "--format", "html"], "argument --format: invalid choice: 'html'"),
        (["a_1", "--rule", "consensus"], "The rule 'consensus' needs the column 'consensus/shift': a_1 has no column"),
        (["a_1", "--column", "round"], "--column takes OURS=THEIRS, as in `--column round=t`, got 'round'."),
        (["a_1", "--column", "t=round"], "--column t=round: there is no column 't' here; ours are round, distance,"),
        (["a_1", "--column", "round=t", "round=u"], "--column names 'round' twice, 't' and 'u'."),
        (["a_1", "--column", "round=t"], "has no column 't', named for 'round'; it has round, distance"),
        (["a_1", "--out", "no/such/x.csv"], "No such file or directory: 'no/such/x.csv'."),
        (["a_1", "--tau", "1"], "unrecognized arguments: --tau"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(refused, args, message):
    assert message in refused(*args)


def test_debug_shows_where_it_comes_from(root, capsys):
    with pytest.raises(SystemExit):
        main(["replay", "nowhere", "--debug"])
    assert "Traceback" in capsys.readouterr().err


def test_help_lists_the_options(printed, capsys):
    with pytest.raises(SystemExit) as exit:
        printed("--help")
    assert exit.value.code == 0
    assert "--zero_based" in capsys.readouterr().out


def run_process(*args, cwd, **arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(args, cwd=cwd, env=environment, capture_output=True, text=True, check=True, **arguments)


def test_a_record_of_500_rounds_is_replayed_without_loading_anything_heavy(root):
    rows = "".join(f"{n},{n**0.5},{1 / n},{1 - 1 / n},0.5\n" for n in range(1, 501))
    (root / "long.csv").write_text(HEADER + rows)
    code = (
        "import sys; from lightning_fedstop.cli.main import main;"
        "main(['replay', 'long.csv', '--threshold', '0.005', '0.01', '0.05', '0.1', '--patience', '1', '5', '10']);"
        "heavy = {'torch', 'lightning', 'numpy', 'pandas', 'jsonargparse', 'rich', 'matplotlib'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    table = run_process(sys.executable, "-c", code, cwd=root).stdout
    assert len(table.splitlines()) == 1 + 3 * 4 * 3
    assert table.splitlines()[6].split() == ["long.csv", "task_vector", "0.01", "10", "60", "0.120", "50.0"]


@pytest.mark.process
def test_a_reader_that_stops_reading_and_a_screen_without_unicode_are_no_errors(root):
    (root / "größe.csv").write_text(ROWS.format(""))
    command = [sys.executable, "-m", "lightning_fedstop", "replay", "größe.csv"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    output = subprocess.run(command, cwd=root, env=environment, capture_output=True, check=True)
    assert rb"gr\xf6\xdfe.csv" in output.stdout
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        command = [sys.executable, "-m", "lightning_fedstop", "replay", "a_1"]
        piped = subprocess.run(command, cwd=root, env=environment, stdout=closed, stderr=subprocess.PIPE, check=True)
    assert piped.stderr == b""


def test_the_code_in_the_documentation_runs(root):
    text = (ROOT / "docs" / "replay.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(code, "replay.md", "exec"), {})
    commands = re.findall(r"^\$ fedstop (.*)$", text, flags=re.MULTILINE)
    assert len(commands) == 3
    (root / "runs").mkdir()
    (root / "a_1").rename(root / "runs" / "seed0")
    (root / "lightning_logs/version_0").mkdir(parents=True)
    (root / "lightning_logs/version_0/metrics.csv").write_text("epoch,task_vector/distance\n0,1\n1,1\n")
    for command in commands:
        main(command.split())
