import random

import numpy as np
import pytest
import torch

from lightning_fedstop.core.seeding import RandomStream, derive_seed, resolve_seed, seeded, torch_generator


def test_resolve_seed_takes_the_argument_then_lightnings_then_zero(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert resolve_seed() == 0
    monkeypatch.setenv("PL_GLOBAL_SEED", "42")
    assert resolve_seed() == 42
    assert resolve_seed(0) == 0


@pytest.mark.parametrize("seed", [-1, 1.0, True, "1"])
def test_other_seeds_are_refused(seed):
    with pytest.raises((TypeError, ValueError), match="`seed` must be an integer of at least 0"):
        resolve_seed(seed)


def test_streams_differ_by_every_part_of_their_path_and_never_change():
    paths = [(s, name, r, c) for s in (0, 1) for name in ("client", "batches") for r in range(5) for c in range(5)]
    assert len({derive_seed(*path) for path in paths}) == len(paths)
    assert all(0 <= derive_seed(*path) < 2**63 for path in paths)
    # Fixed once and for all: another value would change every run.
    assert derive_seed(0, "client", 1, 3) == 3302892175424399807


def test_generators_of_the_same_path_draw_the_same():
    draws = [torch.rand(3, generator=torch_generator(1, "cohort", r)) for r in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002


def seed_all():
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


def test_seeded_blocks_repeat_and_leave_the_outer_generators_alone():
    seed_all()
    expected = [draw(), draw()]
    seed_all()
    got = [draw()]
    inside = []
    for _ in range(2):
        with seeded(2**62 + 1):
            inside.append(draw())
    with pytest.raises(KeyError), seeded(5):
        raise KeyError
    got.append(draw())
    assert got == expected
    assert inside[0] == inside[1]


def test_interleaved_streams_draw_what_each_draws_alone():
    alone = []
    for seed in (3, 4):
        with seeded(seed):
            alone.append([draw(), draw()])
    seed_all()
    expected = draw()
    seed_all()
    streams = [RandomStream(seed) for seed in (3, 4)]
    drawn = [[], []]
    for number in (0, 1, 1, 0):
        with streams[number].resumed():
            drawn[number].append(draw())
    assert drawn == alone
    assert draw() == expected
