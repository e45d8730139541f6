"""layer_profile without rendering."""

import numpy as np
import pytest

from tests.about import about
from workbench.errors import OptionError, SchemaError
from workbench.plots import layer_profile
from workbench.plots.curve_figures import DEFAULT_MEASURES, measure_columns, remark

pytestmark = pytest.mark.render


def test_each_panel_holds_the_measure_of_each_model(calm, wild):
    figure = layer_profile({"calm": calm, "wild": wild})
    assert len(figure) == len(DEFAULT_MEASURES)
    for measure, panel in zip(DEFAULT_MEASURES, figure, strict=True):
        curves = {curve.label: curve for curve in panel if type(curve).__name__ == "Curve"}
        assert set(curves) == {"calm", "wild"}
        np.testing.assert_array_equal(curves["wild"][measure], wild[measure].values)


def test_depth_is_a_fraction_if_models_differ_in_depth(calm, wild):
    def last(figure):
        return max(float(curve["depth"].max()) for curve in next(iter(figure)) if type(curve).__name__ == "Curve")

    assert last(layer_profile(calm)) == 3
    assert last(layer_profile({"calm": calm, "wild": wild})) == 1
    assert last(layer_profile({"calm": calm, "wild": wild}, depth="index")) == 5


def test_values_that_are_not_finite_are_omitted_and_listed(ragged):
    assert np.isnan(measure_columns(ragged, "eigenvector_condition")["eigenvector_condition"][3])
    assert remark({"a": ragged}, "eigenvector_condition") == "infinite in layer 3"
    assert remark({"a": ragged, "b": ragged}, "nonlinearity_ratio").startswith("a undefined in layer 0; b")
    assert remark({"a": ragged}, "spectral_radius") == ""


def test_uninformative_layers_are_hollow(ragged):
    np.testing.assert_array_equal(measure_columns(ragged, "rank")["fill"], [1, 1, 0, 1])


def test_runs_are_drawn_in_one_panel_at_the_latest_step(runs):
    figure = layer_profile({name: runs[name] for name in ("Pre-LN", "none")}, step=15, measures=["near_unit_mass"])
    curves = {curve.label: curve for curve in next(iter(figure)) if type(curve).__name__ == "Curve"}
    assert set(curves) == {"Pre-LN, step 10", "none, step 10"}
    expected = runs["none"]["spectra"].near_unit_mass.sel(step=10).values
    np.testing.assert_array_equal(curves["none, step 10"]["near_unit_mass"], expected)


def test_one_layer_is_enough(calm):
    assert len(layer_profile({"a": calm.isel(layer=[0]), "b": calm})) == 4


def test_invalid_input_is_rejected(calm):
    with pytest.raises(SchemaError, check=about("measures", "loss")):
        layer_profile(calm, measures=["loss"])
    with pytest.raises(OptionError, check=about("depth", "metres", ("index", "fraction"))):
        layer_profile(calm, depth="metres")
