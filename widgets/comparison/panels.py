"""The views "eigenvalues", "layers" and "training", in panels that are built once and updated in place."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import ipywidgets
import numpy as np
import xarray as xr
from bokeh.layouts import gridplot
from bokeh.models import BasicTicker, Line, LogScale, Range1d, Span, TapTool

from workbench.errors import OptionError
from workbench.plots import eigenvalue_map, layer_profile
from workbench.plots.curve_figures import (
    DEFAULT_MEASURES,
    LOGARITHMIC,
    REFERENCE,
    Trace,
    TracesPanel,
    measure_columns,
    remark,
    trace_of,
    traces,
)
from workbench.plots.figure_files import bokeh_plot
from workbench.plots.figure_inputs import select_layers
from workbench.plots.plane_view import ZOOMS, view_of
from workbench.plots.style import NEUTRAL, log_ticks_bokeh, note_bokeh
from workbench.schema.runs import MONITORS, SPECTRA
from workbench.studies.comparison import ENERGETIC, SPECTRAL
from workbench.widgets.base import THEMES, known
from workbench.widgets.comparison.scene import ComparisonView, Scene, labeled
from workbench.widgets.eigenvalue_panels import ZOOM_TIPS, EigenvaluePanels, grid_of, key_in_words
from workbench.widgets.saved_page import SavedView
from workbench.widgets.tables import Tags, muted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from bokeh.models import ColumnDataSource, GlyphRenderer, GridPlot, Range1d, Title
    from bokeh.plotting import figure

    from workbench.widgets.comparison.scene import RecordedRun


def own_panel(drawing: Any, x_range: Range1d, *, frame_width: int) -> tuple[Any, figure, Title]:
    """Return the single panel of a figure, for use in a grid and for updates in place."""
    plot = bokeh_plot(drawing)
    (panel,) = plot.traverse(lambda part: part, [lambda part: type(part).__name__ == "OverlayPlot"])
    plot.state.document.clear()  # the panel moves into another grid
    panel.state.update(x_range=x_range, frame_width=frame_width)
    note_bokeh("")(panel, None)
    for legend in panel.state.legend:
        legend.visible = False
    return panel, panel.state, panel.state.select_one({"name": "note_above"})


def grid(figures: Sequence[figure], *, n_columns: int) -> GridPlot:
    """Arrange panels in rows with one toolbar."""
    options = {"logo": None, "active_drag": None, "autohide": False}
    return gridplot(list(figures), ncols=n_columns, merge_tools=True, toolbar_location="above", toolbar_options=options)


def fit(axis: Range1d, values: np.ndarray, *, is_logarithmic: bool = False, padding: float = 0.08) -> None:
    """Fit a range to the finite values with some padding; without finite values it stays unchanged."""
    values = values[np.isfinite(values)]
    if is_logarithmic:
        values = np.log10(values[values > 0])
    if not len(values):
        return
    lowest, highest = values.min(), values.max()
    room = padding * (highest - lowest) or 0.05 * max(abs(highest), 1.0)
    ends = np.array([lowest - room, highest + room])
    set_range(axis, *(10.0**ends if is_logarithmic else ends).tolist())


def set_range(axis: Range1d, start: float, end: float) -> None:
    """Set a range; an unchanged range is not written again, so that the user's zoom is kept."""
    if (axis.reset_start, axis.reset_end) != (start, end):
        axis.update(start=start, end=end, reset_start=start, reset_end=end)


class PanelGrid:
    """Panels by name in a grid with a shared horizontal axis; each is built when it is first needed."""

    def __init__(self, n_columns: int) -> None:
        self._n_columns = n_columns
        self.panels: dict[str, Any] = {}
        self.x_range = Range1d(0, 1)
        self.root: GridPlot | None = None
        self.shown: tuple[Any, ...] = ()

    def arrange(self, names: Sequence[str], suits: Callable[[Any], bool], make: Callable[[str], Any]) -> bool:
        """Arrange these panels, of which those that do not suit are made again; return whether the grid has changed."""
        for name in names:
            if name not in self.panels or not suits(self.panels[name]):
                self.panels[name] = make(name)
        panels = tuple(self.panels[name] for name in names)
        if panels == self.shown:
            return False
        self.shown = panels
        self.root = grid([panel.figure for panel in panels], n_columns=self._n_columns)
        return True

    def saved(self, view: str, titles: Mapping[str, str]) -> SavedView:
        """Return a view of all panels, which are hidden by their titles, for a page without a kernel."""
        panels = self.panels
        names = dict.fromkeys(name for panel in panels.values() for name in panel.sources)
        models = {name: [part for panel in panels.values() for part in panel.parts(name)] for name in names}
        signals = {titles[name]: [panel.figure] for name, panel in panels.items()}
        return SavedView(view, self.root, models, signals, shown=list(signals))


#: All numeric variables per layer.
LAYER_MEASURES = [name for name, rule in SPECTRA.items() if rule.dims == ("layer",) and rule.kind != "b"]
_AXIS_LABELS = {"index": "layer", "fraction": "depth (0 first, 1 last layer)"}


class LayerView(ComparisonView):
    """Measures against depth, one line per run."""

    tip = "Measures of each layer against depth, with all models in one panel"

    def __init__(self, lock: AbstractContextManager, theme: str = "page") -> None:
        super().__init__(lock, theme)
        options = [
            {"name": name, "text": SPECTRA[name].long_name, "tip": SPECTRA[name].meaning.capitalize()}
            for name in LAYER_MEASURES
        ]
        self.measures = Tags(label="measures", options=options, value=list(DEFAULT_MEASURES))
        self.controls = [self.measures]
        self.panels = PanelGrid(2)

    def draw(self, scene: Scene) -> None:
        """Update the measures in the panels, each of which is built once for all runs."""
        if not self.measures.value:
            raise OptionError("No measure is chosen; switch on at least one.")
        everything = {name: run.near(scene.step) for name, run in scene.runs.items()}
        panels, spectra = self.panels, scene.spectra()

        def make(measure: str) -> MeasurePanel:
            return MeasurePanel(measure, everything, panels.x_range, theme=self.theme)

        if panels.arrange(self.measures.value, lambda panel: panel.suits(everything), make):
            self.put(self.measures, root=panels.root)
        with self.batch():
            for panel in panels.shown:
                panel.write(spectra, list(scene.layer_range), depth=_kind_of_depth(scene))
            depths = [np.asarray(panels.shown[0].sources[name].data["depth"], float) for name in spectra]
            fit(panels.x_range, np.concatenate(depths or [np.zeros(0)]))

    def saved(self) -> SavedView:
        """Return a view with one panel per measure; the chosen measures are visible at first."""
        return self.panels.saved("layers", {option["name"]: option["text"] for option in self.measures.options})

    def layered(self) -> list[ColumnDataSource]:
        """Return the markers of each panel."""
        return [source for panel in self.panels.panels.values() for source in panel.sources.values()]

    def figure(self, scene: Scene, backend: str) -> Any:
        """Return the panels as a figure of `workbench.plots.layer_profile`."""
        spectra = {name: select_layers(data, scene.layer_range) for name, data in scene.titled().items()}
        places = {scene.runs[name].title(scene.step): place for name, place in scene.places.items()}
        return layer_profile(
            spectra, measures=self.measures.value, depth=_kind_of_depth(scene), places=places, backend=backend
        )


class MeasurePanel:
    """One measure against depth, one line per run; data, visibility and ranges are updated in place."""

    def __init__(self, measure: str, spectra: Mapping[str, xr.Dataset], x_range: Range1d, *, theme: str) -> None:
        self.measure = measure
        self._n_letters = round(52 / THEMES[theme])
        drawing = layer_profile(spectra, measures=[measure], depth="index")
        self._plot, self.figure, self._note = own_panel(drawing, x_range, frame_width=330)
        self.is_logarithmic = isinstance(self.figure.y_scale, LogScale)
        self._is_wide: bool | None = None
        parts = [part.handles for part in self._plot.subplots.values() if "glyph_renderer" in part.handles]
        self._lines = dict(zip(spectra, parts[0::2], strict=True))
        self._markers = dict(zip(spectra, parts[1::2], strict=True))
        self.sources: dict[str, ColumnDataSource] = {name: part["source"] for name, part in self._markers.items()}
        self.figure.add_tools(TapTool())
        for axis in self.figure.xaxis:
            axis.ticker = BasicTicker(num_minor_ticks=0)
        for part in self._markers.values():  # holoviews writes a constant if all values are equal
            part["glyph_renderer"].glyph.fill_alpha = "fill"

    def parts(self, name: str) -> list[GlyphRenderer]:
        """Return the glyphs of a run."""
        return [part["glyph_renderer"] for part in (self._lines[name], self._markers[name])]

    def suits(self, spectra: Mapping[str, xr.Dataset]) -> bool:
        """Return whether the panel has these models, and the scale of its axis (linear or logarithmic) suits them."""
        if list(spectra) != list(self.sources):
            return False
        if self.measure not in LOGARITHMIC:
            return True
        values = np.concatenate([data[self.measure].values.astype(float) for data in spectra.values()])
        values = values[np.isfinite(values)]
        return not len(values) or self.is_logarithmic == bool((values > 0).all())

    def write(self, spectra: Mapping[str, xr.Dataset], layers: Sequence[int], *, depth: str) -> None:
        """Show these runs and hide all others."""
        values = [np.array([REFERENCE[self.measure]])] if self.measure in REFERENCE else [np.zeros(0)]
        for name, source in self.sources.items():
            for part in self.parts(name):
                part.visible = name in spectra
            if name in spectra:
                columns = measure_columns(spectra[name], self.measure, depth=depth)
                chosen = np.isin(columns["layer"], layers)
                source.data = {key: np.asarray(column)[chosen] for key, column in columns.items()}
                self._lines[name]["source"].data = {key: source.data[key] for key in ("depth", self.measure)}
                values.append(source.data[self.measure])
        fit(self.figure.y_range, np.concatenate(values), is_logarithmic=self.is_logarithmic)
        if self.is_logarithmic:
            is_wide = self.figure.y_range.end >= 100 * self.figure.y_range.start
            if is_wide != self._is_wide:  # new ticks are slow to draw, and rarely change between steps
                self._is_wide = is_wide
                log_ticks_bokeh(self._plot, None)
        selected = {name: select_layers(data, layers) for name, data in spectra.items()}
        lines = textwrap.wrap(remark(selected, self.measure), self._n_letters, max_lines=2, placeholder=" …")
        self._note.text = "\n".join(lines)
        (axis,) = self.figure.xaxis
        axis.axis_label = _AXIS_LABELS[depth]
        axis.ticker.min_interval = 1 if depth == "index" else 0


def _kind_of_depth(scene: Scene) -> str:
    """Return "fraction" for models of unequal depth if all layers are shown, else "index"."""
    is_equal = len({scene.runs[name].n_layers for name in scene.shown}) == 1
    return "index" if is_equal or not scene.is_every_layer else "fraction"


class TrainingView(ComparisonView):
    """Losses and other traces over steps, with a line at the displayed step."""

    tip = "Loss, gradient norm and other traces over all steps, one line per model"

    def __init__(self, lock: AbstractContextManager, theme: str = "page") -> None:
        super().__init__(lock, theme)
        self.variables = Tags(label="traces")
        self.controls = [self.variables]
        self.panels = PanelGrid(1)
        self._offered_for: Mapping[str, RecordedRun] | None = None

    def draw(self, scene: Scene) -> None:
        """Move the line, and update the traces of changed runs."""
        self._offer(scene.runs)
        if not self.variables.options:
            self.box.children = [ipywidgets.HTML(muted("No run has monitors or spectra of several steps."))]
            return
        if not self.variables.value:
            raise OptionError("No trace is chosen; switch on at least one.")
        panels, runs, shown = self.panels, scene.runs, scene.shown

        def make(variable: str) -> TracePanel:
            return TracePanel(variable, runs, shown, panels.x_range, theme=self.theme)

        if panels.arrange(self.variables.value, lambda panel: panel.suits(runs, shown), make):
            self.put(self.variables, root=panels.root)
        with self.batch():
            for panel in panels.shown:
                panel.write(runs, shown, scene.step)
            fit(panels.x_range, np.array([end for name in shown for end in runs[name].extent], float), padding=0.02)

    def saved(self) -> SavedView:
        """Return a view with one panel per trace; the chosen traces are visible at first."""
        return self.panels.saved("training", {option["name"]: option["text"] for option in self.variables.options})

    def figure(self, scene: Scene, backend: str) -> Any:
        """Return the panels as a figure of `workbench.plots.traces`."""
        self._offer(scene.runs)
        trees = {name: scene.runs[name].tree for name in scene.shown}
        return traces(trees, variables=self.variables.value, places=scene.places, backend=backend)

    def _offer(self, runs: Mapping[str, RecordedRun]) -> None:
        """Offer all traces that any run has."""
        if runs is self._offered_for:
            return
        self._offered_for = runs
        monitors = [run.part("monitors") for run in runs.values()]
        names = dict.fromkeys([*MONITORS, *(str(name) for data in monitors if data is not None for name in data)])
        offered = set(self.variables.names)  # a trace is never withdrawn
        options = []
        for name in dict.fromkeys([*names, *SPECTRAL, *ENERGETIC]):
            if name in offered or any(np.isfinite(trace_of(run.tree, name, "").value).any() for run in runs.values()):
                about = SPECTRA.get(name) or MONITORS.get(name)
                text = about.long_name if about else name.replace("_", " ")
                options.append({"name": name, "text": text, "tip": about.meaning.capitalize() if about else ""})
        is_first = not self.variables.options and not self.variables.value
        if options != self.variables.options:
            self.variables.options = options
        if is_first:
            available = self.variables.names
            default = ("loss", "grad_norm") if "loss" in available else ("near_unit_mass", "spectral_radius")
            self.variables.value = [name for name in available if name in default]


class TracePanel:
    """One variable over steps, one line per run, of the runs shown when it was built (all if none of those has it)."""

    def __init__(
        self, variable: str, runs: Mapping[str, RecordedRun], shown: Sequence[str], x_range: Range1d, *, theme: str
    ) -> None:
        self.variable = variable
        self._n_letters = round(90 / THEMES[theme])
        self._lines: dict[str, Trace] = {}
        self._runs: dict[str, RecordedRun] = {}
        self._lines, self._runs = self._read(runs), dict(runs)
        drawn = list(shown) if _is_any_recorded(self._lines, shown) else list(runs)
        places = {name: place for place, name in enumerate(runs)}
        drawing = traces({name: runs[name].tree for name in drawn}, variables=[variable], places=places)
        self._plot, self.figure, self._note = own_panel(drawing, x_range, frame_width=680)
        self.cursor = Span(dimension="height", line_color=NEUTRAL, line_width=1.5, line_dash=[4, 3])
        self.figure.add_layout(self.cursor)
        # A run has a line, optionally markers with the same columns, and optionally a cross at its divergence.
        self._parts: dict[str, list[dict[str, Any]]] = {}
        names = iter(drawn)
        for part in self._plot.subplots.values():
            if isinstance(part.handles["glyph"], Line):
                name = next(names)
            self._parts.setdefault(name, []).append(part.handles)
        self.sources: dict[str, ColumnDataSource] = {name: parts[0]["source"] for name, parts in self._parts.items()}
        self._is_logarithmic = isinstance(self.figure.y_scale, LogScale)
        self._shown: tuple[str, ...] = ()

    def parts(self, name: str) -> list[GlyphRenderer]:
        """Return the glyphs of a run; empty if the panel does not contain it."""
        return [part["glyph_renderer"] for part in self._parts.get(name, [])]

    def suits(self, runs: Mapping[str, RecordedRun], shown: Sequence[str]) -> bool:
        """Return whether the panel can be updated with the current state of these runs."""
        if list(runs) != list(self._runs) or not set(shown) <= set(self.sources):
            return False
        lines = self._read(runs)
        if any((lines[name].cross is None) != (self._lines[name].cross is None) for name in self.sources):
            return False
        is_fitting = TracesPanel.of([lines[name] for name in shown]).is_logarithmic == self._is_logarithmic
        return is_fitting or not _is_any_recorded(lines, shown)

    def write(self, runs: Mapping[str, RecordedRun], shown: Sequence[str], step: int) -> None:
        """Show these runs, hide all others, and put the line at the step."""
        self.cursor.location = step
        changed = [name for name, run in runs.items() if run is not self._runs[name]]
        if not changed and tuple(shown) == self._shown:
            return
        self._lines = self._read(runs)
        self._runs, self._shown = dict(runs), tuple(shown)
        panel = TracesPanel.of([self._lines[name] for name in shown])
        for name, parts in self._parts.items():
            line = self._lines[name]
            for part in parts:
                part["glyph_renderer"].visible = name in shown
                if _is_cross(part) and line.cross is not None:
                    step, value = line.cross
                    part["source"].data = {"step": [step], "value": [min(value, panel.limits[1])]}
                elif name in changed:
                    part["source"].data = line.columns
        set_range(self.figure.y_range, *panel.view)
        if self._is_logarithmic:
            log_ticks_bokeh(self._plot, None)
        crosses = [
            f"× {name} diverged at step {runs[name].diverged_at}"
            for name in shown
            if self._lines[name].cross is not None
        ]
        note = "; ".join(filter(None, [*crosses, panel.note]))
        self._note.text = "\n".join(textwrap.wrap(note, self._n_letters, max_lines=2, placeholder=" …"))

    def _read(self, runs: Mapping[str, RecordedRun]) -> dict[str, Trace]:
        """Return the lines of the runs, reusing those of unchanged runs."""
        return {
            name: self._lines[name] if run is self._runs.get(name) else trace_of(run.tree, self.variable, name)
            for name, run in runs.items()
        }


def _is_any_recorded(lines: Mapping[str, Trace], names: Sequence[str]) -> bool:
    return any(len(lines[name].step) for name in names)


def _is_cross(part: Mapping[str, Any]) -> bool:
    return not isinstance(part["glyph"], Line) and part["glyph"].marker == "x"


class EigenvalueView(ComparisonView):
    """Eigenvalue maps in a grid with shared axes."""

    tip = "Eigenvalues in the complex plane, one panel per model"

    def __init__(self, lock: AbstractContextManager, theme: str = "page") -> None:
        super().__init__(lock, theme)
        self.zoom = ipywidgets.ToggleButtons(options=list(ZOOMS), tooltips=ZOOM_TIPS, style={"button_width": "96px"})
        self.key = ipywidgets.HTML(layout={"margin": "2px 2px 2px 12px"})
        self._zoom_row = labeled("zoom", self.zoom, self.key)
        self.controls = [self.zoom]
        self.panels: EigenvaluePanels | None = None
        self._built_for: Any = None
        self._arranged: tuple[str, ...] = ()

    def draw(self, scene: Scene) -> None:
        """Update the modes in the panels, which are built once for all runs."""
        depths = {name: run.n_layers for name, run in scene.runs.items()}
        panels = self.panels
        if panels is None or depths != self._built_for:
            self.withdraw()
            near = {name: run.near(scene.step) for name, run in scene.runs.items()}
            panels = self.panels = EigenvaluePanels(near, theme=self.theme)
            self._built_for, self._arranged = depths, ()
        if scene.shown != self._arranged:
            self.withdraw()
            panels.arrange(scene.shown)
            self.put(self._zoom_row, root=panels.root)
            self._arranged = scene.shown
        data = {name: scene.layers_of(name) for name in scene.shown}
        columns = {name: panels.columns(name, spectra) for name, spectra in data.items()}
        view = view_of(columns, self.zoom.value)
        with self.batch():
            for name, spectra in data.items():
                remark = scene.runs[name].remark(scene.step)
                panels.write(name, spectra, columns[name], view, remark=remark)
            panels.set_view(view)
        self.key.value = muted(key_in_words(data.values()))

    def saved(self) -> SavedView:
        """Return a view with one panel per model."""
        panels = known(self.panels)
        models = {name: [panel] for name, panel in panels.figures.items()}
        return SavedView("eigenvalues", panels.root, models, planes=list(panels.figures.values()), above=self.key.value)

    def layered(self) -> list[ColumnDataSource]:
        """Return the modes of each panel."""
        return [] if self.panels is None else list(self.panels.sources.values())

    def figure(self, scene: Scene, backend: str) -> Any:
        """Return the panels as a figure of `workbench.plots.eigenvalue_map`."""
        spectra = scene.titled()
        return eigenvalue_map(
            spectra, layers=scene.layer_range, zoom=self.zoom.value, columns=grid_of(len(spectra))[0], backend=backend
        )
