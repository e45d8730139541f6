"""Comparison of architectures as radar charts, ours solid and published values dashed, and as a table."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.formatting import three_digits
from workbench.option_checks import checked
from workbench.option_kinds import NonNegativeInt, PositiveInt
from workbench.plots import style
from workbench.plots.figure_files import redrawable
from workbench.plots.figure_inputs import require_choices
from workbench.plots.primitives import PlaneFrame, Primitives
from workbench.studies.comparison import SOURCES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd
    import xarray as xr

#: The order keeps published measures adjacent, so that their line has few gaps.
DEFAULT_MEASURES = (
    "expansive_mass", "near_unit_mass", "spectral_radius", "nonlinearity_ratio", "eigenvector_condition",
)  # fmt: skip
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
        """Return the distance from the center, 0 to 1; NaN if the value cannot be drawn on the axis."""
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
    """One value per axis of ``"ours"`` and ``"published"`` (NaN if unknown) for an architecture, and a note on it."""

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


_RINGS = (0.25, 0.5, 0.75, 1.0)
#: View of a chart: half its width, its bottom and its top, where the rim has radius 1.
_WIDTH, _LOW, _HIGH = 1.95, -1.5, 1.5
#: Height of a chart on the screen, in pixels.
_HEIGHT = 285


@redrawable
def radar(
    comparison: xr.Dataset,
    *,
    measures: Sequence[str] | None = None,
    columns: PositiveInt = 3,
    places: Mapping[str, NonNegativeInt] | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw a comparison as radar charts (after RKSP Fig. 6): one axis per measure, increasing outwards.

    Fractions range from 0 at the center to 1 at the rim. Measures without an upper bound have a logarithmic range of
    round numbers that covers all architectures and is stated in the figure. Published values are dashed with hollow
    markers, and in parentheses. A value that is unknown or infinite leaves a gap and is written as "–" or "∞".

    Args:
        comparison: Dataset from `workbench.compare`.
        measures: At least three variables with dims ``architecture`` and ``source``; None selects the expansive and the
            near-unit mass, the spectral radius, the nonlinearity ratio and the eigenvector condition.
        columns: Charts per row.
        places: Style number (color, marker, dash) of each architecture, by name; None numbers them in the order given.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout with options for that backend only.

    Raises:
        SchemaError: If the dataset is not a comparison, or lacks a measure.
        OptionError: If the backend does not exist, an architecture has no style number, or there are fewer than three
            measures.

    Example:
        >>> import workbench as wb
        >>> comparison = wb.samples.open("initialization/norms").mean("seed").isel(architecture=[0, 1])
        >>> figure = wb.plots.radar(comparison)
        >>> len(figure)  # charts
        2

    See Also:
        `workbench.compare`: Creates the comparison.
        `workbench.plots.comparison_table`: Returns the same values as a table.
    """
    axes = axes_of(comparison, measures)
    names = comparison["architecture"].values.tolist()
    charts = [
        RadarChart.of(comparison, axes, name, place)
        for name, place in zip(names, style.model_places(names, places), strict=True)
    ]
    with style.drawing(backend) as hv:
        corner = (len(charts) - 1) // columns * columns
        panels = [
            _drawn(Primitives(hv, backend, "x", "y"), axes, chart, Texts.of(axes, chart, has_key=index == corner))
            for index, chart in enumerate(charts)
        ]
        layout = hv.Layout(panels).cols(columns)
        if backend == "matplotlib":
            return layout.opts(sublabel_format="", tight=True, hspace=0.1, vspace=-0.1, fig_size=100, backend=backend)
        return layout.opts(shared_axes=False, merge_tools=True, toolbar=None, backend=backend)


def _drawn(draw: Primitives, axes: list[RadarAxis], chart: RadarChart, texts: Texts) -> Any:
    """Draw one chart from bottom to top; the widget that updates it relies on the order."""
    own = style.model_style(chart.place)
    looks: dict[str, dict[str, Any]] = {
        "ours": {"color": own["color"], "dash": "solid", "width": 2},
        "published": {"color": draw.ink, "dash": "dashed", "width": 1.6},
    }
    rings = [np.array([axis.point(ring) for axis in [*axes, axes[0]]]) for ring in _RINGS]
    spokes = [np.array([(0.0, 0.0), axis.point(1.0)]) for axis in axes]
    draw.paths(rings + spokes, color=style.NEUTRAL, width=0.8, alpha=0.35)
    outlines = {source: outline(axes, chart.values[source]) for source in SOURCES}
    if np.isfinite(outlines["ours"]["x"]).all():
        draw.area({key: outlines["ours"][key] for key in ("x", "y")}, color=own["color"], alpha=0.16)
    for source, columns in outlines.items():
        draw.line(columns["x"], columns["y"], **looks[source])
    for source, columns in outlines.items():
        table = labeled_points(axes, columns, who=f"{chart.name}, {source}")
        look: dict[str, Any] = {
            "color": looks[source]["color"],
            "marker": own["marker"],
            "is_hollow": source == "published",
        }
        look |= {"size": 8 if source == "published" else 6.5, "tips": [("", "@who"), ("@measure", "@value")]}
        draw.dots(table.pop("x"), table.pop("y"), columns=table, **look)
    for axis, text in zip(axes, texts.at_axes, strict=True):
        x, y = axis.point(1.11)
        side = "center" if abs(x) < 0.1 else "left" if x > 0 else "right"
        level = "bottom" if y > 0.9 else "top" if y < -0.6 else "center"
        if level == "top" and side != "center":
            x *= 0.8
        draw.words(x, y, text, align=side, valign=level, size=style.TICK_SIZE)
    return draw.panel(
        title=texts.title,
        note=texts.note,
        view=((-_WIDTH, _WIDTH), (_LOW, _HIGH)),
        size=(round(_HEIGHT * 2 * _WIDTH / (_HIGH - _LOW)), _HEIGHT),
        names=("", ""),
        plane=PlaneFrame(key=texts.key, has_border=False),
    )


#: Variables of a run other than its spectra, in the order of the columns; integers come first.
_COUNTS = ("step", "divergence_step")
_RESULTS = ("final_loss", "final_accuracy", "best_accuracy")


@checked
def comparison_table(
    comparison: xr.Dataset, *, measures: Sequence[str] | None = None, digits: PositiveInt = 3
) -> pd.DataFrame:
    """Return a comparison as a table: one row per architecture, our values next to the published ones.

    Args:
        comparison: Dataset from `workbench.compare`.
        measures: Names of variables with dims ``architecture`` and ``source``; None selects those of the radar chart,
            the fraction of reliable modes and the divergence rate.
        digits: Significant digits; at least 1.

    Returns:
        Numbers under two header rows: the variable, then "ours" or "published". Columns without any value are
        omitted; NaN means unknown. The step of the spectra comes first, the outcome of the training last.

    Raises:
        SchemaError: If the dataset is not a comparison, or lacks a measure.
        OptionError: If ``digits`` is below 1.

    Example:
        >>> import workbench as wb
        >>> comparison = wb.samples.open("initialization/norms").mean("seed")
        >>> table = wb.plots.comparison_table(comparison, measures=["near_unit_mass"])
        >>> list(table.index)[:2]
        ['Pre-LN', 'Post-LN']

    See Also:
        `workbench.compare`: Creates the comparison.
        `workbench.plots.radar`: Draws the same values.
    """
    import pandas as pd

    measures = comparison_measures(comparison, measures or (*DEFAULT_MEASURES, "reliable_fraction", "divergence_rate"))
    columns = {
        (measure, source): comparison[measure].sel(source=source)
        for measure in measures
        for source in ("ours", "published")
        if source in comparison["source"]
    }
    outcome = {(name, ""): comparison[name] for name in (*_COUNTS, *_RESULTS) if name in comparison.variables}
    columns = {key: column for key, column in outcome.items() if key[0] == "step"} | columns | outcome
    table = {}
    for (name, source), column in columns.items():
        values = column.values.astype(float)
        if np.isnan(values).all():
            continue
        heading = (comparison[name].attrs.get("long_name", name), source)
        table[heading] = (
            pd.array(values).astype("Int64")
            if name in _COUNTS
            else np.array([float(f"{value:.{digits}g}") for value in values])
        )
    names, sources = zip(*table, strict=True) if table else ((), ())
    frame = pd.DataFrame(dict(enumerate(table.values())), index=comparison["architecture"].values)
    frame.columns = pd.MultiIndex.from_arrays([names, sources])
    return frame
