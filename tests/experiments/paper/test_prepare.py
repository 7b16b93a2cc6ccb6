import pytest

from experiments.paper import Choice, runs_of
from experiments.paper.prepare import _fetch
from experiments.paper.prepare import prepare as fetch


@pytest.fixture
def fetched(monkeypatch):
    """What would be fetched."""
    seen = []
    monkeypatch.setattr("experiments.paper.prepare._fetch", lambda what, code, *arguments: seen.append(arguments))
    return seen


def test_each_data_set_is_fetched_once(fetched):
    there = fetch(runs_of("figure5"))
    assert fetched == [("bloodmnist", "64"), ("dermamnist", "64"), ("pathmnist", "64")]
    assert there[0] == "the data set bloodmnist of 64 pixels"


def test_weights_are_fetched_if_wanted(fetched):
    fetch(runs_of("figure5", Choice(scale="small", datasets=["bloodmnist"])), weights=True)
    assert fetched == [("bloodmnist", "28"), ("convnextv2_atto",)]


def test_nothing_is_fetched_where_the_files_are_or_none_are_needed(fetched):
    assert fetch(runs_of("figure5"), "files") == []
    assert fetch(runs_of("figure5", Choice(scale="tiny")), weights=True) == []
    assert not fetched


def test_a_failure_says_what_could_not_be_fetched():
    with pytest.raises(RuntimeError, match="The data set x could not be fetched: no network"):
        _fetch("the data set x", "raise OSError('no network')")
