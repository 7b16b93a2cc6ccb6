"""Figures of records made by hand, against the rules worked out by hand."""

import math

import pytest

from experiments.paper import TABLES, Choice, Run, runs_of
from experiments.paper.compare import compare
from experiments.paper.results import Results
from tests.experiments.paper.runs import write_run

ONE = Choice(datasets=["bloodmnist"], methods=["FedAvg"], skews=["dirichlet"], seeds=[0])
# The distance grows by 20 % up to round 5, then by nothing: rounds 6, 7, ... count.
STILL = [1.2 ** min(n, 5) for n in range(1, 41)]
# The last improvement of the loss is in round 3 and of the accuracy in round 6.
LOSS = [3.0, 2.0, 1.0, *[1.0] * 37]
ACCURACY = [0.1, 0.2, 0.3, 0.4, 0.5, *[0.6] * 35]
TEST = [n / 100 for n in range(1, 41)]


def write(root, run, **columns):
    write_run(root, run, **{"distance": STILL, "val_loss": LOSS, "val_acc": ACCURACY, "test_acc": TEST} | columns)


def figures(root, table, choice=ONE, **options):
    """The rows' labels joined, and ours."""
    rows = compare(table, Results(root, **options), choice)
    return {" ".join(row.labels.values()): {k: ours for k, (ours, _) in row.figures.items()} for row in rows}


def test_table_1_takes_the_best_phi_of_means_over_seeds(tmp_path):
    choice = Choice(datasets=["bloodmnist"], methods=["FedProx"], skews=["dirichlet"], seeds=[0, 1])
    last = {(-1, 0): 0.9, (-1, 1): 0.1, (-2, 0): 0.6, (-2, 1): 0.8, (-3, 0): 0.5, (-3, 1): 0.5}
    for run in runs_of("table1", choice):
        write(tmp_path, run, test_acc=[0.95, *[0.0] * 38, last[run.log_phi, run.seed]])
    (row,) = compare("table1", Results(tmp_path), choice)
    assert row.figures["accuracy"] == (pytest.approx(70), 97.69)
    assert (row.labels["log Phi"], row.labels["paper's"]) == ("-2", "-3")
    assert (row.done, row.needed) == (6, 6)
    (row,) = compare("table1", Results(tmp_path, "best"), choice)
    assert row.figures["accuracy"][0] == pytest.approx(95)


def test_table_2_tells_learning_rates_apart(tmp_path):
    write(tmp_path, Run("bloodmnist", "FedAvg", "dirichlet", 0.1, log_lr=-1))
    rows = compare("table2", Results(tmp_path), ONE)
    assert [(row.labels["eta"], row.figures["accuracy"], row.done) for row in rows] == [
        ("0.1", (40.0, 12.5), 1),
        ("0.01", (None, 67.44), 0),
        ("0.001", (None, 97.44), 0),
    ]


def test_table_3_is_the_accuracy_at_the_stop_minus_the_better_baseline(tmp_path):
    write(tmp_path, Run("bloodmnist", "FedAvg", "dirichlet", 0.1))
    # Task vector: 6 ... 15, ten in a row. Loss: 4 ... 13. Accuracy: 7 ... 16.
    found = figures(tmp_path, "table3")
    assert found["bloodmnist FedAvg dirichlet 0.1"]["delta accuracy"] == pytest.approx(15 - 16)
    assert found["bloodmnist FedAvg dirichlet 1"]["delta accuracy"] is None


def test_table_4_counts_rounds_from_0_and_takes_the_earlier_baseline(tmp_path):
    write(tmp_path, Run("bloodmnist", "FedAvg", "dirichlet", 0.1, log_lr=-1))
    (found,) = figures(tmp_path, "table4").values()
    assert found == {
        "accuracy": pytest.approx(15),
        "r*": 14,
        "delta acc": pytest.approx(15 - 16),
        "delta r": 14 - 12,
        "r*/R %": pytest.approx(100 * 14 / 40),
        "val_loss r": 12,
        "val_acc r": 15,
    }


def test_a_model_at_chance_is_screened_as_in_the_paper(tmp_path):
    flat = {"val_loss": [math.nan] * 40, "val_acc": [0.125] * 40, "test_acc": [0.125] * 40}
    write(tmp_path, Run("bloodmnist", "FedAvg", "dirichlet", 0.1, log_lr=-1), **flat)
    (found,) = figures(tmp_path, "table4").values()
    assert (found["val_loss r"], found["val_acc r"]) == (9, 10)  # the accuracy of round 1 improves on 0, NaN never
    assert (found["accuracy"], found["delta acc"]) == (12.5, 0)


def test_a_rule_that_never_stops_uses_up_the_budget(tmp_path):
    growing = [1.5**n for n in range(40)]
    write(tmp_path, Run("bloodmnist", "FedAvg", "dirichlet", 0.1), distance=growing)
    found = figures(tmp_path, "figure6")
    assert found["bloodmnist dirichlet 0.1"] == {"r*/R %": 100.0}


def test_a_run_that_diverged_ended_where_it_did(tmp_path):
    run = Run("bloodmnist", "FedAvg", "dirichlet", 0.1)
    short = {"distance": STILL[:4], "val_loss": LOSS[:4], "val_acc": ACCURACY[:4], "test_acc": TEST[:4]}
    folder = write_run(tmp_path, run, **short)
    (folder / "summary.json").write_text('{"stop_round": 4, "budget": 40}')
    found = figures(tmp_path, "figure5")
    assert found["bloodmnist task_vector"] == {"round": 4, "accuracy": pytest.approx(4)}


def test_figure_5_counts_rounds_from_1_and_shows_each_rule(tmp_path):
    write(tmp_path, Run("bloodmnist", "FedAvg", "dirichlet", 0.1))
    found = figures(tmp_path, "figure5")
    assert {name: cell["round"] for name, cell in found.items()} == {
        "bloodmnist task_vector": 15,
        "bloodmnist val_loss": 13,
        "bloodmnist val_acc": 16,
    }
    derma = Choice(datasets=["dermamnist"], methods=["FedAvg"], seeds=[0])
    rows = compare("figure5", Results(tmp_path), derma)
    assert [row.figures["round"][1] for row in rows] == [79, 29, 39]


def test_figure_6_gives_shares_and_their_mean(tmp_path):
    write(tmp_path, Run("bloodmnist", "FedAvg", "dirichlet", 0.01))
    write(tmp_path, Run("bloodmnist", "FedAvg", "dirichlet", 1.0), distance=[1.5**n for n in range(40)])
    rows = compare("figure6", Results(tmp_path), ONE)
    assert [(row.labels["skew"], *row.figures["r*/R %"]) for row in rows] == [
        ("dirichlet 0.01", 37.5, 14.9),
        ("dirichlet 0.1", None, None),
        ("dirichlet 1", 100.0, 11.1),
        ("mean", (37.5 + 100) / 2, 14.9),
    ]


def test_figure_7_goes_over_thresholds(tmp_path):
    slower = [sum(1.04 ** min(k, 20) for k in range(n)) for n in range(1, 41)]
    write(tmp_path, Run("bloodmnist", "FedAvg", "dirichlet", 0.1), distance=slower)
    found = figures(tmp_path, "figure7")
    stops = [found[f"bloodmnist FedAvg {tau}"]["task_vector"] for tau in ("0.005", "0.01", "0.05", "0.1")]
    assert stops == sorted(stops, reverse=True)
    assert stops[0] > stops[-1]


def test_figure_8_goes_over_patience_and_averages(tmp_path):
    write(tmp_path, Run("bloodmnist", "FedAvg", "dirichlet", 0.1, log_lr=-1))
    found = figures(tmp_path, "figure8")
    shares = {"rho 1": 100 * 5 / 40, "rho 5": 100 * 9 / 40, "rho 10": 100 * 14 / 40}
    for name in ("bloodmnist FedAvg dirichlet 0.1", "bloodmnist mean mean", "mean mean dirichlet", "mean mean mean"):
        assert found[name] == pytest.approx(shares)
    whole = compare("figure8", Results(tmp_path), Choice())
    papers = {" ".join(row.labels.values()): row.figures["rho 10"][1] for row in whole}
    assert papers["mean mean mean"] == 4.3
    assert papers["pathmnist mean mean"] == 5.1
    assert papers["mean mean quantity"] == 5.0
    assert papers["pathmnist SCAFFOLD quantity 1"] == 14.7
    assert sum(paper is not None for paper in papers.values()) == 6


def test_the_released_form_counts_as_the_authors_code(tmp_path):
    choice = Choice("released_code", datasets=["bloodmnist"], methods=["FedAvg"], skews=["dirichlet"], seeds=[0])
    slow = [1.0, *[1.001**n for n in range(1, 40)]]
    for form in ("published", "released_code"):
        write(tmp_path, Run("bloodmnist", "FedAvg", "dirichlet", 0.1, form=form), distance=slow)
    assert figures(tmp_path, "figure5")["bloodmnist task_vector"]["round"] == 11
    assert figures(tmp_path, "figure5", choice)["bloodmnist task_vector"]["round"] == 12


@pytest.mark.parametrize("table", TABLES)
def test_a_table_without_runs_has_the_papers_numbers_alone(table, tmp_path):
    rows = compare(table, Results(tmp_path), Choice())
    assert {ours for row in rows for ours, _ in row.figures.values()} == {None}
    assert any(paper is not None for row in rows for _, paper in row.figures.values())
    assert all(row.done == 0 < row.needed for row in rows)


def test_an_unfinished_run_is_left_out(tmp_path):
    first, second = runs_of(
        "table1", Choice(datasets=["bloodmnist"], methods=["FedAvg"], skews=["dirichlet"], seeds=[0, 1])
    )
    write(tmp_path, first)
    write_run(tmp_path, second, summary=False, test_acc=[0.9])
    (row,) = compare(
        "table1", Results(tmp_path), Choice(datasets=["bloodmnist"], methods=["FedAvg"], skews=["dirichlet"])
    )
    assert (row.figures["accuracy"][0], row.done, row.needed) == (40.0, 1, 3)


def test_a_record_without_test_accuracies_is_refused(tmp_path):
    write(tmp_path, Run("bloodmnist", "FedAvg", "dirichlet", 0.1), test_acc=[0.5, "", *[0.5] * 38])
    with pytest.raises(ValueError, match=r"has no test accuracy in round 2: .*--trainer.check_test_every_n_round 1"):
        compare("table1", Results(tmp_path), ONE)
