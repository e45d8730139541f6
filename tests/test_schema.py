import numpy as np
import pytest
import xarray as xr

from tests.about import about
from tests.koopman.snapshots import snapshots
from workbench.errors import SchemaError
from workbench.koopman import whitened_dmd
from workbench.schema.runs import SCHEMA_VERSION, validate_events, validate_monitors, validate_part, validate_spectra
from workbench.schema.sweeps import require
from workbench.schema.weights import validate_weights


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
        (lambda ds: ds.drop_vars("residual"), about("residual", None)),
        (lambda ds: ds.assign(eigenvalue=ds.eigenvalue.T), about("eigenvalue", ("mode", "layer"))),
        (lambda ds: ds.assign(eigenvalue=np.abs(ds.eigenvalue)), about("eigenvalue", "float64", "of kind 'c'")),
        (
            lambda ds: ds.assign(near_unit_mass=ds.near_unit_mass + 0.5),
            about("near_unit_mass, expansive_mass, contractive_mass, intermediate_mass"),
        ),
        (lambda ds: ds.drop_vars("layer_name"), about("layer_name", None)),
        (lambda ds: without_attr(ds, "ridge"), about("ridge", None)),
        (lambda ds: ds.assign_attrs(n_snapshots="many"), about("n_snapshots", "many", "an integer")),
        (
            lambda ds: ds.assign_attrs(schema_version=SCHEMA_VERSION + 1),
            about("schema_version", SCHEMA_VERSION + 1),
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
        (validate_monitors, xr.Dataset({"loss": ("step", [1.0])}), about("step", None)),
        (validate_monitors, xr.Dataset({"loss": ("step", [1.0, 1.0])}, {"step": [3, 3]}), about("step", 3)),
        (validate_monitors, xr.Dataset({"loss": ("step", [1])}, {"step": [3]}), about("loss", "int64")),
        (lambda data: validate_part("curvature", data), xr.Dataset(), about("step", None)),
        (validate_events, xr.Dataset(), about("step", None)),
        (validate_weights, xr.Dataset(), about("singular_value", None)),
        (lambda data: require(data, ["task"]), xr.Dataset(coords={"run": [0]}), about("task", None)),
        (lambda data: require(data, []), xr.Dataset(), about("run", None)),
        (lambda data: require(data, []), xr.Dataset(coords={"run": []}), about("run", 0)),
    ],
)
def test_other_data_that_do_not_follow_the_schema_are_rejected(validate, data, error):
    with pytest.raises(SchemaError, check=error):
        validate(data)


def test_spectra_of_several_steps_are_valid(spectra):
    many = xr.concat([spectra, spectra], "step", combine_attrs="override", data_vars="all")
    assert validate_spectra(many) is many
