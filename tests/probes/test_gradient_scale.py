import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.probes.gradient_comparison import Rounding, fit_scale, fit_weights

N = 12


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def rounding(relative=1e-6, n=N):
    return Rounding(np.ones(n), np.full(n, relative), np.full(n, 1e-40), np.full(n, 100), 4.0)


def every(n=N):
    return np.ones(n, bool)


@given(st.integers(0, 10**6), st.integers(0, N - 1), st.floats(1e-12, 1e12))
def test_the_scale_is_that_of_most_parameters(seed, n_others, scale):
    """Two parameters that agree suffice, for any number of others with individual scales."""
    gradients = draw(N, 8, seed=seed)
    own = np.full(N, scale)
    own[:n_others] *= 2.0 + np.arange(n_others)
    fit = fit_scale(gradients, own[:, None] * gradients, rounding(), every(), every())
    assert fit.is_parallel.all()
    if n_others < N - 1:
        assert fit.scale == pytest.approx(scale, rel=1e-9)
        assert fit.is_explained.tolist() == [False] * n_others + [True] * (N - n_others)


@given(st.integers(0, 10**6), st.integers(2, 5))
def test_weights_are_those_of_least_squares(seed, n_ranks):
    local, received = draw(n_ranks, N, 8, seed=seed), draw(N, 8, seed=seed + 1)
    found = fit_weights(local, received, rounding(), every(), 1.0)
    oracle, *_ = np.linalg.lstsq(local.reshape(n_ranks, -1).T / n_ranks, received.ravel())
    assert found.weights == pytest.approx(oracle, abs=1e-8)
    left = received - np.tensordot(oracle, local, 1) / n_ranks
    assert found.left == pytest.approx(left, abs=1e-8)


@given(st.integers(0, 10**6))
def test_standard_errors_are_those_of_the_noise(seed):
    local, noise = draw(3, 200, 8, seed=seed), 0.1 * draw(200, 8, seed=seed + 1)
    found = fit_weights(local, local.mean(0) + noise, rounding(n=200), every(200), 1.0)
    assert found.errors == pytest.approx(np.full(3, 0.1 * 3 / np.sqrt(1600)), rel=0.3)
    assert (abs(found.weights - 1) < 6 * found.errors).all()
