from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from enum import Enum, IntEnum

import numpy as np
import pytest
import torch
from torch import nn

from lightning_fedstop.utilities.plain import as_in, is_plain, plain_state

Point = namedtuple("Point", "x y")


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Text(str):
    """A text that is more than that."""


KINDS = {
    "counter": (Counter({3: 2, 1: 1}), {3: 2, 1: 1}),
    "deque": (deque([1.0, 2.0], maxlen=2), [1.0, 2.0]),
    "defaultdict": (defaultdict(list, {"a": [1]}), {"a": [1]}),
    "user dict": (UserDict({"a": 1}), {"a": 1}),
    "named tuple": (Point(1, (2, 3)), (1, (2, 3))),
    "frozen set": (frozenset({1}), {1}),
    "numpy float": (np.float32(0.5), 0.5),
    "numpy integer": (np.int64(7), 7),
    "float64, which is a float too": (np.float64(0.25), 0.25),
    "enum": (Colour.RED, "red"),
    "enum of integers": (Level.HIGH, 3),
    "text": (Text("x"), "x"),
    "nested": ([OrderedDict(a=Counter("aab"))], [{"a": {"a": 2, "b": 1}}]),
    "keys": ({Colour.RED: 1, np.int64(2): 2}, {"red": 1, 2: 2}),
}


@pytest.mark.parametrize(("value", "expected"), KINDS.values(), ids=KINDS)
def test_a_state_is_saved_plainly_and_comes_back_in_its_own_types(tmp_path, value, expected):
    saved = plain_state({"value": value})
    assert saved == {"value": expected}
    assert is_plain(saved)
    torch.save(saved, tmp_path / "x.pt")
    restored = as_in({"value": value}, torch.load(tmp_path / "x.pt", weights_only=True))["value"]
    assert restored == value
    assert type(restored) is type(value)


def test_an_array_is_saved_as_a_tensor():
    saved = plain_state({"a": np.arange(3.0)})
    assert torch.equal(saved["a"], torch.arange(3.0, dtype=torch.float64))
    assert as_in({"a": np.zeros(3)}, saved)["a"].tolist() == [0.0, 1.0, 2.0]


def test_a_collection_keeps_its_own_attributes():
    live = {"d": defaultdict(int, a=5), "q": deque([9, 9], maxlen=2)}
    restored = as_in(live, {"d": {"b": 1}, "q": [1, 2]})
    assert (restored["d"]["missing"], restored["q"].maxlen) == (0, 2)
    assert restored == {"d": {"b": 1, "missing": 0}, "q": deque([1, 2])}
    assert live == {"d": {"a": 5}, "q": deque([9, 9])}


@pytest.mark.parametrize("live", [{}, {"x": None}, {"x": 1}, {"x": "text"}, {"x": Colour.RED}, {"x": []}])
def test_what_the_owner_does_not_hold_yet_comes_back_as_it_was_saved(live):
    assert as_in(live, {"x": 0.5, "y": [1]}) == {"x": 0.5, "y": [1]}


def test_what_is_plain_already_stays_as_it_is():
    state = {
        "weights": OrderedDict(w=torch.zeros(2)),
        "numbers": (1, 2.5, None, "x", True, {1, 2}, torch.float16, torch.Size([2])),
    }
    kept = plain_state(state)
    assert kept == state
    assert kept["weights"] is state["weights"]


def test_entries_without_a_plain_form_are_left_out_by_name():
    names = []
    state = {"model": nn.ReLU(), "mixed": {"n": 1, "f": print}, "bad": {"f": [print]}, "o": np.array([print])}
    assert plain_state(state, names) == {"mixed": {"n": 1}, "bad": {}}
    assert names == ["model", "mixed.f", "bad.f", "o"]
