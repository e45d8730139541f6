import numpy as np
import pytest

from tests.koopman.snapshots import snapshots
from workbench.errors import SchemaError
from workbench.koopman import whitened_dmd
from workbench.schema.runs import SCHEMA_VERSION, validate_spectra


@pytest.fixture
def spectra():
    return whitened_dmd(*snapshots(6, 80))


def without_attr(ds, name):
    ds = ds.copy()
    del ds.attrs[name]
    return ds


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda ds: ds.drop_vars("residual"), "lacks residual; make one with wb.profile"),
        (lambda ds: ds.assign(eigenvalue=ds.eigenvalue.T), r"'eigenvalue' has dims \('mode', 'layer'\)"),
        (lambda ds: ds.assign(eigenvalue=np.abs(ds.eigenvalue)), "dtype float64, expected kind 'c'"),
        (lambda ds: ds.assign(near_unit_mass=ds.near_unit_mass + 0.5), "do not add up to 1"),
        (lambda ds: ds.drop_vars("layer_name"), "no coordinate 'layer_name'"),
        (lambda ds: without_attr(ds, "ridge"), "no attribute 'ridge'"),
        (lambda ds: ds.assign_attrs(n_snapshots="many"), "Attribute 'n_snapshots' is of type str, expected an integer"),
        (lambda ds: ds.assign_attrs(schema_version=SCHEMA_VERSION + 1), "update the workbench"),
    ],
)
def test_what_does_not_follow_the_schema_is_refused(spectra, spoil, message):
    assert validate_spectra(spectra) is spectra
    with pytest.raises(SchemaError, match=message):
        validate_spectra(spoil(spectra))


def test_spectra_of_several_steps_are_spectra(spectra):
    import xarray as xr

    many = xr.concat([spectra, spectra], "step", combine_attrs="override", data_vars="all")
    assert validate_spectra(many) is many
