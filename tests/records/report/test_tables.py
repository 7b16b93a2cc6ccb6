import pytest
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from lightning_fedstop.records.reader import read_record
from lightning_fedstop.records.report.runs import Run, grouped
from lightning_fedstop.records.report.tables import (
    Table,
    comparison_table,
    costs_table,
    differences,
    rules_table,
    runs_table,
)
from tests.records.report.made import config, summary, write_run


def written(table):
    loader = PackageLoader("lightning_fedstop.records", "report")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return str(environment.get_template("macros.html.j2").module.table(table))


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    made = [config(seed=0), config(seed=1), config(seed=0, method="FedDyn")]
    return grouped(
        [
            Run(read_record(write_run(folder / str(n), seed=n, made_config=c, made_summary=summary()), name=f"run{n}"))
            for n, c in enumerate(made)
        ]
    )


def test_a_table_has_a_caption_and_scopes():
    text = written(Table("What & why", ["Run", "Round"], [["a<b", 5], ["c", None]]))
    assert "<caption><span>What &amp; why</span></caption>" in text
    assert '<th scope="col" class="text">Run</th><th scope="col" class="number">Round</th>' in text
    assert '<th scope="row" class="text">a&lt;b</th><td class="number">5</td>' in text
    assert '<td class="number">–</td>' in text
    assert text.startswith('<div class="scroll" tabindex="0" role="region" aria-label="What &amp; why">')


def test_groups_of_columns_and_markup():
    text = written(Table("x", ["a", Markup("b.<wbr>c"), "d"], [], groups=[("", 1), ("both", 2)]))
    assert '<tr><td colspan="1"></td><th scope="colgroup" colspan="2">both</th></tr>' in text
    assert "b.<wbr>c" in text


@pytest.mark.parametrize(("rows", "align"), [([["1", "2", "3"]], ""), ([["1", "2"]], "l")])
def test_a_row_or_an_alignment_of_the_wrong_length_is_an_error(rows, align):
    with pytest.raises(ValueError, match="must have 2 cells"):
        Table("x", ["a", "b"], rows, align)


def test_what_all_runs_share_is_left_out(groups):
    table = runs_table([run for group in groups for run in group.runs])
    assert list(table.header)[:3] == ["Run", "Method", "Seed"]
    assert "Data" not in table.header
    assert [row[2] for row in table.rows] == [0, 1, 0]


def test_rules_of_one_configuration_are_compared_run_by_run(groups):
    rows = {row[0]: row for row in rules_table(groups[:1], 0.01, 10).rows}
    runs = groups[0].runs
    rounds, points = differences(runs, "val_loss", 0.01, 10)
    stops = [run.stop("task_vector", 0.01, 10).stop_round - run.stop("val_loss", 0.01, 10).stop_round for run in runs]
    assert rounds == stops
    assert rows["Task vector"][-2:] == [None, None]
    assert rows["Validation loss"][-2] == f"{sum(stops) / 2:+.1f}".replace("-", "\N{MINUS SIGN}")
    assert len(points) == 2


def test_costs_and_comparison_hold_every_run_and_configuration(groups):
    runs = [run for group in groups for run in group.runs]
    assert [row[0] for row in costs_table(runs).rows] == [run.name for run in runs]
    assert costs_table(runs).rows[0][2:] == [
        "48\xa0min", "41\xa0min", "6\xa0min", "2.4\xa0s", "120\xa0MB", "108\xa0MB", "1.93\xa0GB",
    ]  # fmt: skip
    assert [row[1] for row in comparison_table(groups).rows] == [2, 1]
