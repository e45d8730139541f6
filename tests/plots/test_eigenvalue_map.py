"""eigenvalue_map without pixels: which modes are drawn where, and what the panels share."""

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.plots.panels import bokeh_panels
from workbench.errors import OptionError, SchemaError
from workbench.plots import eigenvalue_map
from workbench.plots.mode_columns import headline, mode_columns, silent_layers, view_of

pytestmark = pytest.mark.render


def points_of(figure, index=0):
    return list(figure)[index].Points.Modes


def test_every_mode_is_drawn_at_its_eigenvalue(calm):
    points = points_of(eigenvalue_map(calm))
    drawn = points["real"] + 1j * points["imag"]
    expected = calm["eigenvalue"].values[points["layer"], points["mode"]]
    np.testing.assert_allclose(drawn, expected, rtol=1e-6)
    assert len(drawn) == calm["eigenvalue"].size


def test_modes_that_do_not_exist_are_dropped(ragged):
    assert len(points_of(eigenvalue_map(ragged))) == ragged["eigenvalue"].size - 3


def test_unreliable_modes_are_hollow_and_silent_layers_crossed(ragged):
    columns = mode_columns(ragged)
    reliable = ragged["is_reliable"].values[columns["layer"], columns["mode"]]
    np.testing.assert_array_equal(columns["fill"] > 0, reliable)
    np.testing.assert_array_equal(columns["marker"] == "x", columns["layer"] == 2)
    assert "layer 2" in silent_layers(ragged)


def test_reliable_only_leaves_the_others_out_of_picture_and_masses(calm):
    points = points_of(eigenvalue_map(calm, reliable_only=True))
    assert len(points) == int(calm["is_reliable"].sum())
    assert (points["fill"] > 0).all()


def test_layers_are_selected_and_keep_their_depth(calm):
    points = points_of(eigenvalue_map(calm, layers=[1, 3]))
    assert set(points["layer"]) == {1, 3}
    np.testing.assert_allclose(np.unique(points["depth"]), [1 / 3, 1])
    with pytest.raises(OptionError, match="choose from 0 to 3"):
        eigenvalue_map(calm, layers=[7])


def test_panels_share_their_ranges_and_are_square(calm, wild):
    first, second = bokeh_panels(eigenvalue_map({"calm": calm, "wild": wild}))
    assert first.x_range is second.x_range
    assert first.y_range is second.y_range
    assert (first.x_range.start, first.x_range.end) == (first.y_range.start, first.y_range.end)
    assert first.frame_width == first.frame_height


def test_a_view_around_one_holds_most_modes():
    rng = np.random.default_rng(0)
    columns = {"real": 1 + 0.1 * rng.normal(size=400), "imag": 0.1 * rng.normal(size=400)}
    view = view_of({"a": columns}, center=1.0)
    assert view.real[0] + view.real[1] == pytest.approx(2.0)
    assert 0.05 < view.limit < 0.3
    assert np.mean(view.reach(columns) <= view.limit) == pytest.approx(2 / 3, abs=0.01)
    assert view_of({"a": columns}, 0.5, 1.0).real == (0.5, 1.5)
    with pytest.raises(OptionError, match="The center is nan, expected a finite number"):
        view_of({"a": columns}, center=float("nan"))


def test_a_wild_model_does_not_shrink_the_unit_circle(calm, wild):
    modes = {"calm": mode_columns(calm), "wild": mode_columns(wild)}
    assert view_of(modes).limit == 1.5
    assert view_of(modes, "all").limit > float(wild["spectral_radius"].max())
    assert view_of(modes, 2).limit == 2
    n_outside = int((np.maximum(abs(modes["wild"]["real"]), abs(modes["wild"]["imag"])) > 1.5).sum())
    assert f"   {n_outside} outside" in headline(wild, modes["wild"], view_of(modes))
    for wrong in (0, np.nan, "wide"):
        with pytest.raises(OptionError):
            view_of(modes, wrong)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 1e9, width=32) | st.sampled_from([np.nan, np.inf])] * 2), min_size=1))
def test_the_headline_says_what_summarize_does(rows):
    values = np.array(rows, dtype=np.float32).T
    spectra = xr.Dataset(
        {name: ("layer", row) for name, row in zip(("near_unit_mass", "spectral_radius"), values, strict=True)}
    )
    summary = wb.summarize(spectra)
    expected = (
        float(summary["near_unit_mass"].sel(statistic="mean")),
        float(summary["spectral_radius"].sel(statistic="max")),
    )
    none = {"real": np.zeros(0), "imag": np.zeros(0)}
    line = headline(spectra, none, view_of({}), template="{!r} {!r}")
    assert line == "{!r} {!r}".format(*expected)


def test_the_band_is_the_dataset_s_own(calm):
    changed = calm.assign_attrs(near_unit_lower=0.5, near_unit_upper=1.2)
    ring = next(iter(eigenvalue_map(changed))).Polygons.values()[0]
    radius = np.hypot(ring["real"], ring["imag"])
    assert radius.min() == pytest.approx(0.5)
    assert radius.max() == pytest.approx(1.2)


def test_markers_follow_the_columns_even_if_all_values_are_the_same(calm):
    renderer = bokeh_panels(eigenvalue_map(calm, reliable_only=True))[0].renderers[-1]
    assert renderer.glyph.fill_alpha == "fill"
    assert renderer.glyph.marker == "marker"
    assert renderer.glyph.fill_color.field == "depth"


@pytest.mark.slow
def test_a_run_is_shown_at_the_step_asked_for(runs):
    run = runs["Pre-LN"]
    for step, shown in ((10, 10), (15, 10), ("last", 20)):
        figure = eigenvalue_map({"a": run}, step=step)
        expected = np.sort_complex(run["spectra"].eigenvalue.sel(step=shown).values.ravel().astype(np.complex64))
        points = points_of(figure)
        np.testing.assert_allclose(np.sort_complex(points["real"] + 1j * points["imag"]), expected, rtol=1e-6)
        assert bokeh_panels(figure)[0].title.text == f"a, step {shown}"
    assert bokeh_panels(eigenvalue_map(run, step=0))[0].title.text == "calm, step 0"
    assert bokeh_panels(eigenvalue_map({"b": runs["bare"]}, step="last"))[0].title.text == "b"
    with pytest.raises(SchemaError, match="'a' runs over step and .* or draw with step='last'"):
        eigenvalue_map({"a": run})
    with pytest.raises(OptionError, match="'a' has no spectra at or before step -3; its first are at step 0"):
        eigenvalue_map({"a": run}, step=-3)


def test_a_run_of_bare_spectra_needs_no_step(calm):
    from workbench.io.store import as_run

    assert len(points_of(eigenvalue_map({"a": as_run(calm)}))) == calm["eigenvalue"].size


def test_wrong_input_says_what_to_do(calm):
    with pytest.raises(SchemaError, match="empty dict"):
        eigenvalue_map({})
    with pytest.raises(SchemaError, match="'a' is of type int"):
        eigenvalue_map({"a": 1})
    with pytest.raises(SchemaError, match="isel"):
        eigenvalue_map(calm.expand_dims(step=[1, 2]))
    with pytest.raises(OptionError, match="plotly"):
        eigenvalue_map(calm, backend="plotly")
