import numpy as np
import pytest

from tests.about import about, says
from tests.risk.known_designs import known_designs
from workbench.errors import SchemaError
from workbench.risk.features import FEATURES, counts_as_diverged, feature_table


@pytest.fixture(scope="module")
def cases():
    return known_designs(n_families=4, n_of_family=3)[0]


def value(cases, name, **changes):
    case = cases.isel(run=[4]).assign({key: ("run", [new]) for key, new in changes.items()})
    return float(feature_table(case, [name]).values[0, 0])


def test_statistics_over_layers_ignore_padding(cases):
    table = feature_table(cases, list(FEATURES))
    assert table.dims == ("run", "feature")
    assert not table.isnull().any()
    for i, run in enumerate(cases.near_unit_mass.values):
        layers = run[~np.isnan(run)]
        found = [float(table[i].sel(feature=f"near_unit_mass {s}")) for s in ("mean", "max", "min", "std", "change")]
        np.testing.assert_allclose(
            found, [layers.mean(), layers.max(), layers.min(), layers.std(), layers[-1] - layers[0]]
        )
    log_rho = np.log10(cases.spectral_radius).mean("layer")
    np.testing.assert_allclose(table.sel(feature="spectral_radius mean"), log_rho)


def test_an_infinite_kreiss_constant_counts_as_its_bound(cases):
    table = feature_table(cases, ["kreiss_constant mean"])
    has_infinite = np.isinf(cases.kreiss_constant).any("layer").values
    assert 0 < has_infinite.sum() < len(has_infinite)
    np.testing.assert_allclose(table.values[:, 0], np.where(has_infinite, 3.0, np.log10(2.0)))


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("d_model", {"d_model": 100}, 2.0),
        ("n_steps", {"n_steps": 1000}, 3.0),
        ("warmup", {"warmup": 99}, 2.0),
        ("warmup", {"warmup": 0}, 0.0),
        ("warmup_share", {"warmup": 30, "n_steps": 200}, 0.15),
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
        ("unit_change_rate", {"unit_change_rate": 0.01}, -2.0),
        ("scale_response", {"scale_response": 1.0}, 1.0),
    ],
)
def test_settings_and_scalars(cases, name, changes, expected):
    assert value(cases, name, **changes) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda s: s.drop_vars("energy_gain"), "energy_gain"),
        (lambda s: s.drop_vars("learning_rate"), "learning_rate"),
        (lambda s: s.isel(run=[]), "run"),
        (lambda s: s.assign(logit_std=s.logit_std.where(s.logit_std != s.logit_std[2])), "logit_std"),
        (lambda s: s.isel(run=[0]).map(lambda v: v * np.nan if "layer" in v.dims else v), "spectra"),
    ],
)
def test_incomplete_cases_are_rejected(cases, change, name):
    with pytest.raises(SchemaError, check=about(name)):
        feature_table(change(cases), ["energy_gain mean", "logit_std"])


def test_values_may_be_missing_if_allowed(cases):
    incomplete = cases.assign(logit_std=cases.logit_std.where(cases.logit_std > 1))
    table = feature_table(incomplete, ["logit_std", "d_model"], allow_missing=True)
    np.testing.assert_array_equal(np.isnan(table.values[:, 0]), cases.logit_std.values <= 1)
    assert not np.isnan(table.values[:, 1]).any()
    # A missing variable is still an error.
    with pytest.raises(SchemaError, check=says("The cases lack logit_std; measure them with")):
        feature_table(cases.drop_vars("logit_std"), ["logit_std"], allow_missing=True)


def test_untrained_models_beyond_the_limits_count_as_diverged(cases):
    started = cases.isel(run=slice(4)).assign(
        initial_loss=("run", [51.0, 4.0, np.nan, 50.0]), initial_grad_norm=("run", [1.0, np.nan, np.inf, 500.0])
    )
    assert counts_as_diverged(started).tolist() == [True, False, True, False]
    assert not counts_as_diverged(started.drop_vars(["initial_loss", "initial_grad_norm"])).any()
