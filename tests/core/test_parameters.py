import copy
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_model, save_file, save_model
from torch import nn

from lightning_fedstop.core import parameters
from lightning_fedstop.core.parameters import FlatParameters, _parts, is_finite, norm


def net():
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


def test_every_parameter_has_a_storage_of_its_own(tmp_path):
    """As in a Trainer: one tensor is written alone, and ``safetensors`` finds none that share memory."""
    module = net()
    flat = FlatParameters(module)
    for parameter in module.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4
        torch.save(parameter, tmp_path / "one.pt")
        assert torch.equal(torch.load(tmp_path / "one.pt"), parameter)
    flat.zero_grad()
    assert module[0].weight.grad.untyped_storage().nbytes() == 24
    save_model(module, str(tmp_path / "x.safetensors"))
    save_file(module.state_dict(), tmp_path / "y.safetensors")
    other = net()
    load_model(other, str(tmp_path / "x.safetensors"))
    assert torch.equal(nn.utils.parameters_to_vector(other.parameters()), flat.vector)
    module.state_dict()["0.weight"].fill_(7.0)  # which aliases the module, as that of any
    assert torch.equal(flat.vector[:6], torch.full((6,), 7.0))


def test_parts_of_a_vector_are_views_where_an_address_is_none():
    parts = _parts(torch.zeros(5, device="meta"), [torch.Size([2, 2]), torch.Size([1])])
    assert [(part.shape, part.storage_offset()) for part in parts] == [((2, 2), 0), ((1,), 4)]


def test_tied_and_empty_parameters_are_saved_as_those_of_any_module(tmp_path):
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    module.empty = nn.Parameter(torch.zeros(0, 3))
    flat = FlatParameters(module)
    assert len(flat) == 4
    flat.check_unchanged()
    save_model(module, str(tmp_path / "x.safetensors"))
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(module.state_dict(), tmp_path / "y.safetensors")


def test_vector_and_module_share_memory():
    module = net()
    expected = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    flat = FlatParameters(module)
    assert torch.equal(flat.vector, expected)
    assert len(flat) == len(expected)
    flat.vector.mul_(2)
    assert torch.equal(nn.utils.parameters_to_vector(module.parameters()), 2 * expected)
    with torch.no_grad():
        module[0].bias.fill_(7)
    assert (flat.vector == 7).sum() == 2


def test_backward_fills_the_gradient_vector_and_adds_to_it():
    module, x = net(), torch.randn(5, 3)
    expected = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    flat = FlatParameters(module)
    flat.zero_grad()
    for passes in (1, 2):
        module(x).sum().backward()
        torch.testing.assert_close(flat.grad, passes * torch.cat([g.reshape(-1) for g in expected]))
    flat.zero_grad()
    assert not flat.grad.any()


def test_parameters_whose_memory_was_exchanged_are_refused():
    module = net()
    flat = FlatParameters(module)
    module[0].weight.data.zero_()
    flat.check_unchanged()
    module[0].weight.data = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"must keep their memory during a fit, but 0\.weight lies elsewhere now"):
        flat.check_unchanged()


def test_gradients_that_were_replaced_or_dropped_come_back_into_the_vector():
    module = net()
    flat = FlatParameters(module)
    flat.zero_grad()
    flat.grad.fill_(5)
    module[0].weight.grad = torch.full_like(module[0].weight, 3.0)
    module[2].bias.grad = None
    flat.gather_grad()
    assert flat.grad[:6].eq(3).all()
    assert flat.grad[-1] == 0
    assert flat.grad[6:-1].eq(5).all()
    flat.grad.zero_()
    assert not module[0].weight.grad.any()  # attached again


def test_detach_grad_leaves_none_until_zero_grad():
    flat = FlatParameters(module := net())
    flat.zero_grad()
    flat.detach_grad()
    assert all(parameter.grad is None for parameter in module.parameters())
    flat.zero_grad()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_frozen_parameters_and_buffers_stay_outside():
    module = net()
    module[0].weight.requires_grad_(False)
    flat = FlatParameters(module)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flat.vector.add_(1)
    changed = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"0.bias", "1.weight", "1.bias", "2.weight", "2.bias"}
    assert [name for name, p in module.named_parameters() if not p.requires_grad] == ["0.weight"]


def test_tied_parameters_are_counted_once():
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    flat = FlatParameters(module)
    flat.vector.fill_(3)
    assert len(flat) == 4
    assert module[1].weight is module[0].weight
    assert module[1].weight.eq(3).all()


def test_holding_puts_back_what_was_there_even_after_an_error():
    flat = FlatParameters(net())
    before = flat.vector.clone()

    def look():
        with flat.holding(torch.zeros_like(before)):
            assert not flat.vector.any()
            raise KeyError

    with pytest.raises(KeyError):
        look()
    assert torch.equal(flat.vector, before)


def test_a_released_module_is_an_ordinary_one():
    module = net()
    flat = FlatParameters(module)
    flat.zero_grad()
    flat.release()
    storages = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    assert len(storages) == len(list(module.parameters()))
    assert all(p.untyped_storage().nbytes() == p.numel() * 4 and p.grad is None for p in module.parameters())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda module: module[0].weight.requires_grad_(False), "0.weight"),
        (lambda module: module.append(nn.Linear(1, 1, bias=False)), "3.weight"),
        (lambda module: setattr(module[2], "bias", nn.Parameter(torch.zeros(1))), "2.bias"),
        (lambda module: module[1].bias.requires_grad_(True), None),
    ],
)
def test_check_unchanged(change, named):
    flat = FlatParameters(module := net())
    change(module)
    if named is None:
        flat.check_unchanged()
        return
    with pytest.raises(ValueError, match=rf"must stay the same during a fit, but {named} changed"):
        flat.check_unchanged()


def mixed():
    module = net()
    module[2].double()
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: nn.ReLU(), "ReLU has no trainable parameter"),
        (lambda: net().requires_grad_(False), "Sequential has no trainable parameter"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), r"'0\.weight' of Sequential is lazy"),
        (mixed, r"share one dtype and one device, got \['torch.float32', 'torch.float64'\]"),
    ],
)
def test_modules_that_make_no_vector_are_refused(module, message):
    with pytest.raises(ValueError, match=message):
        FlatParameters(module())


INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([1.0, -2.0], torch.float32, True),
        ([], torch.float32, True),
        ([3e38, 3e38], torch.float32, True),  # their sum is not finite
        ([6e4, 6e4], torch.float16, True),
        ([1e308, 1e308], torch.float64, True),
        ([1.0, NAN], torch.float32, False),
        ([1.0, INF], torch.float32, False),
        ([INF, -INF], torch.float32, False),
        ([-INF, 3e38], torch.bfloat16, False),
    ],
)
def test_a_vector_is_finite_if_each_number_is(values, dtype, expected):
    assert is_finite(torch.tensor(values, dtype=dtype)) is expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(3_000_001,), (3, 1_000_001)])
def test_the_norm_of_a_long_vector_is_exact(shape, dtype):
    """Plain sums in float32 are 1e-5 short at a million numbers on a CPU, and 6e-5 at three millions."""
    vector = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = np.linalg.norm(vector.double().numpy(), axis=-1)
    np.testing.assert_allclose(norm(vector).numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(parameters._norm_in_float32(vector).squeeze(-1).numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("ways", [norm, parameters._norm_in_float32])
@pytest.mark.parametrize("size", [1e30, 1e-30, 1.0])
def test_the_norm_neither_overflows_nor_vanishes(ways, size):
    assert ways(torch.tensor([3.0, 4.0]) * size).item() == pytest.approx(5 * size)


def test_the_shape_of_a_norm():
    vectors = torch.ones(2, 4)
    assert norm(vectors).tolist() == [2, 2]
    assert norm(vectors, keepdim=True).tolist() == [[2], [2]]
    assert norm(vectors[0]).shape == ()
    assert norm(torch.full((3,), torch.nan)).isnan()
    assert parameters._norm_in_float32(torch.zeros(5000)).tolist() == [0]
