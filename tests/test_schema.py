import numpy as np
import pytest
import xarray as xr

from tests.about import says
from tests.koopman.snapshots import snapshots
from workbench.errors import SchemaError
from workbench.koopman import whitened_dmd
from workbench.schema.runs import (
    SCHEMA_VERSION,
    validate_events,
    validate_monitors,
    validate_part,
    validate_spectra,
    validate_weights,
)


@pytest.fixture
def spectra():
    return whitened_dmd(*snapshots(6, 80))


def without_attr(ds, name):
    ds = ds.copy()
    del ds.attrs[name]
    return ds


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda ds: ds.drop_vars("residual"), says("The spectra lack residual;")),
        (lambda ds: ds.assign(eigenvalue=ds.eigenvalue.T), says(")); transpose it.")),
        (lambda ds: ds.assign(eigenvalue=np.abs(ds.eigenvalue)), says("use astype().")),
        (
            lambda ds: ds.assign(near_unit_mass=ds.near_unit_mass + 0.5),
            says("The four masses of a layer do not sum to"),
        ),
        (lambda ds: ds.drop_vars("layer_name"), says("The spectra have no coordinate")),
        (lambda ds: without_attr(ds, "ridge"), says("keep the attributes that wb.profile() wrote.")),
        (
            lambda ds: ds.assign_attrs(n_snapshots="many"),
            says("is of type str, expected an integer; keep that of"),
        ),
        (
            lambda ds: ds.assign_attrs(schema_version=SCHEMA_VERSION + 1),
            says("this workbench"),
        ),
    ],
)
def test_spectra_that_do_not_follow_the_schema_are_rejected(spectra, change, error):
    assert validate_spectra(spectra) is spectra
    with pytest.raises(SchemaError, check=error):
        validate_spectra(change(spectra))


@pytest.mark.parametrize(
    ("validate", "data", "error"),
    [
        (validate_monitors, xr.Dataset({"loss": ("step", [1.0])}), says("assign the step of each row.")),
        (
            validate_monitors,
            xr.Dataset({"loss": ("step", [1.0, 1.0])}, {"step": [3, 3]}),
            says("do not increase; sort the rows and drop repeated ones."),
        ),
        (validate_monitors, xr.Dataset({"loss": ("step", [1])}, {"step": [3]}), says("use astype().")),
        (lambda data: validate_part("curvature", data), xr.Dataset(), says("assign the step of each row.")),
        (validate_events, xr.Dataset(), says("The events lack step, kind, source, score, message; add")),
        (validate_weights, xr.Dataset(), says("The weight spectra lack")),
    ],
)
def test_other_data_that_do_not_follow_the_schema_are_rejected(validate, data, error):
    with pytest.raises(SchemaError, check=error):
        validate(data)


def test_spectra_of_several_steps_are_valid(spectra):
    many = xr.concat([spectra, spectra], "step", combine_attrs="override", data_vars="all")
    assert validate_spectra(many) is many
