"""Content of a radar chart: axes with stated ranges, outlines on them, and labels."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.formatting import three_digits
from workbench.plots.dataset_columns import require_choices
from workbench.studies.comparison import SOURCES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr

#: The order keeps published measures adjacent, so that their line has few gaps.
DEFAULT_MEASURES = (
    "expansive_mass",
    "near_unit_mass",
    "spectral_radius",
    "nonlinearity_ratio",
    "eigenvector_condition",
)
#: Measures without an upper bound, drawn on a logarithmic axis -> smallest possible value; None if there is none.
LOGARITHMIC = {
    "spectral_radius": None,
    "eigenvector_condition": 1.0,
    "kreiss_constant": 1.0,
    "energy_gain": None,
    "update_norm": None,
}


@dataclass(frozen=True)
class RadarAxis:
    """One axis of a radar chart."""

    measure: str
    title: str
    lowest: float
    highest: float
    is_logarithmic: bool
    angle: float

    def place(self, value: float) -> float:
        """Return the distance from the center, 0 to 1.

        The result is NaN if the value cannot be drawn: NaN, infinite, or not positive on a logarithmic axis.
        """
        if not math.isfinite(value) or (self.is_logarithmic and value <= 0):
            return math.nan
        scale = math.log if self.is_logarithmic else float
        return (scale(value) - scale(self.lowest)) / (scale(self.highest) - scale(self.lowest))

    def point(self, distance: float) -> tuple[float, float]:
        """Return the coordinates of the point at a distance from the center."""
        return distance * math.cos(self.angle), distance * math.sin(self.angle)

    @property
    def span(self) -> str:
        """Range as text."""
        return f"{self.lowest:g} to {self.highest:g}"


def comparison_measures(comparison: xr.Dataset, measures: Sequence[str]) -> list[str]:
    """Return the names of measures after checking that the comparison has them."""
    known = [str(name) for name, v in comparison.data_vars.items() if v.dims == ("architecture", "source")]
    if not known:
        raise SchemaError("The dataset has no variables by architecture and source; create it with wb.compare().")
    require_choices("measures", measures, known)
    return list(measures)


def axes_of(comparison: xr.Dataset, measures: Sequence[str] | None = None) -> list[RadarAxis]:
    """Return the axes of a comparison, clockwise from the top; see `radar`."""
    measures = comparison_measures(comparison, measures or DEFAULT_MEASURES)
    if len(measures) < 3:
        raise OptionError.of("measures", measures, "at least 3 names", remedy="a radar chart has one axis per measure")
    axes = []
    for place, measure in enumerate(measures):
        values = comparison[measure].values.ravel()
        is_logarithmic = measure in LOGARITHMIC
        values = values[np.isfinite(values) & ((values > 0) | (not is_logarithmic))]
        lowest, highest = 0.0, float(max(1.0, values.max(initial=0)))
        if is_logarithmic:
            lowest = LOGARITHMIC[measure] or _round(values.min(initial=1), down=True)
            highest = max(_round(values.max(initial=lowest), down=False), 2 * lowest)
        angle = math.pi / 2 - 2 * math.pi * place / len(measures)
        title = comparison[measure].attrs.get("long_name", measure)
        axes.append(RadarAxis(measure, title, float(lowest), float(highest), is_logarithmic, angle))
    return axes


@dataclass(frozen=True)
class RadarChart:
    """Values of one architecture on the axes.

    Attributes:
        name: Name of the architecture.
        place: Number of its style; see `style.model_style`.
        values: One value per axis for ``"ours"`` and for ``"published"``; NaN if unknown.
        note: Step, divergence, and whether the update was too small for a spectrum.
    """

    name: str
    place: int
    values: dict[str, list[float]]
    note: str

    @classmethod
    def of(cls, comparison: xr.Dataset, axes: list[RadarAxis], name: str, place: int) -> RadarChart:
        """Read one architecture of a comparison."""
        row = comparison.sel(architecture=name)
        known = {source: index for index, source in enumerate(row["source"].values.tolist())}
        values = {
            source: [float(row[axis.measure].values[known[source]]) if source in known else math.nan for axis in axes]
            for source in SOURCES
        }
        notes = []
        if "step" in row.coords and np.isfinite(row["step"]):
            notes.append(f"step {int(row['step'])}")
        if "divergence_step" in row and np.isfinite(row["divergence_step"]):
            notes.append(f"diverged at step {int(row['divergence_step'])}")
        if "is_informative" in row and not bool(row["is_informative"]):
            notes.append("update too small for a spectrum")
        return cls(str(name), place, values, ", ".join(notes))

    @property
    def has_published(self) -> bool:
        """Whether there are published values."""
        return any(math.isfinite(value) for value in self.values["published"])


def outline(axes: list[RadarAxis], values: list[float]) -> dict[str, np.ndarray]:
    """Return a closed line over the axes: columns ``x`` and ``y``, NaN where a value cannot be drawn, and ``value``."""
    points = [axis.point(axis.place(value)) for axis, value in zip(axes, values, strict=True)]
    x, y = np.array([*points, points[0]]).T
    return {"x": x, "y": y, "value": np.array([*values, values[0]])}


def labeled_points(axes: list[RadarAxis], columns: dict[str, np.ndarray], *, who: str) -> dict[str, np.ndarray]:
    """Return the points of an `outline` that can be drawn, with the text of the tooltip of each."""
    has_place = np.isfinite(columns["x"][:-1])  # the last point repeats the first to close the line
    table = {key: column[:-1][has_place] for key, column in columns.items()}
    table["measure"] = np.array([axis.title for axis in axes], dtype=object)[has_place]
    table["who"] = np.full(len(table["x"]), who, dtype=object)
    return table


@dataclass(frozen=True)
class Texts:
    """Texts of one chart: the title, a line under it, a key below the chart, and a label at the end of each axis."""

    title: str
    note: str
    key: str
    at_axes: list[str]

    @classmethod
    def of(cls, axes: list[RadarAxis], chart: RadarChart, *, has_key: bool) -> Texts:
        """Return the texts of one architecture: its values at the axes, published ones in parentheses."""
        at_axes = []
        for axis, ours, published in zip(axes, chart.values["ours"], chart.values["published"], strict=True):
            known = f" ({three_digits(published)})" if math.isfinite(published) else ""
            at_axes.append(_at_axis(axis, three_digits(ours) + known))
        note = ", ".join(filter(None, [chart.note, "" if chart.has_published else "no published values"]))
        return cls(chart.name, note or " ", _scales(axes) if has_key else "", at_axes)


def _scales(axes: list[RadarAxis]) -> str:
    """Return lines that explain the dashes and give the range of each axis."""
    by_span: dict[str, list[str]] = {}
    for axis in axes:
        by_span.setdefault(f"{axis.span}{', logarithmic' if axis.is_logarithmic else ''}", []).append(axis.title)
    lines = ["dashed line and (parentheses): published, at initialization", "from center to rim:"]
    for span, titles in by_span.items():
        # No-break spaces keep each title on one line.
        items = ", ".join(title.replace(" ", "\xa0") for title in titles)
        lines += textwrap.wrap(f"{items} {span}".replace(f" {span}", "\xa0" + span.replace(" ", "\xa0")), 60)
    return "\n".join(lines)


def _at_axis(axis: RadarAxis, text: str) -> str:
    """Return the title of an axis, on two lines where there is little space next to the chart, and a text below it."""
    is_beside = abs(axis.point(1.0)[0]) > 0.1 and len(axis.title) >= 12
    title = textwrap.wrap(axis.title, len(axis.title) // 2 + 3, break_long_words=False) if is_beside else [axis.title]
    return "\n".join([*title, text])


def _round(value: float, *, down: bool) -> float:
    """Round up, or down, to the nearest of 1, 2, 5, 10, ..."""
    decade = 10.0 ** math.floor(math.log10(value))
    steps = [factor * decade for factor in (1, 2, 5, 10)]
    fitting = [step for step in steps if (step <= value * 1.0001 if down else step >= value * 0.9999)]
    return float(f"{(max if down else min)(fitting):.3g}")
