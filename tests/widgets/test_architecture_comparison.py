"""ArchitectureComparison without a browser: controls, and the data of figures, texts and tables."""

import threading
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

import workbench as wb
from tests.about import about, says
from tests.plots.conftest import spectra_of
from tests.widgets.recorded_runs import run_of, spectra_over
from workbench.errors import OptionError, SchemaError, StoreError
from workbench.plots.comparison_figures import axes_of, outline
from workbench.plots.style import model_style, shortened
from workbench.widgets import ArchitectureComparison
from workbench.widgets.comparison.scene import RecordedRun

pytestmark = pytest.mark.render


@pytest.fixture(scope="module")
def runs():
    """Runs with every step, every other step, a divergence at step 25, and spectra without steps."""
    return {
        "Pre-LN": run_of([0, 10, 20, 30]),
        "slow": run_of([0, 20], seed=10),
        "wild": run_of([0, 10, 20], n_steps=25, diverges=True, drift=0.1, seed=20),
        "bare": spectra_of(0.9, n_layers=4, seed=30),
    }


@pytest.fixture
def open_comparison():
    opened = []

    def build(runs, view="table", **options):
        opened.append(ArchitectureComparison(runs, view=view, **options))
        assert opened[-1].error == ""
        return opened[-1]

    yield build
    for comparison in opened:
        comparison.close()


def modes_of(comparison, name):
    data = comparison.views["eigenvalues"].panels.sources[name].data
    return np.sort_complex(data["real"] + 1j * data["imag"])


def expected_modes(spectra, step):
    here = spectra if "step" not in spectra.dims else spectra.sel(step=step)
    return np.sort_complex(here["eigenvalue"].values.ravel().astype(np.complex64))


def titles(comparison):
    figures = comparison.views["eigenvalues"].panels.figures
    return {name: figure.title.text for name, figure in figures.items()}


def test_maps_show_the_step_in_place_and_in_one_message(open_comparison, runs):
    comparison = open_comparison({name: runs[name] for name in ("Pre-LN", "bare")}, view="eigenvalues")
    view = comparison.views["eigenvalues"]
    sources, canvas, sent = dict(view.panels.sources), view.canvas, []
    canvas.send = lambda content, buffers=None: sent.append(content)
    assert (comparison.step, comparison.steps) == (0, [0, 10, 20, 30])
    for step in (30, 10):
        comparison.step = step
        np.testing.assert_array_equal(modes_of(comparison, "Pre-LN"), expected_modes(runs["Pre-LN"].spectra, step))
        np.testing.assert_array_equal(modes_of(comparison, "bare"), expected_modes(runs["bare"], step))
    assert len(sent) == 2
    assert view.canvas is canvas
    assert view.panels.sources == sources


@pytest.mark.slow
def test_titles_say_what_is_not_of_this_step(open_comparison, runs):
    comparison = open_comparison(
        {name: runs[name] for name in ("slow", "wild")} | {"late": run_of([10, 30])}, view="table"
    )
    remarks = {
        0: {"slow": "", "wild": "", "late": "recorded from step 10"},
        10: {"slow": "step 0", "wild": "", "late": ""},
        20: {"slow": "", "wild": "", "late": "step 10"},
        30: {"slow": "ended at step 20", "wild": "diverged at step 25", "late": ""},
    }
    for step, expected in remarks.items():
        assert {name: run.remark(step) for name, run in comparison.runs.items()} == expected
    comparison.models = ["slow", "wild"]
    comparison.view = "eigenvalues"
    comparison.step = 30
    assert titles(comparison) | {"late": ""} == {
        "slow": "slow · ended at step 20",
        "wild": "wild · diverged at step 25",
        "late": "",
    }
    np.testing.assert_array_equal(modes_of(comparison, "wild"), expected_modes(runs["wild"].spectra, 20))


def test_a_run_that_may_continue_has_not_ended(runs):
    running = xr.DataTree.from_dict({"/spectra": runs["slow"].spectra.to_dataset()})
    assert RecordedRun("a", running).remark(30) == "recorded to step 20"
    events = xr.concat([runs["slow"].events.to_dataset()] * 2, "event")
    events["kind"] = ("event", ["stopped", "resumed"])
    resumed = xr.DataTree.from_dict({"/spectra": runs["slow"].spectra.to_dataset(), "/events": events})
    assert RecordedRun("a", resumed).remark(30) == "recorded to step 20"


def test_where_nothing_is_recorded_yet_the_panel_is_empty(open_comparison, runs):
    comparison = open_comparison({"Pre-LN": runs["Pre-LN"], "late": run_of([10, 20])}, view="eigenvalues")
    assert len(modes_of(comparison, "late")) == 0
    assert titles(comparison)["late"] == "late · recorded from step 10"
    comparison.step = 10
    assert len(modes_of(comparison, "late")) > 0


def test_hidden_models_leave_the_grid_and_others_keep_their_style(open_comparison, runs):
    comparison = open_comparison({name: runs[name] for name in ("Pre-LN", "slow", "wild")}, view="eigenvalues")
    view = comparison.views["eigenvalues"]
    comparison.models = ["wild", "Pre-LN"]
    assert comparison.models == ["Pre-LN", "wild"]
    assert [child[0] for child in view.panels.root.children] == [view.panels.figures[n] for n in ("Pre-LN", "wild")]
    comparison.measures = ["spectral_radius"]
    comparison.view = "layers"
    panel = comparison.views["layers"].panels.panels["spectral_radius"]
    lines = {name: part["glyph_renderer"] for name, part in panel._lines.items()}
    assert {name: line.visible for name, line in lines.items()} == {"Pre-LN": True, "slow": False, "wild": True}
    assert [line.glyph.line_color for line in lines.values()] == [model_style(place)["color"] for place in range(3)]
    comparison._models.value = []
    assert comparison.error == "No model is shown; switch on at least one."


def test_layers_are_chosen_in_every_view(open_comparison, runs):
    comparison = open_comparison({"Pre-LN": runs["Pre-LN"]}, view="eigenvalues")
    comparison.measures = ["spectral_radius"]
    comparison.layers = (1, 2)
    assert set(comparison.views["eigenvalues"].panels.sources["Pre-LN"].data["layer"]) == {1, 2}
    comparison.view = "layers"
    panel = comparison.views["layers"].panels.panels["spectral_radius"]
    assert panel.sources["Pre-LN"].data["layer"].tolist() == [1, 2]
    comparison.view = "table"
    expected = runs["Pre-LN"].spectra["near_unit_mass"].sel(step=0, layer=[1, 2]).mean()
    assert f"{float(expected):.3f}" in comparison.views["table"].table.value
    assert "layers 1 to 2" in comparison.views["table"].table.value


@pytest.mark.parametrize("width", [150, 204])
@pytest.mark.parametrize(
    "name", ["Pre-LN", "gpt2-medium-pre-ln-lr3e-4-seed0", "TRANSFORMER WITH RMSNORM AND WARMUP", "W" * 300, "l" * 300]
)
def test_long_names_are_shortened_to_their_ends(name, width):
    def drawn_width(text):
        font = FontProperties(family="DejaVu Sans", weight="bold")
        return TextPath((0, 0), text, size=11 * 96 / 72, prop=font).get_extents().width

    title = shortened(name, width)
    start, _, end = title.partition("…")
    assert name.startswith(start)
    assert name.endswith(end)
    if drawn_width(name) < width:
        assert title == name
    else:
        assert 0.8 * width < drawn_width(title) <= width
        assert abs(len(start) - len(end)) <= 2


@pytest.mark.slow
def test_the_panels_of_many_models_have_short_titles_and_the_tags_full_names(open_comparison):
    names = [f"transformer with RMSNorm, seed {place}" for place in range(7)]
    spectra = spectra_of(0.9, n_layers=2, width=4)
    comparison = open_comparison(dict.fromkeys(names, spectra), view="eigenvalues")
    assert len(set(titles(comparison).values())) == 7
    assert all("…" in title and len(title) < 25 for title in titles(comparison).values())
    assert [option["text"] for option in comparison._models.options] == names
    comparison.models = names[:2]
    assert [titles(comparison)[name] for name in names[:2]] == names[:2]


def test_zoom_holds_all_modes_and_does_not_tremble(open_comparison, runs):
    comparison = open_comparison({"wild": runs["wild"]}, view="eigenvalues")
    view = comparison.views["eigenvalues"]
    axis, ends = view.panels.figures["wild"].x_range, set()
    for step in (0, 10, 20):
        comparison.step = step
        data = view.panels.sources["wild"].data
        assert np.hypot(data["x"], data["y"]).max() < axis.end
        ends.add(axis.end)
    assert len(ends) == 1  # one power of ten contains all of these steps
    view.zoom.value = "near 1"
    assert (axis.start, axis.end) == (0.7, 1.3)


def test_a_layer_chosen_in_one_view_is_highlighted_in_all(open_comparison, runs):
    comparison = open_comparison({name: runs[name] for name in ("Pre-LN", "slow")}, view="eigenvalues")
    comparison.measures = ["spectral_radius"]
    maps = comparison.views["eigenvalues"].panels.sources
    place = int(np.flatnonzero(np.asarray(maps["Pre-LN"].data["layer"]) == 2)[0])
    maps["Pre-LN"].selected.indices = [place]  # a click on a mode
    assert comparison.highlight == 2
    for source in maps.values():
        np.testing.assert_array_equal(source.selected.indices, np.flatnonzero(np.asarray(source.data["layer"]) == 2))
    comparison.view = "layers"
    markers = comparison.views["layers"].panels.panels["spectral_radius"].sources
    assert {name: source.selected.indices for name, source in markers.items()} == {"Pre-LN": [2], "slow": [2]}
    markers["slow"].selected.indices = [0]
    assert comparison.highlight == 0
    assert markers["Pre-LN"].selected.indices == [0]
    comparison.highlight = None
    assert markers["slow"].selected.indices == []
    with pytest.raises(OptionError, check=about("highlight", 9)):
        comparison.highlight = 9


def test_profiles_are_built_when_needed_and_written_in_place(open_comparison, runs):
    comparison = open_comparison({name: runs[name] for name in ("Pre-LN", "wild")})
    comparison.measures = ["spectral_radius"]
    comparison.view = "layers"
    panels = comparison.views["layers"].panels.panels
    assert list(panels) == comparison.measures
    before = dict(panels)
    comparison.step = 20
    for name, run in (("Pre-LN", runs["Pre-LN"]), ("wild", runs["wild"])):
        expected = run.spectra["spectral_radius"].sel(step=20)
        panel = panels["spectral_radius"]
        np.testing.assert_array_equal(panel.sources[name].data["spectral_radius"], expected)
        assert panel.figure.y_range.start < expected.min() < expected.max() < panel.figure.y_range.end
    comparison.measures = ["rank", "spectral_radius"]
    assert list(panels) == [*before, "rank"]
    assert all(panels[measure] is panel for measure, panel in before.items())
    comparison.views["layers"].measures.value = []
    assert comparison.error == "No measure is chosen; switch on at least one."


def test_models_of_unequal_depth_share_the_fraction_until_layers_are_chosen(open_comparison, runs):
    comparison = open_comparison({"Pre-LN": runs["Pre-LN"], "deep": run_of([0, 10], n_layers=6)})
    comparison.measures = "rank"
    comparison.view = "layers"
    panel = comparison.views["layers"].panels.panels["rank"]
    assert panel.sources["deep"].data["depth"].tolist() == pytest.approx(np.linspace(0, 1, 6))
    assert panel.sources["Pre-LN"].data["depth"].tolist() == pytest.approx(np.linspace(0, 1, 4))
    comparison.layers = (0, 4)
    assert panel.sources["deep"].data["depth"].tolist() == [0, 1, 2, 3, 4]
    assert panel.figure.xaxis[0].axis_label == "layer"


def test_traces_have_a_line_at_the_step_and_a_cross_at_the_divergence(open_comparison, runs):
    comparison = open_comparison({name: runs[name] for name in ("Pre-LN", "wild", "bare")}, view="training")
    view = comparison.views["training"]
    panel = view.panels.panels["loss"]
    comparison.step = 20
    assert panel.cursor.location == 20
    np.testing.assert_array_equal(panel.sources["Pre-LN"].data["value"], runs["Pre-LN"].monitors["loss"])
    assert panel._note.text.startswith("× wild diverged at step 25; ")
    assert "bare not recorded" in panel._note.text.replace("\n", " ")
    crosses = [
        part["source"].data for part in panel._parts["wild"] if part["glyph"] != panel._parts["wild"][0]["glyph"]
    ]
    assert [list(cross["step"]) for cross in crosses] == [[25]]
    comparison.models = ["Pre-LN"]
    assert panel.figure.y_range.end == pytest.approx(float(runs["Pre-LN"].monitors["loss"].max()), rel=0.1)
    view.variables.choose(["accuracy", "near_unit_mass"])
    assert comparison.error == ""
    assert list(view.panels.panels) == ["loss", "grad_norm", "accuracy", "near_unit_mass"]


@pytest.mark.slow
def test_the_axis_of_a_trace_is_that_of_the_runs_shown(open_comparison, runs):
    wide = run_of([0, 10, 20, 30])
    wide["monitors"]["loss"][-1] = 1e-6
    comparison = open_comparison({"wide": wide, "Pre-LN": runs["Pre-LN"], "slow": runs["slow"], "bare": runs["bare"]})
    comparison.models = ["Pre-LN", "slow"]
    comparison.view = "training"
    view = comparison.views["training"]
    canvas, panel = view.canvas, view.panels.panels["loss"]
    assert type(panel.figure.y_scale).__name__ == "LinearScale"
    comparison.step = 20
    comparison.models = ["slow"]
    comparison.models = ["Pre-LN", "slow"]
    assert (view.canvas, view.panels.panels["loss"]) == (canvas, panel)  # not rebuilt
    comparison.models = ["wide", "slow"]
    panel = view.panels.panels["loss"]
    assert type(panel.figure.y_scale).__name__ == "LogScale"
    np.testing.assert_array_equal(panel.sources["wide"].data["value"], wide["monitors"]["loss"])
    looks = {name: parts[0]["glyph"].line_color for name, parts in panel._parts.items()}
    assert looks == {"wide": model_style(0)["color"], "slow": model_style(2)["color"]}
    comparison.models = ["bare"]
    comparison.step = 30
    assert view.panels.panels["loss"]._note.text == "not recorded"
    panel = view.panels.panels["loss"]
    comparison.step = 0
    assert (view.panels.panels["loss"], comparison.error) == (panel, "")


def test_without_monitors_the_traces_are_measures_or_there_are_none(open_comparison, runs):
    comparison = open_comparison({"a": runs["slow"].spectra.to_dataset()}, view="training")
    assert comparison.views["training"].variables.value == ["near_unit_mass", "spectral_radius"]
    comparison = open_comparison({"bare": runs["bare"]}, view="training")
    assert "No run has monitors" in comparison.views["training"].box.children[0].value


def test_the_table_has_our_numbers_and_the_published_ones(open_comparison, runs):
    comparison = open_comparison({name: runs[name] for name in ("Pre-LN", "slow", "wild")}, published={"slow": "Mamba"})
    table = comparison.views["table"].table
    expected = wb.compare({name: runs[name] for name in comparison.models}, at=0)
    for name in ("Pre-LN", "slow", "wild"):
        assert f"{float(expected.near_unit_mass.sel(architecture=name, source='ours')):.3f}<" in table.value
    assert table.value.count(">published<") == 2
    for number in (">0.16<", ">2.29<", ">0.85<", ">25<"):
        assert number in table.value
    comparison.step = 30
    assert "wild: diverged at step 25" in table.value
    assert "All at rank 12." in table.value


@pytest.mark.parametrize("view", ["table", pytest.param("radar", marks=pytest.mark.slow)])
def test_a_move_of_the_slider_does_not_check_the_runs_again(open_comparison, runs, view, monkeypatch):
    comparison = open_comparison({name: runs[name] for name in ("Pre-LN", "slow", "bare")}, view=view)

    def fail(*_):
        raise AssertionError("checked again")

    monkeypatch.setattr("workbench.io.store.as_run", fail)
    comparison.step = 20
    assert comparison.error == ""
    with pytest.raises(AssertionError, match="checked again"):
        wb.compare({"Pre-LN": runs["Pre-LN"]})


def test_names_of_runs_are_text_not_markup(open_comparison, runs):
    comparison = open_comparison({"<b>bold</b>": runs["bare"]})
    assert "<b>" not in comparison.views["table"].table.value


@pytest.mark.slow
def test_radar_charts_are_written_in_place(open_comparison, runs):
    shown = {name: runs[name] for name in ("Pre-LN", "wild")}
    comparison = open_comparison(shown, view="radar")
    view = comparison.views["radar"]
    charts = view.charts
    comparison.step = 20
    assert view.charts is charts
    expected = wb.compare(shown, at=20)
    axes = axes_of(expected, charts.measures)
    for name, chart in charts.charts.items():
        values = [float(expected[axis.measure].sel(architecture=name, source="ours")) for axis in axes]
        np.testing.assert_allclose(chart.lines["ours"].data["x"], outline(axes, values)["x"])
        assert f"{values[0]:.2f}" in chart.labels[0].data["text"][0]
    assert charts.charts["wild"]._note.text == "step 20, no published values"
    view.measures.choose(["spectral_radius", "near_unit_mass"])
    assert comparison.error == "A radar chart needs at least 3 measures; switch on another one."


def test_only_the_visible_view_is_drawn(open_comparison, runs):
    comparison = open_comparison({"Pre-LN": runs["Pre-LN"]})
    assert all(view.canvas is None for view in comparison.views.values())
    comparison.view = "training"
    assert [name for name, view in comparison.views.items() if view.canvas] == ["training"]
    before = comparison.views["table"].table.value
    comparison.step = 30
    assert comparison.views["table"].table.value == before
    comparison.view = "table"
    assert comparison.views["table"].table.value != before


def test_playing_moves_the_step_and_the_other_way_round(open_comparison, runs):
    comparison = open_comparison({"Pre-LN": runs["Pre-LN"]})
    assert (comparison._play.min, comparison._play.max) == (0, 3)
    comparison._play.value = 2
    assert comparison.step == 20
    comparison.step = 10
    assert comparison._play.value == 1
    comparison._speed.value = 100
    assert comparison._play.interval == 100


def test_what_cannot_be_drawn_at_a_step_is_said_however_one_gets_there(open_comparison, runs):
    comparison = open_comparison({"Pre-LN": runs["Pre-LN"], "late": run_of([10, 20])})
    comparison.step = 10
    comparison.models = ["late"]
    for control in (comparison._slider, comparison._play):
        control.value = 0
        expected = "No model shown has spectra of these layers at step 0; choose others or a later step."
        assert comparison.error == expected
        control.value = 1
        assert comparison.error == ""


def test_at_the_end_the_step_follows_a_run_that_grows(open_comparison):
    growing = spectra_over([0, 5, 10, 15], n_layers=3)
    comparison = open_comparison({"a": growing.isel(step=[0]), "b": growing.isel(step=[0])}, view="eigenvalues")
    view = comparison.views["eigenvalues"]
    canvas, panels = view.canvas, view.panels
    comparison.update("a", growing.isel(step=[0, 1]))
    assert (comparison.step, titles(comparison)["b"]) == (5, "b · recorded to step 0")
    np.testing.assert_array_equal(modes_of(comparison, "a"), expected_modes(growing, 5))
    comparison.update("b", growing.isel(step=[0, 1]))
    comparison.step = 0
    comparison.update("a", growing.isel(step=[0, 1, 2]))
    assert (comparison.step, comparison.steps) == (0, [0, 5, 10])
    comparison.step = 10
    comparison.update("b", growing)
    assert (comparison.step, comparison._play.max, comparison._slider.max, comparison._readout.value) == (
        15,
        3,
        3,
        "15",
    )
    assert (view.canvas, view.panels, comparison.error) == (canvas, panels, "")


@pytest.mark.slow
def test_a_growing_run_moves_its_traces_in_place(open_comparison):
    comparison = open_comparison({"a": run_of([0, 10]), "b": run_of([0, 10], seed=5)}, view="training")
    panel = comparison.views["training"].panels.panels["loss"]
    longer = run_of([0, 10, 20])
    comparison.update("a", longer)
    assert comparison.views["training"].panels.panels["loss"] is panel
    np.testing.assert_array_equal(panel.sources["a"].data["value"], longer.monitors["loss"])
    assert panel.figure.x_range.end > 20
    comparison.update("a", run_of([0, 10, 20], n_steps=24, diverges=True))
    panel = comparison.views["training"].panels.panels["loss"]
    assert "× a diverged at step 24" in panel._note.text
    assert comparison.error == ""


def test_a_new_run_and_a_deeper_one_are_taken_in(open_comparison, runs):
    comparison = open_comparison({"Pre-LN": runs["Pre-LN"]}, view="eigenvalues")
    comparison.update("deep", run_of([0, 10], n_layers=6))
    assert comparison.models == ["Pre-LN", "deep"]
    assert comparison.layers == (0, 5)
    assert len(modes_of(comparison, "deep")) == 6 * 12
    assert comparison.error == ""


def test_an_update_that_is_no_run_changes_nothing(open_comparison, runs):
    comparison = open_comparison({"Pre-LN": runs["Pre-LN"]})
    before = comparison.runs
    with pytest.raises(SchemaError, check=says("has no spectra, only monitors; record spectra in")):
        comparison.update("b", xr.DataTree.from_dict({"/monitors": runs["Pre-LN"].monitors.to_dataset()}))
    assert comparison.runs is before


def test_stored_runs_are_opened_by_path(open_comparison, runs, tmp_path):
    path = wb.save(runs["Pre-LN"], tmp_path / "a.zarr")
    comparison = open_comparison({"a": path, "b": str(path)}, view="eigenvalues")
    comparison.step = 30
    np.testing.assert_array_equal(modes_of(comparison, "b"), expected_modes(runs["Pre-LN"].spectra, 30))


def test_spectra_that_are_not_finite_leave_an_empty_panel(open_comparison):
    spectra = spectra_over([0, 10], n_layers=2)
    here = {"step": 1}
    for name, variable in spectra.data_vars.items():
        if variable.dtype.kind in "fc":
            spectra[name][here] = np.nan
    comparison = open_comparison({"a": spectra}, view="eigenvalues")
    comparison.measures = ["spectral_radius"]
    for view in ("layers", "training", "table", "eigenvalues"):
        comparison.view = view
        comparison.step = 10
        assert comparison.error == ""
        comparison.step = 0
    comparison.step = 10
    assert comparison.views["eigenvalues"].panels._notes["a", "above"].text == "no modes"


def test_controls_and_updates_may_come_from_different_threads(open_comparison):
    spectra = spectra_over([0, 1, 2, 3], n_layers=2, width=6)
    comparison = open_comparison({"a": spectra.isel(step=[0, 1])}, view="eigenvalues")

    def move():
        for i in range(40):
            comparison._slider.value = i % 2

    thread = threading.Thread(target=move, daemon=True)
    thread.start()
    for i in range(20):
        comparison.update("a", spectra.isel(step=slice(0, 2 + i // 7)))
    thread.join(60)
    assert not thread.is_alive()
    assert (comparison.steps, comparison.error) == ([0, 1, 2, 3], "")
    np.testing.assert_array_equal(modes_of(comparison, "a"), expected_modes(spectra, comparison.step))


def test_after_close_nothing_reacts_and_nothing_is_left(runs):
    comparison = ArchitectureComparison({"Pre-LN": runs["Pre-LN"]}, view="training")
    comparison.view = "table"
    hidden = comparison.views["training"]
    table = comparison.views["table"].table
    comparison.close()
    before = table.value
    comparison._slider.value = 2
    assert table.value == before
    for widget in (hidden.canvas, hidden.variables, hidden.box, table, comparison._play, comparison.export_bar.path):
        assert widget.comm is None


@pytest.mark.parametrize(
    ("bad", "kind", "error"),
    [
        ({}, SchemaError, says("The runs are an empty dict, expected a non-empty dict of")),
        ([1], SchemaError, says("The runs are of type list, expected a non-empty dict of")),
        ({"a": 3}, SchemaError, says("is of type int, expected a run or a dataset of wb.profile().")),
        ({"a": "nowhere.zarr"}, StoreError, about("path", Path("nowhere.zarr"))),
    ],
)
def test_values_that_are_not_runs_are_rejected(bad, kind, error):
    with pytest.raises(kind, check=error):
        ArchitectureComparison(bad)


def test_spectra_of_several_architectures_or_without_steps_are_rejected(runs):
    several = xr.concat([runs["bare"]] * 2, "architecture", combine_attrs="override")
    with pytest.raises(SchemaError, check=says("has the dimension architecture; select one entry, for")):
        ArchitectureComparison({"a": several})
    with pytest.raises(SchemaError, check=says("with at least one step and increasing values.")):
        ArchitectureComparison({"a": spectra_over([0, 10]).drop_vars("step")})


def test_names_and_numbers_that_do_not_exist_are_rejected(open_comparison, runs):
    comparison = open_comparison({name: runs[name] for name in ("Pre-LN", "slow")})
    for attribute, value, error in (
        ("step", 7, says("No run recorded spectra at step")),
        ("models", "GPT", about("models", "GPT", ("Pre-LN", "slow"))),
        ("models", [], about("models", None, ("Pre-LN", "slow"))),
        ("measures", "beauty", about("measures", "beauty")),
        ("layers", (0, 9), says("choose from")),
        ("view", "pie", about("view", "pie", ("eigenvalues", "layers", "training", "table", "radar"))),
    ):
        with pytest.raises(OptionError, check=error):
            setattr(comparison, attribute, value)
    with pytest.raises(OptionError, check=about("view", "pie")):
        ArchitectureComparison({"a": runs["bare"]}, view="pie")
    with pytest.raises(SchemaError, check=says("; the runs are a.")):
        ArchitectureComparison({"a": runs["bare"]}, published={"b": "Mamba"})
