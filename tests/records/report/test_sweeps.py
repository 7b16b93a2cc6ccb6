import pytest

from lightning_fedstop.records.reader import read_record
from lightning_fedstop.records.report.runs import Run, grouped
from lightning_fedstop.records.report.sweeps import (
    accuracy_against_threshold,
    share_against_degree,
    share_against_patience,
)
from tests.records.report.made import config, write_run


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    runs = []
    for c in (0.1, 1.0):
        for seed in (0, 1):
            path = write_run(folder / f"{c}-{seed}", seed=seed, speed=0.3 + 0.1 * c, made_config=config(seed=seed, c=c))
            runs.append(Run(read_record(path, name=f"{c}-{seed}")))
    return grouped(runs)


def test_share_against_degree_needs_two_degrees(groups):
    picture = share_against_degree(groups, 0.01, 10)
    shares = [run.share_of("task_vector", 0.01, 10) for run in groups[0].runs]
    assert picture.table.rows[0][2].startswith(f"{sum(shares) / 2:.1f}\xa0±")
    assert "standard deviation" in picture.caption
    assert "differ only in their skew's c" in share_against_degree(groups[:1], 0.01, 10)


def test_accuracy_against_threshold_with_the_better_validation_rule(groups):
    picture = accuracy_against_threshold(groups[:1], (0.1, 0.01), 5)
    run = groups[0].runs[0]
    best = [max(r.accuracy_of(rule, 0.1, 5) for rule in ("val_loss", "val_acc")) for r in groups[0].runs]
    assert list(picture.table.header[2:]) == ["0.01", "0.1"]
    assert picture.table.rows[1][3].startswith(f"{sum(best) / 2:.1f}\xa0±")
    assert run.accuracy_of("task_vector", 0.1, 5) == run.stop("task_vector", 0.1, 5).accuracy
    assert "two of the rounds" in accuracy_against_threshold(groups, (0.1,), 5)


def test_share_against_patience(groups):
    picture = share_against_patience(groups, 0.01, (10, 1))
    assert picture.name == "share-against-patience"
    assert "two of the patiences" in share_against_patience(groups, 0.01, (5, 5))


def test_a_record_that_ends_before_the_stop_has_no_share(tmp_path):
    run = Run(read_record(write_run(tmp_path / "a", rounds=5, made_config=config())))
    assert run.share_of("task_vector", 0.001, 10) is None
    assert "long enough" in share_against_patience(grouped([run]), 0.001, (5, 10))
