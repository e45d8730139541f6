import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.risk.made_sweep import PLANTED, made_sweep
from workbench.errors import OptionError, SchemaError
from workbench.risk.feature_map import FeatureMap, read
from workbench.risk.features import FEATURE_SETS, FEATURES, OPTIMIZER, counts_as_diverged, features_of

NUMERIC = [name for name in FEATURES if name != OPTIMIZER]


@pytest.fixture(scope="module")
def sweep():
    return made_sweep(n_configurations=6, n_cells=2, n_rates=3, n_seeds=1)[0]


def value(sweep, name, **changes):
    case = sweep.isel(run=[4]).assign({key: ("run", [new]) for key, new in changes.items()})
    return float(wb.risk.feature_table(case, [name]).values[0, 0])


def test_statistics_over_layers_are_those_of_the_layers_that_are_there(sweep):
    table = wb.risk.feature_table(sweep, NUMERIC)
    assert table.dims == ("run", "feature")
    assert not table.isnull().any()
    for i, run in enumerate(sweep.near_unit_mass.values):
        layers = run[~np.isnan(run)]
        found = [float(table[i].sel(feature=f"near_unit_mass {s}")) for s in ("mean", "max", "min", "std", "change")]
        np.testing.assert_allclose(
            found, [layers.mean(), layers.max(), layers.min(), layers.std(), layers[-1] - layers[0]]
        )
    log_rho = np.log10(sweep.spectral_radius).mean("layer")
    np.testing.assert_allclose(table.sel(feature="spectral_radius mean"), log_rho)


def test_an_infinite_kreiss_constant_counts_as_its_bound(sweep):
    table = wb.risk.feature_table(sweep, ["kreiss_constant mean"])
    has_infinite = np.isinf(sweep.kreiss_constant).any("layer").values
    np.testing.assert_allclose(table.values[:, 0], np.where(has_infinite, 3.0, np.log10(2.0)))


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("d_model", {"d_model": 100}, 2.0),
        ("warmup", {"warmup": 99}, 2.0),
        ("warmup", {"warmup": 0}, 0.0),
        ("warmup_share", {"warmup": 30}, 0.15),
        ("weight_decay", {"weight_decay": 0.0}, -2.0),
        ("weight_decay", {"weight_decay": 0.09}, -1.0),
        ("momentum_gain", {"momentum": 0.9, "optimizer": "SGD"}, 1.0),
        ("momentum_gain", {"momentum": 0.9, "optimizer": "rmsprop"}, 1.0),
        ("momentum_gain", {"momentum": 0.9, "optimizer": "AdamW"}, 0.0),
        ("momentum", {"momentum": np.nan}, 0.0),
        ("is_clipped", {"clip_norm": np.nan}, 0.0),
        ("is_clipped", {"clip_norm": 0.1}, 1.0),
        ("clip_norm", {"clip_norm": np.nan}, 0.0),
        ("clip_norm", {"clip_norm": 0.1}, -1.0),
        ("stream_growth", {"stream_rms_first": 0.1, "stream_rms_last": 10.0}, 2.0),
        ("overshoot_rate", {"overshoot_rate": np.inf}, np.inf),
        ("logit_std", {"logit_std": 0.0}, -6.0),
        ("initial_grad_norm", {"initial_grad_norm": 1000.0}, 3.0),
    ],
)
def test_settings_and_scalars(sweep, name, changes, expected):
    found = value(sweep, name, **changes)
    assert found == pytest.approx(expected)
    if FEATURES[name].is_log and name in changes and np.isfinite(changes[name]) and changes[name] > 0:
        assert FEATURES[name].original(found) == pytest.approx(changes[name])


def test_no_feature_knows_the_name_of_an_architecture():
    names = {"architecture", "family", "norm", "initialization", "init_std", "task", "study", "configuration", "cell"}
    assert not names & {need for feature in FEATURES.values() for need in feature.needs}


def test_no_feature_of_a_set_looks_at_what_training_shows(sweep):
    outcomes = ["grad_norm_step_100", "grad_norm_variance", "n_loss_spikes", "has_diverged", "cause", "final_loss",
                "divergence_step", "accuracy"]  # fmt: skip
    case = sweep.isel(run=[0]).drop_vars(outcomes)
    for names in FEATURE_SETS.values():
        assert wb.risk.is_complete(case, names).all()
    gradient = {"initial_grad_norm", "overshoot_rate", "breaking_rate"}
    assert not gradient & {need for name in FEATURE_SETS["forward"] for need in FEATURES[name].needs}
    assert set(FEATURE_SETS["gradient"]) - set(FEATURE_SETS["forward"]) == gradient


@pytest.mark.parametrize(("rate", "said"), [(0.0, "0"), (-1e-3, "-0.001"), (np.nan, "nan"), (np.inf, "inf")])
def test_an_impossible_learning_rate_is_refused_before_anything_else(rate, said):
    nothing_else = xr.Dataset(coords={"learning_rate": ("run", [0.1, rate])})
    with pytest.raises(OptionError, match=f"^The learning rate is {said}, expected a positive number.$"):
        wb.risk.feature_table(nothing_else, ["d_model"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: s.drop_vars("energy_gain"), "The cases lack energy_gain; measure them as a sweep does"),
        (lambda s: s.drop_vars("optimizer"), "The cases lack momentum|The cases lack optimizer"),
        (lambda s: s.drop_vars("learning_rate"), "The cases have no learning_rate"),
        (lambda s: s.isel(run=[]), "There is no case; select less narrowly."),
        (
            lambda s: s.assign(logit_std=s.logit_std.where(s.logit_std != s.logit_std[2])),
            r"1 of \d+ cases has no logit_std \(NaN\), which is made from logit_std; leave such cases out.",
        ),
        (
            lambda s: s.isel(run=[0]).map(lambda v: v * np.nan if "layer" in v.dims else v),
            r"^The case has no spectra \(every layer is NaN\); measure the fresh model before asking for its risk.$",
        ),
    ],
)
def test_cases_that_lack_something_are_refused_by_name(sweep, change, sentence):
    with pytest.raises(SchemaError, match=sentence):
        read(change(sweep), PLANTED)


def test_complete_cases_are_found(sweep):
    holes = sweep.assign(logit_std=sweep.logit_std.where(sweep.logit_std > 1))
    found = wb.risk.is_complete(holes, PLANTED)
    np.testing.assert_array_equal(found, sweep.logit_std > 1)
    wb.risk.feature_table(holes.isel(run=found.values), ["logit_std"])


def test_names_of_features_are_checked():
    with pytest.raises(
        OptionError, match="features is 'backward', expected forward, gradient, pilot, or a list of names"
    ):
        features_of("backward")
    with pytest.raises(OptionError, match="'colour' is no feature; choose from wb.risk.FEATURES"):
        features_of(["colour"])
    with pytest.raises(OptionError, match="The feature 'd_model' is named twice"):
        features_of(["d_model", "d_model"])


def test_models_that_start_beyond_the_limits_are_known(sweep):
    started = sweep.isel(run=slice(3)).assign(
        initial_loss=("run", [51.0, 4.0, np.nan]), initial_grad_norm=("run", [1.0, np.nan, np.inf])
    )
    assert counts_as_diverged(started).tolist() == [True, False, True]


def test_columns_have_mean_0_and_deviation_1_over_the_training_runs(sweep):
    names = ("near_unit_mass mean", "d_model", "n_steps", OPTIMIZER)
    design = FeatureMap.of(sweep, names, squares=["d_model"], interactions=[("d_model", "optimizer SGD")])
    assert design.columns == (
        "near_unit_mass mean", "d_model", "n_steps", "optimizer AdamW", "optimizer SGD", "d_model squared",
        "d_model x optimizer SGD",
    )  # fmt: skip
    columns = design.matrix(design.read(sweep))
    np.testing.assert_allclose(columns.mean(axis=0), 0, atol=1e-6)
    deviation = columns.std(axis=0)
    np.testing.assert_allclose(deviation[[0, 1, 3, 4, 5, 6]], 1, atol=1e-6)
    assert deviation[2] == 0  # every run has as many steps
    z = columns[:, 1]
    squared = (z**2 - np.mean(z**2)) / np.std(z**2)
    np.testing.assert_allclose(columns[:, 5], squared, atol=1e-6)
    assert design.sources[5] == "d_model"
    with pytest.raises(OptionError, match="There is no column 'warmup' to square or multiply"):
        FeatureMap.of(sweep, names, squares=["warmup"])


def test_infinite_rates_count_as_the_largest_one_tried(sweep):
    rates = np.where(np.arange(sweep.sizes["run"]) % 2, np.inf, 0.5 + np.arange(sweep.sizes["run"]))
    sweep = sweep.assign(breaking_rate=("run", rates))
    design = FeatureMap.of(sweep, ["breaking_rate"])
    columns = design.matrix(design.read(sweep))[:, 0]
    largest = columns[np.argmax(np.where(np.isinf(rates), -1, rates))]
    np.testing.assert_allclose(columns[np.isinf(rates)], largest)
    with pytest.raises(OptionError, match="'breaking_rate' is infinite in every run; fit a model without it."):
        FeatureMap.of(sweep.isel(run=[1, 3]), ["breaking_rate"])


@settings(max_examples=25, deadline=None)
@given(share=st.floats(-1, 2))
def test_excess_is_1_an_eighth_of_the_range_beyond_it(share):
    sweep = made_sweep(n_configurations=4, n_cells=1, n_rates=1, n_seeds=1)[0]
    sweep = sweep.assign_coords(n_tokens=("run", [100, 1000, 10, 10]))
    design = FeatureMap.of(sweep, ["n_tokens", "n_steps"])
    case = sweep.isel(run=[0]).assign_coords(n_tokens=("run", [10 ** (1 + 2 * share)]))
    excess = design.excess(design.read(case))[0]
    assert excess[0] == pytest.approx(abs(share - 0.5) / 0.625, abs=1e-6)
    assert (excess[0] > 1) == (not -0.125 <= share <= 1.125)
    assert excess[1] == 0
    other = case.assign_coords(n_steps=("run", [201]))
    assert design.excess(design.read(other))[0, 1] == np.inf  # it never varied


def test_optimizers_are_known_in_any_spelling_of_case(sweep):
    design = FeatureMap.of(sweep, [OPTIMIZER])
    adam = sweep.isel(run=np.flatnonzero(sweep.optimizer.values == "AdamW")[:1])
    for name in ("AdamW", "adamw"):
        known = design.read(adam.assign_coords(optimizer=("run", [name])))
        np.testing.assert_array_equal(design.matrix(known), design.matrix(design.read(adam)))
        assert design.excess(known)[0, 0] == 0
    known = design.read(adam.assign_coords(optimizer=("run", ["Lion"])))
    np.testing.assert_allclose(design.matrix(known), 0, atol=1e-6)  # the mean of those seen
    assert design.excess(known)[0, 0] == np.inf
