"""SpectrumExplorer without a browser: controls, and the data of the figure and the tables."""

import threading

import numpy as np
import pytest

import workbench as wb
from tests.about import about, says
from workbench import plots
from workbench.errors import OptionError, SchemaError
from workbench.koopman.measures import remeasure
from workbench.widgets import SpectrumExplorer

pytestmark = pytest.mark.render


@pytest.fixture
def explorer(spectra):
    explorer = SpectrumExplorer(spectra)
    yield explorer
    explorer.close()


def test_it_starts_with_all_modes_and_no_error(explorer, spectra):
    assert explorer.error == ""
    for name, source in explorer.sources.items():
        assert len(source.data["real"]) == spectra[name]["eigenvalue"].size


def test_thresholds_recompute_the_masses(explorer, spectra):
    before = explorer.masses.value
    explorer.near_unit_lower.value = 0.6
    assert "contractive_upper must be at most near_unit_lower (0.6)" in explorer.error
    assert explorer.masses.value == before
    explorer.contractive_upper.value = 0.5
    assert explorer.error == ""
    expected = remeasure(spectra["calm"], near_unit_lower=0.6, contractive_upper=0.5)
    np.testing.assert_array_equal(explorer.measured["calm"]["near_unit_mass"], expected["near_unit_mass"])
    assert f"{float(expected['near_unit_mass'].mean()):.3f}" in explorer.masses.value


def test_contradicting_thresholds_keep_the_last_picture(explorer):
    data = dict(explorer.sources["calm"].data)
    explorer.near_unit_upper.value = 0.85
    assert "near_unit_lower must be less than near_unit_upper (0.85), got 0.9" in explorer.error
    assert explorer.error.split()[0] in explorer.message.value
    assert explorer.sources["calm"].data == data
    explorer.near_unit_upper.value = 1.1
    assert explorer.error == ""


def test_layers_and_reliability_filter_the_points(explorer, spectra):
    explorer.layers.value = (1, 2)
    assert set(explorer.sources["calm"].data["layer"]) == {1, 2}
    explorer.reliable_only.value = True
    n_reliable = int(spectra["calm"]["is_reliable"].sel(layer=[1, 2]).sum())
    assert len(explorer.sources["calm"].data["real"]) == n_reliable
    explorer.layers.value = (5, 5)
    assert len(explorer.sources["calm"].data["real"]) == 0
    assert "no layer in this range" in explorer.masses.value
    assert explorer.error == ""


def test_the_residual_slider_fills_and_empties_markers(explorer):
    explorer.reliable_residual.value = 0.0
    assert not explorer.sources["wild"].data["fill"].any()
    explorer.reliable_residual.value = 1.0
    assert explorer.sources["wild"].data["fill"].all()


def test_selected_modes_are_listed_and_survive_a_filter(explorer, spectra):
    explorer.sources["wild"].selected.indices = [3, 5]
    rows = explorer.selected()
    assert [row["model"] for row in rows] == ["wild", "wild"]
    for row in rows:
        assert row["eigenvalue"] == spectra["wild"]["eigenvalue"].values[row["layer"], row["mode"]]
    assert f"{rows[0]['modulus']:.4f}" in explorer.selection.value
    other = next(layer for layer in range(6) if layer not in {row["layer"] for row in rows})
    explorer.layers.value = (other, other)
    assert explorer.selected() == []
    explorer.layers.value = (0, 5)
    assert explorer.selected() == rows
    explorer.sources["wild"].selected.indices = []
    assert explorer.selected() == []


def test_modes_selected_in_one_panel_highlight_their_layers_in_the_others(explorer):
    explorer.sources["wild"].selected.indices = [3, 5]
    layers = {row["layer"] for row in explorer.selected()}
    calm = explorer.sources["calm"]
    marked = {int(calm.data["layer"][i]) for i in calm.selected.indices}
    assert marked == layers & set(calm.data["layer"].tolist())
    assert len(calm.selected.indices) == sum(int(layer) in layers for layer in calm.data["layer"])
    explorer.reliable_only.value = True
    assert {int(calm.data["layer"][i]) for i in calm.selected.indices} <= layers
    explorer.reliable_only.value = False
    # A selection in the other panel replaces it.
    calm.selected.indices = [0]
    assert [row["model"] for row in explorer.selected()] == ["calm"]
    calm.selected.indices = []
    assert explorer.selected() == []
    assert explorer.sources["wild"].selected.indices == []


def test_the_zoom_shows_every_mode_or_the_square_around_one(explorer):
    axis = explorer._axes.x_range
    assert axis.end == explorer._axes.y_range.end
    for source in explorer.sources.values():
        assert np.hypot(source.data["x"], source.data["y"]).max() < axis.end
    assert not explorer._axes.xaxis[0].visible
    explorer.zoom.value = "near 1"
    assert (axis.start, axis.end) == (0.7, 1.3)
    assert explorer._axes.xaxis[0].visible
    explorer.zoom.value = "all modes"
    assert axis.start == -axis.end


@pytest.mark.slow
def test_the_figure_to_keep_shows_what_the_widget_shows(explorer, tmp_path):
    explorer.layers.value = (1, 2)
    explorer.reliable_only.value = True
    points = next(iter(explorer.figure())).Points.Modes
    np.testing.assert_array_equal(points["real"], explorer.sources["calm"].data["real"])
    assert plots.save(explorer.figure(backend="matplotlib"), tmp_path / "view.png").stat().st_size > 10_000


def test_controls_and_selections_may_come_from_different_threads(explorer):
    selected = explorer.sources["wild"].selected

    def select():
        for i in range(30):
            change = {"kind": "ModelChanged", "model": {"id": selected.id}, "attr": "indices", "new": [i % 7]}
            explorer.canvas._receive(explorer.canvas, {"changes": [change]}, [])

    thread = threading.Thread(target=select, daemon=True)
    thread.start()
    for i in range(10):
        explorer.near_unit_upper.value = 1.05 + 0.01 * i
    thread.join(30)
    assert not thread.is_alive()
    assert explorer.error == ""
    assert len(explorer.selected()) == 1


def test_after_close_nothing_reacts(spectra):
    explorer = SpectrumExplorer(spectra)
    source = explorer.sources["calm"]
    before = source.data
    explorer.close()
    explorer.near_unit_upper.value = 1.2
    assert source.data is before
    assert explorer.canvas.comm is None


def test_one_dataset_and_one_layer_are_enough(spectra):
    explorer = SpectrumExplorer(spectra["calm"].isel(layer=[0]))
    assert list(explorer.sources) == ["calm"]
    assert explorer.error == ""
    explorer.close()


def test_saved_spectra_are_shown_as_they_are_opened(spectra, tmp_path):
    data = next(iter(spectra.values()))
    tree = wb.open_run(wb.save(data, tmp_path / "a.zarr"))
    for given in (tree, {"calm": tree}):
        widget = wb.SpectrumExplorer(given)
        assert next(iter(widget.spectra.values())).sizes == data.sizes
        widget.close()
    with pytest.raises(OptionError, check=about("spectra", 3)):
        wb.SpectrumExplorer(3)


def test_spectra_in_a_list_are_named_after_their_subjects(spectra):
    one = next(iter(spectra.values()))
    widget = SpectrumExplorer([one, one])
    assert list(widget.spectra) == [one.attrs["subject"], f"{one.attrs['subject']} (2)"]
    widget.close()


def test_invalid_data_are_rejected_immediately(spectra):
    with pytest.raises(SchemaError, check=says("The spectra lack residual;")):
        SpectrumExplorer({"a": spectra["calm"].drop_vars("residual")})
