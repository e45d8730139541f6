"""The views "table" and "radar": metrics of every run, with published values."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import ipywidgets
import numpy as np
import xarray as xr

from workbench.errors import OptionError
from workbench.formatting import compact
from workbench.plots.comparison_figures import (
    DEFAULT_MEASURES,
    RadarChart,
    Texts,
    axes_of,
    labeled_points,
    outline,
    radar,
)
from workbench.plots.figure_files import bokeh_plot
from workbench.plots.style import shortened
from workbench.studies.comparison import compare_checked
from workbench.widgets.base import known
from workbench.widgets.comparison.panels import grid
from workbench.widgets.comparison.scene import ComparisonView, Scene
from workbench.widgets.saved_page import SavedView
from workbench.widgets.tables import NAME, SCROLLING, TABLE, Tags, muted
from workbench.widgets.text_picture import text_picture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from bokeh.models import ColumnDataSource, GridPlot

    from workbench.plots.comparison_figures import RadarAxis


_HEAD = "padding:2px 0 2px 9px;text-align:right;vertical-align:bottom;line-height:1.25;font-weight:600"
_CELL = "padding:1px 0 1px 9px;text-align:right;white-space:nowrap"
_MUTED = "color:var(--jp-ui-font-color2,GrayText)"
_LINE = "border-top:1px solid var(--jp-border-color2,#8884)"
#: Label of the row below a run.
_PUBLISHED = "published"
#: Columns of the table, in order; columns without values are omitted.
_MEASURES = (
    "near_unit_mass", "expansive_mass", "contractive_mass", "spectral_radius", "eigenvector_condition",
    "nonlinearity_ratio", "kreiss_constant", "reliable_fraction", "rank", "final_loss", "best_accuracy",
    "divergence_step",
)  # fmt: skip


class TableView(ComparisonView):
    """Metrics of every run, with published values below."""

    tip = "Means over layers, with published values below"
    refused_kinds = dict.fromkeys(
        (".png", ".svg"), "The table is not a figure; choose HTML or netCDF, or another view."
    )

    def __init__(self, lock: AbstractContextManager, theme: str = "page") -> None:
        super().__init__(lock, theme)
        self.table = ipywidgets.HTML(layout=SCROLLING)
        self.box.children = [self.table]

    def draw(self, scene: Scene) -> None:
        """Update the table."""
        self.table.value = comparison_table(scene)

    def picture(self, scene: Scene) -> bytes:
        """Return the table as PNG."""
        rows, note = comparison_rows(scene)
        return text_picture("Comparison of architectures", [note], rows)

    def saved(self) -> SavedView:
        """Return a view that is only text."""
        return SavedView("table", None, below=self.table.value)


def comparison_of(scene: Scene) -> xr.Dataset:
    """Return the comparison of the displayed runs at this step and in these layers, as `workbench.compare` does."""
    spectra = {name: scene.layers_of(name) for name in scene.shown}
    spectra = {name: data for name, data in spectra.items() if data.sizes["layer"]}
    if not spectra:
        raise OptionError(
            f"No model shown has spectra of these layers at step {scene.step}; choose others or a later step."
        )
    runs = {name: scene.runs[name].tree for name in spectra}  # checked by the constructor
    return compare_checked(runs, spectra, published=scene.published_of(spectra))


def comparison_rows(scene: Scene) -> tuple[list[list[str]], str]:
    """Return the comparison as text: a header, one row per run, followed by its published values; and a note."""
    comparison = comparison_of(scene)
    ours = {name: _of(comparison[name], "ours") for name in _MEASURES}
    published = {name: _of(comparison[name], "published") for name in _MEASURES}
    measures = [name for name in _MEASURES if not (np.isnan(ours[name]).all() and np.isnan(published[name]).all())]
    # Values that are equal for all runs are in the note.
    measures = [name for name in measures if name not in ("rank", "kreiss_constant") or len(set(ours[name])) > 1]
    rows = [["", *(comparison[name].attrs["long_name"] for name in measures)]]
    for index, model in enumerate(comparison["architecture"].values.tolist()):
        rows.append([model, *(compact(ours[name][index]) for name in measures)])
        theirs = [published[name][index] for name in measures]
        if not np.isnan(theirs).all():
            rows.append([_PUBLISHED, *("" if np.isnan(value) else f"{value:g}" for value in theirs)])
    return rows, _note(scene, comparison)


def comparison_table(scene: Scene) -> str:
    """Return the comparison as an HTML table."""
    (heads, *rows), note = comparison_rows(scene)
    head = "".join(f'<th style="{_HEAD}">{html.escape(name).replace("-", "&#8209;")}</th>' for name in heads[1:])
    body = "".join(
        _row(html.escape(name), cells, _MUTED if name == _PUBLISHED else f"{_LINE};font-weight:500")
        for name, *cells in rows
    )
    table = f'<table style="{TABLE};font-size:12px"><tr><td></td>{head}</tr>{body}</table>'
    look = f"{_MUTED};line-height:1.5;margin-top:4px;max-width:780px;white-space:normal"
    return f'{table}<div style="{look}">{html.escape(note)}</div>'


def _of(values: xr.DataArray, source: str) -> np.ndarray:
    """Return one number per run; NaN if this source has none."""
    if "source" in values.dims:
        return values.sel(source=source).values
    return values.values if source == "ours" else np.full(values.shape, np.nan)


def _row(name: str, cells: list[str], style: str) -> str:
    body = "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells)
    return f'<tr style="{style}"><th scope="row" style="{NAME};font-weight:inherit">{name}</th>{body}</tr>'


def _note(scene: Scene, comparison: xr.Dataset) -> str:
    layers = "all layers" if scene.is_every_layer else f"layers {scene.layers[0]} to {scene.layers[1]}"
    late = [
        f"{name}: {scene.runs[name].remark(scene.step)}" for name in scene.shown if scene.runs[name].remark(scene.step)
    ]
    lines = [f"Spectra at step {scene.step}, mean over {layers} with a nonzero update"]
    lines += [", ".join(late)] if late else []
    if np.isinf(comparison["kreiss_constant"].sel(source="ours")).all():
        lines.append("All Kreiss constants are infinite")
    ranks = set(comparison["rank"].values)
    lines.append(f"All at rank {ranks.pop():g}" if len(ranks) == 1 else "M is comparable only at equal rank")
    if any(comparison["published_as"].values):
        lines.append(f"Published values: at initialization, {comparison.attrs['source']}")
    return ". ".join(lines) + "."


_N_COLUMNS = 2
_FEWEST_MEASURES = 3


class RadarView(ComparisonView):
    """One radar chart per run: means over layers, measured and published."""

    tip = "Means over layers, one axis per measure; published values are dashed"

    def __init__(self, lock: AbstractContextManager, theme: str = "page") -> None:
        super().__init__(lock, theme)
        self.measures = Tags(label="measures", value=list(DEFAULT_MEASURES))
        self.key = ipywidgets.HTML()
        self.controls = [self.measures]
        self.charts: RadarCharts | None = None

    def draw(self, scene: Scene) -> None:
        """Update the charts, which are built once for all runs."""
        comparison = comparison_of(scene)
        self._offer(comparison)
        if len(self.measures.value) < _FEWEST_MEASURES:
            raise OptionError(f"A radar chart needs at least {_FEWEST_MEASURES} measures; switch on another one.")
        measures, names = list(self.measures.value), list(scene.runs)
        notes = {name: scene.runs[name].remark(scene.step) or f"step {scene.step}" for name in scene.shown}
        charts = self.charts
        if charts is None or (charts.names, charts.measures) != (names, measures):
            charts = self.charts = RadarCharts(names, measures, comparison, theme=self.theme)
        if charts.arrange(comparison["architecture"].values.tolist()):
            self.put(self.measures, self.key, root=charts.root)
        with self.batch():
            charts.write(comparison, notes)
        self.key.value = muted(html.escape(charts.key).replace("\n", " &ensp; "))

    def saved(self) -> SavedView:
        """Return a view with one chart per model."""
        charts = known(self.charts)
        models = {name: [chart.figure] for name, chart in charts.charts.items()}
        return SavedView("radar", charts.root, models, above=self.key.value)

    def figure(self, scene: Scene, backend: str) -> Any:
        """Return the charts as a figure of `workbench.plots.radar`."""
        comparison = comparison_of(scene)
        self._offer(comparison)
        return radar(comparison, measures=self.measures.value, places=scene.places, backend=backend)

    def _offer(self, comparison: xr.Dataset) -> None:
        if not self.measures.options:
            compared = [name for name, data in comparison.data_vars.items() if "source" in data.dims]
            about = {name: comparison[name].attrs for name in dict.fromkeys([*DEFAULT_MEASURES, *compared])}
            self.measures.options = [
                {"name": name, "text": attrs["long_name"], "tip": attrs["meaning"].capitalize()}
                for name, attrs in about.items()
            ]


class RadarCharts:
    """A chart for every run, of which some are shown."""

    def __init__(self, names: Sequence[str], measures: Sequence[str], comparison: xr.Dataset, *, theme: str) -> None:
        self._n_columns = _N_COLUMNS if theme == "page" else 1
        self.names, self.measures = list(names), list(measures)
        # A chart without missing values has all parts; missing values are removed when the chart is updated.
        like = comparison.isel(architecture=np.zeros(len(names), int)).assign_coords(architecture=list(names))
        like = like.assign({name: like[name].where(False, 1.0) for name in measures})
        plot = bokeh_plot(radar(like, measures=measures))
        panels = plot.traverse(lambda panel: panel, [lambda part: type(part).__name__ == "OverlayPlot"])
        plot.state.document.clear()  # the charts move into another grid
        self.root: GridPlot | None = None
        self.key = ""
        self.charts = {name: Chart(panel) for name, panel in zip(names, panels, strict=True)}
        for name, chart in self.charts.items():
            chart.figure.title.text = shortened(name, chart.figure.frame_width)
        self._arranged: list[str] = []

    def arrange(self, names: Sequence[str]) -> bool:
        """Arrange these charts in a grid, and return whether the grid has changed."""
        if list(names) == self._arranged:
            return False
        self._arranged = list(names)
        self.root = grid([self.charts[name].figure for name in names], n_columns=self._n_columns)
        self.root.toolbar_location = None
        return True

    def write(self, comparison: xr.Dataset, notes: Mapping[str, str]) -> None:
        """Update the charts with a comparison of the displayed runs and a note above each chart."""
        axes = axes_of(comparison, self.measures)
        for place, name in enumerate(self._arranged):
            chart = RadarChart.of(comparison, axes, name, place)
            texts = Texts.of(axes, chart, has_key=place == 0)
            note = notes[name] if chart.has_published else f"{notes[name]}, no published values"
            self.charts[name].write(axes, chart, texts.at_axes, note)
            self.key = texts.key or self.key


class Chart:
    """The variable parts of one chart."""

    def __init__(self, panel: Any) -> None:
        self.figure = panel.state
        (self._note,) = self.figure.select({"name": "note_above"})
        for note in self.figure.select({"name": "note_below"}):
            note.visible = False
        _, fill, ours, published, our_points, published_points, *labels = (
            part.handles["source"] for part in panel.subplots.values()
        )
        self.fill: ColumnDataSource = fill
        self.lines: dict[str, ColumnDataSource] = {"ours": ours, "published": published}
        self.points: dict[str, ColumnDataSource] = {"ours": our_points, "published": published_points}
        self.labels: list[ColumnDataSource] = labels

    def write(self, axes: list[RadarAxis], chart: RadarChart, at_axes: Sequence[str], note: str) -> None:
        """Update the chart with one run."""
        for source, values in chart.values.items():
            columns = outline(axes, values)
            self.lines[source].data = {key: columns[key] for key in ("x", "y")}
            self.points[source].data = labeled_points(axes, columns, who=f"{chart.name}, {source}")
            if source == "ours":
                is_complete = np.isfinite(columns["x"]).all()
                self.fill.data = {
                    "xs": [[[columns["x"]]]] if is_complete else [],
                    "ys": [[[columns["y"]]]] if is_complete else [],
                }
        for label, text in zip(self.labels, at_axes, strict=True):
            label.data = {**label.data, "text": [text]}
        self._note.text = note
