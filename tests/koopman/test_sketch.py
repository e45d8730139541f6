"""Sketches of snapshots: their spectra, compared with those of the exact moments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

import workbench as wb
from tests.about import about, says
from workbench.errors import SnapshotError
from workbench.koopman import SnapshotMoments, SnapshotSketch, layer_spectrum


def pairs(n, width, decay, seed=0):
    """Generate states whose variances decay as a power law, and their images under a matrix, with noise."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    turn = torch.linalg.qr(normal(width, width)).Q
    scale = torch.arange(1, width + 1, dtype=torch.float64) ** (-decay / 2)
    x = normal(n, width) * scale @ turn.T + normal(width)
    step = torch.eye(width, dtype=torch.float64) + 0.3 * normal(width, width) / width**0.5
    return x, x @ step.T + 0.05 * normal(n, width) * scale @ turn.T


def fed(sketch, x, y, size):
    for i in range(0, len(x), size):
        sketch.update(x[i : i + size], y[i : i + size])
    return sketch


def distance(one, other):
    """Compute the largest distance between matched eigenvalues."""
    gaps = np.abs(one.eigenvalue[:, None] - other.eigenvalue[None])
    return gaps[linear_sum_assignment(gaps)].max()


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(4, 60),
    size=st.integers(1, 60),
    decay=st.sampled_from([0.0, 1.0, 2.0]),
    rank=st.sampled_from([None, 3]),
)
def test_few_snapshots_give_the_spectra_of_their_moments(n, size, decay, rank):
    x, y = pairs(n, 60, decay, seed=n)
    options = wb.DmdOptions(rank=rank)
    exact = layer_spectrum(SnapshotMoments(60).update(x, y), options)
    found = layer_spectrum(fed(SnapshotSketch(60, rank=rank), x, y, size), options)
    assert distance(exact, found) < 1e-8
    for name in ("update_norm", "energy_gain", "covariance_condition", "rank"):
        np.testing.assert_allclose(found.values[name], exact.values[name], rtol=1e-8, err_msg=name)
    np.testing.assert_allclose(found.values["nonlinearity_ratio"], exact.values["nonlinearity_ratio"], atol=1e-6)


@pytest.mark.parametrize(("decay", "bound"), [(0.5, 0.06), (1.0, 0.04), (1.5, 0.015), (2.0, 0.01)])
@pytest.mark.parametrize(("n", "rank"), [(1000, 8), (4000, 16)])
def test_a_sketch_of_many_snapshots_is_near_the_leading_modes(decay, bound, n, rank):
    x, y = pairs(n, 160, decay, seed=1)
    options = wb.DmdOptions(rank=rank)
    exact = layer_spectrum(SnapshotMoments(160).update(x, y), options)
    found = layer_spectrum(fed(SnapshotSketch(160, rank=rank), x, y, 64), options)
    assert distance(exact, found) < bound
    assert found.values["covariance_condition"] == pytest.approx(exact.values["covariance_condition"], rel=bound)


def test_the_sketch_follows_directions_that_come_late():
    x, y = pairs(600, 64, 0.0, seed=2)
    x[:300, :4] = 0
    x[300:, :4] *= 30
    y = 0.5 * x
    found = layer_spectrum(fed(SnapshotSketch(64, rank=4), x, y, 50), wb.DmdOptions(rank=4))
    np.testing.assert_allclose(np.abs(found.eigenvalue), 0.5, atol=1e-3)


def test_without_a_rank_there_may_not_be_more_snapshots_than_features():
    x, y = pairs(9, 8, 1.0)
    with pytest.raises(SnapshotError, check=says("A sketch without a rank takes at most as many snapshots as")):
        SnapshotSketch(8).update(x, y)


def test_a_larger_rank_than_that_of_the_sketch():
    x, y = pairs(30, 8, 1.0)
    with pytest.raises(SnapshotError, check=about("rank", 3)):
        layer_spectrum(SnapshotSketch(8, rank=2).update(x, y), wb.DmdOptions(rank=3))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_unchecked_values_that_are_not_finite_never_reach_lapack(value):
    x = torch.randn(30, 12, generator=torch.Generator().manual_seed(0))
    sketch = SnapshotSketch(12, rank=2).update(x[:6], x[:6], check_finite=False)
    assert bool(sketch.is_finite)
    x[7, 3] = value
    sketch.update(x[6:12], x[6:12], check_finite=False)
    assert not bool(sketch.is_finite)
    with pytest.raises(SnapshotError, check=says("The residual stream holds NaN or infinite values in the")):
        sketch.update(x[12:], x[12:], check_finite=False)
