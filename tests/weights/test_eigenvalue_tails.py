import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.about import says
from tests.weights.powerlaw_table import TABLE, samples
from workbench.errors import OptionError
from workbench.weights import power_law_tail, random_bulk
from workbench.weights.matrix_spectra import PowerLaw, _median


def pareto(alpha, n, seed=0):
    return (1 - np.random.default_rng(seed).random(n)) ** (-1 / (alpha - 1))


def eigenvalues(W):
    return np.linalg.svd(W, compute_uv=False) ** 2 / max(W.shape)


@pytest.mark.parametrize("name", samples())
def test_the_fit_is_that_of_the_package_powerlaw(name):
    recorded, fit = json.loads(TABLE.read_text())[name], power_law_tail(samples()[name])
    assert fit.alpha == pytest.approx(recorded["alpha"], rel=1e-9)
    assert fit.error == pytest.approx(recorded["error"], rel=1e-9)
    assert fit.distance == pytest.approx(recorded["distance"], rel=1e-9)
    assert fit.start == pytest.approx(recorded["start"], rel=1e-12)


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0, 5.0])
def test_the_exponent_of_a_pareto_law_is_found_within_its_standard_error(alpha):
    fits = [power_law_tail(pareto(alpha, 2000, seed)) for seed in range(10)]
    z = np.array([(fit.alpha - alpha) / fit.error for fit in fits])
    assert abs(z.mean()) < 1.5
    assert np.sqrt((z**2).mean()) < 2.0  # the choice of the start adds to the standard error
    assert all(fit.error == pytest.approx((fit.alpha - 1) / np.sqrt(fit.n_tail)) for fit in fits)
    assert max(fit.distance for fit in fits) < 0.05


def test_the_tail_leaves_the_body_out():
    values = np.concatenate([np.random.default_rng(0).random(1000), 2 * pareto(2.5, 1000)])
    fit = power_law_tail(values)
    assert 2 <= fit.start < 4
    assert fit.distance < 0.03
    assert fit.alpha == pytest.approx(2.5, abs=3 * fit.error)
    assert fit.n_tail == (values >= fit.start).sum()


@settings(max_examples=25, deadline=None)
@given(scale=st.floats(1e-12, 1e12), seed=st.integers(0, 99))
def test_scaling_changes_only_the_start(scale, seed):
    values = pareto(2.2, 120, seed)
    fit, scaled = power_law_tail(values), power_law_tail(scale * np.random.default_rng(seed).permutation(values))
    assert scaled.start == pytest.approx(scale * fit.start, rel=1e-9)
    assert scaled.alpha == pytest.approx(fit.alpha, rel=1e-9)
    assert scaled.n_tail == fit.n_tail


@pytest.mark.parametrize(
    "values",
    [np.ones(100), 1 + 1e-9 * np.arange(100), np.zeros(100), pareto(2, 49), np.append(pareto(2, 49), np.zeros(99))],
    ids=["equal", "equal but for rounding", "zeros", "too few", "too few above zero"],
)
def test_without_a_tail_all_is_nan(values):
    assert repr(power_law_tail(values)) == repr(PowerLaw())


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_values_that_are_no_eigenvalues_are_rejected(bad):
    with pytest.raises(OptionError, check=says("Some of the values are negative or not finite; pass")):
        power_law_tail(np.append(np.ones(60), bad))
    with pytest.raises(OptionError, check=says("Some of the eigenvalues are negative or not finite; pass")):
        random_bulk(np.append(np.ones(60), bad), 61, 61)
    with pytest.raises(OptionError, check=says("pass all squared singular values divided by")):
        random_bulk(np.ones(70), 60, 70)


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.1, 0.01])
def test_the_median_is_that_of_the_marchenko_pastur_density(ratio):
    """Compare with the numerically integrated density; that of a square matrix has a pole at 0."""
    low, high = (1 - np.sqrt(ratio)) ** 2, (1 + np.sqrt(ratio)) ** 2
    x = low + (high - low) * np.linspace(0, 1, 400_001) ** 3
    x = (x[1:] + x[:-1]) / 2
    density = np.sqrt((high - x) * (x - low)) / (2 * np.pi * ratio * x)
    edges = low + (high - low) * np.linspace(0, 1, 400_001) ** 3
    mass = np.cumsum(density * np.diff(edges))
    assert mass[-1] == pytest.approx(1, abs=1e-3)
    assert _median(ratio) == pytest.approx(np.interp(0.5, mass, x), rel=2e-3)


@pytest.mark.parametrize("shape", [(200, 200), (400, 100), (60, 600)])
def test_a_random_matrix_has_its_variance_and_hardly_a_spike(shape):
    rng = np.random.default_rng(0)
    bulks = [random_bulk(eigenvalues(rng.normal(0, 0.02, size=shape)), *shape) for _ in range(60)]
    assert np.mean([bulk.variance for bulk in bulks]) == pytest.approx(4e-4, rel=0.02)
    assert sum(bulk.n_spikes for bulk in bulks) <= 4  # 0.6 are expected, more than 4 with probability below 0.001


@pytest.mark.parametrize("n_spikes", [0, 1, 3, 8])
def test_known_spikes_are_counted(n_spikes):
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(300, 150))
    left, right = (np.linalg.qr(rng.normal(size=(n, 8)))[0][:, :n_spikes] for n in noise.shape)
    strength = np.sqrt(300) * np.linspace(2.5, 5, n_spikes)
    bulk = random_bulk(eigenvalues(noise + left * strength @ right.T), 300, 150)
    assert bulk.n_spikes == n_spikes
    assert bulk.variance == pytest.approx(1, rel=0.1)


def test_where_most_eigenvalues_are_zero_every_other_one_is_a_spike():
    bulk = random_bulk(np.append(np.zeros(60), [1.0, 2.0]), 62, 100)
    assert (bulk.variance, bulk.edge, bulk.n_spikes) == (0, 0, 2)


@pytest.mark.parametrize(("values", "shape"), [(np.zeros(60), (60, 90)), (np.ones(49), (49, 90))])
def test_without_a_bulk_all_is_nan(values, shape):
    bulk = random_bulk(values, *shape)
    assert np.isnan([bulk.variance, bulk.edge, bulk.n_spikes]).all()
