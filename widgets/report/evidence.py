"""One criterion as text, and the figure of the data that support it."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.formatting import percent
from workbench.plots import layer_profile
from workbench.plots.criteria_bands_figure import criteria_bands
from workbench.reports import pictures
from workbench.reports.assessment_document import proxy_of
from workbench.reports.document import Picture
from workbench.reports.quantity import Numbers, Quantity
from workbench.schema.statuses import CriterionState
from workbench.widgets.stage import FigureStage
from workbench.widgets.tables import HEAD, MUTED

if TYPE_CHECKING:
    import xarray as xr

#: Parts that contain only summary numbers -> part whose figure shows the underlying data.
_PICTURED_BY = {"structure": "flow", "trials": "pilot"}
#: Parts whose figure has sentences next to its frame, and its minimum width in pixels.
_OF_BANDS, _WIDTH_OF_BANDS = ("criteria", "hardware"), 860


class Evidence(ipywidgets.VBox):
    """A criterion and its figure.

    Attributes:
        words: Text about the measurement, the healthy band and the reason.
        button: Shows the criterion's row in the report.
        key: Identifies the figure; None if it must be redrawn.
    """

    def __init__(self, head: str = "", *, theme: str = "page") -> None:
        self.head = head
        self.key: tuple[str, str] | None = None
        self.words = ipywidgets.HTML()
        self.button = ipywidgets.Button(
            description="Show in report", tooltip="Show the row of this number in the report's tables",
            layout={"width": "auto", "align_self": "flex-start", "display": "none"},
        )  # fmt: skip
        self._place = FigureStage(theme)
        super().__init__(
            [self.words, self.button, self._place],
            layout={"flex": "1 1 760px", "min_width": "0", "max_width": "100%", "overflow": "hidden"},
        )

    @property
    def figure(self) -> Any:
        """The displayed figure; None if there is none."""
        return self._place.figure

    def clear(self) -> None:
        """Show nothing."""
        self.words.value, self.button.layout.display = "", "none"
        self.key = None
        if self.figure is not None:
            self._place.draw(None)

    def tell(self, numbers: Numbers, name: str) -> None:
        """Show a criterion."""
        quantity = numbers.criterion(name)
        data = numbers.node("criteria").sel(criterion=name)
        self.words.value = _words(quantity, data, self.head, proxy_of(numbers))
        self.button.layout.display = None
        key, draw = picture_of(numbers, name)
        if key != self.key:
            self.key = key
            self._place.draw(draw(), min_width=_WIDTH_OF_BANDS if key[0] in _OF_BANDS else 0)


def picture_of(numbers: Numbers, name: str) -> tuple[tuple[str, str], Callable[[], Any]]:
    """Return the figure of the data that support a criterion, or of the criteria of its mode if there is none."""
    criteria = numbers.node("criteria")
    one = criteria.sel(criterion=name)
    part, variable = str(one["path"].values).strip("/"), str(one["variable"].values)
    if part == "spectra" and numbers.node(part)[variable].dims == ("layer",):
        return (part, variable), lambda: layer_profile(numbers.node(part), measures=[variable])
    part = _PICTURED_BY.get(part, part)
    found = pictures.of_part(part, numbers.node(part), at=numbers.at) if part and numbers.has(part) else []
    picture = next((block for block in found if isinstance(block, Picture)), None)
    if picture:
        return (part, picture.title), lambda: picture.draw(numbers.tree, "bokeh")
    mode = str(one["failure_mode"].values)
    alike = criteria.isel(criterion=[str(its) == mode for its in criteria["failure_mode"].values])
    return ("criteria", mode), lambda: criteria_bands(alike)


def _words(quantity: Quantity, data: xr.Dataset, head: str, proxy: str) -> str:
    text = " ".join(filter(None, [quantity.text, quantity.units]))
    layer, n_runs, sure = int(data["layer"]), int(data["n_reference"]), float(data["confidence"])
    reason = str(data["reason"].values).strip()
    lines = [f"<b>{html.escape(quantity.state)}</b>" + (f", confidence {percent(sure)}" if sure > 0 else "")]
    if quantity.state != CriterionState.NOT_MEASURED:
        band = f"healthy: {quantity.band}" + (f", as in {n_runs} healthy runs" if n_runs else "")
        place = f" in block {layer}" if layer >= 0 else ""
        of = f", of {proxy}" if proxy else ""
        lines.insert(0, f"<b>{html.escape(text)}</b>{place}{of}; {html.escape(band)}")
    if reason and quantity.state != CriterionState.HEALTHY:
        lines.append(html.escape(f"{reason[0].upper()}{reason[1:].rstrip('.')}."))
    title = html.escape(": ".join(filter(None, [head, quantity.meaning])))
    body = "".join(f"<div>{line}</div>" for line in lines)
    where = f'<div style="{MUTED};overflow-wrap:anywhere">{html.escape(quantity.where)}</div>'
    style = "white-space:normal;line-height:1.5;color:var(--jp-content-font-color1,#222)"
    return f'<div aria-live="polite" style="{style}"><div style="{HEAD}">{title}</div>{body}{where}</div>'
