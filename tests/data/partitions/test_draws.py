# ruff: noqa: NPY002 - these tests are about the global generator
import numpy as np
import pytest

from lightning_fedstop.data.partitions.draws import (
    dirichlet_logits,
    largest_remainder,
    legacy_generator,
    legacy_proportions,
    repair,
    softmax,
)


@pytest.mark.parametrize("concentration", [1e-320, 1e-6, 1e-3, 0.1, 1.0, 1e6, 1e308])
def test_dirichlet_weights_are_proportions_at_any_concentration(concentration):
    for seed in range(20):
        shares = softmax(dirichlet_logits(np.random.default_rng(seed), concentration, 7))
        assert np.isfinite(shares).all()
        assert shares.sum() == pytest.approx(1)


def test_dirichlet_weights_have_the_moments_of_the_distribution():
    rng, c, size = np.random.default_rng(0), 0.3, 4
    draws = np.array([softmax(dirichlet_logits(rng, c, size)) for _ in range(20_000)])
    np.testing.assert_allclose(draws.mean(0), 1 / size, atol=0.01)
    np.testing.assert_allclose(draws.var(0), (size - 1) / (size**2 * (size * c + 1)), rtol=0.04)


def test_tiny_concentrations_pick_every_client_equally_often():
    rng = np.random.default_rng(0)
    winners = [int(np.argmax(dirichlet_logits(rng, 1e-6, 5))) for _ in range(5000)]
    np.testing.assert_allclose(np.bincount(winners, minlength=5) / 5000, 0.2, atol=0.03)


def test_largest_remainder_is_exact_and_close():
    rng = np.random.default_rng(0)
    for total in (0, 1, 17, 12345):
        shares = rng.dirichlet(np.full(50, 0.2))
        sizes = largest_remainder(shares, total)
        assert sizes.sum() == total
        assert (np.abs(sizes - shares * total) < 1).all()


def test_legacy_stream_is_that_of_the_global_seed():
    np.random.seed(11)
    assert legacy_generator(11).random_sample() == np.random.random()
    assert legacy_generator(2**32 + 1).random_sample() != legacy_generator(1).random_sample()


def test_legacy_proportions_fall_back_where_the_stream_gives_nothing():
    for seed in range(5):
        shares = legacy_proportions(legacy_generator(seed), 1e-7, 3, seed)
        assert np.isfinite(shares).all()
        assert shares.sum() == pytest.approx(1)


def test_repair_moves_one_at_a_time_from_the_largest():
    owner = np.array([0] * 5 + [1] * 4 + [2])
    classes = np.array([2, 1, 1, 2, 2, 0, 0, 0, 0, 5])
    repair(owner, classes, 5, 1, np.random.default_rng(0))
    # Client 3 gets from client 0 (5 samples), its smallest class 1; client 4 from the first of the equals, again 0.
    assert np.bincount(owner).tolist() == [3, 4, 1, 1, 1]
    assert classes[owner == 3].tolist() == [1]
    assert classes[owner == 4].tolist() == [1]
    kept = owner.copy()
    repair(owner, classes, 5, 1, np.random.default_rng(0))
    np.testing.assert_array_equal(owner, kept)
