import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from sklearn.metrics import roc_auc_score

import workbench as wb
from tests.risk.made_sweep import made_sweep
from workbench.errors import OptionError, SchemaError
from workbench.formatting import percent
from workbench.risk.probability_calibration import group_folds, platt
from workbench.studies.outcomes import predictor_table

pytestmark = pytest.mark.medium

OPTIONS = {
    "features": ["near_unit_mass mean", "spectral_radius mean", "d_model", "warmup", "optimizer"], "penalty": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def sweep():
    return made_sweep(n_configurations=24, n_cells=2, n_rates=7, n_seeds=1, seed=4)[0]


@pytest.fixture(scope="module")
def predicted(sweep):
    return wb.risk.cross_validate(sweep, by="architecture", **OPTIONS)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=20, max_size=80).filter(lambda g: len(set(g)) >= 4), st.integers(0, 99))
def test_no_group_is_on_both_sides_and_every_run_is_held_out_once(groups, seed):
    groups = np.array(groups)
    seen = np.zeros(len(groups), int)
    for train, held_out in group_folds(groups, 4, seed):
        assert not set(groups[train]) & set(groups[held_out])
        assert sorted([*train, *held_out]) == list(range(len(groups)))
        seen[held_out] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("by", ["configuration", "architecture", "cell"])
def test_a_run_is_predicted_by_a_model_that_has_not_seen_its_group(sweep, by):
    """Another outcome of some runs of one group changes no prediction for any of them."""
    found = wb.risk.cross_validate(sweep, by=by, n_folds=2, **OPTIONS)
    own = found.fold.values == found.fold.values[0]
    assert set(sweep[by].values[own]).isdisjoint(sweep[by].values[~own])
    is_other = own & (np.arange(len(own)) % 4 == 0)
    other = sweep.assign(has_diverged=("run", np.where(is_other, ~sweep.has_diverged, sweep.has_diverged)))
    changed = wb.risk.cross_validate(other, by=by, n_folds=2, **OPTIONS)
    np.testing.assert_array_equal(changed.fold, found.fold)
    np.testing.assert_array_equal(changed.probability[own], found.probability[own])
    assert (changed.probability[~own] != found.probability[~own]).any()


def test_held_out_runs_are_predicted_in_the_order_of_the_sweep(sweep, predicted):
    np.testing.assert_array_equal(predicted.has_diverged, sweep.has_diverged)
    np.testing.assert_array_equal(predicted.learning_rate, sweep.learning_rate)
    np.testing.assert_array_equal(predicted.group, sweep.architecture)
    assert len(np.unique(predicted.fold)) == 8  # one architecture at a time
    held_out = sweep.architecture.values == "kind 3"
    model = wb.risk.fit(sweep.isel(run=~held_out), n_bootstrap=0, **OPTIONS)
    alone = model._extrapolated(sweep.isel(run=held_out))
    np.testing.assert_array_equal(predicted.probability[held_out], alone.probability)
    np.testing.assert_array_equal(predicted.is_familiar[held_out], alone.is_familiar)
    assert wb.risk.auroc(predicted.probability, sweep.has_diverged).value > 0.93
    assert wb.risk.calibration_error(predicted.probability, sweep.has_diverged) < 0.08


def test_other_runs_are_predicted_without_their_own_group(sweep):
    other = made_sweep(n_configurations=6, n_cells=1, n_rates=3, n_seeds=1, seed=4)[0]
    names = np.where(other.architecture == "kind 5", "new", other.architecture)
    other = other.assign_coords(architecture=("run", names)).isel(run=np.isin(names, ["new", "kind 2", "kind 4"]))
    names = other.architecture.values
    found = wb.risk.cross_validate(sweep, by="architecture", test=other, **OPTIONS)
    np.testing.assert_array_equal(found.has_diverged, other.has_diverged)
    for name, keep in (("new", np.full(sweep.sizes["run"], True)), ("kind 2", sweep.architecture.values != "kind 2")):
        of = names == name
        model = wb.risk.fit(sweep.isel(run=keep), n_bootstrap=0, **OPTIONS)
        alone = model._extrapolated(other.isel(run=of))
        np.testing.assert_array_equal(found.probability[of], alone.probability)


def test_figures_are_those_of_the_predictions(sweep, predicted):
    figures = wb.risk.figures_of(predicted, sweep, n_bootstrap=50)
    everything = figures["all"]
    label, probability = sweep.has_diverged.values, predicted.probability.values
    assert everything["auroc"][0] == pytest.approx(roc_auc_score(label, probability))
    assert everything["auroc"][1] < everything["auroc"][0] < everything["auroc"][2]
    assert everything["brier"] == pytest.approx(np.mean((probability - label) ** 2))
    assert everything["n_diverged"] == label.sum()
    assert figures["familiar"]["n_runs"] == predicted.is_familiar.sum()
    one = figures["architectures"]["kind 1"]
    of = sweep.architecture.values == "kind 1"
    assert one["n_runs"] == of.sum()
    assert one["auroc"] == pytest.approx(roc_auc_score(label[of], probability[of]))
    assert one["mean_probability"] == pytest.approx(probability[of].mean())
    rates = everything["stable_rates"]
    assert rates["n_cells"] == 48
    assert rates["share_within_2"] > 0.75  # one run a rate: what is measured is noisy itself
    assert 0.7 < rates["median_ratio"] < 1.4
    # Runs of one outcome have counts and no figures.
    assert wb.risk.figures_of(predicted.isel(run=label), sweep.isel(run=label))["all"] == {
        "n_runs": label.sum(), "n_diverged": label.sum()
    }  # fmt: skip


def grid_of(shares, *, n=10, rates=None, cell="a"):
    """A cell whose runs diverge at the given shares of its rates."""
    rates = rates or [10.0 ** (-4 + i) for i in range(len(shares))]
    label = [i < round(share * n) for share in shares for i in range(n)]
    names = {"cell": cell, "architecture": "Pre-LN", "configuration": "c"}
    coords = {key: ("run", [name] * len(label)) for key, name in names.items()}
    coords["learning_rate"] = ("run", np.repeat(rates, n))
    return xr.Dataset({"has_diverged": ("run", label)}, coords)


@pytest.mark.parametrize(
    ("shares", "last", "first", "is_lower", "is_upper"),
    [
        ([0, 0.1, 0.2, 1], 1e-3, 1e-2, False, False),  # .2 is not below .2
        ([0, 0.1, 0.1, 0.1], 1e-1, np.nan, True, False),
        ([0.2, 0, 0, 0], np.nan, 1e-4, False, True),  # unstable at the smallest, whatever follows
        ([0, 0.5, 0, 1], 1e-4, 1e-3, False, False),  # stable at it and at all smaller ones
    ],
)
def test_a_cell_is_stable_up_to_the_rate_before_the_first_unstable_one(shares, last, first, is_lower, is_upper):
    found = wb.risk.stable_rates(grid_of(shares)).squeeze()
    np.testing.assert_equal([found.last_stable.item(), found.first_unstable.item()], [last, first])
    np.testing.assert_allclose(found.largest_stable_rate.item(), np.sqrt(last * first))
    assert (found.is_lower_bound.item(), found.is_upper_bound.item()) == (is_lower, is_upper)
    assert found.n_runs.item() == 40


def test_other_shares_of_runs_may_be_borne():
    cell = grid_of([0, 0.1, 0.4, 1])
    lasts = [wb.risk.stable_rates(cell, below=below).last_stable.item() for below in (0.05, 0.3, 0.5)]
    np.testing.assert_allclose(lasts, [1e-4, 1e-3, 1e-2])


def test_predicted_over_measured_is_one_a_cell_and_bounds_are_kept_or_not():
    cells = {"z": [0, 0, 1], "a": [0, 0, 0], "m": [1, 1, 1]}
    sweep = xr.concat([grid_of(shares, cell=name, n=2) for name, shares in cells.items()], "run")
    rates = {"z": 2 * 10**-2.5, "a": 5e-3, "m": 5e-5}
    predicted = xr.DataArray([rates[name] for name in sweep.cell.values], dims="run")
    predicted[0] = np.nan  # refused: the other runs of the cell say it
    found = wb.risk.stable_rate_accuracy(sweep, predicted)
    assert found["cell"].values.tolist() == ["z", "a", "m"]
    np.testing.assert_allclose(found.ratio, [2, np.nan, np.nan])
    assert found.is_consistent.values.tolist() == [True, False, True]
    assert found.is_lower_bound.values.tolist() == [False, True, False]
    assert wb.risk.share_within(found.ratio, 2.0) == 1
    assert wb.risk.share_within(found.ratio, 1.5) == 0
    assert np.isnan(wb.risk.share_within(found.ratio[1:], 1.5))
    ratios = xr.DataArray([1 / 1.5, 1.5, 1.6, 1 / 1.6, 1.0, np.nan], dims="cell")
    assert wb.risk.share_within(ratios) == 0.6


@pytest.mark.slow
def test_validation_goes_into_the_file_and_the_card(sweep, tmp_path):
    figures = wb.risk.validate(sweep, n_bootstrap=20, n_folds=2, **OPTIONS)
    assert list(figures) == ["configuration", "architecture", "near_unit_mass"]
    model = wb.risk.fit(sweep, n_bootstrap=5, **OPTIONS)
    assert "Not validated: no figures are stored with this model." in model.card()
    model = model.with_validation(figures)
    card = model.card()
    for name in ("configuration", "architecture"):
        part = figures[name]["all"]
        value, low, high = part["auroc"]
        assert f"| {name} | {part['n_runs']} | {part['n_diverged']} | {value:.3f} [{low:.3f}, {high:.3f}] |" in card
        assert f"{percent(part['stable_rates']['share_within_1.5'])} lie within a factor of 1.5" in card
    mass = figures["near_unit_mass"]
    assert f"{mass['ece']:.3f} ({mass['ece_as_probability']:.3f} as it stands)" in card
    assert f"{sweep.sizes['run']} runs, {int(sweep.has_diverged.sum())} of which diverged, in 48 cells" in card
    assert "| d_model | width | 16 to 256 |" in card
    assert "| optimizer | optimizer | AdamW or SGD |" in card
    assert "nan" not in card
    assert "None" not in card
    loaded = wb.risk.load(model.save(tmp_path / "risk.json"))
    assert loaded.card() == card


def test_the_mass_alone_is_judged_as_it_stands_and_calibrated(sweep):
    figures = wb.risk.mass_figures(sweep, n_bootstrap=20)
    score, label = sweep.near_unit_mass.mean("layer").values, sweep.has_diverged.values
    assert figures["auroc"][0] == pytest.approx(roc_auc_score(label, score))
    assert figures["ece_as_probability"] == wb.risk.calibration_error(score, label)
    assert figures["ece_as_probability"] > 0.15 > figures["ece"]
    # Rates straddle every edge, so that within a cell M is chance.
    assert figures["auroc_within_cell"] == pytest.approx(0.5, abs=0.1)


def test_a_score_is_calibrated_on_other_groups():
    random = np.random.default_rng(0)
    groups = np.repeat(np.arange(50), 20)
    score = np.repeat(random.normal(size=50), 20)
    truth = expit(3 * score - 1)
    label = random.random(1000) < truth
    found = wb.risk.calibrated_score(score, label, groups)
    assert np.mean(np.abs(found - truth)) < 0.04
    own = groups == 7
    changed = wb.risk.calibrated_score(score, np.where(own, ~label, label), groups)
    np.testing.assert_array_equal(found[own], changed[own])
    alike = wb.risk.calibrated_score(score, groups == 7, groups, n_folds=50)
    assert (alike[own] == 0).all()  # nobody else diverged


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 0.0), (25.0, -3.0), (0.02, 1.0)])
def test_platt_finds_factor_and_offset_whatever_the_unit(factor, shift):
    random = np.random.default_rng(0)
    score = random.normal(size=20_000) / factor
    label = random.random(20_000) < expit(factor * score + shift)
    found = platt(score, label)
    assert found == pytest.approx((factor, shift), rel=0.05, abs=0.08)
    weight = random.integers(0, 3, 20_000)
    drawn = np.repeat(np.arange(20_000), weight)
    assert platt(score, label, weight) == pytest.approx(platt(score[drawn], label[drawn]), rel=1e-2, abs=1e-2)


def test_the_published_predictors_are_those_of_the_paper(sweep):
    table = wb.outcomes.predictor_table(sweep, n_bootstrap=50)
    published = wb.published.predictor_table()
    assert table["predictor"].values.tolist() == published["predictor"].values.tolist()
    np.testing.assert_array_equal(table.published_auroc, published.auroc)
    label = sweep.has_diverged.values
    mass, kappa = (sweep[name].mean("layer").values for name in ("near_unit_mass", "eigenvector_condition"))
    scores = {
        "M": mass, "M log10(kappa)": mass * np.log10(kappa), "rho": sweep.spectral_radius.mean("layer").values,
        "kappa": kappa, "initial grad norm": sweep.initial_grad_norm.values,
        "grad norm at step 100": sweep.grad_norm_step_100.values, "grad norm variance": sweep.grad_norm_variance.values,
        "loss spikes": sweep.n_loss_spikes.values,
    }  # fmt: skip
    for name, score in scores.items():
        row = table.sel(predictor=name)
        assert float(row.auroc) == pytest.approx(roc_auc_score(label, score)), name
        assert float(row.low) <= float(row.auroc) <= float(row.high)
        within = wb.risk.auroc_within(score, label, sweep.cell.values, n_bootstrap=0).value
        assert float(row.auroc_within_cell) == within
    assert (table.n_runs == len(label)).all()


def test_runs_without_a_score_are_left_out_and_counted(sweep):
    holes = sweep.assign(
        grad_norm_step_100=sweep.grad_norm_step_100.where(np.arange(sweep.sizes["run"]) % 2 == 0),
        eigenvector_condition=sweep.eigenvector_condition * np.inf,
    )
    table = wb.outcomes.predictor_table(holes, n_bootstrap=0)
    row = table.sel(predictor="grad norm at step 100")
    assert row.n_runs == sweep.sizes["run"] // 2
    assert row.n_diverged == sweep.has_diverged.values[::2].sum()
    assert np.isnan(row.low)
    assert table.auroc.sel(predictor="kappa") == 0.5  # infinite everywhere


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda s: wb.risk.cross_validate(s, by="colour"), SchemaError, "The sweep has no colour; take one from"),
        (lambda s: wb.risk.cross_validate(s, n_folds=1), OptionError, "n_folds is 1, expected at least 2."),
        (
            lambda s: wb.risk.cross_validate(s.isel(run=slice(14))),
            SchemaError,
            "The sweep has 1 different values of configuration, expected at least 3 to hold some out.",
        ),
        (lambda s: predictor_table(s.drop_vars("n_loss_spikes")), SchemaError, "The sweep lacks n_loss_spikes"),
        (lambda s: predictor_table(s.isel(run=s.has_diverged.values)), SchemaError, "ended alike, so no AUROC"),
        (
            lambda s: wb.risk.stable_rates(s, below=0),
            OptionError,
            "below is 0, expected a share above 0, at most 1.",
        ),
        (lambda s: wb.risk.stable_rates(s.drop_vars("cell")), SchemaError, "The sweep has no cell; take one from"),
        (lambda s: wb.risk.stable_rates(s.isel(run=[])), SchemaError, "The sweep has no run; take one from"),
        (
            lambda s: wb.risk.share_within(xr.DataArray([1.0]), 0.9),
            OptionError,
            "factor is 0.9, expected a number of",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused_in_one_sentence(sweep, call, error, sentence):
    with pytest.raises(error, match=sentence):
        call(sweep)


def test_trees_are_judged_on_the_same_terms(sweep):
    found = wb.risk.boosted_probability(sweep, features=OPTIONS["features"])
    assert found.shape == sweep.has_diverged.shape
    assert roc_auc_score(sweep.has_diverged, found) > 0.8
