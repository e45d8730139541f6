"""Explore eigenvalues of one or several models: choose layers and thresholds, select modes, read the masses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ipywidgets
import numpy as np
import xarray as xr

from workbench.formatting import listed
from workbench.io.store import as_run
from workbench.koopman.measures import remeasure
from workbench.plots import eigenvalue_map
from workbench.plots.figure_inputs import named_spectra, select_layers
from workbench.plots.plane_view import ZOOMS, PlaneView, view_of
from workbench.widgets.base import KINDS, THEMES, WorkbenchWidget
from workbench.widgets.eigenvalue_panels import ZOOM_TIPS, EigenvaluePanels, key_in_words
from workbench.widgets.figure import Figure
from workbench.widgets.saved_page import SavedView, saved_page
from workbench.widgets.tables import SCROLLING, mass_table, mode_table, muted


class SpectrumExplorer(WorkbenchWidget):
    """Eigenvalues of each model in linked panels, with controls of layers, reliability and thresholds.

    Moving a threshold updates the masses and the band. Selecting modes (box, lasso or click) in one panel lists them in
    a table and highlights their layers in the other panels. If thresholds contradict each other, the figure stays
    unchanged and an error is shown under the widget.

    Args:
        spectra: One spectra dataset or run, or several by name or in a list; dims ``layer`` and ``mode``.
        theme: ``"page"``, or ``"projector"`` for large type.

    Attributes:
        layers, near_unit_lower, near_unit_upper, contractive_upper, reliable_residual, reliable_only, zoom: The
            controls; set their ``value`` to drive the widget from code.
        sources: The displayed modes, one ``ColumnDataSource`` per model.
        measured: The displayed spectra, with the masses for the current thresholds.

    Raises:
        SchemaError: If a dataset is not a spectra dataset, or has a dimension of steps or runs.

    Example:
        >>> import workbench as wb
        >>> from workbench import widgets
        >>> model = wb.zoo.transformer(norm="pre_ln", d_model=16, n_layers=3, n_heads=2, vocab_size=256)
        >>> spectra = wb.profile(model, wb.tasks.associative_recall(), n_snapshots=256, progress=False)
        >>> widget = widgets.SpectrumExplorer({"Pre-LN": spectra})
        >>> widget.layers.value = (1, 2)
        >>> widget.summary
        'Eigenvalues of Pre-LN, layers 1 to 2, all modes.'
        >>> widget.close()

    See Also:
        `workbench.profile`: Measures the spectra.
        `workbench.plots.eigenvalue_map`: Draws the same figure without controls.
    """

    kinds = KINDS

    def __init__(
        self,
        spectra: xr.Dataset | xr.DataTree | Mapping[str, xr.Dataset | xr.DataTree] | Sequence[xr.Dataset | xr.DataTree],
        *,
        theme: str = "page",
    ) -> None:
        super().__init__(theme=theme)
        self.spectra = named_spectra(spectra)
        self.measured = dict(self.spectra)
        self._picked: dict[str, set[tuple[int, int]]] = {name: set() for name in self.spectra}
        self._highlighted = dict(self._picked)
        self._is_writing = False
        self._make_controls()
        self._panels = EigenvaluePanels(self.spectra, theme=theme)
        self.sources = self._panels.sources
        self._axes = next(iter(self._panels.figures.values()))
        self.canvas = Figure(self._panels.root, lock=self.turn)
        self.key = ipywidgets.HTML()
        self.masses, self.selection = ipywidgets.HTML(layout=SCROLLING), ipywidgets.HTML(layout=SCROLLING)
        self._fill([self._controls, self.key, self.canvas, self.masses, self.selection], suggested="exports/spectra")
        for control in (*self._thresholds.values(), self.layers, self.reliable_only, self.zoom):
            self._watch(control, lambda _: self.update())
        pick = self._guarded(lambda attr, old, new: self._read_selection())
        for source in self.sources.values():
            source.selected.on_change("indices", pick)
            self._at_close(partial(source.selected.remove_on_change, "indices", pick))
        with self._attempt():
            self.update()

    @property
    def thresholds(self) -> dict[str, float]:
        """The thresholds of the sliders, by the argument names of ``workbench.remeasure()``."""
        return {name: float(slider.value) for name, slider in self._thresholds.items()}

    @property
    def summary(self) -> str:
        """Models and layers in one sentence."""
        first, last = self.layers.value
        return f"Eigenvalues of {listed(self.spectra)}, layers {first} to {last}, {self.zoom.value}."

    def update(self) -> None:
        """Redraw the widget with the current values of the controls; it is called whenever a control changes.

        Raises:
            OptionError: If the thresholds contradict each other; the widget is then unchanged.
        """
        reliable_only = bool(self.reliable_only.value)
        measured = {
            name: select_layers(remeasure(data, **self.thresholds, reliable_only=reliable_only), self._layer_range())
            for name, data in self.spectra.items()
        }
        columns = {
            name: self._panels.columns(name, data, reliable_only=reliable_only) for name, data in measured.items()
        }
        self.measured = measured
        view = view_of(columns, self.zoom.value)
        with self.canvas.batch():
            self._is_writing = True
            try:
                for name, data in measured.items():
                    self._draw(name, data, columns[name], view)
            finally:
                self._is_writing = False
            self._panels.set_view(view)
        self.key.value = muted(key_in_words(measured.values()))
        self.masses.value = mass_table(measured)
        self._highlight()
        self.selection.value = mode_table(self.selected())
        self._settle()

    def selected(self) -> list[dict[str, Any]]:
        """Return the selected modes of the displayed layers as dicts.

        The keys are model, layer, mode, eigenvalue, modulus, residual and is_reliable.
        """
        rows = []
        for name, picked in self._picked.items():
            data = self.measured[name]
            for layer, mode in sorted(picked & set(self._drawn(name))):
                here = data.sel(layer=layer).isel(mode=mode)
                eigenvalue = complex(here["eigenvalue"])
                rows.append(
                    {
                        "model": name,
                        "layer": layer,
                        "mode": mode,
                        "eigenvalue": eigenvalue,
                        "modulus": abs(eigenvalue),
                        "residual": float(here["residual"]),
                        "is_reliable": bool(here["is_reliable"]),
                    }
                )
        return rows

    def figure(self, backend: str = "bokeh") -> Any:
        """Return the current view as a separate figure, for example for ``workbench.plots.save()``."""
        chosen: dict[str, Any] = self.thresholds
        reliable_only = bool(self.reliable_only.value)
        measured = {name: remeasure(data, **chosen) for name, data in self.spectra.items()}
        return eigenvalue_map(
            measured, layers=self._layer_range(), reliable_only=reliable_only, zoom=self.zoom.value, backend=backend
        )

    def close(self) -> None:
        """Remove the widget and all its parts."""
        super().close()
        if hasattr(self, "canvas"):
            self.canvas.document.clear()

    def page(self) -> str:
        """Return the panels as one HTML page with zoom, tooltips, and a choice of models and layers."""
        panels = EigenvaluePanels(self.spectra, theme=self.theme)  # the page needs a separate bokeh document
        chosen: dict[str, Any] = self.thresholds
        measured = {name: remeasure(data, **chosen) for name, data in self.spectra.items()}
        columns = {
            name: panels.columns(name, data, reliable_only=bool(self.reliable_only.value))
            for name, data in measured.items()
        }
        view = view_of(columns)
        for name, data in measured.items():
            panels.write(name, data, columns[name], view)
        panels.set_view(view)
        saved = SavedView(
            "eigenvalues",
            panels.root,
            models={name: [panel] for name, panel in panels.figures.items()},
            planes=list(panels.figures.values()),
            above=key_in_words(measured.values()),
            below=mass_table(measured),
        )
        saved.record()
        n_layers = self.layers.max + 1 if not self.layers.disabled else 1
        return saved_page(
            ", ".join(self.spectra), [saved], steps=[0], step=0, n_layers=n_layers, layers=self.layers.value
        )

    def _shown_runs(self) -> Mapping[str, xr.DataTree]:
        chosen: dict[str, Any] = self.thresholds
        return {name: as_run(remeasure(data, **chosen)) for name, data in self.spectra.items()}

    def _make_controls(self) -> None:
        first = next(iter(self.spectra.values()))
        last = max(int(data["layer"].values[-1]) for data in self.spectra.values())
        look = {"style": {"description_width": "120px"}, "layout": {"width": "auto"}}
        fine = {"step": 0.01, "readout_format": ".2f", **look}

        def threshold(name: str, label: str, lowest: float, highest: float) -> ipywidgets.FloatSlider:
            value = first.attrs[name]
            bounds = {"min": min(lowest, value), "max": max(highest, value)}
            return ipywidgets.FloatSlider(value=value, description=label, **bounds, **fine)

        self.near_unit_lower = threshold("near_unit_lower", "near-unit from", 0.5, 1.2)
        self.near_unit_upper = threshold("near_unit_upper", "near-unit to", 0.8, 1.5)
        self.contractive_upper = threshold("contractive_upper", "contractive below", 0.0, 1.2)
        self.reliable_residual = threshold("reliable_residual", "residual at most", 0.0, 1.0)
        self.layers = ipywidgets.IntRangeSlider(
            value=(0, last), min=0, max=max(last, 1), description="layers", disabled=last == 0, **look
        )
        self.reliable_only = ipywidgets.Checkbox(
            value=False, description="Reliable modes only", indent=False, layout={"width": "auto"}
        )
        self.zoom = ipywidgets.ToggleButtons(options=list(ZOOMS), tooltips=ZOOM_TIPS, style={"button_width": "96px"})
        self._thresholds = {
            name: getattr(self, name)
            for name in ("near_unit_lower", "near_unit_upper", "contractive_upper", "reliable_residual")
        }
        switches = ipywidgets.HBox(
            [self.zoom, self.reliable_only], layout={"align_items": "center", "grid_gap": "16px", "margin": "4px 0"}
        )
        sliders = [self.layers, self.near_unit_lower, self.near_unit_upper]
        sliders += [self.contractive_upper, self.reliable_residual]
        widest, least = (f"{THEMES[self.theme] * pixels:g}px" for pixels in (960, 290))
        columns = f"repeat(auto-fit, minmax(min({least}, 100%), 1fr))"
        grid = ipywidgets.GridBox(sliders, layout={"grid_template_columns": columns, "max_width": widest})
        self._controls = ipywidgets.VBox([grid, switches])

    def _layer_range(self) -> range:
        first, last = self.layers.value
        return range(first, last + 1)

    def _draw(self, name: str, data: xr.Dataset, columns: dict[str, Any], view: PlaneView) -> None:
        self._panels.write(name, data, columns, view)

    def _drawn(self, name: str) -> list[tuple[int, int]]:
        """Return layer and mode of each point, in the order of the points."""
        data = self.sources[name].data
        return list(zip(data["layer"].tolist(), data["mode"].tolist(), strict=True))

    def _read_selection(self) -> None:
        """Read the modes selected in one panel, and highlight the modes of their layers in the others."""
        if self._is_writing:
            return
        for name, source in self.sources.items():
            points = self._drawn(name)
            now = {points[i] for i in source.selected.indices}
            # Modes that a filter hides stay selected until the selection changes.
            if now != self._highlighted[name] & set(points):
                self._picked = {other: now if other == name else set() for other in self.sources}
                break
        self._highlight()
        self.selection.value = mode_table(self.selected())

    def _highlight(self) -> None:
        """Highlight the selected modes in their panel, and the modes of their layers in the others."""
        layers = {layer for picked in self._picked.values() for layer, _ in picked}
        with self.canvas.batch():
            self._is_writing = True
            try:
                for name, source in self.sources.items():
                    linked = {point for point in self._all_points(name) if point[0] in layers}
                    self._highlighted[name] = self._picked[name] or linked
                    marked = [i for i, point in enumerate(self._drawn(name)) if point in self._highlighted[name]]
                    if marked != source.selected.indices:
                        source.selected.indices = marked
            finally:
                self._is_writing = False

    def _all_points(self, name: str) -> set[tuple[int, int]]:
        """Return layer and mode of all modes of a model, including hidden ones."""
        data = self.spectra[name]
        rows, modes = np.nonzero(np.isfinite(data["eigenvalue"].transpose("layer", "mode").values))
        return set(zip(data["layer"].values[rows].tolist(), modes.tolist(), strict=True))
