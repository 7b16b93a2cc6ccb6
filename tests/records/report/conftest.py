"""Reports that several tests look at, written once."""

import json

import pytest

from lightning_fedstop.records.partition_record import PARTITION_FILE
from lightning_fedstop.records.reader import read_records
from lightning_fedstop.records.report import write_report
from lightning_fedstop.records.report.picture import Picture
from tests.records.report.browser import Browser, find_browser
from tests.records.report.made import config, rows, summary, write_run

PARTITION = {
    "counts": [[5, 0, 1], [0, 40, 0], [3, 3, 3], [0, 0, 200]],
    "class_names": ["neutrophil & <kin>", "b", "c"],
    "skew": "DirichletSkew(concentration=0.1)",
    "seed": 0,
}


def with_partition(folder):
    (folder / PARTITION_FILE).write_text(json.dumps(PARTITION))
    return folder


def draw_nothing(monkeypatch):
    """Figures as their texts and tables alone, which takes no time."""
    monkeypatch.setattr(Picture, "svg", lambda self, kind: self.description)
    monkeypatch.setattr(Picture, "write", lambda self, folder: [])


@pytest.fixture
def undrawn(monkeypatch):
    draw_nothing(monkeypatch)


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """The report on 2 degrees of skew, two seeds of one of them, and a killed run without evaluation."""
    folder = tmp_path_factory.mktemp("compared")
    for number, (c, seed) in enumerate([(0.1, 0), (0.1, 1), (1.0, 0)]):
        made = config(seed=seed, c=c, method="FedDyn")
        run = folder / "runs" / f"{c}-{seed}"
        with_partition(write_run(run, seed=number, speed=0.3 + 0.1 * c, made_config=made, made_summary=summary()))
    killed = rows(rounds=7, validation=False, test=False, consensus=False)
    with_partition(write_run(folder / "runs" / "killed <b>&</b>", made_rows=killed, made_config=config(lr=0.1)))
    return write_report(read_records([folder / "runs"]), folder / "out" / "report.html")


@pytest.fixture(scope="session")
def single(tmp_path_factory):
    """The report on one run, and its record."""
    folder = tmp_path_factory.mktemp("single")
    run = with_partition(write_run(folder / "run", made_config=config(), made_summary=summary()))
    records = read_records([run])
    return write_report(records, folder / "report.html"), records[0]


@pytest.fixture(scope="session")
def browser():
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium is installed (apt-get install chromium-headless-shell)")
    opened = Browser(path)
    yield opened
    opened.close()
