"""Published figures, spot-checked against the papers' tables, and their form."""

import numpy as np
import pytest

import workbench as wb
from workbench.schema import SPECTRA


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
