from collections import Counter
from pathlib import Path

import pytest

from experiments.paper import TABLES, Choice, Run, runs_of
from experiments.paper.published import paper_results
from experiments.paper.runs import DATASETS, PHI, SEEDS

GRID = 2 + 8 * 3  # settings of the methods: two without Phi, eight with three values of it each


def test_counts_are_those_of_the_paper():
    assert len(runs_of("table1")) == 3 * 3 * GRID * 3 == 702
    assert len(runs_of("table2")) == 3 * 3 * GRID * 3 == 702
    assert len(runs_of("table3")) == 3 * 10 * 9 * 3 == 810
    assert len(runs_of("table4")) == 3 * 10 * 3 == 90
    assert len(runs_of("figure5")) == 3 * 3
    assert len(runs_of("figure6")) == 3 * 9 * 3
    assert len(runs_of("figure7")) == 3 * 10 * 3
    assert len(runs_of("figure8")) == 3 * 10 * 9 * 3


def test_one_run_serves_several_tables():
    table1, table2, table3, table4, *figures = (set(runs_of(name)) for name in TABLES)
    figure5, figure6, figure7, figure8 = figures
    assert len(table1 & table2) == 3 * GRID * 3  # Dirichlet 0.1 at 0.001
    assert len(table1 & table3) == 3 * 10 * 3 * 3  # the c of Table I, at its Phi
    assert table4 <= table2 & figure8
    assert figure5 <= figure6 & figure7
    assert figure6 | figure7 <= table3
    assert figure7 <= table1
    assert len(runs_of("all")) == len(table1 | table2 | table3 | figure8) == 2430


@pytest.mark.parametrize("name", TABLES)
def test_runs_are_listed_once_with_each_seed(name):
    runs = runs_of(name)
    assert len(set(runs)) == len(runs)
    assert set(Counter(run.seed for run in runs).values()) == {len(runs) // 3}


def test_each_cell_of_the_papers_tables_has_its_runs():
    paper = paper_results()
    have = {(r.dataset, f"{r.skew}-{r.c:g}", r.method, r.log_phi) for r in runs_of("table1")}
    for row in paper["table1_accuracy_by_skew"]:
        for method in row["accuracy"]:
            skew = row["skew"]
            assert (row["dataset"], skew, method, row["log_phi"].get(method)) in have
    have = {(r.dataset, 10.0**r.log_lr, r.method, r.log_phi) for r in runs_of("table2")}
    for row in paper["table2_accuracy_by_lr"]:
        for method in row["accuracy"]:
            assert any(
                key[0] == row["dataset"] and key[1] == pytest.approx(row["lr"]) and key[2:] == (method, phi)
                for key in have
                for phi in [row["log_phi"].get(method)]
            )
    have = {(r.dataset, r.method, r.skew, r.c) for r in runs_of("table3")}
    assert have == {(c["dataset"], c["method"], c["skew"], c["c"]) for c in paper["table3_delta_accuracy"]}
    have = {(r.dataset, r.method) for r in runs_of("table4")}
    assert have == {(c["dataset"], c["method"]) for c in paper["table4_bad_configurations"]}


def test_phi_is_that_of_the_papers_tables():
    table3 = {(r.dataset, r.method, r.skew, r.c): r.log_phi for r in runs_of("table3")}
    assert table3["pathmnist", "FedSAM", "quantity", 0.01] == -1  # Table I, quantity 0.1
    assert table3["pathmnist", "FedSAM", "dirichlet", 1.0] == -1
    assert table3["pathmnist", "FedSAM", "pathological", 3] == -2
    assert table3["pathmnist", "FedAvg", "quantity", 0.01] is None
    table4 = {(r.dataset, r.method): (r.log_phi, r.log_lr) for r in runs_of("table4")}
    assert table4["bloodmnist", "FedProx"] == (-2, -1)  # Table II at 0.1
    assert table4["dermamnist", "FedProx"] == (-3, -1)


def test_a_choice_takes_a_part():
    choice = Choice("released_code", "small", ["bloodmnist"], ["SCAFFOLD", "FedSAM"], ["quantity"], [7])
    runs = runs_of("table1", choice)
    assert [(run.method, run.log_phi) for run in runs] == [
        ("SCAFFOLD", None),
        ("FedSAM", -1),
        ("FedSAM", -2),
        ("FedSAM", -3),
    ]
    for run in runs:
        assert (run.form, run.scale, run.dataset, run.skew) == ("released_code", "small", "bloodmnist", "quantity")
        assert run.seed == 7
    assert not runs_of("table2", choice)


def test_an_unknown_table_is_refused():
    with pytest.raises(ValueError, match=r"`table` must be one of table1, .*, all, got 'table9'"):
        runs_of("table9")


def test_the_defaults_are_the_papers():
    assert {run.seed for run in runs_of("table1")} == set(SEEDS)
    assert {run.dataset for run in runs_of("figure5")} == set(DATASETS)
    assert {run.method for run in runs_of("table4")} == set(PHI)
    assert runs_of("figure5")[0] == Run("dermamnist", "FedAvg", "dirichlet", 0.1)


def test_the_documentation_has_the_counts():
    text = (Path(__file__).parents[3] / "docs" / "paper.md").read_text(encoding="utf-8")
    names = {name: name.replace("table", "Table ").replace("figure", "Figure ") for name in TABLES} | {"all": "all"}
    roman = {"Table 1": "Table I", "Table 2": "Table II", "Table 3": "Table III", "Table 4": "Table IV"}
    for table, name in names.items():
        assert f"| {roman.get(name, name)} | {len(runs_of(table))} |" in text
