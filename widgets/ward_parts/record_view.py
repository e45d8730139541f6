"""Figures of what was measured of a run: signals over steps with their layers, or values in a table."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import ipywidgets

from workbench.plots.layer_profile_figure import DEFAULT_MEASURES
from workbench.studies import signals as sig
from workbench.widgets.stage import Stage
from workbench.widgets.tables import HEAD, MUTED, NAME, TABLE
from workbench.widgets.timeline import Timeline
from workbench.widgets.ward_parts.score_view import scrolling

if TYPE_CHECKING:
    import xarray as xr

#: Name of the run in figures.
PATIENT = "patient"


class RecordView(ipywidgets.VBox):
    """The figure of one measurement: a timeline of its signals, or a table of settings.

    Attributes:
        name: Name of the measurement that is shown; empty if there is none.
        timeline: The timeline; None if the measurement has no steps.
    """

    def __init__(self, theme: str) -> None:
        self._theme = theme
        self._title, self._stage = ipywidgets.HTML(), Stage()
        self._table = ipywidgets.HTML(layout={"display": "none"})
        self.name = ""
        self.timeline: Timeline | None = None
        super().__init__([self._title, self._table, self._stage])

    def clear(self, sentence: str) -> None:
        """Show a sentence instead of a figure."""
        self.name = ""
        self._title.value = f'<div style="{MUTED}">{html.escape(sentence)}</div>'
        self._drop_timeline()
        self._say_values("")

    def show(self, name: str, measured: xr.Dataset, record: xr.DataTree) -> None:
        """Show a measurement."""
        self.name = name
        nothing = "" if any(measured.sizes.values()) else "The measurement is empty: the model has no such part."
        self._title.value = (
            f'<div style="{HEAD}">{html.escape(name)}</div><div style="{MUTED}">{html.escape(nothing)}</div>'
        )
        self._say_values(value_table(measured))
        signals = signals_of(measured, record)
        if not signals:
            self._drop_timeline()
            return
        before, view = self.timeline, None if self.timeline is None else self.timeline.view
        self.timeline = Timeline({PATIENT: record}, signals=signals, theme=self._theme)
        self.timeline.export_bar.layout.display = "none"  # the widget around it has one
        self.timeline.view = view
        if "layer" in measured.dims or "layer" in measured.coords:  # its layers, and for spectra its eigenvalues
            self.timeline.select(int(measured["step"][-1]), signal=signals[0])
        self._stage.put(self.timeline, replaces=before)

    def close(self) -> None:
        """Remove the view."""
        self._drop_timeline()
        super().close()

    def _drop_timeline(self) -> None:
        if self.timeline is not None:
            self.timeline.close()
        self._stage.clear()
        self.timeline = None

    def _say_values(self, table: str) -> None:
        self._table.value = table
        self._table.layout.display = None if table else "none"


def signals_of(measured: xr.Dataset, record: xr.DataTree) -> list[str]:
    """Return the names of the signals of a measurement, of spectra the main ones; empty if it has no steps."""
    if not measured.sizes.get("step"):
        return []
    found = [name for name, entry in sig.catalogue(record).items() if entry.variable in measured.data_vars]
    return [name for name in found if name in DEFAULT_MEASURES] or found


def losses_of(replay: xr.Dataset) -> dict[str, xr.DataTree]:
    """Return the loss of the run and of its replay with a change as two runs by name."""
    import xarray as xr

    lines = {"the run": replay["loss"], "replay with the change": replay["cured_loss"]}
    return {
        name: xr.DataTree.from_dict({"/monitors": line.dropna("step").to_dataset(name="loss")})
        for name, line in lines.items()
    }


def values_of(measured: xr.Dataset) -> list[tuple[str, str]]:
    """Return name and value of each setting; empty if the measurement has no settings."""
    if "setting" not in measured.dims:
        return []
    return list(zip(measured["setting"].values.tolist(), measured["value"].values.tolist(), strict=True))


def value_table(measured: xr.Dataset) -> str:
    """Return an HTML table of `values_of`, which scrolls; empty if there are none."""
    rows = "".join(
        f'<tr><th scope="row" style="{NAME};font-weight:400">{html.escape(name)}</th>'
        f'<td style="{NAME}">{html.escape(value)}</td></tr>'
        for name, value in values_of(measured)
    )
    return scrolling("settings", f'<table style="{TABLE}">{rows}</table>', "max-height:440px") if rows else ""
