import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

import workbench as wb
from tests.risk.made_sweep import PLANTED, SLOPE, made_sweep
from workbench.errors import OptionError, SchemaError, StoreError
from workbench.risk import model_file
from workbench.risk.probability_calibration import edge_spread

pytestmark = pytest.mark.medium

FORWARD = PLANTED


def at(cases, **changes):
    """Cases with some settings changed."""
    n = cases.sizes["run"]
    return cases.assign_coords({name: ("run", np.broadcast_to(new, n)) for name, new in changes.items()})


@pytest.fixture(scope="module")
def unseen():
    """Other configurations of the same kind, with their truth."""
    return made_sweep(n_configurations=30, n_cells=2, n_rates=7, n_seeds=1, seed=1)


def test_the_planted_probability_and_edge_are_recovered(model, unseen):
    cases, truth = unseen
    found = model._extrapolated(cases)
    assert float(abs(found.probability - truth.probability).mean()) < 0.05
    edges = model._extrapolated_rates(cases)["edge"]
    assert float(np.sqrt(np.mean((np.log10(edges) - truth.log_edge) ** 2))) < 0.09
    assert model.coefficients().attrs["slope"] == pytest.approx(SLOPE, rel=0.2)


def test_the_planted_probability_lies_in_the_interval(model, unseen):
    cases, truth = unseen
    found = model._extrapolated(cases)
    # One model, so that its runs share their errors; the ridge's bias is not part of the interval.
    assert float(((found.low <= truth.probability) & (truth.probability <= found.high)).mean()) > 0.8
    assert ((found.low <= found.probability) & (found.probability <= found.high)).all()


def test_stable_rates_are_the_planted_ones(model, unseen):
    cases, truth = unseen
    one = cases.isel(run=slice(None, None, 7))
    found = model._extrapolated_rates(one, below=0.3)
    planted = 10 ** (truth.log_edge.values[::7] + np.log(0.3 / 0.7) / SLOPE)
    ratio = np.log10(found.expected_stable_rate.values / planted)
    assert np.sqrt(np.mean(ratio**2)) < 0.08
    # Without a spread that is no feature's, the cautious rate is the expected one.
    np.testing.assert_allclose(found.largest_stable_rate, found.expected_stable_rate, rtol=0.15)
    assert (found.low <= found.largest_stable_rate).all()
    assert (found.largest_stable_rate <= found.high).all()


def test_at_the_largest_stable_rate_the_risk_is_the_one_asked_for(model, planted):
    cases = planted[0].isel(run=slice(None, None, 13))
    for below in (0.05, 0.2, 0.5):
        rate = model._extrapolated_rates(cases, below=below).largest_stable_rate
        found = model._extrapolated(at(cases, learning_rate=rate.values))
        np.testing.assert_allclose(found.probability, below, rtol=1e-6)


def test_a_spread_that_no_feature_explains_is_found_and_makes_the_risk_cautious():
    sweep, _ = made_sweep(n_configurations=60, n_cells=1, n_rates=9, n_seeds=2, slope=30, noise=0.25)
    names = ["near_unit_mass mean", "spectral_radius mean", "d_model", "warmup", "optimizer"]
    model = wb.risk.fit(sweep, features=names, penalty=1.0, n_bootstrap=0)
    assert model.spread[0] == pytest.approx(30, rel=0.3)
    assert model.spread[1] == pytest.approx(0.25, rel=0.3)
    assert model.weights[0, 0] < 0.4 * 30
    fresh, _ = made_sweep(n_configurations=80, n_cells=1, n_rates=9, n_seeds=2, slope=30, noise=0.25, seed=5)
    found = wb.risk.stable_rate_accuracy(fresh, model._extrapolated_rates(fresh).expected_stable_rate)
    assert 0.8 < float(found.ratio.median()) < 1.25
    rates = model._extrapolated_rates(fresh)
    low, high = (wb.risk.stable_rate_accuracy(fresh, rates[name]).ratio for name in ("expected_low", "expected_high"))
    assert float(((low <= 1) & (high >= 1)).mean()) >= 0.85  # of .95, with 80 cells
    probability = model._extrapolated(fresh).probability
    assert wb.risk.calibration_error(probability, fresh.has_diverged) < 0.08


@pytest.mark.parametrize(("slope", "spread"), [(8.0, 0.02), (40.0, 0.3), (15.0, 0.1)])
def test_slope_and_spread_are_told_apart(slope, spread):
    random = np.random.default_rng(0)
    cells = np.repeat(np.arange(150), 12)
    offset = np.tile(np.linspace(-0.6, 0.6, 12), 150)
    error = spread * random.normal(size=150)[cells]
    label = random.random(len(cells)) < expit(slope * (offset - error))
    found = edge_spread(offset, label, cells)
    assert found[0] == pytest.approx(slope, rel=0.25)
    assert found[1] == pytest.approx(spread, abs=0.05)


@settings(max_examples=25, deadline=None)
@given(
    factors=st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=6, unique=True),
    row=st.integers(0, 400),
    asks=st.sampled_from(["predict", "_extrapolated"]),
)
def test_the_risk_never_falls_as_the_rate_rises(model, planted, factors, row, asks):
    case = planted[0].isel(run=[row] * len(factors))
    rates = np.sort(factors) * float(case.learning_rate[0])
    found = getattr(model, asks)(at(case, learning_rate=rates))
    for name in ("probability", "low", "high"):
        assert (np.diff(found[name]) >= -1e-12).all()


def test_far_rates_keep_the_last_risk_seen_and_say_so(model, planted):
    case = planted[0].isel(run=[0])
    edge = float(model.largest_stable_rate(case).edge[0])
    found = model.predict(at(case, learning_rate=edge * 1e-5))
    assert not found.is_rate_seen.item()
    assert found.is_familiar.item()
    assert found.probability.item() == pytest.approx(expit(model.weights[0, 0] * model.seen[0]))
    assert "1 learning rate lies further from the predicted edge than any that was trained with" in found.attrs["note"]
    by_formula = model._extrapolated(at(case, learning_rate=edge * 1e-5))
    assert by_formula.probability.item() == pytest.approx(expit(-5 * model.weights[0, 0]), rel=1e-4)
    assert by_formula.attrs["note"].endswith("the risk goes by the formula alone.")
    near = model.predict(at(case, learning_rate=edge))
    assert near.is_rate_seen.item()
    assert near.attrs["note"] == near.attrs["warning"] == ""
    assert near.probability.item() == pytest.approx(0.5)


def test_training_runs_are_familiar_and_other_ones_are_refused(model, planted):
    cases = planted[0]
    assert float(model.predict(cases).is_familiar.mean()) > 0.97
    mixed = cases.isel(run=[0, 50, 100])
    mixed = at(mixed, d_model=[mixed.d_model.values[0], 8192, mixed.d_model.values[2]])
    found = model.predict(mixed)
    assert found.is_familiar.values.tolist() == [True, False, True]
    assert np.isnan(found.probability.values).tolist() == [False, True, False]
    assert np.isnan([found.low.values[1], found.high.values[1]]).all()
    assert found.farthest_feature.values[1] == "d_model"
    assert found.attrs["warning"].startswith(
        "1 of 3 cases is unlike the runs that the risk model has seen, at a distance of"
    )
    assert found.attrs["warning"].endswith(
        "farthest in width (d_model), which is 8192 where they had 16 to 256; no number is given."
    )
    asked = model._extrapolated(mixed)
    assert not np.isnan(asked.probability).any()
    assert asked.attrs["warning"].endswith("the numbers given are extrapolated.")
    np.testing.assert_array_equal(asked.distance, found.distance)
    rates = model.largest_stable_rate(mixed)
    for name in ("largest_stable_rate", "low", "high", "expected_stable_rate", "edge"):
        assert np.isnan(rates[name].values).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("change", "feature", "words"),
    [
        ({"optimizer": "Lion"}, "optimizer", "farthest in optimizer, which is Lion where they had AdamW or SGD"),
        ({"clip_norm": 1.0}, "is_clipped", "in gradient clipping (is_clipped), which is 1 where they had 0"),
        ({"weight_decay": 0.5}, "weight_decay", "which is 0.5 where they had 0.01"),
    ],
)
def test_a_setting_that_never_varied_is_not_guessed_at(model, planted, change, feature, words):
    found = model.predict(at(planted[0].isel(run=[0]), **change))
    assert np.isnan(found.probability.item())
    assert found.farthest_feature.item() == feature
    assert words in found.attrs["warning"]
    assert found.distance.item() == np.inf


@pytest.fixture(scope="module")
def blind(planted):
    """A model none of whose features is a size; its runs were 16 to 256 wide with 1 to 6 layers."""
    return wb.risk.fit(planted[0], features=["near_unit_mass mean", "optimizer"], penalty=1.0, n_bootstrap=3)


@pytest.mark.parametrize(
    ("change", "size", "distance", "words"),
    [
        ({"d_model": 576}, "d_model", 576 / 256, "farthest in width (d_model), which is 576 where they had 16 to 256"),
        ({"d_model": 8}, "d_model", 2.0, "which is 8 where they had 16 to 256"),
        ({"n_layers": 30}, "n_layers", 5.0, "in number of layers (n_layers), which is 30 where they had 1 to 6"),
        ({"d_model": 288, "n_layers": 30}, "n_layers", 5.0, "which is 30 where"),
        ({"d_model": np.nan}, "d_model", np.inf, "which is nan where"),
    ],
)
def test_a_size_that_nobody_trained_is_refused_though_no_feature_sees_it(blind, planted, change, size, distance, words):
    case = planted[0].isel(run=[0])
    assert blind.predict(case).is_familiar.item()
    found, rates, drivers = blind.predict(at(case, **change)), blind.largest_stable_rate(at(case, **change)), None
    assert not found.is_familiar.item()
    assert found.farthest_feature.item() == size
    assert found.distance.item() == pytest.approx(distance)
    assert words in found.attrs["warning"]
    drivers = blind.drivers(at(case, **change))
    for values in (found.probability, found.low, found.high, rates.largest_stable_rate, rates.edge, drivers):
        assert np.isnan(values.values).all()
    assert np.isnan(wb.risk.over_rates(blind, at(case, **change), [0.01, 1.0])["probability"].values).all()


def test_the_ends_of_the_sizes_seen_are_familiar(blind, planted):
    case = planted[0].isel(run=[0])
    for size, ends in blind.applicability.sizes.items():
        assert ends == (float(planted[0][size].min()), float(planted[0][size].max()))
        for end in ends:
            assert blind.predict(at(case, **{size: int(end)})).is_familiar.item()


def test_a_case_that_does_not_say_its_size_is_refused_in_a_sentence(blind, planted):
    with pytest.raises(SchemaError, match="^The cases lack n_layers, the size of the model; measure them"):
        blind.predict(planted[0].isel(run=[0]).drop_vars("n_layers"))


def test_nobody_is_offered_a_number_all_the_same(model, planted):
    far = at(planted[0].isel(run=[0]), d_model=8192)
    for ask in (model.predict, model.largest_stable_rate):
        assert "extrapolate" not in ask(far).attrs["warning"]
        with pytest.raises(TypeError):
            ask(far, extrapolate=True)
    with pytest.raises(TypeError):
        wb.risk.over_rates(model, far, [0.1], extrapolate=True)


def test_a_combination_that_nobody_had_is_far_though_each_feature_was_seen():
    random = np.random.default_rng(0)
    sweep, _ = made_sweep(n_configurations=40, n_cells=1, n_rates=5, n_seeds=1)
    x = np.repeat(random.uniform(-1, 1, 40), 5)
    noise = 0.02 * np.repeat(random.normal(size=40), 5)
    sweep = sweep.assign(logit_std=("run", 10**x), initial_loss=("run", 4 * 10 ** (0.2 * x + noise)))
    model = wb.risk.fit(sweep, features=["logit_std", "initial_loss", "optimizer"], penalty=1.0, n_bootstrap=0)
    usual, odd = (sweep.isel(run=[0]).assign(logit_std=("run", [10**a]), initial_loss=("run", [4 * 10 ** (0.2 * b)]))
                  for a, b in ((0.5, 0.5), (0.6, -0.6)))  # fmt: skip
    assert model.predict(usual).is_familiar.item()
    found = model.predict(odd)
    assert not found.is_familiar.item()
    assert "where the nearest of them had" in found.attrs["warning"]


def test_a_model_that_counts_as_diverged_at_the_start_is_no_case_of_rates(model, planted):
    case = planted[0].isel(run=[0]).assign(initial_loss=("run", [1e4]))
    found = model.predict(case)
    assert found.probability.item() == found.low.item() == found.high.item() == 1
    assert found.starts_diverged.item()
    assert found.attrs["note"].startswith("The fresh model counts as diverged before any update, with a loss above 50")
    rates = model._extrapolated_rates(case)
    assert np.isnan(rates.largest_stable_rate.item())
    assert "counts as diverged before any update" in rates.attrs["warning"]
    # And a fit leaves such runs out: they would say that no rate is small enough.
    sweep = planted[0]
    worse = sweep.isel(run=slice(20)).assign(
        initial_loss=("run", np.full(20, 1e4)), has_diverged=("run", np.ones(20, bool))
    )
    import xarray as xr

    again = wb.risk.fit(xr.concat([sweep, worse], "run"), features=PLANTED, penalty=1.0, n_bootstrap=0)
    np.testing.assert_array_equal(again.weights[0], model.weights[0])
    assert again.about["n_started_diverged"] == 20


def test_drivers_add_up_to_the_log_odds(model, planted):
    cases = planted[0].isel(run=slice(None, None, 31))
    cases = cases.isel(run=model.predict(cases).is_familiar.values)
    drivers = model.drivers(cases)
    assert drivers.dims == ("run", "feature")
    assert drivers["feature"].values[0] == "learning_rate"
    assert set(drivers["feature"].values) == {"learning_rate", *model.features}
    log_odds = (drivers.sum("feature") + drivers.attrs["mean"]).values
    np.testing.assert_allclose(expit(log_odds), model._extrapolated(cases).probability, rtol=1e-9)
    everything = model.drivers(planted[0])
    assert np.isnan(everything).any("feature").values.tolist() == (~everything["is_familiar"]).values.tolist()
    log_rate = np.log10(cases["learning_rate"].values)
    rising = model.weights[0, 0] * (log_rate - log_rate[0])
    np.testing.assert_allclose(drivers.isel(feature=0) - drivers.isel(feature=0, run=0), rising, rtol=1e-9)


def test_coefficients_have_the_planted_signs(model):
    found = model.coefficients()
    signs = {"learning_rate": 1, "near_unit_mass mean": 1, "spectral_radius mean": 1, "d_model": 1, "optimizer SGD": -1,
             "warmup": -1}  # fmt: skip
    for name, sign in signs.items():
        one = found.sel(feature=name)
        assert sign * one > 0.2, name
        assert sign * one.low > 0
        assert sign * one.high > 0
    assert abs(found.sel(feature="weight_decay")) < 1e-9  # it never varied


def test_squares_and_interactions_are_found_when_they_are_there():
    def edge(cell):
        z = (np.log10(cell["d_model"]) - 1.8) / 0.4
        return -1 - 0.5 * z**2 + (0.6 * (cell["mass"] - 0.5) if cell["optimizer"] == "SGD" else 0)

    sweep, truth = made_sweep(n_configurations=50, n_rates=5, n_seeds=1, edge_of=edge)
    names = ["near_unit_mass mean", "d_model", "optimizer"]
    plain = wb.risk.fit(sweep, features=names, penalty=1.0, n_bootstrap=0)
    rich = wb.risk.fit(sweep, features=names, penalty=1.0, n_bootstrap=0, squares=["d_model"],
                       interactions=[("near_unit_mass mean", "optimizer SGD")])  # fmt: skip
    errors = [np.sqrt(np.mean((np.log10(m._extrapolated_rates(sweep).edge) - truth.log_edge) ** 2))
              for m in (plain, rich)]  # fmt: skip
    assert errors[1] < 0.5 * errors[0]
    drivers = rich.drivers(sweep.isel(run=[0]))
    assert "near_unit_mass mean x optimizer SGD" in drivers["feature"].values
    assert "d_model squared" not in drivers["feature"].values  # it belongs to d_model
    assert "d_model squared" in rich.coefficients()["feature"].values


def test_the_two_step_form_finds_the_planted_edge(planted, unseen):
    model = wb.risk.fit(planted[0], features=PLANTED, method="edge", penalty=1.0, n_bootstrap=3)
    edges = model._extrapolated_rates(unseen[0])["edge"]
    error = float(np.sqrt(np.mean((np.log10(edges) - unseen[1].log_edge) ** 2)))
    assert error < 0.4 * float(unseen[1].log_edge.std())  # of edges that one run a rate shows to a tenth of a decade
    assert model.weights.shape == (4, 2 + len(model.feature_map.columns))


def test_the_same_seed_gives_the_same_model_and_leaves_global_randomness_alone(planted):
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    options = {"features": ["near_unit_mass mean", "d_model", "optimizer"], "n_bootstrap": 3}
    one, two, other = (wb.risk.fit(planted[0], seed=seed, **options) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.weights, two.weights)
    assert (one.weights[1:] != other.weights[1:]).any()
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002


def test_without_a_bootstrap_there_is_no_interval(planted):
    model = wb.risk.fit(planted[0], features=["d_model"], penalty=1.0, n_bootstrap=0)
    found = model.predict(planted[0].isel(run=[0]))
    assert np.isnan([found.low.item(), found.high.item()]).all()
    assert not np.isnan(found.probability.item())


def test_runs_longer_than_any_seen_are_told_what_the_risk_is_of(model, planted):
    found = model.predict(at(planted[0].isel(run=[0]), n_steps=100_000))
    assert found.attrs["note"].endswith(
        "ended after 200 updates, so the risk is that of divergence within the first 200."
    )


def test_one_case_needs_no_dimension(model, planted):
    one = planted[0].isel(run=3)
    found, as_row = model.predict(one), model.predict(planted[0].isel(run=[3]))
    np.testing.assert_array_equal(found.probability, as_row.probability)
    assert found.sizes["run"] == 1


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda s: wb.risk.fit(s, method="forest"), OptionError, "method is 'forest', expected logistic or edge."),
        (lambda s: wb.risk.fit(s, penalty=0), OptionError, "penalty is 0, expected a positive number."),
        (lambda s: wb.risk.fit(s, n_bootstrap=-1), OptionError, "n_bootstrap is -1, expected at least 0."),
        (lambda s: wb.risk.fit(s, n_folds=1), OptionError, "n_folds is 1, expected at least 2."),
        (lambda s: wb.risk.fit(s, level=0), OptionError, "level is 0, expected a share between 0 and 1."),
        (
            lambda s: wb.risk.fit(s, features="all"),
            OptionError,
            "features is 'all', expected forward, gradient, pilot, or a list",
        ),
        (lambda s: wb.risk.fit(s.drop_vars("cell")), SchemaError, "The sweep has no cell; take one from wb.open_sweep"),
        (lambda s: wb.risk.fit(s, by="colour"), SchemaError, "The sweep has no colour"),
        (
            lambda s: wb.risk.fit(s.isel(run=s.has_diverged.values)),
            SchemaError,
            r"All \d+ runs of the sweep ended alike; add rates at which they do not.",
        ),
        (
            lambda s: wb.risk.fit(s.isel(run=slice(42))),
            SchemaError,
            "The sweep has 3 different values of configuration, expected at least 4 to learn from.",
        ),
        (
            lambda s: wb.risk.fit(s.assign_coords(learning_rate=1 / s.learning_rate), n_bootstrap=0, penalty=1.0),
            SchemaError,
            "larger learning rates do not diverge more often",
        ),
    ],
)
def test_what_cannot_be_learnt_from_is_refused_in_one_sentence(planted, call, error, sentence):
    with pytest.raises(error, match=sentence):
        call(planted[0])


def test_impossible_questions_are_refused_in_one_sentence(model, planted):
    case = planted[0].isel(run=[0])
    with pytest.raises(OptionError, match="below is 1, expected a probability between 0 and 1."):
        model.largest_stable_rate(case, below=1)
    for ask in (model.predict, model.largest_stable_rate, model.drivers):
        with pytest.raises(OptionError, match="^The learning rate is -1, expected a positive number.$"):
            ask(at(case, learning_rate=-1.0).drop_vars("optimizer"))
    rates = model.largest_stable_rate(case, below=1e-12)
    assert np.isnan(rates.largest_stable_rate.item())
    assert rates.attrs["warning"] == "No run was seen where the risk is 1e-12; no rate is given."


def test_a_file_gives_the_same_model_back(model, planted, tmp_path):
    full = model.with_validation({"configuration": {"all": {"n_runs": 3}}, "share": np.float64(0.5), "none": np.nan})
    path = full.save(tmp_path / "risk.json")
    found = wb.risk.load(path)
    assert path.stat().st_size < 100_000
    cases = at(planted[0], clip_norm=np.where(np.arange(planted[0].sizes["run"]) % 9, np.nan, 1.0))
    assert found.predict(cases).identical(model.predict(cases))
    assert found._extrapolated(cases).identical(model._extrapolated(cases))
    assert found.largest_stable_rate(cases).identical(model.largest_stable_rate(cases))
    assert found.drivers(cases).identical(model.drivers(cases))
    assert found.coefficients().identical(model.coefficients())
    assert found.validation == {"configuration": {"all": {"n_runs": 3}}, "share": 0.5, "none": None}
    again = found.save(tmp_path / "again.json")
    assert again.read_bytes() == path.read_bytes()
    with pytest.raises(StoreError, match="exists already; pass overwrite=True"):
        model.save(path)
    model.save(path, overwrite=True)


def test_a_file_of_an_older_workbench_opens_and_says_nothing_of_sizes(blind, planted, tmp_path):
    path = blind.save(tmp_path / "risk.json")
    content = json.loads(path.read_text())
    assert content["schema_version"] == 2
    content["schema_version"] = 1
    del content["familiarity"]["sizes"]
    path.write_text(json.dumps(content))
    old, case = wb.risk.load(path), planted[0].isel(run=[0])
    assert old.predict(case).identical(blind.predict(case))
    assert old.predict(at(case, d_model=8192)).is_familiar.item()
    assert "does not say how large its models were" in old.card()
    assert "Its models had a width of 16 to 256 and a number of layers of 1 to 6." in blind.card()


def damaged(text, *keys, value):
    content = json.loads(text)
    part = content
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: "not JSON", "is no risk model"),
        (lambda text: "[1, 2]", "is JSON but no risk model; pass a file from RiskModel.save()"),
        (lambda text: '{"kind": "something else"}', "is JSON but no risk model"),
        (lambda text: text[: len(text) // 2], "is no risk model"),
        (
            lambda text: damaged(text, "schema_version", value=99),
            "follows version 99 of risk models, this workbench reads",
        ),
        (
            lambda text: damaged(text, "weights", value=[[1.0, 2.0]]),
            "the weights do not fit the columns; write it again",
        ),
        (
            lambda text: damaged(text, "design", "features", 0, value="colour"),
            "knows a feature 'colour' that there is not",
        ),
        (lambda text: damaged(text, "design", "lowest", value=[0.0]), "the ranges do not fit the features"),
        (lambda text: damaged(text, "design", "center", 0, value=None), "some numbers are not finite"),
        (lambda text: damaged(text, "weights", 0, 0, value=-1.0), "a slope or scale is not positive"),
        (lambda text: damaged(text, "seen", value=[1.0]), "is a damaged risk model"),
        (lambda text: damaged(text, "about", value={}), "its options are gone"),
        (
            lambda text: damaged(text, "familiarity", "sizes", value={"d_model": [96.0, 24.0]}),
            "the range of a size is none",
        ),
        (lambda text: damaged(text, "familiarity", "sizes", value={"d_model": [24.0]}), "is a damaged risk model"),
        (lambda text: damaged(text, "design", value=3), "is a damaged risk model"),
    ],
)
def test_foreign_and_damaged_files_are_refused_in_one_sentence(model, tmp_path, change, sentence):
    path = model.save(tmp_path / "risk.json")
    path.write_text(change(path.read_text()))
    with pytest.raises(StoreError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        wb.risk.load(path)


def test_shipped_models_are_found_by_their_features(model, planted, tmp_path, monkeypatch):
    monkeypatch.setattr(model_file, "_SHIPPED", tmp_path)
    model.save(tmp_path / "risk_forward.json")
    case = planted[0].isel(run=[0])
    assert wb.risk.shipped().predict(case).identical(model.predict(case))
    with pytest.raises(StoreError, match="risk_gradient.json; install the workbench again, or fit a model"):
        wb.risk.shipped("gradient")
    with pytest.raises(OptionError, match="features is 'all', expected forward"):
        wb.risk.shipped("all")
    with pytest.raises(StoreError, match="is no risk model"):
        wb.risk.load(tmp_path / "nothing.json")
