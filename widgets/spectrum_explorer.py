"""Look at eigenvalues of one or several models: choose layers and thresholds, select modes, read the masses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.koopman.measures import remeasure
from workbench.plots import eigenvalue_map
from workbench.plots.mode_columns import view_of
from workbench.plots.spectra_inputs import named_spectra, select_layers
from workbench.widgets.base import WorkbenchWidget, known
from workbench.widgets.eigenvalue_panels import VIEW_TIPS, VIEWS, EigenvaluePanels
from workbench.widgets.figure import Figure
from workbench.widgets.tables import mass_table, mode_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    import xarray as xr

    from workbench.plots.mode_columns import View


class SpectrumExplorer(WorkbenchWidget):
    """Eigenvalues of each model in a linked panel, with controls of layers, reliability and thresholds.

    Moving a threshold updates the masses and redraws the band; selecting modes (box, lasso or click) lists them in
    a table. Thresholds that contradict each other leave the last figure and show an error under the widget.

    Args:
        spectra: One spectra dataset, or several by name; dims ``layer`` and ``mode``.
        limit: Half the width of the first view, as in ``workbench.plots.eigenvalue_map``.

    Attributes:
        layers, near_unit_lower, near_unit_upper, contractive_upper, reliable_residual, reliable_only, view: The
            controls; set their ``value`` to drive the widget from code.
        sources: The points drawn, one ``ColumnDataSource`` for each model.
        measured: The spectra as they are shown, with the masses for the present thresholds.

    Raises:
        SchemaError: If a dataset is no spectra dataset, or runs over steps or runs.
    """

    def __init__(self, spectra: xr.Dataset | Mapping[str, xr.Dataset], *, limit: float | str | None = None) -> None:
        super().__init__()
        self.spectra = named_spectra(spectra)
        self.measured = dict(self.spectra)
        self._limit = limit
        self._picked: dict[str, set[tuple[int, int]]] = {name: set() for name in self.spectra}
        self._is_writing = False
        self._make_controls()
        self._panels = EigenvaluePanels(self.spectra, limit=limit)
        self.sources = self._panels.sources
        self._axes = next(iter(self._panels.figures.values()))
        self.canvas = Figure(self._panels.root, lock=self.turn)
        self.masses = ipywidgets.HTML()
        self.selection = ipywidgets.HTML()
        self.fill([self._controls, self.canvas, self.masses, self.selection])
        for control in (*self._thresholds.values(), self.layers, self.reliable_only, self.view):
            self.watch(control, lambda _: self.update())
        pick = self.guarded(lambda attr, old, new: self._read_selection())
        for source in self.sources.values():
            source.selected.on_change("indices", pick)
            self.at_close(partial(source.selected.remove_on_change, "indices", pick))
        with self.attempt():
            self.update()

    @property
    def thresholds(self) -> dict[str, float]:
        """The thresholds set by the sliders, by the names that ``workbench.remeasure()`` takes."""
        return {name: float(slider.value) for name, slider in self._thresholds.items()}

    def update(self) -> None:
        """Draw what the controls say.

        Raises:
            OptionError: If the thresholds contradict each other; then nothing has changed.
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
        center, limit = VIEWS[self.view.value]
        view = view_of(columns, self._limit if center == 0 and limit is None else limit, center)
        with self.canvas.batch():
            self._is_writing = True
            try:
                for name, data in measured.items():
                    self._draw(name, data, columns[name], view)
            finally:
                self._is_writing = False
            self._panels.set_view(view)
        self.masses.value = mass_table(measured)
        self._read_selection()

    def selected(self) -> list[dict[str, Any]]:
        """The selected modes of the shown layers, one dict each: model, layer, mode, eigenvalue, residual, ..."""
        rows = []
        for name, picked in self._picked.items():
            data = self.measured[name]
            for layer, mode in sorted(picked & self._drawn(name)):
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
        """The current view as a separate figure, to keep or to write with ``workbench.plots.save()``."""
        view = known(self._panels.view, "Nothing is drawn yet; show the explorer first.")
        chosen: dict[str, Any] = self.thresholds
        reliable_only = bool(self.reliable_only.value)
        measured = {name: remeasure(data, **chosen) for name, data in self.spectra.items()}
        return eigenvalue_map(
            measured,
            layers=self._layer_range(),
            reliable_only=reliable_only,
            limit=view.limit,
            center=view.center,
            backend=backend,
        )

    def close(self) -> None:
        """Remove the widget and everything that belongs to it."""
        super().close()
        if hasattr(self, "canvas"):
            self.canvas.document.clear()

    def _make_controls(self) -> None:
        first = next(iter(self.spectra.values()))
        last = max(int(data["layer"].values[-1]) for data in self.spectra.values())
        look = {"style": {"description_width": "120px"}, "layout": {"width": "auto"}}
        fine = {"step": 0.01, "readout_format": ".2f", **look}

        def threshold(name: str, label: str, lowest: float, highest: float) -> ipywidgets.FloatSlider:
            value = first.attrs[name]
            bounds = {"min": min(lowest, value), "max": max(highest, value)}
            return ipywidgets.FloatSlider(value=value, description=label, **bounds, **fine)

        self.near_unit_lower = threshold("near_unit_lower", "near unit, from", 0.5, 1.2)
        self.near_unit_upper = threshold("near_unit_upper", "near unit, to", 0.8, 1.5)
        self.contractive_upper = threshold("contractive_upper", "contractive below", 0.0, 1.2)
        self.reliable_residual = threshold("reliable_residual", "residual at most", 0.0, 1.0)
        self.layers = ipywidgets.IntRangeSlider(
            value=(0, last), min=0, max=max(last, 1), description="layers", disabled=last == 0, **look
        )
        self.reliable_only = ipywidgets.Checkbox(
            value=False, description="only reliable modes", indent=False, layout={"width": "auto"}
        )
        self.view = ipywidgets.ToggleButtons(
            options=list(VIEWS),
            tooltips=VIEW_TIPS,
            style={"button_width": "96px"},
        )
        self._thresholds = {
            name: getattr(self, name)
            for name in ("near_unit_lower", "near_unit_upper", "contractive_upper", "reliable_residual")
        }
        switches = ipywidgets.HBox(
            [self.view, self.reliable_only], layout={"align_items": "center", "grid_gap": "16px", "margin": "4px 0"}
        )
        sliders = [self.layers, self.near_unit_lower, self.near_unit_upper]
        sliders += [self.contractive_upper, self.reliable_residual]
        grid = ipywidgets.GridBox(
            sliders, layout={"grid_template_columns": "repeat(auto-fit, minmax(290px, 1fr))", "max_width": "960px"}
        )
        self._controls = ipywidgets.VBox([grid, switches])

    def _layer_range(self) -> range:
        first, last = self.layers.value
        return range(first, last + 1)

    def _draw(self, name: str, data: xr.Dataset, columns: dict[str, Any], view: View) -> None:
        source = self.sources[name]
        place = {
            pair: i for i, pair in enumerate(zip(columns["layer"].tolist(), columns["mode"].tolist(), strict=True))
        }
        is_first = name == next(iter(self.spectra))
        self._panels.write(name, data, columns, view, has_key=is_first)
        source.selected.indices = sorted(place[pair] for pair in self._picked[name] if pair in place)

    def _drawn(self, name: str) -> set[tuple[int, int]]:
        data = self.sources[name].data
        return set(zip(data["layer"].tolist(), data["mode"].tolist(), strict=True))

    def _read_selection(self) -> None:
        if self._is_writing:
            return
        for name, source in self.sources.items():
            layer, mode = source.data["layer"], source.data["mode"]
            drawn = self._drawn(name)
            now = {(int(layer[i]), int(mode[i])) for i in source.selected.indices}
            # Modes that a filter hides stay selected until something else is.
            if now != self._picked[name] & drawn:
                self._picked[name] = now
        self.selection.value = mode_table(self.selected())
