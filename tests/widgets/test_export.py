"""Files written by the buttons of a widget and from code; existing files are replaced only on request."""

import json

import holoviews as hv
import numpy as np
import pytest
import xarray as xr

import workbench as wb
from tests.about import about, says
from tests.plots.conftest import spectra_of
from tests.widgets.recorded_runs import run_of
from workbench.errors import OptionError, StoreError
from workbench.plots.style import INK, NEUTRAL, drawing
from workbench.widgets import ArchitectureComparison
from workbench.widgets.export import ExportBar
from workbench.widgets.files import ending_of, export_runs, with_ending

pytestmark = pytest.mark.render


@pytest.fixture(scope="module")
def runs():
    return {
        "Pre-LN": run_of([0, 10, 20], width=8, n_layers=2),
        "wild/1": run_of([0, 10], n_steps=14, diverges=True, width=6, n_layers=3),
        "bare": spectra_of(0.9, n_layers=2, width=5),
    }


@pytest.fixture
def comparison(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    comparison = ArchitectureComparison(runs, view="table")
    yield comparison
    comparison.close()


def test_each_button_writes_its_kind_where_the_field_says(comparison, tmp_path):
    comparison.views["training"].variables.value = ["loss"]
    comparison.models = ["Pre-LN"]
    comparison.view = "training"
    comparison.step = 10
    bar = comparison.export_bar
    assert bar.path.value == "exports/training_step10"
    assert not any(button.disabled for button in bar.buttons.values())
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".html": b"<!DOCTYPE html>", ".nc": b"\x89HDF"}
    for ending, start in starts.items():
        bar.buttons[ending].click()
        assert comparison.error == ""
        path = tmp_path / "exports" / f"training_step10{ending}"
        assert path.read_bytes().startswith(start)
        assert f"Saved {path} (" in bar.note.value


@pytest.mark.slow
def test_files_are_replaced_only_if_the_box_is_checked(comparison, tmp_path):
    bar = comparison.export_bar
    bar.buttons[".html"].click()
    path = tmp_path / "exports" / "table_step0.html"
    path.write_text("an earlier page of the Stability Workbench")
    bar.buttons[".html"].click()
    assert "exists already; tick Overwrite to replace it" in comparison.error
    assert bar.note.value == ""
    assert path.read_text() == "an earlier page of the Stability Workbench"
    bar.overwrite.value = True
    bar.buttons[".html"].click()
    assert comparison.error == ""
    assert path.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.slow
def test_a_path_entered_by_the_user_stays(comparison, tmp_path):
    bar = comparison.export_bar
    bar.path.value = str(tmp_path / "mine.v2")
    comparison.step = 20
    assert bar.path.value.endswith("mine.v2")
    bar.buttons[".html"].click()
    assert (tmp_path / "mine.v2.html").exists()
    bar.path.value = "  "
    bar.buttons[".html"].click()
    assert comparison.error == "The file name is empty; enter one, such as exports/figure."


@pytest.mark.slow
def test_the_table_is_a_page_and_no_picture(comparison, tmp_path):
    bar = comparison.export_bar
    assert [kind for kind, button in bar.buttons.items() if button.disabled] == [".png", ".svg"]
    with pytest.raises(StoreError, check=says("The table is not a figure; choose HTML or netCDF, or another view.")):
        comparison.save("a.png")
    with pytest.raises(OptionError, check=about("view", "table", ("eigenvalues", "layers", "training", "radar"))):
        comparison.figure()
    path = comparison.save(tmp_path / "deep" / "table.html")
    assert json.dumps(comparison.views["table"].table.value).replace("<", "\\u003c") in path.read_text()


def test_netcdf_returns_every_run_unchanged(runs, comparison, tmp_path):
    path = comparison.save(tmp_path / "all.nc")
    back = wb.open_run(path)
    assert list(back.children) == ["Pre-LN", "wild|1", "bare"]
    for name, part in (("Pre-LN", "spectra"), ("wild/1", "monitors"), ("wild/1", "spectra")):
        xr.testing.assert_identical(
            back[name.replace("/", "|")][part].to_dataset().load(), runs[name][part].to_dataset()
        )
    assert back["wild|1"]["events"]["kind"].values.tolist() == ["divergence"]
    np.testing.assert_array_equal(back["bare"]["spectra"]["eigenvalue"], runs["bare"]["eigenvalue"])
    again = ArchitectureComparison(dict(back.children), view="table")
    assert (again.error, again.steps) == ("", [0, 10, 20])
    again.close()


def test_netcdf_holds_the_models_shown_alone(comparison, tmp_path):
    comparison.models = ["bare"]
    assert list(wb.open_run(comparison.save(tmp_path / "one.nc")).children) == ["bare"]


@pytest.mark.slow
def test_figures_to_keep_show_what_the_widget_shows(comparison, tmp_path):
    comparison.models = ["Pre-LN", "wild/1"]
    comparison.layers = (1, 1)
    comparison.step = 20
    comparison.view = "eigenvalues"
    panels = list(comparison.figure())
    with drawing("bokeh"):
        titles = [hv.Store.lookup_options("bokeh", panel, "plot").kwargs["title"] for panel in panels]
    assert titles == ["Pre-LN", "wild/1 · diverged at step 14"]
    source = comparison.views["eigenvalues"].panels.sources["Pre-LN"].data
    np.testing.assert_array_equal(panels[0].Points.Modes["real"], source["real"])
    comparison.models = ["Pre-LN"]
    comparison.measures = ["rank"]
    comparison.view = "layers"
    assert comparison.save(tmp_path / "layers.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "view", [pytest.param("layers", marks=pytest.mark.slow), "training", pytest.param("radar", marks=pytest.mark.slow)]
)
def test_files_have_the_style_of_the_screen(comparison, view):
    comparison.models = ["wild/1", "bare"]
    comparison.step = 20
    comparison.view = view
    tags = {option["name"]: option["color"] for option in comparison._models.options}
    colors = {}
    for backend in ("bokeh", "matplotlib"):
        figure = comparison.figure(backend)
        with drawing(backend):
            for curve in figure.traverse(lambda part: part, [hv.Curve]):
                color = hv.Store.lookup_options(backend, curve, "style").kwargs["color"]
                colors.setdefault(curve.label.split(" ")[0], set()).add(color)
    colors = {name: found - {NEUTRAL, INK} for name, found in colors.items()}  # published radar lines are gray
    assert colors == {name: {tags[name]} for name in ("wild/1", "bare")}


def test_an_unknown_suffix_and_a_folder_that_cannot_be_created_are_rejected(comparison, tmp_path):
    with pytest.raises(StoreError, check=says("expected one of .png, .svg, .html, .nc.")):
        comparison.save("a.gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, check=says("The folder file cannot be created (File exists); choose")):
        comparison.save("file/table.html")


def test_endings_are_added_once():
    assert with_ending("a/b.png", ".png").name == "b.png"
    assert with_ending("a/b.5", ".png").name == "b.5.png"
    assert with_ending(" a ", ".nc").name == "a.nc"
    assert ending_of("a.PNG", [".png"]) == ".png"


def test_names_that_become_equal_are_rejected(runs, tmp_path):
    tree = runs["Pre-LN"]
    with pytest.raises(StoreError, check=says("Two runs have the same name after their slashes are")):
        export_runs({"a/b": tree, "a|b": tree}, tmp_path / "a.nc")
    assert not (tmp_path / "a.nc").exists()


def test_a_bar_has_the_kinds_that_it_is_given(comparison, monkeypatch):
    kinds = {".txt": ("Text", "Words alone"), ".nc": ("netCDF", "Numbers")}
    asked = []

    def save(path, *, overwrite):
        asked.append((path.name, overwrite))
        raise StoreError("The disk is full.")

    monkeypatch.setattr(comparison, "save", save)
    bar = ExportBar(comparison, kinds)
    assert {ending: button.description for ending, button in bar.buttons.items()} == {".txt": "Text", ".nc": "netCDF"}
    bar.offer({".txt": "There are no words."})
    assert [(button.disabled, button.tooltip) for button in bar.buttons.values()] == [
        (True, "There are no words."),
        (False, "Numbers"),
    ]
    bar.offer({})
    assert bar.buttons[".txt"].tooltip == "Words alone"
    bar.path.value = "mine"
    bar.buttons[".txt"].click()
    assert asked == [("mine.txt", False)]
    assert comparison.error == "The disk is full."
