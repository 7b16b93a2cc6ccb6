"""Vectors of clients: the same from memory and from disk, and no more of them than were written."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from lightning_fedstop.core.client_states import ClientStates
from lightning_fedstop.methods import SCAFFOLD
from tests.helpers import ToyData, fit

DIM = 1000
both = pytest.mark.parametrize("storage", ["memory", "disk"])


def opened(storage, folder, dtype=None, like=torch.float32, dim=DIM):
    states = ClientStates(storage, dtype)
    states.open(torch.zeros(dim, dtype=like), folder)
    return states


def files(folder):
    return list(Path(folder).glob(".client_states.*"))


@both
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_what_was_set_is_got(tmp_path, storage, dtype):
    states = opened(storage, tmp_path, dtype)
    values = {("c", 7): torch.randn(DIM), ("h", 7): torch.randn(DIM), ("c", 9999): torch.randn(DIM)}
    for _ in range(2):
        for key, value in values.items():
            states.set(*key, value)
    for key, value in values.items():
        got = states.get(*key)
        assert got.dtype is torch.float32
        if dtype == "bfloat16":
            assert torch.equal(got, value.bfloat16().float())
            assert ((got - value).abs() <= value.abs() * 2**-8).all()
        else:
            assert torch.equal(got, value)
    assert not states.get("c", 8).any()
    assert sorted(states.written()) == sorted(values)


@both
def test_float64_models_keep_float64(tmp_path, storage):
    states = opened(storage, tmp_path, like=torch.float64)
    value = torch.randn(DIM, dtype=torch.float64)
    states.set("c", 0, value)
    assert torch.equal(states.get("c", 0), value)


@both
def test_vectors_given_and_got_are_copies(tmp_path, storage):
    states = opened(storage, tmp_path)
    value = torch.ones(DIM)
    states.set("c", 0, value)
    value.zero_()
    states.get("c", 0).zero_()
    states.get("c", 1).fill_(5)
    assert states.get("c", 0).eq(1).all()
    assert not states.get("c", 1).any()


def test_nothing_is_allocated_before_it_is_written(tmp_path):
    """10,000 clients of a million numbers would be 40 GB."""
    states = opened("disk", tmp_path, dim=1_000_000)
    assert not files(tmp_path)
    states.set("c", 9_999, torch.ones(1_000_000))
    (file,) = files(tmp_path)
    assert file.stat().st_size == 4_000_000
    memory = opened("memory", None, dim=1_000_000)
    memory.set("c", 9_999, torch.ones(1_000_000))
    assert len(memory.written()) == 1


def test_the_file_grows_by_one_vector_for_each_client_and_slots_are_used_again(tmp_path):
    states = opened("disk", tmp_path)
    for client in (5000, 3, 5000, 77):
        states.set("c", client, torch.full((DIM,), float(client)))
    (file,) = files(tmp_path)
    assert file.stat().st_size == 3 * DIM * 4
    assert states.pop(("c", 3)).eq(3).all()
    assert not states.get("c", 3).any()
    states.set("c", 8, torch.full((DIM,), 8.0))
    assert file.stat().st_size == 3 * DIM * 4
    assert [states.get("c", client)[-1].item() for client in (5000, 8, 77)] == [5000, 8, 77]
    states.close()
    assert not files(tmp_path)
    assert states.written() == []
    states.close()


def test_a_full_disk_gets_a_sentence(tmp_path):
    """A mapped file would end the process."""
    resource = pytest.importorskip("resource")
    states, before = opened("disk", tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    states.set("c", 1, torch.ones(DIM))
    (file,) = files(tmp_path)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(OSError, match=rf"vectors cannot be kept in '{file}' \(File too large\): make room"):
            states.set("c", 2, torch.ones(DIM))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert states.get("c", 1).eq(1).all()
    states.close()
    assert not files(tmp_path)


def test_a_folder_that_is_gone_and_a_file_that_is_cut_get_a_sentence(tmp_path):
    with pytest.raises(OSError, match=r"vectors cannot be kept in '.*gone' \(No such file or directory\)"):
        opened("disk", tmp_path / "gone").set("c", 1, torch.ones(DIM))
    states = opened("disk", tmp_path)
    states.set("c", 1, torch.ones(DIM))
    os.truncate(files(tmp_path)[0], 10)
    with pytest.raises(OSError, match=r"vectors cannot be kept in .* \(ends before 'c' of client 1\)"):
        states.get("c", 1)
    states.close()


def test_threads_do_not_mix_their_vectors(tmp_path):
    states = opened("disk", tmp_path)

    def work(client):
        for value in range(50):
            states.set("c", client, torch.full((DIM,), float(1000 * client + value)))
            assert states.get("c", client).eq(1000 * client + value).all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


@both
def test_pop_of_what_was_never_written(tmp_path, storage):
    with pytest.raises(KeyError):
        opened(storage, tmp_path).pop(("c", 1))


@pytest.mark.parametrize(("first", "second"), [("memory", "disk"), ("disk", "memory")])
def test_state_goes_from_one_storage_to_the_other(tmp_path, first, second):
    states, other = opened(first, tmp_path), opened(second, tmp_path)
    for client in (2, 0):
        states.set("c", client, torch.randn(DIM))
    states.set("h", 1, torch.randn(DIM))
    other.set("gone", 4, torch.ones(DIM))
    other.load_state_dict(states.state_dict())
    assert sorted(other.written()) == [("c", 0), ("c", 2), ("h", 1)]
    assert all(torch.equal(other.get(*key), states.get(*key)) for key in states.written())


@both
def test_opening_again_begins_anew(tmp_path, storage):
    states = opened(storage, tmp_path)
    states.set("c", 0, torch.ones(DIM))
    companion = states.companion()
    companion.set("model", 1, torch.ones(DIM))
    assert states.written() == [("c", 0)]
    states.open(torch.zeros(3), tmp_path)
    assert states.written() == companion.written() == []
    assert states.get("c", 0).shape == (3,)
    assert not files(tmp_path)


@both
@pytest.mark.parametrize("shape", [(1,), (2, DIM), (DIM + 1,)])
def test_other_shapes_are_refused(tmp_path, storage, shape):
    with pytest.raises(ValueError, match=rf"'c' of client 3 must have the shape \({DIM},\), got"):
        opened(storage, tmp_path).set("c", 3, torch.zeros(shape))


def test_other_storages_and_dtypes_are_refused():
    with pytest.raises(ValueError, match="`storage` of ClientStates must be 'memory' or 'disk', got 'ram'"):
        ClientStates("ram")
    with pytest.raises(
        ValueError, match="`dtype` of ClientStates must be one of float32, bfloat16 or None, got 'half'"
    ):
        ClientStates(dtype="half")


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_storage_does_not_change_a_run(tmp_path, dtype):
    ends = []
    for storage in ("memory", "disk"):
        loop, _ = fit(tmp_path, method=SCAFFOLD(), client_states=ClientStates(storage, dtype))
        ends.append(loop.server.theta)
    assert torch.equal(*ends)


def test_bfloat16_stays_close(tmp_path):
    exact, short = (
        fit(tmp_path, method=SCAFFOLD(), client_states=ClientStates(dtype=d))[0].server.theta
        for d in (None, "bfloat16")
    )
    assert 0 < (exact - short).norm() < 1e-2 * exact.norm()


@pytest.mark.parametrize("fails", [False, True])
def test_the_file_lies_in_the_runs_folder_and_goes_with_the_run(tmp_path, fails):
    seen = []

    class Looks(SCAFFOLD):
        def aggregate(self, theta, mean_delta):
            seen.extend(files(tmp_path / "lightning_logs" / "version_0"))
            if fails:
                raise RuntimeError("stops here")
            return super().aggregate(theta, mean_delta)

    with pytest.raises(RuntimeError, match="stops here") if fails else nullcontext():
        fit(tmp_path, method=Looks(), client_states=ClientStates("disk"))
    assert len(set(seen)) == 1
    assert not list(tmp_path.rglob(".client_states.*"))


def test_ten_thousand_clients_cost_no_more_than_those_who_take_part(tmp_path):
    kept = []

    class Counts(SCAFFOLD):
        def state_dict(self):
            kept.append(len(self.federation.states.written()))
            return super().state_dict()

    fit(tmp_path, method=Counts(), data=ToyData([1] * 10_000, evaluated=False), clients_per_round=3, max_rounds=2)
    assert 3 <= kept[-1] <= 6
