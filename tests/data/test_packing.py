"""Runs packed into one dataset: rounding, and the diagnosis of what is read back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.data_scripts import load_script
from workbench.course import case_files
from workbench.course.case_files import VARIABLES
from workbench.koopman.measures import MASSES
from workbench.schema.runs import SCHEMA_VERSION

packing = load_script("packing")
NAMES = ("architecture", "healthy", "hyperparameter", "precision")


@given(
    st.lists(st.floats(width=32, allow_subnormal=False), min_size=1, max_size=20),
    st.integers(min_value=4, max_value=20),
)
def test_rounding_keeps_the_stated_bits(values, n_bits):
    exact = np.array(values, dtype=np.float32)
    near = packing.rounded_bits(exact, n_bits)
    finite = np.isfinite(exact) & np.isfinite(near)
    assert np.array_equal(np.isnan(near), np.isnan(exact))
    assert np.array_equal(near[np.isinf(exact)], exact[np.isinf(exact)])
    error = np.abs(near[finite].astype(np.float64) - exact[finite].astype(np.float64))
    assert (error <= 2.0 ** -(n_bits + 1) * np.abs(exact[finite].astype(np.float64))).all()
    lost = near[finite].view(np.uint32) & ((1 << (23 - n_bits)) - 1)
    kept_exact = near[finite] == exact[finite]
    assert ((lost == 0) | kept_exact).all()
    assert np.array_equal(packing.rounded_bits(near, n_bits), near, equal_nan=True)


@pytest.fixture(scope="module")
def runs():
    return {name: wb.open_run(wb.samples.failed_run(name)).load() for name in NAMES}


@pytest.fixture(scope="module")
def packed(runs, tmp_path_factory):
    import xarray as xr

    place = tmp_path_factory.mktemp("packed") / "packed.nc"
    table = packing.pack(list(runs.values()))
    table.to_netcdf(place, engine="netcdf4", encoding=packing.encoding(table))
    with xr.open_dataset(place, engine="netcdf4") as data:
        return data.load()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_back_is_within_the_stated_bits(runs, packed, name):
    one, run = packed.isel(patient=NAMES.index(name)), runs[name]
    for part in VARIABLES:
        back = case_files.unpack(one, part)
        if part not in run.children:
            assert not back.data_vars
            continue
        exact = run[part].to_dataset()
        assert back["step"].values.tolist() == exact["step"].values.tolist()
        if part == "spectra":
            wb.schema.runs.validate_spectra(back)
            for mass in MASSES:
                np.testing.assert_allclose(back[mass].values, exact[mass].values, atol=1e-12)
        for variable in back.data_vars:
            if exact[variable].isnull().all():
                continue
            expected = exact[variable].sel(term=back["term"]) if "term" in back[variable].dims else exact[variable]
            expected = expected.transpose(*back[variable].dims).values
            assert back[variable].shape == expected.shape
            n_bits = packing.BITS.get(str(variable), packing.DEFAULT_BITS)
            tolerance = {"rtol": 2.0 ** -(n_bits + 1) * 1.01, "atol": 1e-30, "equal_nan": True}
            for kind in (np.real, np.imag):
                finite = np.abs(kind(expected)) < 1e38
                assert np.allclose(kind(back[variable].values)[finite], kind(expected)[finite], **tolerance), variable


@pytest.mark.parametrize("name", NAMES)
def test_the_diagnosis_is_the_same_as_of_the_exact_values_of_these_parts(runs, packed, name):
    import xarray as xr

    one, run = packed.isel(patient=NAMES.index(name)), runs[name]
    parts = {part: case_files.unpack(one, part) for part in VARIABLES}
    tree = xr.DataTree.from_dict({f"/{part}": data for part, data in parts.items() if data.data_vars})
    tree["events"] = xr.DataTree(case_files.events_of(parts["monitors"]))
    tree.attrs = {"schema_version": SCHEMA_VERSION, "configuration": run.attrs["configuration"]}
    exact = tree.copy()
    for part in parts.keys() & run.children.keys():
        exact[part] = xr.DataTree(run[part].to_dataset(inherit=False))
    found, expected = (wb.diagnose(each)["causes"].to_dataset().set_index(cause="cause") for each in (tree, exact))
    assert found["cause"].values[0] == expected["cause"].values[0]
    difference = found["probability"] - expected["probability"].sel(cause=found["cause"])
    assert float(np.abs(difference).max()) < 0.02
