"""Errors under a widget, cleanup by close(), and files written by its buttons and from code."""

import json
from types import MappingProxyType

import holoviews as hv
import ipywidgets
import numpy as np
import pytest
import xarray as xr

import workbench as wb
from tests.about import about, says
from tests.plots.conftest import spectra_of
from tests.widgets.recorded_runs import run_of
from workbench.errors import OptionError, StoreError, WorkbenchError
from workbench.plots.style import INK, NEUTRAL, drawing
from workbench.widgets import ArchitectureComparison
from workbench.widgets.base import WorkbenchWidget, export_runs

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


@pytest.mark.slow
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
            # A radar chart shows one model, in the order of the selection; elsewhere curves are named after models.
            charts = zip(comparison.models, figure, strict=True) if view == "radar" else [("", figure)]
            for name, chart in charts:
                for curve in chart.traverse(lambda part: part, [hv.Curve]):
                    color = hv.Store.lookup_options(backend, curve, "style").kwargs["color"]
                    colors.setdefault(name or curve.label.split(" ")[0], set()).add(color)
    colors = {name: found - {NEUTRAL, INK} for name, found in colors.items()}  # published radar lines are gray
    assert colors == {name: {tags[name]} for name in ("wild/1", "bare")}


def test_an_unknown_suffix_and_a_folder_that_cannot_be_created_are_rejected(comparison, tmp_path):
    with pytest.raises(StoreError, check=says("expected one of .png, .svg, .html, .nc.")):
        comparison.save("a.gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, check=says("The folder file cannot be created (File exists); choose")):
        comparison.save("file/table.html")


def test_names_that_become_equal_are_rejected(runs, tmp_path):
    tree = runs["Pre-LN"]
    with pytest.raises(StoreError, check=says("Two runs have the same name after their slashes are")):
        export_runs({"a/b": tree, "a|b": tree}, tmp_path / "a.nc")
    assert not (tmp_path / "a.nc").exists()


def test_each_kind_has_a_button_that_is_disabled_with_its_reason(monkeypatch):
    class Kinds(WorkbenchWidget):
        kinds = MappingProxyType({".txt": ("Text", "Words alone"), ".nc": ("netCDF", "Numbers")})
        refused_kinds = MappingProxyType({".txt": "There are no words."})

        def save(self, path, *, overwrite):
            raise StoreError(f"No room for {path.name}.")

    widget = Kinds()
    buttons = widget.export_bar.buttons
    assert {ending: button.description for ending, button in buttons.items()} == {".txt": "Text", ".nc": "netCDF"}
    widget._settle()
    told = [(button.disabled, button.tooltip) for button in buttons.values()]
    assert told == [(True, "There are no words."), (False, "Numbers")]
    monkeypatch.setattr(Kinds, "refused_kinds", {})
    widget._settle()
    assert (buttons[".txt"].disabled, buttons[".txt"].tooltip) == (False, "Words alone")
    for entered, name in (("mine", "mine.txt"), (" a.TXT ", "a.TXT"), ("a.5", "a.5.txt")):
        widget.export_bar.path.value = entered
        buttons[".txt"].click()
        assert widget.error == f"No room for {name}."


@pytest.fixture
def widget():
    return WorkbenchWidget()


def test_an_error_of_the_workbench_is_shown_as_its_sentence_and_cleared_by_success(widget):
    slider = ipywidgets.IntSlider()

    def refuse(change):
        if change["new"] == 1:
            raise WorkbenchError("Choose <another> value.")

    widget._watch(slider, refuse)
    slider.value = 1
    assert widget.error == "Choose <another> value."
    assert "Choose &lt;another&gt; value." in widget.message.value
    slider.value = 2
    assert widget.error == ""
    assert widget.message.value == ""


def test_what_fails_in_a_control_that_another_one_moves_stays(widget):
    first, second = ipywidgets.IntSlider(), ipywidgets.IntSlider()

    def refuse(change):
        if change["new"] == 1:
            raise WorkbenchError("Choose another value.")

    widget._watch(second, refuse)
    widget._watch(second, lambda _: None)
    widget._watch(first, lambda change: setattr(second, "value", change["new"]))
    first.value = 1
    assert widget.error == "Choose another value."
    first.value = 2
    assert widget.error == ""


def test_any_other_exception_is_named_and_logged(widget, caplog):
    button = ipywidgets.Button()
    widget._on_click(button, lambda _: 1 / 0)
    button.click()
    assert widget.error == "ZeroDivisionError: division by zero"
    assert "Traceback" in caplog.text


def test_close_stops_callbacks_and_closes_what_is_inside(widget):
    slider, calls = ipywidgets.IntSlider(), []
    inner = ipywidgets.HBox([slider])
    widget._fill([inner])
    widget._watch(slider, calls.append)
    widget.close()
    slider.value = 5
    assert calls == []
    assert slider.comm is None
    assert inner.comm is None
    widget.close()


def test_there_are_two_themes():
    with pytest.raises(OptionError, check=about("theme", "neon", ("page", "projector"))):
        WorkbenchWidget(theme="neon")
    large = WorkbenchWidget(theme="projector")
    assert "workbench-projector" in large._dom_classes
    large.close()
