import numpy as np
import pytest
from scipy.stats import norm

from workbench.risk.edge_regression import (
    Edges,
    _with_derivatives,
    best_penalty,
    fit_edges,
    log_likelihood,
    out_of_group,
)


def known_edges(n=400, deviation=0.5, seed=0):
    """Return features, and edges from a known regression on them."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(n, 3)) * [1.0, 5.0, 0.1] + [0.0, 2.0, 1.0]
    mean = -5.0 + features @ [0.8, 0.0, -4.0]
    return features, mean + deviation * random.normal(size=n)


def test_known_coefficients_are_found():
    features, edge = known_edges()
    found = fit_edges(features, Edges(edge, edge), penalty=1e-3)
    assert found.coefficients / found.scale == pytest.approx([0.8, 0.0, -4.0], abs=0.3)
    assert np.corrcoef(found.mean(features), edge)[0, 1] > 0.85


def test_intervals_and_censored_edges_are_fitted():
    features, edge = known_edges()
    exact = fit_edges(features, Edges(edge, edge), penalty=1e-3)
    width = 0.4 * np.floor(edge / 0.4)
    between = fit_edges(features, Edges(width, width + 0.4), penalty=1e-3)
    assert between.mean(features) == pytest.approx(exact.mean(features), abs=0.1)
    # Edges above the median are censored there; this must not bias the mean toward the median.
    limit = np.median(edge)
    censored = Edges(np.where(edge > limit, limit, edge), np.where(edge > limit, np.inf, edge))
    assert fit_edges(features, censored, penalty=1e-3).mean(features) == pytest.approx(exact.mean(features), abs=0.35)


def test_likelihoods_are_probabilities_of_the_normal_distribution():
    edges = Edges(np.array([-1.0, 2.0, -np.inf, 1.0, 40.0]), np.array([1.0, np.inf, 0.5, 1.0, 41.0]))
    found = log_likelihood(np.zeros(5), 2.0, edges)
    expected = [
        np.log(norm.cdf(0.5) - norm.cdf(-0.5)), norm.logsf(1.0), norm.logcdf(0.25), norm.logpdf(1.0, scale=2.0),
        norm.logsf(20.0) + np.log1p(-np.exp(norm.logsf(20.5) - norm.logsf(20.0))),
    ]  # fmt: skip
    assert found == pytest.approx(expected)


def test_a_sample_weight_equals_repetition():
    features, edge = known_edges(n=60)
    twice = np.r_[np.arange(60), np.arange(20)]
    weight = np.r_[np.full(20, 2.0), np.ones(40)]
    one = fit_edges(features, Edges(edge, edge), penalty=1.0, weight=weight)
    two = fit_edges(features[twice], Edges(edge[twice], edge[twice]), penalty=1.0)
    assert one.mean(features) == pytest.approx(two.mean(features), abs=2e-3)


def test_the_deviation_of_new_groups_includes_that_between_groups():
    random = np.random.default_rng(1)
    groups = np.repeat(np.arange(20), 4)
    edge = random.normal(size=20)[groups] + 0.2 * random.normal(size=80)
    features = random.normal(size=(80, 1))
    mean, deviation = out_of_group(features, Edges(edge, edge), groups, penalty=1.0)
    assert mean == pytest.approx(np.zeros(80), abs=0.6)
    assert deviation == pytest.approx(edge.std(), rel=0.15)


def test_a_constant_feature_changes_nothing():
    features, edge = known_edges(n=60)
    constant = np.column_stack([features, np.full(60, 7.0)])
    found = fit_edges(constant, Edges(edge, edge), penalty=1.0)
    assert np.isfinite(found.mean(constant)).all()
    assert found.scale[3] == 1


def test_derivatives_agree_with_finite_differences():
    random = np.random.default_rng(2)
    low = random.normal(size=12)
    edges = Edges(
        np.r_[low[:3], low[3:6], np.full(3, -np.inf), low[9:]],
        np.r_[low[:3], np.full(3, np.inf), low[6:9], low[9:] + 0.3],
    )
    mean, deviation, by = random.normal(size=12), 0.8, 1e-6
    _, by_mean, by_deviation = _with_derivatives(mean, deviation, edges)
    above, below = (log_likelihood(mean + step, deviation, edges) for step in (by, -by))
    assert by_mean == pytest.approx((above - below) / (2 * by), abs=1e-7)
    above, below = (log_likelihood(mean, deviation + step, edges) for step in (by, -by))
    assert by_deviation == pytest.approx((above - below) / (2 * by), abs=1e-7)
    far = Edges(np.array([60.0, -np.inf]), np.array([np.inf, -60.0]))
    assert all(np.isfinite(values).all() for values in _with_derivatives(np.zeros(2), 1.0, far))


def test_the_penalty_that_predicts_held_out_groups_is_chosen():
    random = np.random.default_rng(3)
    groups = np.repeat(np.arange(12), 3)
    features = random.normal(size=(36, 8))
    for coefficient, is_small in ((2.0, True), (0.0, False)):
        edge = coefficient * features[:, 0] + 0.3 * random.normal(size=36)
        penalty, deviation = best_penalty(features, Edges(edge, edge), groups)
        assert (penalty < 1) == is_small
        assert deviation == pytest.approx(0.3, abs=0.12)
