"""Copies of what a module holds beside its trainable parameters."""

import warnings

import pytest
import torch
from torch import nn

from lightning_fedstop.core.module_state import ModuleState, difference, overwrite


def quantized(scales):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch takes leave of them
        if len(scales) > 1:
            zeros = torch.zeros(len(scales), dtype=torch.long)
            return torch.quantize_per_channel(torch.ones(2, 2), torch.tensor(scales), zeros, 0, torch.qint8)
        return torch.quantize_per_tensor(torch.ones(4), scales[0], 0, torch.qint8)


TENSORS = {
    "float": lambda k: torch.full((2,), float(k)),
    "scalar": lambda k: torch.tensor(float(k)),
    "float16": lambda k: torch.full((2,), float(k), dtype=torch.float16),
    "float8": lambda k: torch.full((2,), float(k)).to(torch.float8_e4m3fn),
    "nan": lambda k: torch.tensor([torch.nan, k]),
    "negative zero": lambda k: torch.tensor([0.0 if k == 1 else -0.0]),
    "int64": lambda k: torch.tensor([k]),
    "uint16": lambda k: torch.tensor([k], dtype=torch.uint16),
    "bool": lambda k: torch.tensor([k > 1]),
    "complex": lambda k: torch.tensor([k * 1j]),
    "conjugate": lambda k: torch.tensor([k * 1j]).conj(),
    "half complex": lambda k: torch.tensor([k * 1j]).to(torch.complex32),
    "expanded": lambda k: torch.full((1, 2), float(k)).expand(3, 2),
    "coo": lambda k: (torch.eye(4) * k).to_sparse(),
    "csr": lambda k: (torch.eye(4) * k).to_sparse_csr(),
    "csc": lambda k: (torch.eye(4) * k).to_sparse_csc(),
    "bsr": lambda k: (torch.eye(4) * k).to_sparse_bsr((2, 2)),
    "quantised": lambda k: quantized([k / 10]),
    "quantised by channel": lambda k: quantized([0.1, k / 10]),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_of_all_kinds_are_compared_by_their_bits_and_put_back(kind):
    module = nn.Module()
    module.register_buffer("x", TENSORS[kind](1))
    tensor, state = module.x, ModuleState(module, [])
    assert state.changed() == {}
    module.x = TENSORS[kind](1)
    assert state.changed() == {}
    module.x = TENSORS[kind](2)
    assert list(state.changed()) == ["x"]
    with state.restored():
        assert module.x is tensor
        assert state.changed() == {}
    assert list(state.changed()) == ["x"]
    state.restore()
    assert module.x is tensor
    assert state.changed() == {}


@pytest.mark.parametrize("kind", [kind for kind in TENSORS if kind != "expanded"])
def test_tensors_of_all_kinds_are_put_back_in_place(kind):
    module = nn.Module()
    module.register_buffer("x", TENSORS[kind](1))
    state = ModuleState(module, [])
    overwrite(module.x, TENSORS[kind](2))
    assert list(state.changed()) == ["x"]
    with state.restored():
        assert state.changed() == {}
    assert list(state.changed()) == ["x"]
    state.restore()
    assert state.changed() == {}


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.trained = nn.Parameter(torch.zeros(2))
        self.target = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.shared = nn.ParameterList([self.target])


def rebind(module):
    module.target.data = module.target.data * 0.9 + 0.1


def replace(module):
    module.target = nn.Parameter(torch.ones(2), requires_grad=False)


def grow(module):
    module.target.data = torch.ones(5)


CHANGES = [
    lambda module: module.target.add_(1),
    lambda module: module.target.copy_(torch.ones(2)),
    lambda module: module.target.data.add_(1),
    rebind,
    replace,
    grow,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_frozen_parameter_is_followed_however_it_is_changed(change):
    module = Frozen()
    target, state = module.target, ModuleState(module, [module.trained])
    module.trained.data.add_(1)
    assert state.changed() == {}
    change(module)
    assert list(state.changed()) == ["target"]
    with state.restored():
        assert module.target.tolist() == [0, 0]
    assert list(state.changed()) == ["target"]
    state.restore()
    assert module.target is target
    assert target.tolist() == [0, 0]
    assert module.trained.tolist() == [1, 1]


def test_a_buffer_that_is_gone_comes_back():
    module = nn.Module()
    module.register_buffer("x", torch.ones(1))
    state = ModuleState(module, [])
    module.x = None
    assert list(state.changed()) == ["x"]
    with state.restored():
        assert module.x == 1
    assert module.x is None
    state.restore()
    assert module.x == 1


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (torch.zeros(2), None),
        (torch.zeros(2, 3), "its shape from (2,) to (2, 3)"),
        (torch.zeros(2, dtype=torch.int64), "its dtype from torch.float32 to torch.int64"),
        (torch.zeros(2, device="meta"), "its device from cpu to meta"),
        (torch.zeros(2).to_sparse(), "its layout from torch.strided to torch.sparse_coo"),
    ],
)
def test_difference_names_what_has_changed(after, expected):
    assert difference(torch.ones(2), after) == expected
