import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score

from tests.about import about
from workbench.errors import OptionError, SchemaError
from workbench.risk.scores import auroc, reliability, resamples


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(20, 200))
def test_auroc_agrees_with_scikit_learn(seed, n):
    random = np.random.default_rng(seed)
    label = np.arange(n) % 3 == 0
    score = np.round(random.normal(size=n) + label, 1)
    found = auroc(score, label, n_bootstrap=50, seed=seed)
    assert found.value == pytest.approx(roc_auc_score(label, score))
    assert 0 <= found.low <= found.high <= 1
    assert auroc(-score, label, n_bootstrap=0).value == pytest.approx(1 - found.value)


@pytest.mark.medium
def test_each_resample_is_the_auroc_of_the_runs_that_were_drawn():
    random = np.random.default_rng(1)
    groups = np.repeat(np.arange(12), 5)
    label, score = random.random(60) < 0.4, np.round(random.normal(size=60), 1)
    counts = next(iter(resamples(groups, 60, 200, 3))).astype(int)
    assert (counts.reshape(200, 12, 5) == counts.reshape(200, 12, 5)[..., :1]).all()  # groups are drawn as units
    assert (counts[:, ::5].sum(axis=1) == 12).all()
    values = [roc_auc_score(np.repeat(label, n), np.repeat(score, n)) for n in counts]
    found = auroc(score, label, groups=groups, n_bootstrap=200, seed=3)
    np.testing.assert_allclose((found.low, found.high), np.quantile(values, [0.025, 0.975]))


def test_only_runs_of_the_same_kind_are_compared():
    # The score distinguishes only the kinds: it is informative over all runs, and not within a kind.
    kind = np.repeat(["a", "b"], 100)
    label = np.r_[np.arange(100) < 90, np.arange(100) < 10]
    score = np.repeat([1.0, 0.0], 100)
    assert auroc(score, label, n_bootstrap=0).value == pytest.approx(0.9)
    assert auroc(score, label, within=kind, n_bootstrap=0).value == 0.5
    random = np.random.default_rng(0)
    score = random.normal(size=200)
    found = auroc(score, label, within=kind, n_bootstrap=0).value
    n_pairs = {k: label[kind == k].sum() * (~label[kind == k]).sum() for k in "ab"}
    parts = {k: roc_auc_score(label[kind == k], score[kind == k]) * n_pairs[k] for k in "ab"}
    assert found == pytest.approx(sum(parts.values()) / sum(n_pairs.values()))


@pytest.mark.parametrize(
    ("call", "error", "name"),
    [
        (lambda: auroc([0.1, np.nan], [True, False]), OptionError, "score"),
        (lambda: auroc([0.1, 0.2], [True, True]), SchemaError, "outcome"),
        (lambda: auroc([0.1, 0.2], [True, False], groups=["a"]), OptionError, "groups"),
        (lambda: reliability([0.1, 1.2], [True, False]), OptionError, "probability"),
        (lambda: reliability([np.nan], [True]), SchemaError, "probability"),
    ],
)
def test_invalid_input_is_rejected(call, error, name):
    with pytest.raises(error, check=about(name)):
        call()


def test_the_error_of_calibrated_probabilities_is_only_noise():
    random = np.random.default_rng(0)
    probability = random.random(100_000)
    label = random.random(100_000) < probability
    found = reliability(probability, label)
    assert found.attrs["ece"] < 0.01  # about 0.4 / sqrt(1e4) from noise
    assert ((found.low <= found.mean_probability) & (found.mean_probability <= found.high)).sum() >= 8
    overconfident = reliability(np.clip(1.5 * probability - 0.25, 0, 1), label)
    # The mean over p of |p - clip(1.5 p - 0.25)| is 1/12.
    assert overconfident.attrs["ece"] == pytest.approx(1 / 12, abs=0.01)


@settings(max_examples=30, deadline=None)
@given(st.floats(0, 1), st.lists(st.booleans(), min_size=1, max_size=50))
def test_a_constant_probability_is_wrong_by_its_distance_from_the_rate(probability, label):
    found = reliability([probability] * len(label), label)
    assert found.attrs["ece"] == pytest.approx(abs(probability - np.mean(label)), abs=1e-12)
    assert found.n_runs.values.sum() == len(label)
    assert (found.n_runs > 0).sum() == 1


def test_bins_contain_their_lower_bound_and_missing_predictions_are_counted():
    probability = [0.0, 0.1, 0.2, 0.95, 1.0, np.nan]
    found = reliability(probability, [False, True, False, True, True, True])
    assert found.n_runs.values.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 2]
    assert found.attrs["n_left_out"] == 1
    assert found.attrs["n_runs"] == 5
    assert np.isnan(found.rate.values[3:9]).all()
    interval = binomtest(2, 2).proportion_ci(0.95, method="wilson")
    assert (found.low.values[-1], found.high.values[-1]) == (interval.low, interval.high)
