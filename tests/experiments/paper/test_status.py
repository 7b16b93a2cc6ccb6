import pytest

from experiments.paper import Run
from experiments.paper.status import State, state_of
from tests.experiments.paper.runs import write_run

RUN = Run("bloodmnist", "FedAvg", "dirichlet", 0.1)


@pytest.fixture
def checkpointed(tmp_path):
    folder = write_run(tmp_path, RUN, summary=False)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "last.ckpt").write_bytes(b"x")
    return folder


def test_a_run_without_a_folder_is_missing(tmp_path):
    assert state_of(RUN, tmp_path / "none") == State("missing")


def test_a_run_that_ended_before_its_first_checkpoint_begins_anew(tmp_path):
    folder = write_run(tmp_path, RUN, summary=False)
    assert state_of(RUN, tmp_path) == State("missing", folder)


def test_a_run_with_a_checkpoint_goes_on(tmp_path, checkpointed):
    assert state_of(RUN, tmp_path) == State("unfinished", checkpointed)


def test_a_continued_run_that_ended_at_once_goes_on_from_the_folder_before(tmp_path, checkpointed):
    (checkpointed.parent / "version_1").mkdir()
    assert state_of(RUN, tmp_path) == State("unfinished", checkpointed)


def test_a_summary_makes_a_run_done_and_the_newest_counts(tmp_path, checkpointed):
    write_run(tmp_path, RUN, version=2)
    tenth = write_run(tmp_path, RUN, version=10)
    write_run(tmp_path, RUN, version=11, summary=False)
    assert state_of(RUN, tmp_path) == State("done", tenth)


def test_a_folder_of_another_name_is_passed_over(tmp_path):
    done = write_run(tmp_path, RUN)
    (done.parent / "version_old").mkdir()
    assert state_of(RUN, tmp_path) == State("done", done)
