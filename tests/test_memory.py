"""Memory that was freed goes back to the system, and not too often."""

import time

import pytest

from lightning_fedstop import memory
from lightning_fedstop.memory import MOST_OFTEN, release_memory


@pytest.fixture
def released(monkeypatch):
    """How often the C library was asked."""
    calls = []
    monkeypatch.setattr(memory, "_trim", calls.append)
    return calls


def test_it_is_asked_for_once_in_a_while(released, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    assert release_memory(100.0 - MOST_OFTEN / 2) == 100.0 - MOST_OFTEN / 2
    assert released == []
    assert release_memory(100.0 - MOST_OFTEN) == 100.0
    assert released == [0]


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(memory, "_trim", None)
    assert release_memory(-1e9) == -1e9


@pytest.mark.skipif(memory._trim is None, reason="the C library is not glibc")
def test_glibc_can_be_asked():
    assert release_memory(-1e9) > 0
