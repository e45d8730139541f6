import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.probes.gradient_comparison import Rounding, distinguishes, fit_scale, fit_weights, is_single, own_scales

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


def test_precise_parameters_make_the_scale_precise():
    gradients, noise = draw(N, 8), draw(N, 8, seed=1)
    relative = np.full(N, 1e-2)
    relative[3] = 1e-9
    known = Rounding(np.ones(N), relative, np.zeros(N), np.full(N, 100), 4.0)
    fit = fit_scale(gradients, 3 * (gradients + relative[:, None] * noise), known, every(), every())
    assert fit.scale == pytest.approx(3, rel=1e-8)
    assert fit.is_explained.all()


def test_there_is_no_scale_without_a_telling_parameter():
    gradients = draw(N, 8)
    fit = fit_scale(gradients, gradients, rounding(), every(), ~every())
    assert np.isnan(fit.scale)
    assert not fit.is_explained.any()


def test_excluded_parameters_are_neither_used_nor_explained():
    gradients, among = draw(N, 8), np.arange(N) < 3
    received = np.where(among[:, None], 2.0, 5.0) * gradients
    fit = fit_scale(gradients, received, rounding(), among, every())
    assert fit.scale == pytest.approx(2)
    assert np.array_equal(fit.is_explained, among)


def test_a_negative_scale_is_not_found():
    gradients = draw(N, 8)
    assert not fit_scale(gradients, -gradients, rounding(), every(), every()).is_parallel.any()


def test_agreement_is_vague_if_rounding_explains_anything():
    gradients = draw(N, 8)
    fit = fit_scale(gradients, gradients[::-1], rounding(10.0), every(), every())
    assert fit.is_vague.all()
    assert not fit.is_parallel.any()


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


def test_weights_of_parallel_gradients_stay_equal():
    local = draw(1, N, 8) * np.array([1.0, 1.0, 100.0])[:, None, None]
    found = fit_weights(local, 3 * local.mean(0), rounding(), every(), 3.0)
    assert found.weights == pytest.approx(np.ones(3))
    assert found.missing == ()


@pytest.mark.parametrize("case", ["one rank", "few parameters", "small parameters", "no scale"])
def test_weights_that_cannot_be_known_are_nan(case):
    local = draw(1 if case == "one rank" else 3, N, 8)
    among = np.arange(N) < (0 if case == "few parameters" else N)
    known = rounding()
    if case == "small parameters":
        known = Rounding(known.size, known.relative, known.underflow, np.full(N, 7), 4.0)
    received = -local.mean(0) if case == "no scale" else local.mean(0)
    found = fit_weights(local, received, known, among, np.nan)
    assert np.isnan(found.weights).all()
    assert found.missing == ()


def test_gradients_distinguish_unless_they_are_parallel():
    usual, other = draw(N, 8), draw(N, 8, seed=1)
    assert distinguishes(other, usual, rounding()).all()
    assert not distinguishes(3 * usual, usual, rounding()).any()
    assert not distinguishes(usual + 1e-6 * other, usual, rounding()).any()


def test_a_single_number_has_projections_of_one_size():
    gradients = np.array([[1.0, -1.0, 1.0], [1.0, -2.0, 1.0], [0.0, 0.0, 0.0]])
    assert is_single(gradients).tolist() == [True, False, True]
    assert own_scales(gradients, 2 * gradients).tolist() == [2.0, 2.0, 0.0]
