"""Criteria with different units in one figure, each relative to its own healthy band."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.formatting import NOT_MEASURED, band_in_signs, clipped, short
from workbench.plots import style
from workbench.plots.figure_files import redrawable
from workbench.plots.figure_inputs import columns_of
from workbench.plots.primitives import Primitives
from workbench.schema.statuses import CriterionState

if TYPE_CHECKING:
    import xarray as xr

#: Width of the axis, height of a row and width of a letter, in pixels of bokeh.
_WIDTH, _ROW, _LETTER = 360, 24, 6.3
#: Largest distance of a mark from the band; values further away are drawn at this distance.
_REACH = 1.6
#: State -> color and marker; states differ in both.
STATE_MARKS: dict[str, tuple[str, str]] = {
    CriterionState.HEALTHY: (style.CONVERGED, "circle"),
    CriterionState.AT_RISK: ("#8f7a00", "triangle"),
    CriterionState.FAILING: (style.DIVERGED, "square"),
    CriterionState.NOT_MEASURED: (style.NEUTRAL, "circle"),
}
_LONGEST_TITLE = 46


@redrawable
def criteria_bands(criteria: xr.Dataset, *, backend: str = "bokeh") -> Any:
    """Draw criteria against their healthy bands: one row per criterion, all bands scaled to one shaded column.

    Inside the band the axis is linear, or logarithmic where the band spans more than a factor of ten. Outside it is
    compressed, and values beyond the axis are drawn at its end. Shape and color show the state. A hollow mark has no
    value or no band.

    Args:
        criteria: Dataset with dim ``criterion``: title, value, units, low, high (NaN where the band is open), state.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If a variable is missing.
        OptionError: If the backend does not exist.

    Example:
        >>> import workbench as wb
        >>> import xarray as xr
        >>> columns = {"title": ["signal gain"], "value": [3.0], "units": ["1"], "low": [0.2], "high": [5.0]}
        >>> columns["state"] = ["healthy"]
        >>> criteria = xr.Dataset({name: ("criterion", column) for name, column in columns.items()})
        >>> figure = wb.plots.criteria_bands(criteria)
        >>> len(figure)  # panels
        1

    See Also:
        `workbench.assess`: Measures the criteria of a design.
        `workbench.report`: Shows this figure with the assessment.
    """
    needed = ["title", "value", "units", "low", "high", "state"]
    rows = columns_of(criteria, needed, what="table of criteria", source="wb.assess()", dim="criterion")
    bands = [[float(rows[name][i]) for name in ("value", "low", "high")] for i in range(len(rows["title"]))]
    places = np.array([place_in_band(*band) for band in bands])
    height = -np.arange(len(places), dtype=float)
    lowest = 0.5 - len(places)
    left, right = -_REACH - 0.15, 1 + _REACH + 0.15
    texts = [_value_and_band(rows, i) for i in range(len(places))]
    margin = int(24 + _LETTER * max(map(len, texts), default=0))
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "place", "criterion")
        draw.boxes(0, lowest, 1, 0.5, colors=style.CONVERGED, alpha=0.12)
        draw.bars(left, height, right, height, color=style.NEUTRAL, width=0.6, alpha=0.5)
        for state, (color, marker) in STATE_MARKS.items():
            is_it = np.array([str(its) == state for its in rows["state"]])
            is_known = np.isfinite(places)
            for is_hollow in (False, True):
                chosen = is_it & (is_known != is_hollow)
                if chosen.any():
                    columns = {"name": rows["title"][chosen], "text": np.array(texts)[chosen]}
                    draw.dots(
                        np.where(is_known, places, 0.5)[chosen],
                        height[chosen],
                        color=color,
                        marker=marker,
                        size=11,
                        is_hollow=is_hollow,
                        columns=columns,
                        tips=[("", "@name"), ("", "@text")],
                        label="" if is_hollow and (is_it & is_known).any() else state,
                    )
        for end, sign in ((-_REACH, "‹"), (1 + _REACH, "›")):
            is_out = places == end
            draw.words(end + math.copysign(0.1, end), height[is_out], [sign] * is_out.sum(), align="center")
        draw.words(right + 0.12, height, texts)
        # In a row of the frame, because text above the frame of a matplotlib figure moves with the frame's height.
        draw.words(left + 0.1, 1.0, "shaded: healthy band   compressed outside   ‹ ›: off scale")
        titles = [clipped(str(title), _LONGEST_TITLE) for title in rows["title"]]
        panel = draw.panel(
            title="Criteria against their healthy bands",
            view=((left, right + (right - left) * margin / _WIDTH), (lowest - 0.1, 1.5)),
            size=(_WIDTH + margin, _ROW * (len(titles) + 1) + 14),
            names=("", ""),
            ticks=(
                [(-_REACH / 2, "below"), (0.5, CriterionState.HEALTHY.value), (1 + _REACH / 2, "above")],
                [*zip(height, titles, strict=True)],
            ),
            bounds=(left, right),
            grid=False,
            legend=True,
        )
        return style.laid_out(hv, [panel], backend)


def place_in_band(value: float, low: float, high: float) -> float:
    """Return the position of a value on an axis where the band is [0, 1]; NaN without a value or without a band.

    A band with both ends is linear inside, or logarithmic where it spans more than a factor of ten. If only the upper
    end exists, it is at 1 and zero is at 0. If only the lower end exists, it is at 0 and twice its value at 0.5.
    Outside the band, the logarithm compresses the distance, up to a largest one.
    """
    has_low, has_high = math.isfinite(low), math.isfinite(high)
    if math.isnan(value) or not (has_low or has_high):
        return math.nan
    if has_low and has_high and 0 < low < high / 10:
        raw = (math.log(value) - math.log(low)) / (math.log(high) - math.log(low)) if value > 0 else -math.inf
    elif has_low and has_high and high > low:
        raw = (value - low) / (high - low)
    elif has_high:
        raw = value / high if high > 0 else 1 + (value - high) / (abs(high) or 1.0)
        raw = max(raw, 0.0)
    else:
        raw = (1 - low / value if value > low else (value - low) / low) if low > 0 else _above(value - low)
    if raw < 0:
        return -min(math.log1p(-raw), _REACH)
    return min(1 + math.log1p(raw - 1), 1 + _REACH) if raw > 1 else raw


def _above(distance: float) -> float:
    return distance / (1 + distance) if distance >= 0 else distance


def _value_and_band(rows: dict[str, np.ndarray], row: int) -> str:
    """Return the value of a criterion with its unit, and its band, as text."""
    value, low, high = (float(rows[name][row]) for name in ("value", "low", "high"))
    unit = "" if str(rows["units"][row]) in ("1", "") else f" {rows['units'][row]}"
    if math.isnan(value):
        return NOT_MEASURED
    return f"{short(value)}{unit}  ({band_in_signs(low, high)})"
