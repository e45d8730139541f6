"""Tests of the risk model on designs with known edges: predictions, missing predictions, errors and files."""

import json

import numpy as np
import pytest
from scipy.stats import norm

import workbench as wb
from tests.about import about
from tests.risk.known_designs import EDGES, SGD, SLOPE, WITHOUT_NORM, known_designs
from workbench.errors import OptionError, SchemaError, StoreError
from workbench.risk.edge_model import (
    LEVEL,
    Edges,
    _with_derivatives,
    best_penalty,
    fit_edges,
    log_likelihood,
    out_of_group,
)

pytestmark = pytest.mark.medium

OUTCOMES = ("too_small", "too_large", "failure", "explosion")


def fitted(cases, edges, families, **options):
    return wb.risk.fit(cases, edges, families, **{"features": ["unit_change_rate"], "n_bootstrap": 10} | options)


@pytest.fixture(scope="module")
def designs():
    return known_designs()


@pytest.fixture(scope="module")
def model(designs):
    cases, _, edges, families = designs
    return fitted(cases, edges, families, features=["unit_change_rate", "d_model", "n_steps"], n_bootstrap=30)


@pytest.fixture(scope="module")
def others():
    """Designs of families that were not part of the fit."""
    return known_designs(n_families=30, seed=1)


def at_rates(case, rates):
    return case.isel(run=np.zeros(len(rates), int)).assign_coords(learning_rate=("run", np.asarray(rates)))


# ---- edges


def test_known_edges_of_other_families_are_found(model, others):
    cases, truth, _, _ = others
    found = model.predict(cases)
    assert (found["reason"] == "").all()
    for edge in ("slow_edge", "useful_edge"):
        error = np.log(found[edge].values) - truth[edge]
        assert np.sqrt(np.mean(error**2)) < 0.5  # 0.36 if everything but the families were known
        # The intervals of rates are those of new families.
        is_inside = (np.log(found[f"{edge}_low"]) < truth[edge]) & (truth[edge] < np.log(found[f"{edge}_high"]))
        assert is_inside.mean() == pytest.approx(LEVEL, abs=0.1)
    # Only designs without a norm diverge below the largest rate tried.
    is_normed = cases["scale_response"].values < 0.5
    assert (found["explosion_edge"].values[is_normed] > 3).all()
    error = np.log(found["explosion_edge"].values) - truth["explosion_edge"]
    assert np.sqrt(np.mean(error[~is_normed] ** 2)) < 1.0


def test_settings_and_features_move_the_edges_by_known_amounts(model, designs):
    case = designs[0].isel(run=[int(np.argmax(designs[0]["optimizer"].values == "AdamW"))])
    case = case.assign(scale_response=("run", [0.0]), unit_change_rate=("run", [0.01]))
    edge = float(np.log(model.predict(case)["useful_edge"][0]))

    def moved(**changes):
        other = case.assign({name: ("run", [value]) for name, value in changes.items()})
        return float(np.log(model.predict(other)["useful_edge"][0])) - edge

    assert moved(unit_change_rate=0.02) == pytest.approx(SLOPE * np.log10(2), abs=0.2)
    assert moved(optimizer="SGD") == pytest.approx(SGD, abs=0.7)
    assert moved(scale_response=1.0) == pytest.approx(WITHOUT_NORM, abs=0.7)
    assert moved(d_model=48) == pytest.approx(0, abs=0.4)


def test_a_setting_that_is_also_a_feature_has_its_own_range():
    """The number of updates is checked itself, and is a feature as a logarithm."""
    cases, _, edges, families = known_designs()
    steps = np.log10(cases["n_steps"].values / 240)
    shifted = {name: Edges(of.low - 4 * steps, of.high - 4 * steps) for name, of in edges.items()}
    model = fitted(cases, shifted, families, features=["unit_change_rate", "n_steps"])
    assert model.ranges["n_steps"] == pytest.approx((np.log10(240), np.log10(480)))
    assert model.measured["n_steps"] == (240, 480)
    short, long = (cases.isel(run=[0]).assign_coords(n_steps=("run", [n])) for n in (240, 480))
    ratio = float(model.predict(long)["useful_edge"][0] / model.predict(short)["useful_edge"][0])
    assert np.log(ratio) == pytest.approx(-4 * np.log10(2), abs=0.3)


def test_the_deviation_includes_that_between_families():
    same, different = (known_designs(of_family=of, seed=3) for of in (0.0, 1.0))
    narrow, wide = (fitted(cases, edges, families, n_bootstrap=0) for cases, _, edges, families in (same, different))
    assert narrow.deviations["useful_edge"] == pytest.approx(0.2, abs=0.1)
    assert wide.deviations["useful_edge"] > 0.7


# ---- probabilities


def test_probabilities_are_monotonic_in_the_rate(model, designs):
    for i in (0, 30, 60):
        found = model.predict(at_rates(designs[0].isel(run=[i]), np.geomspace(1e-6, 10, 40)))
        assert (np.diff(found["too_large"]) >= 0).all()
        assert (np.diff(found["explosion"]) >= 0).all()
        assert (np.diff(found["too_small"]) <= 0).all()
        assert found["too_small"][0] > 0.99
        assert found["too_large"][-1] > 0.99


def test_probabilities_follow_from_the_edges(model, others):
    found = model.predict(others[0])
    np.testing.assert_allclose(found["failure"], np.minimum(found["too_small"] + found["too_large"], 1), rtol=1e-12)
    assert (found["explosion"] <= found["too_large"]).all()
    assert (found["useful_edge"] <= found["explosion_edge"]).all()
    for edge, outcome in (("slow_edge", "too_small"), ("useful_edge", "too_large"), ("explosion_edge", "explosion")):
        at = others[0].assign_coords(learning_rate=("run", found[edge].values))
        np.testing.assert_allclose(model.predict(at)[outcome], 0.5)
        low = others[0].assign_coords(learning_rate=("run", found[f"{edge}_low"].values))
        np.testing.assert_allclose(model.predict(low)[outcome], 0.9 if outcome == "too_small" else 0.1)


# ---- missing predictions


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"d_model": 512}, "The risk model was not fitted for a width of 512 (only 48 to 96)."),
        ({"n_layers": 1}, "The risk model was not fitted for a depth of 1 (only 2 to 4)."),
        ({"n_steps": 10_000}, "The risk model was not fitted for training over 10,000 updates (only 240 to 480)."),
        ({"optimizer": "Lion"}, "The risk model was not fitted for Lion with norm (only AdamW and SGD)."),
        (
            {"optimizer": "", "d_model": 32},
            "The risk model was not fitted for a width of 32 (only 48 to 96) and an unnamed optimizer with norm (only "
            "AdamW and SGD).",
        ),
        (
            {"scale_response": np.nan},
            "Whether the model has a norm is unknown: its logits are zero or not finite.",
        ),
    ],
)
def test_outside_of_the_fit_the_values_are_nan_with_a_reason(model, designs, changes, sentence):
    is_normed = designs[0]["scale_response"].values < 0.5
    cases = designs[0].isel(run=np.flatnonzero(is_normed)[:2])
    changed = {name: ("run", np.array([value, cases[name].values[1]])) for name, value in changes.items()}
    found = model.predict(cases.assign(changed))
    assert found["reason"].values.tolist() == [sentence, ""]
    for name in (*OUTCOMES, *EDGES):
        for end in ("", "_low", "_high"):
            assert np.isnan(found[f"{name}{end}"].values).tolist() == [True, False], name


def test_an_optimizer_fitted_only_without_a_norm_is_unknown_with_a_norm(designs):
    cases, _, edges, families = designs
    is_kept = (cases["optimizer"].values != "SGD") | (cases["scale_response"].values > 0.5)
    some = {name: of[is_kept] for name, of in edges.items()}
    model = fitted(cases.isel(run=is_kept), some, families[is_kept], n_bootstrap=0)
    assert model.groups == ("AdamW with norm", "AdamW without norm", "SGD without norm")
    found = model.predict(cases.isel(run=np.flatnonzero(~is_kept)[:1]))
    assert found["reason"].item() == "The risk model was not fitted for SGD with norm (only AdamW)."


def test_an_optimizer_measured_in_two_families_is_unknown(designs):
    cases, _, edges, families = designs
    is_sgd, is_normed = cases["optimizer"].values == "SGD", cases["scale_response"].values < 0.5
    of_sgd = np.unique(families[is_sgd & is_normed])
    few, enough = (~(is_sgd & is_normed) | np.isin(families, of_sgd[:n]) for n in (2, 3))
    models = [
        fitted(cases.isel(run=kept), {name: of[kept] for name, of in edges.items()}, families[kept], n_bootstrap=0)
        for kept in (few, enough, few & ~(is_sgd & is_normed))
    ]
    unknown, known, without = (model.predict(cases.isel(run=is_sgd & is_normed))["useful_edge"] for model in models)
    assert np.isnan(unknown).all()
    assert np.isfinite(known).all()
    assert models[0].about == models[2].about  # the two families were not used
    assert np.isnan(without).all()


def test_an_untrained_model_that_counts_as_diverged_explodes_at_any_rate(model, designs):
    cases = at_rates(designs[0].isel(run=[0]), [1e-9, 1.0]).assign(
        initial_loss=("run", [60.0, 60.0]), d_model=("run", [4096, 64]), unit_change_rate=("run", [np.nan, 0.01])
    )
    found = model.predict(cases)
    outside, started = found["reason"].values.tolist()
    assert outside.startswith("The risk model was not fitted for a width of 4,096")
    assert started.startswith("The untrained model counts as diverged by RKSP's limits (a loss above 50 or")
    for end in ("", "_low", "_high"):
        assert found[f"explosion{end}"].values.tolist() == [1, 1]
        for name in ("too_small", "too_large", "failure", "useful_edge"):  # Some of these models learn.
            assert np.isnan(found[f"{name}{end}"]).all()


def test_features_are_clipped_to_the_fitted_range(model, designs):
    rates = np.r_[np.inf, 1e9, designs[0]["unit_change_rate"].max()]
    cases = at_rates(designs[0].isel(run=[0]), np.ones(3)).assign(unit_change_rate=("run", rates))
    found = model.predict(cases)["useful_edge"].values
    assert found == pytest.approx(np.full(3, found[2]))


# ---- errors


@pytest.mark.parametrize(
    ("call", "error", "name"),
    [
        (lambda c, e, f: fitted(c, e, f, features=["colour"]), OptionError, "features"),
        (lambda c, e, f: fitted(c.isel(run=[]), e, f), SchemaError, "run"),
        (lambda c, e, f: fitted(c, e, ["a"] * len(f)), SchemaError, "families"),
        (lambda c, e, f: fitted(c, e, f[1:]), OptionError, "families"),
        (lambda c, e, f: fitted(c, e | {"slow_edge": e["slow_edge"][1:]}, f), OptionError, "slow_edge"),
        (lambda c, e, f: fitted(c, {k: v for k, v in e.items() if k != "slow_edge"}, f), OptionError, "edges"),
        (lambda c, e, f: fitted(c.drop_vars("scale_response"), e, f), SchemaError, "scale_response"),
        (
            lambda c, e, f: fitted(c.assign(scale_response=c.scale_response.where(c.d_model < 96)), e, f),
            SchemaError,
            "scale_response",
        ),
        (
            lambda c, e, f: fitted(c.assign(unit_change_rate=c.unit_change_rate.where(c.d_model < 96)), e, f),
            SchemaError,
            "unit_change_rate",
        ),
        (
            lambda c, e, f: fitted(c.assign(unit_change_rate=np.inf * c.unit_change_rate), e, f),
            OptionError,
            "unit_change_rate",
        ),
    ],
)
def test_incomplete_arguments_of_a_fit_are_rejected(designs, call, error, name):
    cases, _, edges, families = designs
    with pytest.raises(error, check=about(name)):
        call(cases, edges, families)


@pytest.mark.parametrize(
    ("low", "high", "name"),
    [
        ([0.0, np.nan], [0.0, 1.0], "low[1]"),
        ([2.0], [1.0], "low[0]"),
        ([np.inf], [np.inf], "low[0]"),
        ([0.0], [0.0, 1.0], "high"),
    ],
)
def test_invalid_edges_are_rejected(low, high, name):
    with pytest.raises(OptionError, check=about(name)):
        Edges(np.array(low), np.array(high))


# ---- files


def test_a_loaded_model_makes_the_same_predictions(model, others, tmp_path):
    path = model.save(tmp_path / "model.json")
    loaded = wb.risk.load(path)
    assert (loaded.features, loaded.groups, loaded.about) == (model.features, model.groups, dict(model.about))
    assert (loaded.ranges, loaded.measured) == (model.ranges, model.measured)
    before, after = model.predict(others[0]), loaded.predict(others[0])
    for name in before.drop_vars("reason"):
        np.testing.assert_allclose(after[name], before[name], rtol=1e-3, atol=1e-9)
    coefficients = json.loads(path.read_text())["fits"]["useful_edge"][0][3]
    assert all(value == float(f"{value:.6g}") for value in coefficients)
    # Saving the loaded model loses nothing more.
    assert loaded.save(tmp_path / "again.json").read_text() == path.read_text()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda text: text[:-100], "path"),
        (lambda text: '{"kind": "another"}', "path"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "version"),
        (lambda text: text.replace('"useful_edge"', '"other_edge"'), "path"),
        (lambda text: text.replace('"measured": {', '"measured": [{').replace('}, "dev', '}], "dev'), "path"),
    ],
)
def test_files_that_are_not_a_model_are_rejected(model, tmp_path, change, name):
    path = model.save(tmp_path / "model.json")
    text = change(path.read_text())
    assert text != path.read_text()
    path.write_text(text)
    with pytest.raises(StoreError, check=about(name, path if name == "path" else 2)):
        wb.risk.load(path)


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
