"""Outliers of the residual stream: known outliers, and comparison with NumPy and SciPy."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from workbench.monitors.probe_pass import activation_max, kurtosis, massive_activations, outlier_ratio, state_norm

MEASURES = (activation_max, kurtosis, massive_activations, outlier_ratio, state_norm)


def states(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_against_numpy_and_scipy():
    h = states(2, 7, 5)
    for i, one in enumerate(h.double().numpy()):
        size = np.abs(one).ravel()
        assert activation_max(h)[i].item() == size.max()
        assert outlier_ratio(h)[i].item() == pytest.approx(size.max() / np.median(size))
        assert kurtosis(h)[i].item() == pytest.approx(scipy.stats.kurtosis(one, axis=None, fisher=False))
        assert state_norm(h)[i].item() == pytest.approx(np.linalg.norm(one, axis=1).mean())


def test_a_known_outlier():
    h = torch.ones(4, 25)
    h[::2] = -1
    h[2, 3] = 5000.0
    assert activation_max(h).item() == 5000
    assert outlier_ratio(h).item() == 5000
    assert massive_activations(h).item() == 1
    assert massive_activations(10 * h, ratio=1e5).item() == 0
    assert massive_activations(0.01 * h).item() == 0  # 50: beyond the ratio, not beyond 100
    assert kurtosis(h).item() == pytest.approx(scipy.stats.kurtosis(h.double(), axis=None, fisher=False), rel=1e-4)
    assert 95 < kurtosis(h).item() < 100  # one of a hundred numbers dominates


def test_edge_cases():
    assert outlier_ratio(torch.tensor([[0.0, 0, 0, 1]])).item() == math.inf
    assert outlier_ratio(torch.zeros(2, 3)).isnan()
    assert kurtosis(torch.ones(2, 3)).isnan()
    h = states(3, 4, 5)
    h[1, 2, 3] = math.nan
    for measure in MEASURES:
        assert measure(h).isnan().tolist() == [False, True, False]
    assert all(measure(states(6, 4).bfloat16()).dtype == torch.float64 for measure in MEASURES)
