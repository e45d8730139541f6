"""Figures of findings: criteria relative to their bands, causes in their order, and evidence for and against them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.formatting import NOT_MEASURED, band_in_signs, clipped, short
from workbench.option_checks import checked
from workbench.option_kinds import PositiveInt
from workbench.plots import style
from workbench.plots.figure_files import redrawable
from workbench.plots.figure_inputs import columns_of
from workbench.plots.primitives import Primitives, decades
from workbench.schema.statuses import CriterionState
from workbench.schema.symptoms import symptom_title

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


_BARS_WIDTH, _BAR = 420, 24
_SOURCE = "wb.diagnose()"
_TABLE = {"what": "table of evidence", "source": _SOURCE, "dim": "evidence"}
_LONGEST_NAME = 40


@redrawable
def cause_bars(causes: xr.Dataset, *, backend: str = "bokeh") -> Any:
    """Draw the score of each cause over that of the first as a bar; causes that are not excluded are colored.

    "nothing", the result that nothing was found, is no cause and has no bar.

    Args:
        causes: Dataset with dim ``cause``: title, probability and optionally ``is_possible``; without it, only the
            first cause is colored.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If a variable is missing.
        OptionError: If the backend does not exist.

    Example:
        >>> import workbench as wb
        >>> tree = wb.diagnose(wb.samples.failed_run("precision"))
        >>> figure = wb.plots.cause_bars(tree["causes"].to_dataset())
        >>> len(figure)  # panels
        1

    See Also:
        `workbench.diagnose`: Orders the causes.
        `workbench.plots.evidence_bars`: Draws the evidence behind them.
    """
    rows = columns_of(causes, ["title", "probability"], what="table of causes", source=_SOURCE, dim="cause")
    probability = rows["probability"].astype(float)
    order = np.argsort(-probability, kind="stable")
    is_possible = np.arange(len(order)) == 0
    if "cause" in causes.coords:
        is_cause = causes["cause"].values[order] != "nothing"
        order, is_possible = order[is_cause], is_possible[is_cause]
    if "is_possible" in causes:
        is_possible = causes["is_possible"].values[order]
    titles, score = [str(rows["title"][i]) for i in order], probability[order]
    score = np.nan_to_num(score / np.nanmax(score, initial=1e-30))
    height = -np.arange(len(titles), dtype=float)
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "score", "cause")
        colors = np.where(is_possible, style.DIVERGED, style.NEUTRAL)
        columns, tips = {"name": np.array(titles)}, [("", "@name")]
        ends = (np.zeros(len(titles)), height - 0.32, score, height + 0.32)
        draw.boxes(*ends, colors=colors, alpha=0.85, columns=columns, tips=tips)
        panel = draw.panel(
            title="Causes by their evidence",
            view=((0, 1.02), (height[-1] - 0.6, 0.6)),
            size=(_BARS_WIDTH, _BAR * len(titles) + 12),
            names=("score over that of the first", ""),
            ticks=([0.0, 0.5, 1.0], [*zip(height, titles, strict=True)]),
            bounds=(0, 1),
            grid=False,
        )
        return style.laid_out(hv, [panel], backend)


@checked
@redrawable
def evidence_bars(evidence: xr.Dataset, *, n: PositiveInt = 4, backend: str = "bokeh") -> Any:
    """Draw the evidence of each symptom for a cause (right) or against it (left), grouped by cause.

    Args:
        evidence: Dataset with dim ``evidence``: cause, weight (signed log-odds) and ``symptom`` (name).
        n: Number of symptoms per cause with a separate bar, largest weight first; the others share one bar.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If a variable is missing.
        OptionError: If ``n`` is not positive, or the backend does not exist.

    Example:
        >>> import workbench as wb
        >>> tree = wb.diagnose(wb.samples.failed_run("precision"))
        >>> figure = wb.plots.evidence_bars(tree["evidence"].to_dataset(), n=3)
        >>> len(figure)  # panels
        1

    See Also:
        `workbench.diagnose`: Computes the evidence.
        `workbench.plots.evidence_timeline`: Draws the steps of the symptoms.
    """
    cause, names, weight = _grouped(evidence, n)
    # The row with the name of a cause is above the rows of its symptoms.
    height, heads, up = np.zeros(len(weight)), {}, 0.0
    for i, name in enumerate(cause):
        if name not in heads:
            heads[name], up = up, up - 1
        height[i], up = up, up - 1
    at = height
    reach = 1.35 * float(np.nanmax(np.abs(weight))) or 1.0
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "log-odds", "symptom")
        for is_it, color in ((weight >= 0, style.DIVERGED), (weight < 0, style.CONVERGED)):
            if is_it.any():
                columns, tips = {"name": np.array(names)[is_it]}, [("", "@name")]
                ends = (np.zeros(is_it.sum()), at[is_it] - 0.32, weight[is_it], at[is_it] + 0.32)
                draw.boxes(*ends, colors=color, alpha=0.85, columns=columns, tips=tips)
        for side, is_it in ((1, weight >= 0), (-1, weight < 0)):
            labels = [f"{value:+.2f}" for value in weight[is_it]]
            align = "left" if side > 0 else "right"
            draw.words(weight[is_it] + 0.02 * side * reach, at[is_it], labels, align=align)
        for name, up_here in heads.items():
            draw.words(-0.98 * reach, up_here, name.replace("_", " "), is_bold=True)
        draw.bars([0.0], [up + 0.5], [0.0], [0.5], color=draw.ink, width=1.2)
        step = decades(reach / 4, reach / 1.5)[0]
        ticks = [(k * step, f"{k * step:+g}" if k else "0") for k in range(-4, 5) if abs(k * step) <= 0.95 * reach]
        panel = draw.panel(
            title="Evidence for and against each cause",
            view=((-reach, reach), (up + 0.4, 0.6)),
            size=(_BARS_WIDTH, int(_BAR * -up) + 12),
            names=("← against   evidence (log-odds)   for →", ""),
            ticks=(ticks, list(zip(at.tolist(), names, strict=True))),
            grid=False,
        )
        return style.laid_out(hv, [panel], backend)


@redrawable
def evidence_timeline(evidence: xr.Dataset, *, backend: str = "bokeh") -> Any:
    """Draw the step at which each symptom was observed: one row per symptom, the earliest at the top.

    The size of a mark is the weight of the symptom.

    Args:
        evidence: Dataset with dim ``evidence``: ``symptom``, step (negative or NaN if there is none) and weight.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If a variable is missing, or no symptom has a step.
        OptionError: If the backend does not exist.

    Example:
        >>> import workbench as wb
        >>> tree = wb.diagnose(wb.samples.failed_run("precision"))
        >>> figure = wb.plots.evidence_timeline(tree["evidence"].to_dataset())
        >>> len(figure)  # panels
        1

    See Also:
        `workbench.diagnose`: Finds the symptoms.
        `workbench.plots.timeline`: Draws the recorded signals and events.
    """
    rows = columns_of(evidence, [_name_of(evidence), "step", "weight"], **_TABLE)
    step, weight = rows["step"].astype(float), np.abs(rows["weight"].astype(float))
    seen: dict[tuple[str, float], float] = {}
    for name, at, strength in zip(_titles(rows[_name_of(evidence)]), step, weight, strict=True):
        if at >= 0:
            seen[name, at] = max(seen.get((name, at), 0.0), float(np.nan_to_num(strength)))
    if not seen:
        raise SchemaError("No symptom of the evidence has a step; draw evidence_bars() instead.")
    first: dict[str, float] = {}
    for name, at in seen:
        first[name] = min(at, first.get(name, at))
    lines = {name: -float(i) for i, name in enumerate(sorted(first, key=lambda name: (first[name], name)))}
    heaviest, last = max(seen.values()) or 1.0, max(at for _, at in seen)
    n_elsewhere = int((~(step >= 0)).sum())
    margin = 0.04 * (last or 1.0)
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "step", "symptom")
        heights = np.array(list(lines.values()))
        draw.bars(0, heights, last + margin, heights, color=style.NEUTRAL, width=0.6, alpha=0.5)
        for (name, at), strength in seen.items():
            size = 7 + 9 * strength / heaviest
            draw.dots(
                [at],
                [lines[name]],
                color=style.DIVERGED,
                size=size,
                columns={"name": np.array([name])},
                tips=[("", "@name")],
            )
        note = [f"{n_elsewhere} symptom{'s' * (n_elsewhere > 1)} without a step not shown"] if n_elsewhere else []
        panel = draw.panel(
            title="Steps at which symptoms were observed",
            note=note,
            view=((-margin, last + 2 * margin), (heights.min() - 0.6, 0.6)),
            size=(_BARS_WIDTH, _BAR * len(lines) + 12),
            names=("step", ""),
            ticks=(None, [(up, name) for name, up in lines.items()]),
            grid=False,
        )
        return style.laid_out(hv, [panel], backend)


def _grouped(evidence: xr.Dataset, n: int) -> tuple[list[str], list[str], np.ndarray]:
    """Return cause, name and weight of each bar: causes by total evidence, symptoms by decreasing weight."""
    rows = columns_of(evidence, ["cause", _name_of(evidence), "weight"], **_TABLE)
    cause, weight = rows["cause"].astype(str), np.nan_to_num(rows["weight"].astype(float))
    names = np.array(_titles(rows[_name_of(evidence)]))
    total = {name: weight[cause == name].sum() for name in dict.fromkeys(cause)}
    bars: list[tuple[str, str, float]] = []
    for name in sorted(total, key=lambda name: -total[name]):
        of_cause = np.flatnonzero(cause == name)
        of_cause = of_cause[np.argsort(-np.abs(weight[of_cause]), kind="stable")]
        n_own = len(of_cause) if len(of_cause) == n + 1 else n
        own, rest = of_cause[:n_own], of_cause[n_own:]
        bars += [(name, str(names[i]), float(weight[i])) for i in sorted(own, key=lambda i: -weight[i])]
        if len(rest):
            bars.append((name, f"{len(rest)} others combined", float(weight[rest].sum())))
    return [bar[0] for bar in bars], [bar[1] for bar in bars], np.array([bar[2] for bar in bars])


def _name_of(evidence: xr.Dataset) -> str:
    """Return the variable that names the symptoms; earlier versions called it ``sign`` or ``quantity``."""
    return next(name for name in ("symptom", "sign", "quantity") if name in evidence)


def _titles(quantity: np.ndarray) -> list[str]:
    return [clipped(symptom_title(str(name)), _LONGEST_NAME) for name in quantity]
