import math

import numpy as np
import pytest
import torch

from lightning_fedstop.stopping import task_vector, task_vector_distance
from lightning_fedstop.stopping.criteria.distance import as_list, beside, copied, storable


def test_task_vector_keeps_the_form():
    a, b = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])
    assert torch.equal(task_vector(a, b), torch.tensor([2.0, 0.0]))
    (first, second) = task_vector([a, np.array([[2.0]])], [b, np.array([[0.5]])])
    assert torch.equal(first, torch.tensor([2.0, 0.0]))
    assert second.tolist() == [[1.5]]


def test_task_vector_mixes_libraries():
    array, tensor = np.array([1.0, 2.0]), torch.tensor([4.0, 6.0])
    assert torch.equal(task_vector(tensor, array), torch.tensor([3.0, 4.0]))
    assert task_vector(array, tensor).tolist() == [-3.0, -4.0]
    assert task_vector_distance(tensor, array) == task_vector_distance(array, tensor) == 5.0


def test_distance_is_the_norm_of_all_parameters_together():
    generator = torch.Generator().manual_seed(0)
    now = [torch.randn(shape, generator=generator) for shape in ((3, 4), (5,), (), (2, 1, 3))]
    then = [torch.randn(p.shape, generator=generator) for p in now]
    flat = torch.cat([(a.double() - b.double()).reshape(-1) for a, b in zip(now, then, strict=True)])
    expected = float(flat.norm())
    assert task_vector_distance(now, then) == pytest.approx(expected, rel=1e-15)
    assert task_vector_distance(iter(now), iter(then)) == pytest.approx(expected, rel=1e-15)
    assert task_vector_distance([p.numpy() for p in now], [p.numpy() for p in then]) == pytest.approx(
        expected, rel=1e-15
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_accumulates_in_float64(dtype):
    now = torch.full((3_000_000,), 0.1, dtype=dtype)
    expected = math.sqrt(len(now)) * float(now[0])
    assert task_vector_distance(now, torch.zeros_like(now)) == pytest.approx(expected, rel=1e-14)


def test_holds_no_float64_copy_of_the_whole(monkeypatch):
    sizes = []
    double = torch.Tensor.double
    monkeypatch.setattr(torch.Tensor, "double", lambda self: sizes.append(self.numel()) or double(self))
    task_vector_distance(torch.ones(3_000_000), torch.zeros(3_000_000))
    assert sum(sizes) == 6_000_000
    assert max(sizes) <= 1 << 20


@pytest.mark.parametrize("make", [torch.from_numpy, np.asarray], ids=["torch", "numpy"])
@pytest.mark.parametrize("size", [1e200, 1e-200, 3e307, 5e-324])
def test_neither_overflows_nor_vanishes(make, size):
    now, then = np.array([[size], [size], [0.0]]), np.zeros(4)
    distance = task_vector_distance([make(now), make(then + size)], [make(0 * now), make(then)])
    assert distance == pytest.approx(math.sqrt(6) * size, rel=1e-15, abs=0)


def test_large_bfloat16_values():
    now = torch.full((4,), 3e38, dtype=torch.bfloat16)
    assert task_vector_distance(now, -now) == 4 * float(now[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_is_not_finite_if_a_parameter_is_not(bad):
    now = [torch.tensor([1.0, bad]), torch.tensor([2.0])]
    assert not math.isfinite(task_vector_distance(now, [torch.zeros(2), torch.zeros(1)]))
    assert not math.isfinite(task_vector_distance(np.array([1.0, bad]), np.zeros(2)))
    assert math.isnan(task_vector_distance(torch.tensor([math.nan, math.inf]), torch.zeros(2)))


def test_memory_formats_and_views():
    now = torch.arange(48.0).reshape(2, 3, 4, 2).to(memory_format=torch.channels_last)
    assert task_vector_distance(now, torch.zeros(2, 3, 4, 2)) == pytest.approx(float(now.double().norm()), rel=1e-15)
    assert task_vector_distance(np.arange(6.0).reshape(2, 3).T, np.zeros((3, 2))) == pytest.approx(math.sqrt(55))


def test_sparse_parameters_are_measured_as_dense_ones():
    dense = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert task_vector_distance([dense.to_sparse()], [torch.zeros(2, 2).to_sparse()]) == 5
    assert task_vector_distance([dense.to_sparse_csr()], [torch.zeros(2, 2)]) == 5


def test_complex_integer_and_wide_parameters():
    assert task_vector_distance(torch.tensor([3 + 4j]), torch.tensor([0j])) == 5.0
    assert task_vector_distance(np.array([3 + 4j]), np.array([0j])) == 5.0
    assert task_vector_distance(np.array([3, 4]), np.array([0, 0])) == 5.0
    assert task_vector_distance(np.array([3.0, 4.0], np.longdouble), np.zeros(2, ">f4")) == 5.0


def test_the_parameter_is_not_touched():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert task_vector_distance([parameter], [torch.zeros(2, dtype=torch.float64)]) == math.sqrt(5)
    assert parameter.tolist() == [1.0, 2.0]
    assert parameter.requires_grad


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"Parameter 1 has shape \(2,\), but \(3,\) at the start"):
        task_vector_distance([np.zeros(1), np.zeros(2)], [np.zeros(1), np.zeros(3)])
    with pytest.raises(ValueError, match="holds 1 tensors or arrays, but the start holds 2"):
        task_vector_distance(np.zeros(1), [np.zeros(1), np.zeros(3)])


@pytest.mark.parametrize("bad", [None, 3, "abc", {"w": np.zeros(2)}, ["abc"], [None], [[1.0]], np.array(["a"])])
def test_refuses_what_holds_no_numbers(bad):
    with pytest.raises(TypeError, match=r"`parameters`|Parameter 0"):
        as_list(bad)


def test_refuses_a_module_with_a_hint():
    with pytest.raises(TypeError, match=r"got Linear. Pass `module.parameters\(\)`"):
        as_list(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("empty", [[], np.zeros((0, 3)), [torch.zeros(0)], iter(())])
def test_refuses_nothing(empty):
    with pytest.raises(ValueError, match="is empty"):
        as_list(empty)


def test_copies_do_not_follow():
    tensor, array = torch.nn.Parameter(torch.ones(2)), np.ones(2, np.float32)
    first, second, third = copied([tensor, array, np.array([1, 2])], "cpu")
    tensor.data += 1
    array += 1
    assert first.tolist() == second.tolist() == [1.0, 1.0]
    assert not first.requires_grad
    assert (second.dtype, third.dtype) == (np.float32, np.float64)


def test_beside_follows_the_device():
    start = torch.zeros(2)
    assert beside([start], [torch.ones(2)])[0] is start
    assert beside([start], [torch.ones(2, device="meta")])[0].device.type == "meta"
    assert beside([np.zeros(2)], [torch.ones(2)])[0].tolist() == [0.0, 0.0]


def test_accepts_other_libraries_arrays():
    other = type("Other", (), {"__array__": lambda self, dtype=None, copy=None: np.array([3.0, 4.0])})()
    assert task_vector_distance(other, np.zeros(2)) == 5.0


def test_storable_gives_tensors():
    (tensor,) = storable(copied(np.array([1.0, 2.0], ">f4")))
    assert isinstance(tensor, torch.Tensor)
    assert tensor.tolist() == [1.0, 2.0]
