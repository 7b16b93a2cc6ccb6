import subprocess
import sys

import pytest

from lightning_fedstop.cli.main import main
from tests.cli_tools import ROOT, refusal
from tests.records.report.conftest import draw_nothing, with_partition
from tests.records.report.made import config, summary, write_run


@pytest.fixture
def run(tmp_path):
    made = config(stop={"threshold": 0.05, "patience": 3})
    return with_partition(write_run(tmp_path / "a" / "version_0", rounds=15, made_config=made, made_summary=summary()))


@pytest.fixture
def undrawn(monkeypatch):
    draw_nothing(monkeypatch)


def test_the_page_and_the_figures(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["report", str(run.parent), "--title", "A & B", "--thresholds", "0.1", "0.2", "--patiences", "1", "2"])
    said = capsys.readouterr().out.splitlines()
    assert said == ["Report: report.html", "Figures: report_figures (8 files)"]
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<title>A &amp; B</title>" in text
    assert len(list((tmp_path / "report_figures").iterdir())) == 8
    assert not list(tmp_path.glob(".*"))


def test_where_it_is_told_to(run, tmp_path, capsys):
    out, figures = tmp_path / "new" / "page.html", tmp_path / "pictures"
    out.parent.mkdir()
    out.write_text("an earlier one")
    main(["report", str(run), "--out", str(out), "--figures", str(figures), "--threshold", "0.2", "--patience", "2"])
    text = out.read_text(encoding="utf-8")
    assert "τ\xa0=\xa00.2 and ρ\xa0=\xa02" in text
    assert figures.is_dir()
    assert not out.with_name("page_figures").exists()


def test_a_run_that_cannot_be_read_is_told_and_left_out(undrawn, run, tmp_path, capsys):
    broken = tmp_path / "a" / "version_1"
    broken.mkdir()
    (broken / "metrics.csv").write_text("")
    main(["report", str(tmp_path / "a"), "--out", str(tmp_path / "r.html")])
    assert "version_1 is left out" in capsys.readouterr().err
    assert "version_1 is left out" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_columns_of_another_tool(undrawn, tmp_path, capsys):
    log = tmp_path / "log.csv"
    log.write_text("t,dist\n" + "".join(f"{t},{1 + t**0.3}\n" for t in range(30)))
    options = ["--column", "round=t", "distance=dist", "--zero_based", "--out", str(tmp_path / "r.html")]
    main(["report", str(log), *options])
    assert "task vector not by round 30" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "there is no column 'dist'" in refusal(capsys, "report", str(log), "--column", "dist=distance")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: RUN; see `fedstop report --help`."),
        (["gone"], "There is no file or folder 'gone'."),
        (["RUN", "--out", "x.csv"], "A report is written as an .html file, got 'x.csv'."),
        (["RUN", "--patience", "0"], "`patience` must be"),
        (["RUN", "--threshold", "-1"], "`threshold` must be"),
        (["RUN", "--patience", "x"], "argument --patience: invalid int value: 'x'; see"),
        (["RUN", "--treshold", "1"], "unrecognized arguments: --treshold 1; see"),
    ],
)
def test_errors_are_one_sentence(arguments, sentence, undrawn, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = [str(run) if word == "RUN" else word for word in arguments]
    assert refusal(capsys, "report", *given).startswith(sentence)
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_cannot_be_written(undrawn, run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    sentence = refusal(capsys, "report", str(run), "--out", str(tmp_path / "file" / "r.html"))
    assert sentence.startswith("The report cannot be written (")


def test_neither_torch_nor_lightning_is_imported(run, tmp_path):
    code = (
        "import sys; from lightning_fedstop.cli.main import main; "
        f"main(['report', {str(run)!r}, '--out', {str(tmp_path / 'r.html')!r}]); "
        "assert not {'torch', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)
