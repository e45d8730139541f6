import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.about import about, says
from tests.koopman.snapshots import snapshots
from tests.oracle import oracle
from workbench.errors import OptionError, SnapshotError
from workbench.koopman import (
    RankWarning,
    SnapshotMoments,
    layer_spectra,
    whitened_dmd,
    whitened_operator,
)
from workbench.koopman.dmd import DmdOptions

MEASURES = ("spectral_radius", "eigenvector_condition", "nonlinearity_ratio", "update_norm", "energy_gain")
KINDS = ("linear", "residual", "generic")


def absolute_ridge(X):
    return 1e-5 * np.cov(X.T).trace() / X.shape[1]


def largest_error(X, Y):
    """Compute the largest relative differences from the oracle, over moduli, residuals and measures."""
    found, truth = whitened_dmd(X, Y).isel(layer=0), oracle(X.T, Y.T, absolute_ridge(X))
    errors = {name: abs(float(found[name]) / truth[name] - 1) for name in MEASURES}
    errors["modulus"] = np.abs(np.abs(found.eigenvalue.values) / np.abs(truth["eigenvalue"]) - 1).max()
    errors["residual"] = np.abs(found.residual.values / truth["residual"] - 1).max()
    errors["of_radius"] = np.abs(np.abs(found.eigenvalue.values) - np.abs(truth["eigenvalue"])).max()
    errors["of_radius"] /= truth["spectral_radius"]
    return errors, float(found.significant_digits), float(found.covariance_condition)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d", "n"), [(2, 40), (16, 200), (48, 500), (96, 800)])
@pytest.mark.parametrize("log_condition", [0, 3, 5.5])
def test_agrees_with_oracle_to_1e8_where_well_conditioned(d, n, kind, log_condition):
    X, Y = snapshots(d, n, log_condition, kind, seed=d)
    errors, _, condition = largest_error(X, Y)
    assert condition < 1.5e6
    assert max(errors.values()) < 1e-8, errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d", "n"), [(16, 200), (48, 500)])
@pytest.mark.parametrize("log_condition", [7, 8.5, 9.5])
def test_agrees_with_oracle_to_1e5_where_ill_conditioned(d, n, kind, log_condition):
    X, Y = snapshots(d, n, log_condition, kind, seed=d)
    errors, _, condition = largest_error(X, Y)
    assert 1e6 < condition < 1.5e10
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("log_condition", [0, 4, 8, 10, 11.5])
def test_reported_digits_are_significant(kind, log_condition):
    for seed in range(4):
        errors, digits, _ = largest_error(*snapshots(24, 300, log_condition, kind, seed=seed))
        assert -np.log10(errors["of_radius"] + 1e-16) > digits, (errors, digits)
    if log_condition >= 10:
        assert digits < 6


def test_spectra_of_fewer_snapshots_than_features_are_limited_to_their_span():
    X, Y = snapshots(40, 25, kind="residual", seed=1)
    with pytest.warns(RankWarning, match="span fewer than 40 directions"):
        found = whitened_dmd(X, Y).isel(layer=0)
    truth = oracle(X.T, Y.T, absolute_ridge(X))
    assert int(found["rank"]) == 24
    assert found.sizes["mode"] == 24
    np.testing.assert_allclose(np.abs(found.eigenvalue), np.abs(truth["eigenvalue"][:24]), rtol=1e-8)
    assert np.abs(truth["eigenvalue"][24:]).max() < 1e-6
    # 24 directions fit 25 centered snapshots exactly, up to the square root of the rounding error.
    assert float(found.nonlinearity_ratio) < 1e-6
    assert float(found.residual.max()) < 1e-5
    assert truth["nonlinearity_ratio"] < 1e-6


@pytest.mark.parametrize("leaves_span", [False, True])
def test_rank_deficient_states(leaves_span):
    rng = np.random.default_rng(3)
    d, r, n = 30, 12, 400
    Z = rng.normal(size=(n, r))
    embed = np.linalg.qr(rng.normal(size=(d, r)))[0].T
    X = Z @ embed
    Y = (Z + 0.3 * np.tanh(Z @ rng.normal(size=(r, r)))) @ embed
    if leaves_span:
        Y = Y + 0.1 * rng.normal(size=(n, d))
    with pytest.warns(RankWarning):
        found = whitened_dmd(X, Y).isel(layer=0)
    truth = oracle(X.T, Y.T, absolute_ridge(X))
    assert int(found["rank"]) == r
    np.testing.assert_allclose(np.abs(found.eigenvalue), np.abs(truth["eigenvalue"][:r]), rtol=1e-8)
    np.testing.assert_allclose(found.residual, truth["residual"][:r], rtol=1e-6)
    np.testing.assert_allclose(float(found.nonlinearity_ratio), truth["nonlinearity_ratio"], rtol=1e-8)


def test_known_spectrum_is_recovered():
    rng = np.random.default_rng(0)
    blocks = [np.array([[0.6, -0.8], [0.8, 0.6]]), 1.04 * np.array([[0.0, -1.0], [1.0, 0.0]]), [[0.5]], [[-0.95]]]
    K = np.zeros((6, 6))
    i = 0
    for block in map(np.atleast_2d, blocks):
        K[i : i + len(block), i : i + len(block)] = block
        i += len(block)
    T = rng.normal(size=(6, 6))
    X = rng.normal(size=(500, 6)) * [1, 2, 3, 4, 5, 6] + 10
    Y = X @ (T @ K @ np.linalg.inv(T)).T + 3
    found = whitened_dmd(X, Y).isel(layer=0)
    expected = [1.04j, -1.04j, 0.6 + 0.8j, 0.6 - 0.8j, -0.95, 0.5]
    distance = np.abs(found.eigenvalue.values[:, None] - np.array(expected)[None])
    assert distance.min(axis=0).max() < 1e-10
    assert distance.min(axis=1).max() < 1e-10
    assert float(found.nonlinearity_ratio) < 1e-6
    assert float(found.spectral_radius) == pytest.approx(1.04)
    assert float(found.near_unit_mass) == pytest.approx(5 / 6)
    assert float(found.contractive_mass) == pytest.approx(1 / 6)


def test_identity_map_is_not_informative():
    X = np.random.default_rng(0).normal(size=(100, 8))
    found = whitened_dmd(X, X).isel(layer=0)
    np.testing.assert_allclose(found.eigenvalue, 1.0)
    assert float(found.near_unit_mass) == 1.0
    assert not bool(found.is_informative)
    assert float(found.update_norm) == 0.0
    assert float(found.nonlinearity_ratio) == 0.0
    assert float(found.kreiss_constant) == pytest.approx(1.0, abs=1e-6)


def test_residual_stays_right_where_eigenvectors_are_nearly_parallel():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 3))
    K = np.array([[0.9, 1.0, 0.0], [1e-16, 0.9, 0.0], [0.0, 0.0, 0.2]])
    Y = X @ K.T + 0.1 * rng.normal(size=X.shape)
    found, truth = whitened_dmd(X, Y).isel(layer=0), oracle(X.T, Y.T, absolute_ridge(X))
    np.testing.assert_allclose(found.residual, truth["residual"], rtol=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(-6, 6), st.sampled_from(KINDS))
def test_invariant_under_rotation_and_scaling(seed, exponent, kind):
    rng = np.random.default_rng(seed)
    X, Y = snapshots(10, 120, 2, kind, seed=seed)
    Q = np.linalg.qr(rng.normal(size=(10, 10)))[0]
    scale = 10.0**exponent
    before, after = (whitened_dmd(*pair).isel(layer=0) for pair in ((X, Y), (scale * X @ Q, scale * Y @ Q)))
    for name in (*MEASURES, "near_unit_mass", "expansive_mass"):
        assert float(after[name]) == pytest.approx(float(before[name]), rel=1e-7), name
    np.testing.assert_allclose(np.abs(after.eigenvalue), np.abs(before.eigenvalue), rtol=1e-7)
    np.testing.assert_allclose(after.residual, before.residual, rtol=1e-6)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.floats(1e-9, 1e-2))
def test_eigenvalues_and_residuals_do_not_depend_on_the_ridge_at_full_rank(seed, ridge):
    X, Y = snapshots(8, 100, 2, "residual", seed=seed)
    one, other = (whitened_dmd(X, Y, options=DmdOptions(ridge=r)).isel(layer=0) for r in (1e-5, ridge))
    np.testing.assert_allclose(np.abs(one.eigenvalue), np.abs(other.eigenvalue), rtol=1e-8)
    np.testing.assert_allclose(one.residual, other.residual, rtol=1e-7)


def test_absolute_ridge_is_the_published_one():
    X, Y = snapshots(12, 200, 1, "residual", seed=2)
    found = whitened_dmd(X, Y, options=DmdOptions(ridge=1e-2, ridge_kind="absolute")).isel(layer=0)
    truth = oracle(X.T, Y.T, 1e-2)
    assert float(found.eigenvector_condition) == pytest.approx(truth["eigenvector_condition"], rel=1e-9)
    assert float(found.nonlinearity_ratio) == pytest.approx(truth["nonlinearity_ratio"], rel=1e-9)


def test_randomized_rank_is_the_spectrum_of_the_leading_directions():
    X, Y = snapshots(40, 600, 0, "linear", seed=0)
    X, Y = (Z * np.geomspace(1, 1e-5, 40) for Z in (X, Y))
    found = whitened_dmd(X, Y, options=DmdOptions(rank=8, seed=1)).isel(layer=0)
    leading = np.linalg.eigh(np.cov(X.T))[1][:, -8:]
    truth = oracle((X @ leading).T, (Y @ leading).T, absolute_ridge(X))
    assert found.sizes["mode"] == 8
    np.testing.assert_allclose(np.abs(found.eigenvalue), np.abs(truth["eigenvalue"]), rtol=1e-6)
    np.testing.assert_allclose(found.residual, truth["residual"], rtol=1e-5)
    assert float(found.nonlinearity_ratio) == pytest.approx(truth["nonlinearity_ratio"], rel=1e-5)
    repeated = whitened_dmd(X, Y, options=DmdOptions(rank=8, seed=1)).isel(layer=0)
    assert repeated.eigenvalue.identical(found.eigenvalue)


def test_operator_is_differentiable_in_the_moments():
    X, Y = (torch.from_numpy(Z) for Z in snapshots(6, 50, 0, "residual"))
    Y.requires_grad_()
    matrix = whitened_operator(SnapshotMoments(6).update(X, Y)).matrix
    matrix.square().sum().backward()
    step = torch.randn_like(Y)
    value = lambda t: whitened_operator(SnapshotMoments(6).update(X, Y.detach() + t * step)).matrix.square().sum()  # noqa: E731
    assert float((Y.grad * step).sum()) == pytest.approx(float((value(1e-5) - value(-1e-5)) / 2e-5), rel=1e-5)


def test_cuda_agrees_with_cpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    X, Y = snapshots(64, 500, 3, "residual")
    on_cpu, on_cuda = whitened_dmd(X, Y), whitened_dmd(X, Y, device="cuda")
    np.testing.assert_allclose(np.abs(on_cuda.eigenvalue), np.abs(on_cpu.eigenvalue), rtol=1e-8)


def test_spectra_without_scipy_and_threadpoolctl_are_the_same(monkeypatch):
    X, Y = snapshots(80, 400, 3, "residual")  # wide enough for Lanczos iteration, which needs SciPy
    moments = SnapshotMoments(80).update(torch.from_numpy(X), torch.from_numpy(Y))
    (expected,) = layer_spectra([moments], n_workers=1)
    for name in ("scipy", "scipy.sparse.linalg", "threadpoolctl"):
        monkeypatch.setitem(sys.modules, name, None)
    (found,) = layer_spectra([moments], n_workers=1)
    assert found.values == pytest.approx(expected.values, rel=1e-8)


def test_bad_snapshots_are_rejected():
    X = np.random.default_rng(0).normal(size=(50, 4))
    with pytest.raises(SnapshotError, check=says("snapshots, but the layer has")):
        whitened_dmd(X[:2], X[:2])
    with pytest.raises(SnapshotError, check=says("expected (snapshot, feature); flatten batch and token.")):
        whitened_dmd(X[:, 0], X[:, 0])
    with pytest.raises(SnapshotError, check=says("The states entering the layer are all the same; pass")):
        whitened_dmd(np.full((50, 4), 3.7), X)
    with pytest.raises(SnapshotError, check=says("The states entering the layer are all the same; pass")):
        whitened_dmd(np.float32(1e6) + np.zeros((50, 4), np.float32) + np.float32(0.01) * X.astype(np.float32), X)
    with pytest.raises(SnapshotError, check=says("flatten batch and token into the first axis.")):
        whitened_dmd(X, X[:, :3])
    with pytest.raises(SnapshotError, check=says("Snapshots of the layer have the types")):
        whitened_dmd(X.astype(int), X.astype(int))


def test_states_whose_squares_overflow_are_rejected():
    X = 1e200 * np.random.default_rng(0).normal(size=(50, 4))
    with pytest.raises(SnapshotError, check=says("The states passing the layer have squares beyond float64")):
        whitened_dmd(X, 1.1 * X)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_rejected_before_lapack_is_called(bad):
    X = np.random.default_rng(0).normal(size=(50, 4))
    Y = X.copy()
    Y[17, 2] = bad
    with pytest.raises(SnapshotError, check=says("The residual stream holds NaN or infinite values in the")):
        whitened_dmd(X, Y)


@pytest.mark.parametrize(
    ("name", "value"),
    [("ridge", -1.0), ("ridge", np.inf), ("ridge_kind", "sometimes"), ("rank", 0), ("rank_tolerance", 2.0)],
)
def test_invalid_options_are_rejected(name, value):
    with pytest.raises(OptionError, check=about(name, value)):
        DmdOptions(**{name: value})
