"""Eigenvalues in the complex plane without rendering: positions of the modes, and what the panels share."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.about import about, says
from tests.plots.conftest import run_of
from tests.plots.panels import bokeh_panels, elements
from workbench.errors import OptionError, SchemaError
from workbench.io.store import named_runs
from workbench.plots import eigenvalue_map, step_grid
from workbench.plots.eigenvalue_figures import cell_of
from workbench.plots.figure_files import picture_of
from workbench.plots.plane_view import (
    DENSE,
    N_CELLS,
    PlaneView,
    density,
    headline,
    key,
    mode_columns,
    silent_layers,
    view_of,
)

pytestmark = pytest.mark.render


def points_of(figure, index=0):
    return list(figure)[index].Points.Modes


def test_every_mode_is_drawn_at_its_eigenvalue(calm):
    points = points_of(eigenvalue_map(calm))
    drawn = points["real"] + 1j * points["imag"]
    expected = calm["eigenvalue"].values[points["layer"], points["mode"]]
    np.testing.assert_allclose(drawn, expected, rtol=1e-6)
    assert len(drawn) == calm["eigenvalue"].size


def test_modes_that_do_not_exist_are_omitted(ragged):
    assert len(points_of(eigenvalue_map(ragged))) == ragged["eigenvalue"].size - 3


def test_unreliable_modes_are_hollow_and_uninformative_layers_are_crosses(ragged):
    columns = mode_columns(ragged)
    reliable = ragged["is_reliable"].values[columns["layer"], columns["mode"]]
    np.testing.assert_array_equal(columns["fill"] > 0, reliable)
    np.testing.assert_array_equal(columns["marker"] == "x", columns["layer"] == 2)
    assert "layer 2" in silent_layers(ragged)


def test_reliable_only_excludes_other_modes_from_figure_and_masses(calm):
    points = points_of(eigenvalue_map(calm, reliable_only=True))
    assert len(points) == int(calm["is_reliable"].sum())
    assert (points["fill"] > 0).all()


def test_layers_are_selected_and_keep_their_depth(calm):
    points = points_of(eigenvalue_map(calm, layers=[1, 3]))
    assert set(points["layer"]) == {1, 3}
    np.testing.assert_allclose(np.unique(points["depth"]), [1 / 3, 1])
    with pytest.raises(OptionError, check=about("layers", (7,))):
        eigenvalue_map(calm, layers=[7])


def test_panels_share_their_ranges_and_are_square(calm, wild):
    first, second = bokeh_panels(eigenvalue_map({"calm": calm, "wild": wild}))
    assert first.x_range is second.x_range
    assert first.y_range is second.y_range
    assert (first.x_range.start, first.x_range.end) == (first.y_range.start, first.y_range.end)
    assert first.frame_width == first.frame_height


def test_modes_are_drawn_at_their_mapped_positions(wild):
    points = points_of(eigenvalue_map(wild))
    eigenvalue = points["real"] + 1j * points["imag"]
    drawn = points["x"] + 1j * points["y"]
    np.testing.assert_allclose(np.angle(drawn), np.angle(eigenvalue), atol=1e-5)
    inside = np.abs(eigenvalue) <= 1.25
    np.testing.assert_allclose(drawn[inside], eigenvalue[inside], rtol=1e-6)
    np.testing.assert_allclose(
        np.abs(drawn[~inside]), 1.25 + 0.3 * np.log10(np.abs(eigenvalue[~inside]) / 1.25), rtol=1e-5
    )


def test_every_mode_of_an_expansive_model_is_visible_and_the_unit_circle_remains_large(calm, wild):
    modes = {"calm": mode_columns(calm), "wild": mode_columns(wild)}
    panels = bokeh_panels(eigenvalue_map({"calm": calm, "wild": wild}))
    half = panels[0].x_range.end
    assert 1 / half > 0.35
    for columns in modes.values():
        assert np.hypot(columns["x"], columns["y"]).max() < half
    assert "outside" not in headline(wild, modes["wild"], view_of(modes))


def test_the_view_near_one_counts_the_modes_outside(wild):
    columns = mode_columns(wild)
    view = view_of({"wild": columns}, "near 1")
    assert (view.real, view.imag) == ((0.7, 1.3), (-0.3, 0.3))
    n_outside = int((np.maximum(abs(columns["real"] - 1), abs(columns["imag"])) > 0.3).sum())
    assert f"   {n_outside} outside" in headline(wild, columns, view)
    axis = bokeh_panels(eigenvalue_map(wild, zoom="near 1"))[0].xaxis[0]
    assert axis.visible
    with pytest.raises(OptionError, check=about("zoom", "wide", ("all modes", "near 1"))):
        eigenvalue_map(wild, zoom="wide")


def test_spectra_of_some_layers_have_the_depths_of_the_model(wild):
    some = wild.isel(layer=[1, 5])
    points = points_of(eigenvalue_map(some, backend="matplotlib"))
    np.testing.assert_allclose(np.unique(mode_columns(some)["depth"]), [1 / 5, 1], rtol=1e-6)
    assert len(points) <= some["eigenvalue"].size
    picture_of(eigenvalue_map(some))


def test_thousands_of_modes_are_drawn_as_their_density(crowded):
    columns = mode_columns(crowded)
    assert not columns["edge"].any()
    image = density(columns, view_of({"a": columns}), crowded.sizes["layer"])
    assert image.dtype == np.uint8
    # Every mode lies in a cell that is drawn, and no other cell is.
    edges = np.linspace(*view_of({"a": columns}).real, N_CELLS + 1)
    counts = np.histogram2d(columns["y"], columns["x"], bins=(edges, edges))[0]
    assert counts.sum() == len(columns["x"]) > DENSE
    np.testing.assert_array_equal(image[..., 3] > 0, counts > 0)
    drawn = next(iter(eigenvalue_map(crowded))).RGB.Density
    assert (drawn.dimension_values("A", flat=False) > 0).sum() == (counts > 0).sum()
    assert f"density of {len(columns['x']):,} modes" in key(crowded)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 1e9, width=32) | st.sampled_from([np.nan, np.inf])] * 2), min_size=1))
def test_the_headline_agrees_with_summarize(rows):
    values = np.array(rows, dtype=np.float32).T
    spectra = xr.Dataset(
        {name: ("layer", row) for name, row in zip(("near_unit_mass", "spectral_radius"), values, strict=True)}
    )
    summary = wb.summarize(spectra)
    expected = (
        float(summary["near_unit_mass"].sel(statistic="mean")),
        float(summary["spectral_radius"].sel(statistic="max")),
    )
    none = {name: np.zeros(0) for name in ("x", "y", "modulus")}
    line = headline(spectra, none, PlaneView(), template="{!r} {!r}")
    assert line == "{!r} {!r}".format(*expected)


def test_the_band_is_that_of_the_dataset(calm):
    changed = calm.assign_attrs(near_unit_lower=0.5, near_unit_upper=1.2)
    ring = next(iter(eigenvalue_map(changed))).Polygons.values()[0]
    radius = np.hypot(ring["x"], ring["y"])
    assert radius.min() == pytest.approx(0.5)
    assert radius.max() == pytest.approx(1.2)


def test_markers_follow_the_columns_even_if_all_values_are_the_same(calm):
    renderers = bokeh_panels(eigenvalue_map(calm, reliable_only=True))[0].renderers
    (renderer,) = [one for one in renderers if type(one.glyph).__name__ == "Scatter"]
    assert renderer.glyph.fill_alpha == "fill"
    assert renderer.glyph.marker == "marker"
    assert renderer.glyph.fill_color.field == "depth"


@pytest.mark.slow
def test_a_run_is_shown_at_the_requested_step(runs):
    run = runs["Pre-LN"]
    for step, shown in ((10, 10), (15, 10), ("last", 20)):
        figure = eigenvalue_map({"a": run}, step=step)
        expected = np.sort_complex(run["spectra"].eigenvalue.sel(step=shown).values.ravel().astype(np.complex64))
        points = points_of(figure)
        np.testing.assert_allclose(np.sort_complex(points["real"] + 1j * points["imag"]), expected, rtol=1e-6)
        assert bokeh_panels(figure)[0].title.text == f"a, step {shown}"
    assert bokeh_panels(eigenvalue_map(run, step=0))[0].title.text == "calm, step 0"
    assert bokeh_panels(eigenvalue_map({"b": runs["bare"]}, step="last"))[0].title.text == "b"
    with pytest.raises(SchemaError, check=about("a", ("step",))):
        eigenvalue_map({"a": run})
    with pytest.raises(OptionError, check=about("step", -3)):
        eigenvalue_map({"a": run}, step=-3)


def test_a_run_of_bare_spectra_needs_no_step(calm):
    from workbench.io.store import as_run

    assert len(points_of(eigenvalue_map({"a": as_run(calm)}))) == calm["eigenvalue"].size


def test_invalid_input_is_rejected(calm):
    with pytest.raises(SchemaError, check=says("The spectra are an empty dict, expected those of")):
        eigenvalue_map({})
    with pytest.raises(OptionError, check=about("spectra", {"a": 1})):
        eigenvalue_map({"a": 1})
    with pytest.raises(SchemaError, check=about("calm", ("step",))):
        eigenvalue_map(calm.expand_dims(step=[1, 2]))
    with pytest.raises(OptionError, check=about("backend", "plotly")):
        eigenvalue_map(calm, backend="plotly")


def drawn_in(panel):
    points = panel.Points.Modes
    return np.sort_complex(points["real"] + 1j * points["imag"])


def test_rows_are_runs_and_columns_are_steps(runs):
    pair = {name: runs[name] for name in ("Pre-LN", "none")}
    figure = list(step_grid(pair, steps=[0, 10, 20]))
    assert len(figure) == 6
    for panel, (name, step) in zip(
        figure, [("Pre-LN", 0), ("Pre-LN", 10), ("Pre-LN", 20), ("none", 0), ("none", 10)], strict=False
    ):
        expected = np.sort_complex(pair[name]["spectra"].eigenvalue.sel(step=step).values.ravel().astype(np.complex64))
        np.testing.assert_allclose(drawn_in(panel), expected, rtol=1e-6)
    assert len(figure[-1].Points.Modes) == 0
    assert elements(figure[-1], "Labels")[-1]["text"].tolist() == ["diverged at step 12"]


@pytest.mark.slow
def test_titles_notes_and_shared_axes(runs):
    panels = bokeh_panels(step_grid({name: runs[name] for name in ("Pre-LN", "none")}))
    assert [panel.title.text for panel in panels] == ["step 0", "step 10", "step 20"] * 2
    assert len({id(panel.x_range) for panel in panels}) == len({id(panel.y_range) for panel in panels}) == 1
    assert [note.text for panel in panels for note in panel.select({"name": "note_left"})] == ["Pre-LN", "none"]
    notes = [panel.select_one({"name": "note_above"}).text for panel in panels]
    spectra = runs["Pre-LN"]["spectra"].sel(step=10)
    radius, mass = float(spectra.spectral_radius.max()), float(spectra.near_unit_mass.mean())
    assert notes[1].startswith(f"M {mass:.2f}   ρ {radius:.3g}")
    assert "outside" not in notes[4]
    assert notes[5] == " "


def test_content_of_a_column(runs):
    trees = named_runs(runs)

    def cell(name, step, **kwargs):
        return cell_of(trees[name], step, name=name, **kwargs)

    assert (cell("Pre-LN", 15).title, cell("Pre-LN", 15).word) == ("step 10", "")
    assert int(cell("Pre-LN", 15).spectra.step) == 10
    assert cell("Pre-LN", 21).word == "recorded to step 20"
    assert (cell("none", 11).title, cell("none", 12).title) == ("step 10", "step 10")
    assert (cell("none", 13).title, cell("none", 13).word) == ("step 13", "diverged at step 12")
    assert (cell("bare", 0).title, cell("bare", 0).word) == ("no step recorded", "")
    assert cell("bare", 20, is_first=False).word == "no step recorded"
    late = run_of({8: 0.9, 20: 0.9}, n_layers=2, width=4)
    assert cell_of(late, 4, name="late").word == "recorded from step 8"


def test_a_run_that_continues_after_its_divergence_states_it(runs):
    run = runs["Pre-LN"].copy(deep=True)
    run["events"] = runs["none"]["events"].copy()
    assert cell_of(run, 20, name="a").title == "step 20, diverged at 12"
    assert cell_of(run, 10, name="a").title == "step 10"


def test_spectra_without_modes_are_reported(runs):
    run = runs["Pre-LN"].copy(deep=True)
    run["spectra"]["eigenvalue"][1] = np.nan
    assert cell_of(run, 10, name="a").word == "no modes"


def test_uninformative_layers_are_reported(runs):
    run = runs["Pre-LN"].copy(deep=True)
    run["spectra"]["is_informative"][0] = False
    panels = bokeh_panels(step_grid({"a": run}, steps=[0]))
    assert panels[0].select_one({"name": "note_above"}).text == "update too small for a spectrum"
    assert "× update too small" in panels[0].select_one({"name": "note_below"}).text


def test_about_four_columns_evenly_spaced():
    run = run_of(dict.fromkeys(range(0, 100, 10), 0.9), n_layers=1, width=3, n_steps=100)
    steps = [cell.Points.Modes for cell in step_grid(run)]
    expected = [run["spectra"].spectral_radius.sel(step=step).item() for step in (0, 30, 60, 90)]
    np.testing.assert_allclose([points["modulus"].max() for points in steps], expected, rtol=1e-6)


def test_layers_and_view_agree_with_the_eigenvalue_map(runs):
    figure = list(step_grid({"a": runs["Pre-LN"]}, steps=[20], layers=[2]))
    assert set(figure[0].Points.Modes["layer"]) == {2}
    columns = mode_columns(runs["Pre-LN"]["spectra"].to_dataset().sel(step=20).isel(layer=[2]), n_layers=3)
    np.testing.assert_array_equal(figure[0].Points.Modes["depth"], columns["depth"])
    panel = bokeh_panels(step_grid({"a": runs["Pre-LN"]}, steps=[0], zoom="near 1"))[0]
    assert (panel.x_range.start, panel.x_range.end, panel.y_range.end) == (0.7, 1.3, 0.3)


def test_invalid_grids_are_rejected(runs):
    with pytest.raises(SchemaError, check=about("runs")):
        step_grid({})
    with pytest.raises(OptionError, check=about("steps", 21)):
        step_grid(runs, steps=[0, 21])
    with pytest.raises(OptionError, check=says("steps is empty; choose steps from")):
        step_grid(runs, steps=[])
    with pytest.raises(OptionError, check=about("layers", (9,))):
        step_grid(runs, layers=[9])
    with pytest.raises(OptionError, check=about("backend", "plotly")):
        step_grid(runs, backend="plotly")
