import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from lightning_fedstop.records.reader import read_record, read_records
from lightning_fedstop.records.replay import replay
from lightning_fedstop.records.report import write_report
from tests.records.report.conftest import with_partition
from tests.records.report.made import COLUMNS, config, rows, summary, write_run

VOID = {"meta", "link", "br", "wbr"}


class Elements(HTMLParser):
    """Every element with its attributes, and a complaint about each that is not closed where it should be."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open, self.faults, self.text = [], [], [], ""
        self.feed(text)
        self.faults += self.open

    def handle_starttag(self, name, attributes):
        self.found.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.found.append((name, dict(attributes)))

    def handle_endtag(self, name):
        if not self.open or self.open.pop() != name:
            self.faults.append(name)

    def handle_data(self, data):
        self.text += data

    def all(self, name):
        return [attributes for found, attributes in self.found if found == name]


@pytest.fixture(scope="module")
def text(compared):
    return compared.page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text):
    return Elements(text)


def report_on(folder, *runs, **options):
    report = write_report(read_records(list(runs)), folder / "report.html", **options)
    return Elements(report.page.read_text(encoding="utf-8"))


def test_it_is_well_formed_and_says_what_it_is(text, page):
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert page.faults == []
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.all("meta")
    assert len(page.all("title")) > 1  # of the page and of each figure
    assert len(page.all("h1")) == 1


def test_headings_are_in_order(page):
    levels = [int(name[1]) for name, _ in page.found if re.fullmatch(r"h[1-6]", name)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_nothing_is_loaded(text, page):
    assert page.all("script") == []
    assert all(attributes["href"] == "data:," for attributes in page.all("link"))
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text)
    assert not re.search(r"@import|url\((?!#)", text)


def test_ids_are_unique_and_every_reference_has_its_target(text):
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    wanted = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text)
    assert {a or b for a, b in wanted} <= set(ids)
    labels = " ".join(re.findall(r'aria-labelledby="([^"]+)"', text)).split()
    assert set(labels) <= set(ids)


def test_figures_have_a_text_and_a_table(page):
    drawings = page.all("svg")
    assert len(drawings) == 2 * len(page.all("figure")) == 16
    assert all(svg["role"] == "img" and svg["aria-labelledby"] for svg in drawings)
    assert len(page.all("desc")) == len(drawings)
    assert {svg["class"] for svg in drawings} == {"wide", "narrow"}


def test_tables_have_captions_and_scopes(page):
    assert len(page.all("caption")) == len(page.all("table"))
    assert all("scope" in attributes for attributes in page.all("th"))


def test_colours_follow_the_page(text):
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert "var(--ink)" in drawings
    assert re.findall(r"#[0-9a-f]{6}", drawings) == []
    assert "prefers-color-scheme: dark" in text


def test_names_are_escaped(text, page):
    assert "<b>&</b>" not in text
    assert "killed <b>&</b>" in page.text
    assert "neutrophil & <kin>" in page.text


def test_every_figure_is_drawn_and_written(compared, page):
    names = {path.stem for path in compared.figures}
    assert {"share-against-c", "accuracy-against-threshold", "share-against-patience", "clients"} <= names
    assert {"curves", *(f"curves-{n}" for n in range(1, 4))} <= names
    for path in compared.figures:
        assert path.parent == compared.page.with_name("report_figures")
        assert path.read_bytes().startswith(b"%PDF" if path.suffix == ".pdf" else b"<svg")
    assert sorted(path.suffix for path in compared.figures) == [".pdf"] * len(names) + [".svg"] * len(names)


def test_the_numbers_are_those_of_replay(single):
    report, record = single
    page = Elements(report.page.read_text(encoding="utf-8"))
    for rule in ("task_vector", "val_loss", "val_acc", "consensus"):
        stop = replay(record, rule, 0.01, 10)
        assert f"in round {stop.stop_round} ({stop.accuracy:.1f}\xa0%)" in page.text
        for threshold in (0.005, 0.01, 0.05, 0.1):
            for patience in (1, 5, 10):
                stop = replay(record, rule, threshold, patience)
                assert f"{stop.stop_round or 'not by round 120'}{stop.accuracy:.1f}\xa0%" in page.text


def test_what_is_left_out_has_its_reason(single, compared):
    text = Elements(single[0].page.read_text(encoding="utf-8")).text
    assert "Share of the budget against c is left out: no runs are given that differ only in their skew's c" in text
    assert "is left out" not in Elements(compared.page.read_text(encoding="utf-8")).text


def test_the_same_again(single, tmp_path):
    report, record = single
    again = write_report([record], tmp_path / "report.html")
    assert again.page.read_bytes() == report.page.read_bytes()
    for old, new in zip(report.figures, again.figures, strict=True):
        assert old.read_bytes() == new.read_bytes()


def test_a_killed_run_of_one_round(tmp_path):
    made = rows(rounds=1, validation=False, test=False, consensus=False)
    run = with_partition(write_run(tmp_path / "run", made_rows=made))
    text = report_on(tmp_path, run).text
    assert "has come to round 1 of 1" in text
    assert "not by round 1" in text


def test_a_record_of_nothing_but_rounds(undrawn, tmp_path):
    (tmp_path / "log.csv").write_text("round\n1\n2\n")
    page = report_on(tmp_path, tmp_path / "log.csv")
    assert "No rule can be replayed on what was recorded." in page.text
    assert "the run has neither a partition.json nor a configuration" in page.text


def test_values_that_are_not_finite(tmp_path):
    made = rows(rounds=12)
    for row in made[5:]:
        row |= dict.fromkeys(("distance", "growth_rate", "val_loss", "val_acc", "test_acc"), "nan")
    made[4] |= {"growth_rate": "inf"}
    run = with_partition(write_run(tmp_path / "run", made_rows=made, made_config=config()))
    page = report_on(tmp_path, run)
    assert page.faults == []
    assert "nan" not in page.text.lower().replace("finance", "")


def test_the_accuracy_at_a_live_stop_is_that_of_the_summary(undrawn, tmp_path):
    made = rows(rounds=120, test=False)
    path = write_run(tmp_path / "all", made_rows=made)
    stop = replay(read_record(path), "task_vector", 0.01, 10).stop_round
    ended = summary(stop, 120, 0.7654, "The distance has grown by less than 0.01.")
    run = with_partition(write_run(tmp_path / "run", made_rows=made[:stop], made_config=config(), made_summary=ended))
    text = report_on(tmp_path, run).text
    assert f"The run stopped in round {stop} of 120" in text
    assert f"task vector in round {stop} (76.5\xa0%)" in text


def test_many_runs_with_long_names(undrawn, tmp_path):
    for number in range(50):
        name = f"{'long-name-' * 15}{number}"
        made = [{**dict.fromkeys(COLUMNS, ""), "round": r, "distance": 1 + r**0.3} for r in range(1, 5)]
        with_partition(write_run(tmp_path / "runs" / name, made_rows=made, made_config=config(lr=number + 1)))
    page = report_on(tmp_path, tmp_path / "runs", thresholds=[0.1], patiences=[1])
    assert page.faults == []
    assert "The first 6 of 50 are drawn" in page.text
    assert page.text.count("long-name-" * 15) >= 50


def test_settings_are_those_of_the_runs_where_they_agree(undrawn, tmp_path):
    own = {"threshold": 0.05, "patience": 3}
    run = with_partition(write_run(tmp_path / "run", made_config=config(stop=own), rounds=20))
    assert "with τ\xa0=\xa00.05 and ρ\xa0=\xa03" in report_on(tmp_path, run).text
    assert "with τ\xa0=\xa00.2 and ρ\xa0=\xa03" in report_on(tmp_path, run, threshold=0.2).text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.0}, "threshold"),
        ({"patience": 0}, "patience"),
        ({"thresholds": []}, "`thresholds` must hold at least one value"),
        ({"patiences": [0]}, "patience"),
        ({"out": "metrics.csv"}, r"written as an \.html file, got 'metrics.csv'"),
    ],
)
def test_what_is_refused(options, message, single, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        write_report([single[1]], **options)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="at least one run"):
        write_report([])
