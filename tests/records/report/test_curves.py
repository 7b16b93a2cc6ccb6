import pytest

from lightning_fedstop.records.reader import read_record
from lightning_fedstop.records.report.curves import curves_picture, mean_curve, overview_picture
from lightning_fedstop.records.report.picture import figure_style
from lightning_fedstop.records.report.runs import Run, grouped
from lightning_fedstop.records.report.style import RULE_STYLE
from tests.records.report.made import config, rows, write_run


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    folder = tmp_path_factory.mktemp("curves")
    runs = [
        Run(read_record(write_run(folder / str(seed), seed=seed, made_config=config(seed=seed)), name=str(seed)))
        for seed in (0, 1)
    ]
    return grouped(runs)[0]


def drawn(picture):
    with figure_style("test"):
        return picture.draw(8.0)


def markers(axes, marker):
    return [tuple(line.get_xydata()[0]) for line in axes.lines if line.get_marker() == marker]


def test_markers_stand_on_the_curves_where_the_rules_stop(group):
    top, below = drawn(curves_picture(group, 0.01, 10, "curves")).axes
    for rule, (_, marker) in RULE_STYLE.items():
        rounds = [run.stop(rule, 0.01, 10).stop_round for run in group.runs]
        assert markers(top, marker) == [
            (r, run.series("test_acc")[r]) for r, run in zip(rounds, group.runs, strict=True) if r
        ]
        assert markers(below, marker) == [
            (r, run.series("growth_rate")[r]) for r, run in zip(rounds, group.runs, strict=True) if r
        ]


def test_growth_is_on_a_logarithmic_scale_with_its_threshold(group):
    _, below = drawn(curves_picture(group, 0.02, 10, "curves")).axes
    assert below.get_yscale() == "log"
    assert any(list(line.get_ydata()) == [0.02, 0.02] for line in below.lines)


def test_the_mean_is_over_the_rounds_that_all_runs_have(group, tmp_path):
    short = Run(read_record(write_run(tmp_path / "a", rounds=5, validation=False)))
    mean = mean_curve([*group.runs, short], "test_acc")
    assert list(mean) == [1, 2, 3, 4, 5]
    assert mean[5] == pytest.approx(sum(run.series("test_acc")[5] for run in [*group.runs, short]) / 3)
    # A run that never validated takes no part in the mean of the others.
    assert len(mean_curve([*group.runs, short], "val_acc")) == 120


def test_losses_where_no_accuracy_was_recorded(tmp_path):
    made = rows(rounds=5, validation=False, test=False)
    group = grouped([Run(read_record(write_run(tmp_path / "a", made_rows=made)))])[0]
    picture = curves_picture(group, 0.01, 3, "curves")
    assert picture.title.startswith("Loss and growth rate")
    assert drawn(picture).axes[0].get_ylabel() == "loss"
    assert "training loss: " in picture.description


def test_the_words_for_stops(group):
    stops = [run.stop("task_vector", 0.01, 10).stop_round for run in group.runs]
    words = curves_picture(group, 0.01, 10, "curves").description
    assert f"Task vector: round {sum(stops) / 2:.1f}\xa0±" in words
    assert "Task vector: not by round 120." in curves_picture(group, 1e-9, 10, "curves").description


def test_all_configurations_are_in_one_picture(group, tmp_path):
    other = Run(read_record(write_run(tmp_path / "b", seed=5, made_config=config(method="FedDyn")), name="b"))
    groups = grouped([*group.runs, other])
    picture = overview_picture(groups, 0.01, "curves")
    top, below = drawn(picture).axes
    assert [list(line.get_ydata()) for line in top.lines] == [
        list(mean_curve(one.runs, "test_acc").values()) for one in groups
    ]
    assert [line.get_label() for line in below.lines][1:] == [one.label for one in groups]
    assert list(picture.table.header) == ["round", *(one.label for one in groups)]
