"""Memory that was freed goes back to the system, and not too often."""

import os
import subprocess
import sys
import time

import pytest

from lightning_fedstop import memory
from lightning_fedstop.memory import (
    ALONE,
    HUGE_PAGES,
    MOST_OFTEN,
    TOGETHER,
    ask_for_huge_pages,
    release_memory,
    return_large_blocks,
)

is_glibc = pytest.mark.skipif(memory._trim is None, reason="the C library is not glibc")


@pytest.fixture
def released(monkeypatch):
    """How often the C library was asked."""
    calls = []
    monkeypatch.setattr(memory, "_trim", calls.append)
    return calls


@pytest.fixture
def settings(monkeypatch):
    """What the C library was told, in a process with huge pages whose user has set up nothing."""
    told = []
    monkeypatch.setattr(memory, "_set", lambda name, value: told.append((name, value)) or 1)
    for name in [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(HUGE_PAGES, "1")
    return told


def test_it_is_asked_for_once_in_a_while(released, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    assert release_memory(100.0 - MOST_OFTEN / 2) == 100.0 - MOST_OFTEN / 2
    assert released == []
    assert release_memory(100.0 - MOST_OFTEN) == 100.0
    assert released == [0]


def test_another_c_library_is_left_alone(monkeypatch, settings):
    monkeypatch.setattr(memory, "_trim", None)
    assert release_memory(-1e9) == -1e9
    monkeypatch.setattr(memory, "_set", None)
    assert not return_large_blocks(ALONE)


@is_glibc
def test_glibc_can_be_asked():
    assert release_memory(-1e9) > 0


def test_huge_pages_are_asked_for_unless_the_user_has_decided(monkeypatch):
    monkeypatch.delenv(HUGE_PAGES, raising=False)
    ask_for_huge_pages()
    assert os.environ[HUGE_PAGES] == "1"
    monkeypatch.setenv(HUGE_PAGES, "0")
    ask_for_huge_pages()
    assert os.environ[HUGE_PAGES] == "0"


@pytest.mark.parametrize("pools", [ALONE, TOGETHER])
def test_large_blocks_are_returned_where_pages_are_huge(settings, pools):
    assert return_large_blocks(pools)
    assert dict(settings) == {-3: pools.large, -1: pools.kept}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (HUGE_PAGES, "0"),
        ("MALLOC_ARENA_MAX", "2"),
        ("MALLOC_MMAP_THRESHOLD_", "65536"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536"),
    ],
)
def test_what_a_user_has_set_up_stays(settings, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert not return_large_blocks(TOGETHER)
    assert settings == []


def test_tunables_of_something_else_do_not_count(settings, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.rtld.optional_static_tls=512")
    assert return_large_blocks(TOGETHER)


@is_glibc
def test_a_freed_block_leaves_the_process():
    """By itself glibc keeps a freed block of 8 MiB after it has seen larger ones, where another lies above it."""
    code = """
import sys
from lightning_fedstop.memory import HUGE_PAGES, TOGETHER, return_large_blocks
import os
import torch
if sys.argv[1] == "yes":
    os.environ[HUGE_PAGES] = "1"
    assert return_large_blocks(TOGETHER)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
blocks = [torch.ones(30 * 2**18)]
blocks.clear()
before = resident()
blocks = [torch.ones(8 * 2**18) for _ in range(32)]
del blocks[:-1]
print(resident() - before)
"""
    ours = ("MALLOC_", "GLIBC_TUNABLES", HUGE_PAGES)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}

    def left(how):
        command = [sys.executable, "-c", code, how]
        return float(subprocess.run(command, capture_output=True, text=True, check=True, env=clean).stdout)

    kept, gone = left("no"), left("yes")
    assert kept > 200
    assert gone < 20
