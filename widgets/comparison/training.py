"""The view "training": traces over steps with a line at the displayed step, built once and updated in place."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import ipywidgets
import numpy as np
from bokeh.models import Line, LogScale, Range1d, Span

from workbench.errors import OptionError
from workbench.plots.style import NEUTRAL, log_ticks_bokeh
from workbench.plots.traces_figure import Trace, TracesPanel, trace_of, traces
from workbench.schema.runs import MONITORS, SPECTRA
from workbench.studies.comparison import ENERGETIC, SPECTRAL
from workbench.widgets.comparison.scene import ComparisonView, Scene
from workbench.widgets.panel_grid import fit, grid, own_panel, set_range
from workbench.widgets.saved_page import SavedView
from workbench.widgets.tables import muted
from workbench.widgets.tags import Tags
from workbench.widgets.theme import THEMES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from bokeh.models import ColumnDataSource, GlyphRenderer, GridPlot

    from workbench.widgets.comparison.recorded_run import RecordedRun


class TrainingView(ComparisonView):
    """Losses and other traces over steps, with a line at the displayed step."""

    tip = "Loss, gradient norm and other traces over all steps, one line per model"

    def __init__(self, lock: AbstractContextManager, theme: str = "page") -> None:
        super().__init__(lock, theme)
        self.variables = Tags(label="traces")
        self.controls = [self.variables]
        self.panels = TracePanels(theme)
        self._offered_for: Mapping[str, RecordedRun] | None = None

    def draw(self, scene: Scene) -> None:
        """Move the line, and update the traces of changed runs."""
        self._offer(scene.runs)
        if not self.variables.options:
            self.box.children = [ipywidgets.HTML(muted("No run has monitors or spectra of several steps."))]
            return
        if not self.variables.value:
            raise OptionError("No trace is chosen; switch on at least one.")
        if self.panels.arrange(self.variables.value, scene.runs, scene.shown):
            self.put(self.variables, root=self.panels.root)
        with self.batch():
            self.panels.write(scene.runs, scene.shown, scene.step)

    def saved(self) -> SavedView:
        """Return a view with one panel per trace; the chosen traces are visible at first."""
        panels = self.panels.panels
        names = dict.fromkeys(name for panel in panels.values() for name in panel.sources)
        models = {name: [part for panel in panels.values() for part in panel.parts(name)] for name in names}
        texts = {option["name"]: option["text"] for option in self.variables.options}
        signals = {texts[variable]: [panel.figure] for variable, panel in panels.items()}
        return SavedView("training", self.panels.root, models, signals, shown=list(signals))

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


class TracePanels:
    """A column of panels with a shared step axis, one per variable; each is built when it is first needed."""

    def __init__(self, theme: str) -> None:
        self._theme = theme
        self.panels: dict[str, TracePanel] = {}
        self.x_range = Range1d(0, 1)
        self.root: GridPlot | None = None
        self._arranged: tuple[TracePanel, ...] = ()

    def arrange(self, variables: Sequence[str], runs: Mapping[str, RecordedRun], shown: Sequence[str]) -> bool:
        """Arrange the panels of these variables in a column, and return whether it has changed."""
        for variable in variables:
            if variable not in self.panels or not self.panels[variable].suits(runs, shown):
                self.panels[variable] = TracePanel(variable, runs, shown, self.x_range, theme=self._theme)
        panels = tuple(self.panels[variable] for variable in variables)
        if panels == self._arranged:
            return False
        self._arranged = panels
        self.root = grid([panel.figure for panel in panels], n_columns=1)
        return True

    def write(self, runs: Mapping[str, RecordedRun], shown: Sequence[str], step: int) -> None:
        """Update all panels with these runs; see `TracePanel.write`."""
        for panel in self._arranged:
            panel.write(runs, shown, step)
        ends = [end for name in shown for end in runs[name].extent]
        fit(self.x_range, np.array(ends, float), padding=0.02)


class TracePanel:
    """One variable over steps, one line per run; data, visibility and the line at a step are updated in place.

    It contains the runs that were shown when it was built, which determine the scale of its axis; it contains all runs
    if none of those has the variable.
    """

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
