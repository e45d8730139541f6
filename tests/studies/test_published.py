"""Published figures, spot-checked against the papers' tables, and their form."""

import numpy as np
import pytest

import workbench as wb
from tests.about import about
from workbench.errors import OptionError
from workbench.schema.runs import SPECTRA


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        (
            "Pre-LN",
            {"near_unit_mass": 0.16, "expansive_mass": 0.54, "spectral_radius": 2.29, "nonlinearity_ratio": 0.52},
        ),
        ("Post-LN", {"near_unit_mass": 0.66, "expansive_mass": 0.31, "spectral_radius": 7.48, "divergence_rate": 0.0}),
        (
            "No-Norm",
            {"near_unit_mass": 0.79, "expansive_mass": 0.19, "spectral_radius": 1.11, "divergence_rate": 0.964},
        ),
        ("MoE top-1", {"near_unit_mass": 0.72, "spectral_radius": 2.85, "divergence_rate": 0.25}),
        ("MoE top-4", {"near_unit_mass": 0.45, "divergence_rate": 1 / 24}),
        ("Mamba", {"near_unit_mass": 0.12, "contractive_mass": 0.85, "spectral_radius": 0.95}),
        ("KAN", {"near_unit_mass": 0.52, "nonlinearity_ratio": 0.78}),
        ("KAN B=8", {"reliable_fraction": 0.52}),
        ("ViT RMSNorm", {"near_unit_mass": 0.48}),
    ],
)
def test_architectures(name, figures):
    row = wb.published.architectures().sel(architecture=name)
    assert {measure: float(row[measure]) for measure in figures} == pytest.approx(figures)


def test_what_is_not_published_is_nan_and_the_rest_is_possible():
    table = wb.published.architectures()
    assert np.isnan(table.nonlinearity_ratio.sel(architecture="Post-LN"))
    assert np.isnan(table.spectral_radius.sel(architecture=["KAN B=4", "ViT Pre-LN"])).all()
    assert len(set(table.architecture.values)) == table.sizes["architecture"] == 15
    for name, values in table.data_vars.items():
        assert not np.isnan(values).all(), name
        assert (values.fillna(0) >= 0).all()
        assert values.attrs["long_name"]
        if name != "spectral_radius":
            assert (values.fillna(0) <= 1).all()
    mass = table.near_unit_mass + table.expansive_mass.fillna(0) + table.contractive_mass.fillna(0)
    assert (mass.fillna(0) <= 1).all()


def test_the_norms_are_those_of_table_1():
    table, norms = wb.published.architectures(), wb.published.normalization_table()
    first_six = table.isel(architecture=slice(6))
    np.testing.assert_array_equal(first_six.expansive_mass, norms.expansive_mass)
    np.testing.assert_allclose(first_six.near_unit_mass, norms.near_unit_mass, atol=0.011)  # .79 and .80 for No-Norm


def test_depth_thirds_have_the_names_of_our_spectra():
    thirds = wb.published.depth_thirds()
    assert set(thirds.data_vars) <= set(SPECTRA)
    assert float(thirds.eigenvector_condition.sel(model="GPT-2 355M", third="late")) == 10.8
    assert np.isnan(thirds.spectral_radius.sel(model="LLaMA-2 7B")).all()


@pytest.mark.parametrize(
    ("control", "percent"),
    [
        ("none", {"divergence_rate": 66.7, "accuracy": 28.5, "near_unit_mass": 85.0}),
        ("clip 1.0", {"divergence_rate": 58.3, "accuracy": 30.8, "near_unit_mass": 83.0}),
        ("KSS .15, published", {"divergence_rate": 12.5, "accuracy": 48.2, "near_unit_mass": 58.0, "overhead": 10.8}),
        ("KSS .15, near-unit term only", {"divergence_rate": 41.7, "accuracy": 36.2, "near_unit_mass": 72.0}),
        ("random l2", {"divergence_rate": 54.2, "accuracy": 31.2, "near_unit_mass": 81.0}),
        ("weight norm", {"divergence_rate": 54.2, "accuracy": 32.8, "overhead": 3.8}),
        ("SAM 0.10", {"divergence_rate": 33.3, "accuracy": 40.2, "overhead": 100.0}),
        ("LAMB + KSS .15, published", {"divergence_rate": 8.3, "accuracy": 52.8}),
    ],
)
def test_shaping_table(control, percent):
    row = 100 * wb.published.shaping_table().sel(control=control)
    assert {name: float(row[name]) for name in percent} == pytest.approx(percent, abs=0.05)


def test_controls_of_the_paper_are_controls_of_ours():
    table = wb.published.shaping_table()
    names = list(table["control"].values)
    assert len(names) == len(set(names)) == 22
    assert {name for name in names if "KSS" not in name} == set(wb.baselines.controls())
    assert np.isnan(table.near_unit_mass.sel(control=["Lion", "spectral norm"])).all()
    assert np.isnan(table.overhead.sel(control=["none", "clip 0.5"])).all()
    for name, values in table.data_vars.items():
        assert ((values.fillna(0) >= 0) & (values.fillna(0) <= 1)).all()
        assert values.attrs["long_name"], name
    counts = table.divergence_rate * table.attrs["n_runs"]
    np.testing.assert_allclose(counts, counts.round())


def test_largest_stable_rates():
    rates = wb.published.largest_stable_rates()
    assert rates.sel(norm="none").values.tolist() == [0.002, 0.005]
    assert rates.sel(norm="pre_ln", control="KSS .15, published") == 0.008
    assert (rates.sel(control="KSS .15, published") > rates.sel(control="none")).all()


def test_predictor_table():
    table = wb.published.predictor_table()
    assert table.sizes["predictor"] == 8
    mass = table.sel(predictor="M")
    assert [float(mass[name]) for name in ("auroc", "low", "high")] == [0.995, 0.986, 1.0]
    others = table.drop_sel(predictor="M")
    assert np.isnan(others.low).all()
    assert np.isnan(others.high).all()
    found = {name: float(table.auroc.sel(predictor=name)) for name in ("rho", "initial grad norm", "loss spikes")}
    assert found == {"rho": 0.845, "initial grad norm": 0.621, "loss spikes": 0.758}
    assert table.auroc.values.argsort()[::-1].tolist() == [0, 1, 2, 7, 6, 3, 5, 4]  # as the paper ranks them
    assert table.attrs["ece_of_mass"] == 0.283


def test_decision_chart_has_numbers_for_the_mass_and_none_for_kappa():
    chart = wb.published.decision_chart()
    assert chart.near_unit_mass.values.tolist() == [0.3, 0.5]
    assert chart["zone"].values.tolist() == ["proceed", "high risk"]
    assert np.isnan(chart.eigenvector_condition).all()
    assert "none for the eigenvector condition" in chart.attrs["note"]
    with_numbers = wb.published.decision_chart(modest_condition=10, large_condition=100)
    assert with_numbers.eigenvector_condition.values.tolist() == [10, 100]


@pytest.mark.parametrize(
    ("mass", "condition", "by_mass_alone", "by_both"),
    [
        (0.1, 5, "proceed", "proceed"),
        (0.1, 50, "proceed", "caution"),
        (0.1, 500, "proceed", "high risk"),
        (0.1, np.inf, "proceed", "high risk"),
        (0.4, 5, "caution", "caution"),
        (0.8, 5, "high risk", "high risk"),
        (0.3, 5, "caution", "caution"),  # the borders belong to neither side
        (0.5, 5, "caution", "caution"),
        (0.1, 10, "proceed", "caution"),
        (0.1, 100, "proceed", "caution"),
        (np.nan, 5, "", ""),
        (0.1, np.nan, "proceed", ""),
        (0.8, np.nan, "high risk", "high risk"),
        (np.nan, 500, "", "high risk"),
    ],
)
def test_decision_zones(mass, condition, by_mass_alone, by_both):
    chart = wb.published.decision_chart(modest_condition=10, large_condition=100)
    assert wb.published.decision_zones(mass, condition) == by_mass_alone
    assert wb.published.decision_zones([mass] * 2, condition, chart=chart).tolist() == [by_both] * 2


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"modest_condition": 0.5}, "modest_condition", 0.5),
        ({"large_condition": np.inf}, "large_condition", np.inf),
        ({"modest_condition": 9, "large_condition": 3}, "modest_condition", 9),
    ],
)
def test_impossible_limits_of_kappa_are_rejected(options, name, value):
    with pytest.raises(OptionError, check=about(name, value)):
        wb.published.decision_chart(**options)
