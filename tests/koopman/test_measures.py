import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import workbench as wb
from tests.about import about, says
from tests.koopman.snapshots import snapshots
from tests.oracle import masses
from workbench.errors import OptionError, SchemaError
from workbench.koopman import mass_fractions, near_unit_mass, whitened_dmd
from workbench.koopman.measures import MASSES, Thresholds, depth_thirds, remeasure, summarize
from workbench.schema.runs import validate_spectra


@given(arrays(float, st.integers(1, 30), elements=st.floats(0, 3)))
def test_masses_agree_with_counting_and_sum_to_one(modulus):
    found = mass_fractions(modulus)
    assert {name: float(value) for name, value in found.items()} == pytest.approx(masses(modulus))
    assert sum(found.values()) == pytest.approx(1.0)


def test_bounds_are_inclusive_as_in_the_paper():
    found = mass_fractions(np.array([0.80, 0.90, 1.05, np.nextafter(1.05, 2), np.nextafter(0.80, 0), np.nan]))
    assert found["intermediate_mass"] == 1 / 5
    assert found["near_unit_mass"] == 2 / 5
    assert found["expansive_mass"] == 1 / 5
    assert found["contractive_mass"] == 1 / 5


def test_near_unit_mass_takes_other_bounds():
    modulus = np.array([0.5, 0.95, 1.0, 1.2])
    assert near_unit_mass(modulus) == 0.5
    assert near_unit_mass(modulus, lower=0.4, upper=1.3) == 1.0
    with pytest.raises(OptionError, check=about("near_unit_lower", 1.2)):
        near_unit_mass(modulus, lower=1.2, upper=1.1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("near_unit_lower", 1.1),
        ("contractive_upper", 0.95),
        ("reliable_residual", -0.1),
        ("near_unit_upper", float("inf")),
    ],
)
def test_contradicting_thresholds_are_rejected(name, value):
    with pytest.raises(OptionError, check=about(name, value)):
        Thresholds(**{name: value})


def test_remeasure_agrees_with_a_new_analysis():
    X, Y = snapshots(16, 200, 1, "linear")
    other = Thresholds(near_unit_lower=0.4, near_unit_upper=0.7, contractive_upper=0.3, reliable_residual=0.5)
    expected = whitened_dmd(X, Y, thresholds=other)
    spectra = whitened_dmd(X, Y)
    found = remeasure(spectra, near_unit_lower=0.4, near_unit_upper=0.7, contractive_upper=0.3, reliable_residual=0.5)
    expected.attrs["created"] = found.attrs["created"]
    assert validate_spectra(found).identical(expected)
    assert spectra.attrs["near_unit_lower"] == 0.9


def test_remeasure_can_count_reliable_modes_only():
    X, Y = snapshots(16, 200, 1, "linear")
    spectra = whitened_dmd(X, Y)
    border = float(spectra.residual.median())
    found = remeasure(spectra, reliable_residual=border, reliable_only=True).isel(layer=0)
    kept = np.abs(found.eigenvalue.values[found.is_reliable.values])
    assert 0 < len(kept) < 16
    assert {name: float(found[name]) for name in MASSES} == pytest.approx(masses(kept))
    none = remeasure(spectra, reliable_residual=0.0, reliable_only=True)
    assert np.isnan(none.near_unit_mass).all()


def test_summary_is_over_layers():
    parts = [whitened_dmd(*snapshots(8, 100, 0, "residual", seed=s)) for s in range(3)]
    spectra = xr.concat(parts, "layer", combine_attrs="override").assign_coords(layer=range(3))
    found = summarize(spectra)
    rho = spectra.spectral_radius.values
    expected = [rho.mean(), rho.max(), rho.min(), rho.std()]
    np.testing.assert_allclose(found.spectral_radius, expected)
    assert list(found.statistic.values) == ["mean", "max", "min", "std"]
    assert "eigenvalue" not in found
    assert float(found.is_informative.sel(statistic="mean")) == 1.0


@pytest.mark.parametrize("measure", [wb.summarize, wb.depth_thirds, wb.remeasure])
@pytest.mark.parametrize(
    ("spectra", "error", "words"),
    [
        (xr.DataTree(), OptionError, r'got .*; pass a part, such as run\["spectra"\]'),
        ("run.zarr", OptionError, r"must be an xarray Dataset, got 'run.zarr'\.$"),
        (xr.Dataset({"loss": ("step", [1.0])}), SchemaError, "no dimension 'layer'"),
    ],
)
def test_other_data_than_spectra_are_rejected(measure, spectra, error, words):
    with pytest.raises(error, match=words):
        measure(spectra)


def test_thirds_need_three_layers():
    with pytest.raises(OptionError, check=says("layers to be divided into thirds, got")):
        depth_thirds(whitened_dmd(*snapshots(8, 100)))
