"""step_grid without rendering: spectra of each panel, and texts of empty panels."""

import numpy as np
import pytest

from tests.about import about, says
from tests.plots.conftest import run_of
from tests.plots.panels import bokeh_panels, elements
from workbench.errors import OptionError, SchemaError
from workbench.io.run_access import named_runs
from workbench.plots import step_grid
from workbench.plots.eigenvalue_figures import cell_of
from workbench.plots.plane_view import mode_columns

pytestmark = pytest.mark.render


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


def test_invalid_input_is_rejected(runs):
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
