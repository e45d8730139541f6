"""Spikes in a curve and the normalizer of the output."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from tests.about import about
from workbench.errors import OptionError
from workbench.monitors.scalars import SpikeScore, log_z, spike_score

values = st.lists(st.one_of(st.floats(-3, 3), st.sampled_from([100.0, math.nan, math.inf, -math.inf])), max_size=40)


@given(values, st.integers(2, 12), st.integers(2, 12), st.sampled_from([1.0, 2.5, 7.0]))
@settings(deadline=None, max_examples=100)
def test_against_a_reference_implementation(curve, window, n_least, n_sigma):
    options = {"window": max(window, n_least), "n_least": n_least, "n_sigma": n_sigma}
    assert spike_score(curve, **options) == pytest.approx(oracle.spike_score(curve, **options), nan_ok=True)


def test_known_spikes():
    curve = np.random.default_rng(0).standard_normal(2000)
    assert spike_score(curve) == 0
    curve[[500, 900, 1500]] = (20, -20, 20)
    assert spike_score(curve) == 3 / 1900
    assert spike_score(torch.tensor(curve)) == 3 / 1900


def test_a_constant_curve_has_no_spike_but_a_change_in_it_is_one():
    assert spike_score([0.1] * 300) == 0
    assert spike_score([0.1] * 200 + [0.2]) == 1 / 101
    assert math.isnan(spike_score([1.0] * 100))
    assert spike_score([1.0, math.nan]) == 1


def test_incremental_score_in_bounded_memory():
    tracker = SpikeScore(window=50, n_least=20)
    assert math.isnan(tracker.score)
    curve = np.random.default_rng(0).standard_normal(500)
    curve[300] = 50
    found = [i for i, value in enumerate(curve) if tracker.update(value)]
    assert found == [300]
    assert (tracker.n_spikes, tracker.n_evaluated) == (1, 480)
    assert tracker.score == spike_score(curve, window=50, n_least=20)
    assert len(tracker._latest) == 50


def test_log_z():
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = np.log(np.exp(logits.numpy()).sum(-1))
    assert log_z(logits).item() == pytest.approx(math.sqrt((z**2).mean()))
    assert log_z(torch.full((3, 4), -math.log(4))).item() == pytest.approx(0, abs=1e-6)
    assert log_z(torch.full((3, 4), 100.0).half()).item() == pytest.approx(100 + math.log(4), rel=1e-6)
    assert log_z(torch.tensor([[1.0, math.nan]])).isnan()


def test_invalid_options_are_rejected():
    with pytest.raises(OptionError, check=about("n_least", 1)):
        spike_score([], n_least=1)
    with pytest.raises(OptionError, check=about("n_least", 100)):
        SpikeScore(window=50)
    with pytest.raises(OptionError, check=about("n_sigma", 0)):
        SpikeScore(n_sigma=0)
