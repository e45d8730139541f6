"""One criterion as text, and the figure of its quantity."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets

from workbench.formatting import percent
from workbench.plots import layer_profile
from workbench.plots.criteria_bands_figure import criteria_bands
from workbench.reports import pictures
from workbench.reports.assessment_document import stand_in_of
from workbench.reports.document import Picture
from workbench.reports.quantity import Numbers, Quantity
from workbench.schema.statuses import CriterionState
from workbench.widgets.stage import FigureStage
from workbench.widgets.tables import HEAD, MUTED

if TYPE_CHECKING:
    import xarray as xr

#: Parts of numbers only -> the part that has the picture of what they sum up.
_PICTURED_BY = {"structure": "flow", "trials": "pilot"}
#: Parts whose picture has sentences beside its frame, and how wide it is at least.
_OF_BANDS, _WIDTH_OF_BANDS = ("criteria", "hardware"), 860


class Evidence(ipywidgets.VBox):
    """A criterion and its picture.

    Attributes:
        words: Text on the measurement, the healthy band and the reason.
        button: Leads to the criterion's row in the report.
        key: Identifies the figure; None: it is to be drawn anew.
    """

    def __init__(self, head: str = "", *, theme: str = "page") -> None:
        self.head = head
        self.key: tuple[str, str] | None = None
        self.words = ipywidgets.HTML()
        self.button = ipywidgets.Button(
            description="Show in the report", tooltip="The row of this number, among all that was measured",
            layout={"width": "auto", "align_self": "flex-start", "display": "none"},
        )  # fmt: skip
        self._place = FigureStage(theme)
        super().__init__(
            [self.words, self.button, self._place],
            layout={"flex": "1 1 760px", "min_width": "0", "max_width": "100%", "overflow": "hidden"},
        )

    @property
    def figure(self) -> Any:
        """The figure that is shown; None: none."""
        return self._place.figure

    def clear(self) -> None:
        """Show nothing."""
        self.words.value, self.button.layout.display = "", "none"
        self.key = None
        if self.figure is not None:
            self._place.draw(None)

    def tell(self, numbers: Numbers, name: str) -> None:
        """Show a criterion.

        Args:
            numbers: Numbers of the assessment's tree.
            name: Name of the criterion.
        """
        quantity = numbers.criterion(name)
        data = numbers.node("criteria").sel(criterion=name)
        self.words.value = _words(quantity, data, self.head, stand_in_of(numbers))
        self.button.layout.display = None
        key, draw = picture_of(numbers, name)
        if key != self.key:
            self.key = key
            self._place.draw(draw(), min_width=_WIDTH_OF_BANDS if key[0] in _OF_BANDS else 0)


def picture_of(numbers: Numbers, name: str) -> tuple[tuple[str, str], Callable[[], Any]]:
    """The picture of what a criterion rests on; where its part has none, that of its failure mode's criteria.

    Returns:
        Part and title, which are the same for the same picture, and what draws it for bokeh.
    """
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


def _words(quantity: Quantity, data: xr.Dataset, head: str, stand_in: str) -> str:
    text = " ".join(filter(None, [quantity.text, quantity.units]))
    layer, n_runs, sure = int(data["layer"]), int(data["n_reference"]), float(data["confidence"])
    reason = str(data["reason"].values).strip()
    lines = [f"<b>{html.escape(quantity.state)}</b>" + (f", confidence {percent(sure)}" if sure > 0 else "")]
    if quantity.state != CriterionState.NOT_MEASURED:
        band = f"healthy: {quantity.band}" + (f", as in {n_runs} healthy runs" if n_runs else "")
        place = f" in block {layer}" if layer >= 0 else ""
        of = f", of {stand_in}" if stand_in else ""
        lines.insert(0, f"<b>{html.escape(text)}</b>{place}{of}; {html.escape(band)}")
    if reason and quantity.state != CriterionState.HEALTHY:
        lines.append(html.escape(f"{reason[0].upper()}{reason[1:].rstrip('.')}."))
    title = html.escape(": ".join(filter(None, [head, quantity.meaning])))
    body = "".join(f"<div>{line}</div>" for line in lines)
    where = f'<div style="{MUTED};overflow-wrap:anywhere">{html.escape(quantity.where)}</div>'
    style = "white-space:normal;line-height:1.5;color:var(--jp-content-font-color1,#222)"
    return f'<div aria-live="polite" style="{style}"><div style="{HEAD}">{title}</div>{body}{where}</div>'
