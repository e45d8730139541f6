"""Look at eigenvalues of one or several models: choose layers and thresholds, select modes, read the masses."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import ipywidgets
import numpy as np

from widgets.base import WorkbenchWidget
from widgets.figure import Figure
from workbench.plots import eigenvalue_map
from workbench.plots.eigenvalues import band_outline, headline, key, mode_columns, silent_layers, view_of
from workbench.plots.files import bokeh_plot
from workbench.plots.inputs import named_spectra, select_layers
from workbench.schema import SPECTRA
from workbench.spectral.measures import MASSES, remeasure, summarize

if TYPE_CHECKING:
    from collections.abc import Mapping

    import xarray as xr
    from bokeh.models import ColumnDataSource

    from workbench.plots.eigenvalues import View

#: From the circle's middle outwards; the same order in the table and in its bars.
_MASS_COLORS = {
    "contractive_mass": "#7f7f7f",
    "intermediate_mass": "#0f8f66",
    "near_unit_mass": "#1f77d4",
    "expansive_mass": "#d55e00",
}
_N_ROWS = 40
#: Name of a view -> its centre and limit, as `workbench.plots.eigenvalue_map` takes them.
_VIEWS = {"unit circle": (0.0, None), "near 1": (1.0, None), "all modes": (0.0, "all")}
_CELL = "padding:2px 12px 2px 0;text-align:right;white-space:nowrap"
_NAME = "padding:2px 12px 2px 0;text-align:left;white-space:nowrap"
_TABLE = "border-collapse:collapse;font-variant-numeric:tabular-nums;line-height:1.5;color:var(--jp-ui-font-color1)"


class SpectrumExplorer(WorkbenchWidget):
    """Eigenvalues of each model in a linked panel, with layers, reliability and thresholds under your hand.

    Moving a threshold counts the masses anew and redraws the band; selecting modes (box, lasso or click) lists them in
    a table. Thresholds that contradict each other leave the last picture and say so under the widget.

    Args:
        spectra: One spectra dataset, or several by name; dims ``layer`` and ``mode``.
        limit: Half the width of the first view, as in ``workbench.plots.eigenvalue_map``.

    Attributes:
        layers, near_unit_lower, near_unit_upper, contractive_upper, reliable_residual, reliable_only, view: The
            controls; set their ``value`` to drive the widget from code.
        sources: The points drawn, one ``ColumnDataSource`` a model.
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
        self.canvas = Figure(self._build_figure(), lock=self.turn)
        self.masses = ipywidgets.HTML()
        self.selection = ipywidgets.HTML()
        self.fill([self._controls, self.canvas, self.masses, self.selection])
        for control in (*self._thresholds.values(), self.layers, self.reliable_only, self.view):
            self.watch(control, lambda _: self.update())
        pick = self.guarded(lambda attr, old, new: self._read_selection())
        for source in self.sources.values():
            source.selected.on_change("indices", pick)
            self.at_close(lambda source=source: source.selected.remove_on_change("indices", pick))
        with self.attempt():
            self.update()

    @property
    def thresholds(self) -> dict[str, float]:
        """The thresholds set by the sliders, by the names that ``workbench.remeasure()`` takes."""
        return {name: float(slider.value) for name, slider in self._thresholds.items()}

    def update(self) -> None:
        """Draw what the controls say.

        Raises:
            ThresholdError: If the thresholds contradict each other; then nothing has changed.
        """
        reliable_only = bool(self.reliable_only.value)
        measured = {
            name: select_layers(remeasure(data, **self.thresholds, reliable_only=reliable_only), self._layer_range())
            for name, data in self.spectra.items()
        }
        columns = {
            name: mode_columns(data, n_layers=self.spectra[name].sizes["layer"], reliable_only=reliable_only)
            for name, data in measured.items()
        }
        self.measured = measured
        center, limit = _VIEWS[self.view.value]
        view = view_of(columns, self._limit if center == 0 and limit is None else limit, center)
        with self.canvas.batch():
            self._is_writing = True
            try:
                for name, data in measured.items():
                    self._draw(name, data, columns[name], view)
            finally:
                self._is_writing = False
            if view != self._drawn_view:
                self._drawn_view = view
                for axis, (start, end) in ((self._axes.x_range, view.real), (self._axes.y_range, view.imag)):
                    axis.update(start=start, end=end, reset_start=start, reset_end=end)
        self.masses.value = _mass_table(measured)
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
        """The present picture as a figure of its own, to keep or to write with ``workbench.plots.save()``."""
        reliable_only = bool(self.reliable_only.value)
        measured = {name: remeasure(data, **self.thresholds) for name, data in self.spectra.items()}
        return eigenvalue_map(
            measured,
            layers=self._layer_range(),
            reliable_only=reliable_only,
            limit=self._drawn_view.limit,
            center=self._drawn_view.center,
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
            options=list(_VIEWS),
            tooltips=[
                "Zoom to the unit circle",
                "Zoom to where most modes are",
                "Zoom out until every mode is visible",
            ],
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

    def _build_figure(self) -> Any:
        """Build the panels once; later only their data, titles and ranges are written."""
        figure = eigenvalue_map(self.spectra, limit=self._limit)
        plot = bokeh_plot(figure)
        panels = plot.traverse(lambda panel: panel, [lambda part: type(part).__name__ == "OverlayPlot"])
        self._panels = dict(zip(self.spectra, panels, strict=True))
        self.sources: dict[str, ColumnDataSource] = {}
        self._bands: dict[str, ColumnDataSource] = {}
        for name, panel in self._panels.items():
            band, _, points = panel.subplots.values()
            self._bands[name] = band.handles["source"]
            self.sources[name] = points.handles["source"]
        self._above = {name: panel.state.select_one({"name": "note_above"}) for name, panel in self._panels.items()}
        self._below = {name: panel.state.select_one({"name": "note_below"}) for name, panel in self._panels.items()}
        self._axes = panels[0].state
        self._drawn_view: View | None = None
        return plot.state

    def _layer_range(self) -> range:
        first, last = self.layers.value
        return range(first, last + 1)

    def _draw(self, name: str, data: xr.Dataset, columns: dict[str, np.ndarray], view: View) -> None:
        source = self.sources[name]
        place = {
            pair: i for i, pair in enumerate(zip(columns["layer"].tolist(), columns["mode"].tolist(), strict=True))
        }
        source.data = columns
        source.selected.indices = sorted(place[pair] for pair in self._picked[name] if pair in place)
        ring = band_outline(data)
        self._bands[name].data = {"xs": [[[ring["real"]]]], "ys": [[[ring["imag"]]]]}
        self._above[name].text = headline(data, columns, view)
        if self._below[name] is not None:
            is_first = name == next(iter(self.spectra))
            self._below[name].text = "\n".join(filter(None, [key(data) if is_first else "", silent_layers(data)]))

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
        self.selection.value = _mode_table(self.selected())


def _mass_table(measured: Mapping[str, xr.Dataset]) -> str:
    names = list(_MASS_COLORS)
    head = "".join(
        f'<th style="{_CELL};font-weight:600"><span style="color:{_MASS_COLORS[name]}">■</span> '
        f"{html.escape(SPECTRA[name].long_name.replace(' mass', ''))}</th>"
        for name in names
    )
    rows = []
    for model, data in measured.items():
        if not data.sizes["layer"]:
            rows.append(
                f'<tr><td style="{_NAME}">{html.escape(model)}</td><td colspan="6">no layer in this range</td></tr>'
            )
            continue
        summary = summarize(data[[*names, "spectral_radius"]])
        cells, bar = "", ""
        for name in names:
            mean, lowest, highest = (float(summary[name].sel(statistic=kind)) for kind in ("mean", "min", "max"))
            spread = f"lowest {lowest:.2f}, highest {highest:.2f} of {data.sizes['layer']} layers"
            cells += f'<td style="{_CELL}" title="{spread}">{_number(mean, ".3f")}</td>'
            share = 0 if np.isnan(mean) else 100 * mean
            bar += f'<span style="width:{share:.2f}%;background:{_MASS_COLORS[name]}"></span>'
        bar = f'<span style="display:flex;width:120px;height:10px;border-radius:2px;overflow:hidden">{bar}</span>'
        radius = float(summary["spectral_radius"].sel(statistic="max"))
        rows.append(
            f'<tr><td style="{_NAME}">{html.escape(model)}</td><td style="{_CELL}">{bar}</td>{cells}'
            f'<td style="{_CELL}">{_number(radius, ".3f")}</td></tr>'
        )
    return (
        f'<table style="{_TABLE}"><tr><th style="{_NAME}">mass, mean over layers</th><th></th>{head}'
        f'<th style="{_CELL}">largest ρ</th></tr>{"".join(rows)}</table>'
    )


def _mode_table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        hint = "Select modes in a panel (box, lasso or click) to list them here."
        return f'<span style="color:var(--jp-ui-font-color2)">{hint}</span>'
    head = "".join(
        f'<th style="{_NAME if name == "model" else _CELL}">{name}</th>'
        for name in (
            "model",
            "layer",
            "mode",
            "λ",
            "|λ|",
            SPECTRA["residual"].long_name,
            SPECTRA["is_reliable"].long_name,
        )
    )
    body = ""
    for row in rows[:_N_ROWS]:
        value = row["eigenvalue"]
        cells = (
            str(row["layer"]),
            str(row["mode"]),
            f"{value.real:.4f} {'−' if value.imag < 0 else '+'} {abs(value.imag):.4f}i",
            f"{row['modulus']:.4f}",
            _number(row["residual"], ".3f"),
            "yes" if row["is_reliable"] else "no",
        )
        body += f'<tr><td style="{_NAME}">{html.escape(row["model"])}</td>'
        body += "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>"
    more = (
        f"<div>and {len(rows) - _N_ROWS} more; <code>selected()</code> has them all</div>"
        if len(rows) > _N_ROWS
        else ""
    )
    return f'<table style="{_TABLE}"><tr>{head}</tr>{body}</table>{more}'


def _number(value: float, spec: str) -> str:
    return format(value, spec) if np.isfinite(value) else "–"


assert set(_MASS_COLORS) == set(MASSES)
