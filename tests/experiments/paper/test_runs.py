import pytest

from experiments.paper import Run, runs_of
from experiments.paper.runs import power


def test_no_two_runs_share_a_name():
    runs = runs_of("all")
    assert len({run.name for run in runs}) == len(runs)


@pytest.mark.parametrize(
    "other",
    [
        {"dataset": "pathmnist"},
        {"method": "FedDyn"},
        {"skew": "quantity"},
        {"c": 1.0},
        {"log_phi": -3},
        {"log_lr": -2},
        {"seed": 1},
        {"form": "released_code"},
        {"scale": "small"},
    ],
)
def test_each_setting_is_part_of_the_name(other):
    given = {"dataset": "bloodmnist", "method": "FedProx", "skew": "dirichlet", "c": 0.1, "log_phi": -2}
    assert Run(**given).name != Run(**given | other).name


def test_a_name_is_stable():
    run = Run("dermamnist", "FedWMSAM", "quantity", 0.01, -1, -2, 2, "released_code", "tiny")
    assert run.name == "tiny-released_code-dermamnist-quantity-0.01-FedWMSAM-phi-0.1-lr-0.01-seed-2"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dataset": "chestmnist"}, "`dataset` must be one of dermamnist, bloodmnist, pathmnist, got 'chestmnist'"),
        ({"method": "FedNova"}, "`method` must be one of FedAvg"),
        ({"skew": "iid"}, "`skew` must be one of"),
        ({"form": "theirs"}, "`form` must be one of published, released_code"),
        ({"scale": "large"}, "`scale` must be one of full, small, tiny"),
        ({"log_phi": None}, "`log_phi` of FedProx must be a number"),
        ({"method": "FedAvg"}, "`log_phi` of FedAvg must be None"),
        ({"c": 0.0}, "`c` of the dirichlet skew must be a number above 0"),
        ({"skew": "pathological", "c": 0.5}, "`c` of the pathological skew must be a whole number of classes"),
    ],
)
def test_what_is_no_run_of_the_paper_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Run(**{"dataset": "bloodmnist", "method": "FedProx", "skew": "dirichlet", "c": 0.1, "log_phi": -2} | given)


def test_powers_of_ten_are_written_as_numbers_and_not_in_exponents():
    assert [power(n) for n in (-1, -2, -3, -4)] == ["0.1", "0.01", "0.001", "0.0001"]
