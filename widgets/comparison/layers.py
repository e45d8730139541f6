"""The view "layers": measures against depth, one line per run, in panels that are built once and updated in place."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
from bokeh.models import BasicTicker, LogScale, Range1d, TapTool

from workbench.errors import OptionError
from workbench.plots import layer_profile
from workbench.plots.figure_inputs import select_layers
from workbench.plots.layer_profile_figure import DEFAULT_MEASURES, LOGARITHMIC, REFERENCE, measure_columns, remark
from workbench.plots.style import log_ticks_bokeh
from workbench.schema.runs import SPECTRA
from workbench.widgets.base import known
from workbench.widgets.comparison.scene import ComparisonView, Scene
from workbench.widgets.panel_grid import fit, grid, own_panel
from workbench.widgets.saved_page import SavedView
from workbench.widgets.tags import Tags
from workbench.widgets.theme import THEMES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    import xarray as xr
    from bokeh.models import ColumnDataSource, GlyphRenderer, GridPlot

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
        self.panels: LayerPanels | None = None

    def draw(self, scene: Scene) -> None:
        """Update the measures in the panels, each of which is built once for all runs."""
        if not self.measures.value:
            raise OptionError("No measure is chosen; switch on at least one.")
        if self.panels is None or self.panels.names != list(scene.runs):
            self.panels = LayerPanels(list(scene.runs), self.theme)
        everything = {name: run.near(scene.step) for name, run in scene.runs.items()}
        if self.panels.arrange(self.measures.value, everything):
            self.put(self.measures, root=self.panels.root)
        with self.batch():
            self.panels.write(scene.spectra(), list(scene.layer_range), depth=_kind_of_depth(scene))

    def saved(self) -> SavedView:
        """Return a view with one panel per measure; the chosen measures are visible at first."""
        panels = known(self.panels)
        models = {
            name: [part for panel in panels.panels.values() for part in panel.parts(name)] for name in panels.names
        }
        signals = {SPECTRA[measure].long_name: [panel.figure] for measure, panel in panels.panels.items()}
        return SavedView("layers", panels.root, models, signals, shown=list(signals))

    def layered(self) -> list[ColumnDataSource]:
        """Return the markers of each panel."""
        panels = [] if self.panels is None else self.panels.panels.values()
        return [source for panel in panels for source in panel.sources.values()]

    def figure(self, scene: Scene, backend: str) -> Any:
        """Return the panels as a figure of `workbench.plots.layer_profile`."""
        spectra = {name: select_layers(data, scene.layer_range) for name, data in scene.titled().items()}
        places = {scene.runs[name].title(scene.step): place for name, place in scene.places.items()}
        return layer_profile(
            spectra, measures=self.measures.value, depth=_kind_of_depth(scene), places=places, backend=backend
        )


class LayerPanels:
    """Panels of several measures in a grid with a shared depth axis; each is built when it is first needed."""

    def __init__(self, names: Sequence[str], theme: str) -> None:
        self.names, self._theme = list(names), theme
        self.panels: dict[str, MeasurePanel] = {}
        self.x_range = Range1d(0, 1)
        self.root: GridPlot | None = None
        self._arranged: tuple[MeasurePanel, ...] = ()

    def arrange(self, measures: Sequence[str], spectra: Mapping[str, xr.Dataset]) -> bool:
        """Arrange the panels of these measures in a grid, and return whether the grid has changed."""
        for measure in measures:
            if measure not in self.panels or not self.panels[measure].suits(spectra):
                self.panels[measure] = MeasurePanel(measure, spectra, self.x_range, theme=self._theme)
        panels = tuple(self.panels[measure] for measure in measures)
        if panels == self._arranged:
            return False
        self._arranged = panels
        self.root = grid([panel.figure for panel in panels], n_columns=2)
        return True

    def write(self, spectra: Mapping[str, xr.Dataset], layers: Sequence[int], *, depth: str) -> None:
        """Update all panels with these runs; see `MeasurePanel.write`."""
        for panel in self._arranged:
            panel.write(spectra, layers, depth=depth)
        depths = [np.asarray(self._arranged[0].sources[name].data["depth"], float) for name in spectra]
        fit(self.x_range, np.concatenate(depths or [np.zeros(0)]))


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
        """Return whether the scale of the axis (linear or logarithmic) suits these spectra."""
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
