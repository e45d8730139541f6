"""traces without rendering: lines, axes, and notes on values that are not drawn."""

import numpy as np
import pytest
import xarray as xr

from tests.about import about, says
from tests.plots.panels import bokeh_panels
from workbench.errors import OptionError, SchemaError
from workbench.io.store import named_runs
from workbench.plots.curve_figures import TracesPanel, trace_of, traces

pytestmark = pytest.mark.render


def panel_of(runs, variable, **kwargs):
    statistic = kwargs.pop("statistic", "mean")
    trees = named_runs(runs, needs_spectra=False)
    return TracesPanel.of([trace_of(run, variable, name, statistic=statistic) for name, run in trees.items()], **kwargs)


@pytest.fixture
def trained(runs):
    return {name: runs[name] for name in ("Pre-LN", "none")}


def test_each_line_is_the_monitor_of_its_run(trained):
    figure = traces(trained)
    assert len(figure) == 2
    for variable, panel in zip(("loss", "grad_norm"), figure, strict=True):
        curves = {curve.label: curve for curve in panel if type(curve).__name__ == "Curve"}
        assert set(curves) == {"Pre-LN", "none × step 12"}
        np.testing.assert_array_equal(curves["Pre-LN"]["value"], trained["Pre-LN"]["monitors"][variable])
        np.testing.assert_array_equal(curves["Pre-LN"]["step"], np.arange(21))


def test_measures_are_reduced_over_layers(trained):
    spectra = trained["Pre-LN"]["spectra"]
    for statistic in ("mean", "max", "min"):
        line = trace_of(trained["Pre-LN"], "spectral_radius", "a", statistic=statistic)
        np.testing.assert_allclose(line.value, getattr(np, statistic)(spectra.spectral_radius.values, axis=1))
        np.testing.assert_array_equal(line.step, [0, 10, 20])
    assert line.title == "spectral radius, min over layers"


def test_uninformative_layers_are_excluded_and_listed(trained):
    run = trained["Pre-LN"].copy(deep=True)
    run["spectra"]["is_informative"][0] = False
    run["spectra"]["is_informative"][1, 0] = False
    line = trace_of(run, "near_unit_mass", "a")
    mass = run["spectra"].near_unit_mass.values
    np.testing.assert_allclose(line.value, [np.nan, mass[1, 1:].mean(), mass[2].mean()])
    assert line.remarks == ["update too small for a spectrum at step 0"]
    assert trace_of(run, "update_norm", "a").remarks == []


def test_a_cross_marks_the_divergence(trained):
    line = trace_of(trained["none"], "loss", "none")
    assert line.cross == (12, 1e3)
    assert line.label == "none × step 12"
    assert trace_of(trained["Pre-LN"], "loss", "a").cross is None
    # The spectra end earlier; the cross is at their last value.
    radius = trace_of(trained["none"], "spectral_radius", "none")
    assert radius.cross == (12, pytest.approx(radius.value[1]))


def test_an_explosion_leaves_the_view_and_is_noted(trained):
    panel = panel_of(trained, "loss")
    assert panel.limits[1] == 4.0
    assert panel.note == "none up to 1e+03, above the axis"
    everything = panel_of(trained, "loss", shows_all=True)
    assert everything.limits[1] == 1e3
    assert everything.note == ""
    assert everything.is_logarithmic
    assert not panel.is_logarithmic
    assert panel_of({"none": trained["none"]}, "loss").limits[1] == 1e3
    cross = next(item for item in next(iter(traces(trained))) if type(item).__name__ == "Points")
    assert (cross["step"].tolist(), cross["value"].tolist()) == ([12], [4.0])


def test_an_explosion_that_leaves_half_of_the_axis_to_other_runs_is_shown(trained):
    run = trained["none"].copy(deep=True)
    run["monitors"]["grad_norm"][12] = 300.0  # the others span 0.01 to 100
    panel = panel_of({"Pre-LN": trained["Pre-LN"], "none": run}, "grad_norm")
    assert (panel.limits[1], panel.note) == (300.0, "")
    run["monitors"]["grad_norm"][12] = 1e12
    panel = panel_of({"Pre-LN": trained["Pre-LN"], "none": run}, "grad_norm")
    assert panel.limits[1] == trained["Pre-LN"]["monitors"].grad_norm.max()


@pytest.mark.slow
def test_axes_are_logarithmic_for_wide_positive_ranges(trained):
    assert panel_of(trained, "grad_norm").is_logarithmic
    run = trained["Pre-LN"].copy(deep=True)
    run["monitors"]["loss"][20] = 1e-3
    assert panel_of({"a": run, "none": trained["none"]}, "loss").is_logarithmic
    run["monitors"]["loss"][20] = 0.0
    assert not panel_of({"a": run}, "loss").is_logarithmic
    assert not panel_of(trained, "learning_rate").is_logarithmic
    assert not panel_of(trained, "accuracy").is_logarithmic
    panels = bokeh_panels(traces(trained, variables=["grad_norm", "loss", "spectral_radius"]))
    assert [type(panel.y_scale).__name__ for panel in panels] == ["LogScale", "LinearScale", "LinearScale"]
    assert len({id(panel.x_range) for panel in panels}) == 1
    assert len({id(panel.y_range) for panel in panels}) == 3


def test_values_that_are_not_finite_are_noted(trained):
    run = trained["none"].copy(deep=True)
    run["monitors"]["grad_norm"][11:] = np.inf
    run["monitors"]["loss"][12] = np.nan
    assert trace_of(run, "grad_norm", "a").remarks == ["infinite from step 11"]
    assert trace_of(run, "loss", "a").remarks == ["undefined after step 11"]
    assert trace_of(run, "loss", "a").cross == (12, run["monitors"].loss.values[11])
    run["monitors"]["loss"][:] = np.nan
    assert trace_of(run, "loss", "a").remarks == ["undefined"]
    assert trace_of(run, "loss", "a").cross is None
    assert len(traces({"a": run}, variables=["loss"])) == 1
    # Measured at few steps.
    assert trace_of(trained["Pre-LN"], "accuracy", "a").remarks == []
    assert trace_of(trained["Pre-LN"], "accuracy", "a").columns["step"].tolist() == [0, 5, 10, 15, 20]


def test_runs_without_the_variable_are_listed(runs):
    assert panel_of(runs, "learning_rate").note == "bare not recorded"
    assert bokeh_panels(traces(runs, variables=["learning_rate"]))[0].select_one({"name": "note_above"}).text


def test_a_run_without_steps_has_an_empty_panel(trained):
    nothing = trained["Pre-LN"]["monitors"].to_dataset().isel(step=slice(0))
    (panel,) = bokeh_panels(traces(xr.DataTree.from_dict({"monitors": nothing}), variables=["loss"]))
    assert panel.select_one({"name": "note_above"}).text == "not recorded"


def test_runs_need_no_spectra(trained):
    run = xr.DataTree.from_dict({"monitors": trained["Pre-LN"]["monitors"].to_dataset()})
    assert len(traces(run)) == 2
    assert len(traces({"a": run, "b": trained["none"]}, variables=["loss", "near_unit_mass"])) == 2


def test_invalid_input_is_rejected(runs, trained):
    with pytest.raises(SchemaError, check=about("runs")):
        traces({})
    with pytest.raises(SchemaError, check=about("variables", "los")):
        traces(trained, variables=["los"])
    with pytest.raises(SchemaError, check=about("variables", "loss", ())):
        traces({"bare": runs["bare"]})
    with pytest.raises(SchemaError, check=says("variables is empty; choose from loss, grad_norm,")):
        traces(trained, variables=[])
    with pytest.raises(OptionError, check=about("statistic", "median", ("mean", "max", "min"))):
        traces(trained, statistic="median")
    with pytest.raises(OptionError, check=about("backend", "plotly")):
        traces(trained, backend="plotly")
