import json

import pytest

from experiments.paper.published import by_lr, by_skew, find, paper_results
from experiments.paper.runs import COEFFICIENTS, DATASETS, LOG_LRS, LOG_PHIS, PHI
from tests.helpers import SHARED


def test_the_tables_are_those_of_the_source():
    path = SHARED / "paper" / "paper_results.json"
    if not path.exists():
        pytest.skip("../shared/paper/paper_results.json is absent")
    source = json.loads(path.read_text())
    assert {key: paper_results()[key] for key in source} == source
    assert paper_results()["source"]["arxiv"] == "2601.22669"


def test_tables_1_and_2_agree_where_they_overlap():
    for dataset in DATASETS:
        for method in PHI:
            assert by_skew(dataset, "dirichlet", method) == by_lr(dataset, -3, method)


def test_each_chosen_phi_is_of_the_grid_and_only_two_methods_have_none():
    for dataset in DATASETS:
        for method, name in PHI.items():
            found = {by_skew(dataset, skew, method)[1] for skew in COEFFICIENTS}
            found |= {by_lr(dataset, log_lr, method)[1] for log_lr in LOG_LRS}
            assert found == {None} if name is None else found <= set(LOG_PHIS)


def test_a_cell_is_found_by_all_it_says():
    key = "figure8_used_ratio_bad_configurations_tau_0.1"
    assert find(key, "percent", "averages", patience=10, dataset=None, skew=None) == 4.3
    assert find(key, "percent", "averages", patience=10, dataset="pathmnist") == 5.1
    assert find(key, "percent", "averages", patience=5, dataset="pathmnist") is None
    figure5 = "figure5_fedavg_dirichlet_0.1_tau_0.01_rho_10"
    assert find(figure5, "round", "dermamnist", "task_vector") == 79
    assert find(figure5, "round", "bloodmnist", "task_vector") is None
