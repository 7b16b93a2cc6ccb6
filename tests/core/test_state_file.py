"""Clients' vectors beside a checkpoint."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback

from lightning_fedstop.core.client_states import ClientStates
from lightning_fedstop.core.state_file import StateFile, read_states
from lightning_fedstop.loop.checkpoint_file import read_checkpoint
from lightning_fedstop.methods import SCAFFOLD, FedSMOO
from tests.helpers import ToyData, bits, fit, same


def vector(value, dtype=torch.float32):
    return torch.full((3,), float(value), dtype=dtype)


def values(states):
    return {(name, client): v[0].item() for name, vectors in states.items() for client, v in vectors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_vectors_come_back_bit_for_bit(tmp_path, dtype):
    random = torch.randn(3).to(dtype)
    manifest = StateFile(tmp_path / "s.bin").write({("c", 7): random, ("h", 2): vector(1, dtype)})
    assert manifest["dim"] == 3
    found = read_states(manifest, tmp_path / "x.ckpt")
    assert torch.equal(found["c"][7], random)
    assert torch.equal(found["h"][2], vector(1, dtype))


def test_no_vectors_need_no_file(tmp_path):
    assert StateFile(tmp_path / "s.bin").write({}) == {}
    assert read_states({}, tmp_path / "x.ckpt") == {}
    assert not list(tmp_path.iterdir())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.dictionaries(st.integers(0, 5), st.integers(0, 99), max_size=4), st.booleans()), max_size=12)
)
def test_a_checkpoint_in_place_keeps_its_vectors_whatever_is_written_later(tmp_path_factory, rounds):
    """A run is killed after any write: the last checkpoint in place refers to what it referred to."""
    folder = tmp_path_factory.mktemp("states")
    file, expected, kept, manifest = StateFile(folder / "s.bin"), {}, {}, {}
    for changed, survives in rounds:
        expected |= {("c", client): value for client, value in changed.items()}
        written = file.write({("c", client): vector(value) for client, value in changed.items()})
        if survives:
            file.settle()
            manifest, kept = written, dict(expected)
        assert values(read_states(manifest, folder / "x.ckpt")) == kept


def test_the_file_holds_about_twice_what_is_in_use(tmp_path):
    file = StateFile(tmp_path / "s.bin")
    for round in range(50):
        file.write({("c", client): vector(round) for client in range(4)})
        file.settle()
    assert (tmp_path / "s.bin").stat().st_size == 2 * 4 * 12


def test_a_file_that_is_missing_short_or_of_another_run_is_refused(tmp_path):
    manifest = StateFile(tmp_path / "s.bin").write({("c", 1): vector(1), ("c", 2): vector(2)})
    with pytest.raises(ValueError, match=r"x.ckpt' needs the file 's.bin' beside it"):
        read_states(manifest, tmp_path / "elsewhere" / "x.ckpt")
    (tmp_path / "s.bin").write_bytes(bytes(24))
    with pytest.raises(ValueError, match=r"does not belong to .*x.ckpt', or is damaged"):
        read_states(manifest, tmp_path / "x.ckpt")
    os.truncate(tmp_path / "s.bin", 20)
    with pytest.raises(ValueError, match="does not belong to"):
        read_states(manifest, tmp_path / "x.ckpt")


def test_a_void_round_leaves_no_trace_in_the_store():
    states = ClientStates()
    states.open(torch.zeros(3))
    states.set("c", 1, vector(1))
    assert list(states.pop_changed()) == [("c", 1)]
    states.begin()
    states.set("c", 1, vector(2))
    states.set("c", 2, vector(3))
    assert torch.equal(states.get("c", 1), vector(2))
    assert values(states.state_dict()) == {("c", 1): 1.0}
    states.discard()
    assert torch.equal(states.get("c", 1), vector(1))
    assert states.pop_changed() == {}
    states.begin()
    states.set("c", 2, vector(4))
    states.commit()
    assert values(states.state_dict()) == {("c", 1): 1.0, ("c", 2): 4.0}
    assert list(states.pop_changed()) == [("c", 2)]


def kept(loop):
    path = Path(loop.log_dir) / "checkpoints" / "last.ckpt"
    return values(read_states(read_checkpoint(path)["federated"]["client_states_beside"], path))


class Sizes(Callback):
    """Notes how large the loop's own checkpoint is after each round."""

    def __init__(self):
        self.sizes = []

    def on_train_epoch_start(self, trainer, module):
        path = Path(trainer.log_dir) / "checkpoints" / "last.ckpt"
        if path.exists():
            self.sizes.append(path.stat().st_size)


@pytest.mark.parametrize("method", [SCAFFOLD, FedSMOO])
@pytest.mark.parametrize("storage", ["memory", "disk"])
def test_a_run_goes_on_from_last_with_the_vectors_beside_it(tmp_path, method, storage):
    given = {"max_rounds": 6, "clients_per_round": 3, "client_states": ClientStates(storage)}
    whole, expected = fit(tmp_path / "whole", method=method(), **given)
    cut, _ = fit(tmp_path / "cut", method=method(), **given | {"max_rounds": 3})
    path = Path(cut.log_dir) / "checkpoints" / "last.ckpt"
    state = read_checkpoint(path)["federated"]
    assert state["client_states"] == {}
    assert values(read_states(state["client_states_beside"], path))
    again, module = fit(tmp_path / "cut", method=method(), ckpt_path="last", **given)
    assert same(bits(module), bits(expected))
    assert kept(again) == kept(whole) != {}


def test_the_rolling_checkpoint_does_not_grow_with_the_clients_ever_trained(tmp_path):
    sizes = Sizes()
    data = ToyData([4] * 60, evaluated=False)
    fit(tmp_path, sizes, method=SCAFFOLD(), data=data, max_rounds=12, clients_per_round=5, seed=1)
    grown = [after - before for before, after in zip(sizes.sizes, sizes.sizes[1:], strict=False)]
    # A client's vector is 40 bytes here, its place in the checkpoint's list some 20 more; both would show.
    assert max(grown) < 5 * 60
