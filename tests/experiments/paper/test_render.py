import csv

import pytest

from experiments.paper.compare import Row
from experiments.paper.render import agreement, render

ROWS = [
    Row({"dataset": "bloodmnist", "method": "FedAvg"}, {"acc %": (61.234, 60.0), "r": (5.0, None)}, 3, 3),
    Row({"dataset": "pathmnist", "method": "FedSAM"}, {"acc %": (None, 70.0), "r": (None, None)}, 0, 3),
    Row({"dataset": "dermamnist", "method": "Fed_X"}, {"acc %": (49.0, 50.5), "r": (7.0, None)}, 1, 3),
]


def test_text_shows_ours_theirs_and_the_difference():
    assert render(ROWS, "table", ["Title"]).splitlines() == [
        "Title",
        "",
        "dataset     method  acc %  paper   diff     r  runs",
        "----------  ------  -----  -----  -----  ----  ----",
        "bloodmnist  FedAvg  61.23  60.00  +1.23  5.00   3/3",
        "pathmnist   FedSAM         70.00                0/3",
        "dermamnist  Fed_X   49.00  50.50  -1.50  7.00   1/3",
    ]


def test_csv_has_the_numbers_as_they_are():
    lines = render(ROWS, "csv", ["Title"]).splitlines()
    assert lines[0] == "# Title"
    first, second, _ = csv.DictReader(lines[1:])
    assert (first["acc %"], first["acc % paper"], first["acc % difference"]) == ("61.234", "60.0", "1.234")
    assert (second["acc %"], second["acc % difference"], second["runs"]) == ("", "", "0/3")


def test_markdown_is_a_table():
    lines = render(ROWS, "markdown", ["Title"]).splitlines()
    assert lines[2:5] == [
        "| dataset | method | acc % | paper | diff | r | runs |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| bloodmnist | FedAvg | 61.23 | 60.00 | +1.23 | 5.00 | 3/3 |",
    ]


def test_latex_escapes_and_sets_signed_numbers_as_mathematics():
    text = render(ROWS, "latex", ["Title"])
    assert text.startswith("% Title\n\\begin{tabular}{llrrrrr}\n")
    assert r"dermamnist & Fed\_X & 49.00 & 50.50 & $-1.50$ & 7.00 & 1/3 \\" in text
    assert r"acc \%" in text


def test_agreement_is_over_what_both_have():
    assert agreement(ROWS) == ["acc %: mean absolute difference 1.37 over 2 of 3 rows."]
    assert agreement([]) == []


@pytest.mark.parametrize("fmt", ["table", "csv", "markdown", "latex"])
def test_no_rows_are_said_to_be_none(fmt):
    assert "no rows" in render([], fmt, ["Title"])
