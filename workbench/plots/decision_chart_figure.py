"""Decision charts of a run before it starts: the paper's chart of the spectrum, and ours of the predicted risk."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.formatting import percent, with_interval
from workbench.plots import outcome_colors, style
from workbench.plots.dataset_columns import columns_of
from workbench.plots.label_places import LETTER, LINE, Box, place_labels
from workbench.plots.primitives import Primitives, decades
from workbench.studies import published

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr

KINDS = ("published", "risk")
_SIZE = (600, 360)
#: Range of the probability axis, with room for points at 0 and 1.
_SHARES = (-0.05, 1.05)
#: Largest number of points with names in the figure; with more, they are shown only under the pointer.
_MOST_NAMES = 20
#: Largest number of intervals drawn; more would hide the points.
_MOST_INTERVALS = 40
_ZONE_COLORS = (outcome_colors.SURVIVED, style.NEUTRAL, outcome_colors.DIVERGED)
_ZONE_ALPHAS = (0.16, 0.10, 0.18)
_OUTCOMES = ("diverged", "some runs diverged", "survived", "outcome not known")


def decision_chart(
    points: xr.Dataset,
    *,
    kind: str = "published",
    limits: xr.Dataset | None = None,
    proceed_below: float = 0.20,
    stop_above: float = 0.80,
    backend: str = "bokeh",
) -> Any:
    """Draw models or planned runs in the zones of a decision, with their outcomes.

    ``"published"`` is the paper's chart (RKSP, Fig. 7): near-unit mass M to the right, eigenvector condition kappa
    upwards; proceed, caution, high risk. The paper gives no number for kappa, so that without ``limits`` M alone
    decides. ``"risk"`` is ours: how far the learning rate lies from the predicted stability edge to the right, the
    predicted probability of divergence upwards; proceed, caution, stop. A bar is an interval: where it crosses
    the border of a zone, the decision is uncertain.

    Points that diverged are filled, those that survived hollow; each zone says how many of its runs diverged. Up to 20
    points are named, and up to 40 have their intervals.

    Args:
        points: Dataset of one dimension; names from its coordinate or ``name``. ``"published"``: near_unit_mass
            and eigenvector_condition, one value per model (the mean over layers of the fresh model). For ``"risk"``:
            probability, learning_rate and largest_stable_rate; where known low and high, largest_stable_rate_low and
            largest_stable_rate_high, is_familiar. For both, where known, has_diverged or divergence_rate.
        kind: Which of the two charts.
        limits: Borders of the published chart's zones, from `workbench.published.decision_chart`; None: published.
        proceed_below: Probability below which our chart recommends to proceed.
        stop_above: Probability above which our chart recommends to stop.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If the points lack a variable, or none has a place in the chart.
        OptionError: If the kind or the backend does not exist, or the probabilities are invalid or out of order.

    Example:
        >>> import workbench as wb
        >>> import xarray as xr
        >>> models = xr.Dataset(
        ...     {"near_unit_mass": ("name", [0.1, 0.7]), "eigenvector_condition": ("name", [20.0, 300.0])},
        ...     {"name": ["Pre-LN", "No-Norm"]},
        ... )
        >>> figure = wb.plots.decision_chart(models)
        >>> len(figure)  # panels
        1
    """
    if kind not in KINDS:
        raise OptionError(f"The kind of chart is '{kind}', expected one of {', '.join(KINDS)}.")
    if not 0 < proceed_below < stop_above < 1:
        raise OptionError(
            f"proceed_below is {proceed_below:g} and stop_above {stop_above:g}, expected 0 < the first < the other < 1."
        )
    if kind == "published":
        chart = _published_chart(points, limits)
    else:
        chart = _risk_chart(points, (proceed_below, stop_above))
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, *chart.axes)
        taken = _draw_zones(draw, chart)
        for x, y, color in chart.rules:
            draw.line(x, y, color=color, width=1, dash="dashed")
        _draw_points(draw, chart)
        n_unnamed = _draw_names(draw, chart, taken)
        panel = draw.panel(
            title=chart.title,
            note=[*chart.note, f"{n_unnamed} names not shown" if n_unnamed else ""],
            view=chart.view,
            size=_SIZE,
            names=chart.axes,
            ticks=chart.ticks,
            formats=chart.formats,
            is_log=chart.is_log,
            legend=True,
            grid=False,
        )
        return style.laid_out(hv, [panel], backend)


@dataclass(frozen=True)
class DecisionChart:
    """Points and zones, ready to be drawn.

    Attributes:
        title: Title of the figure.
        axes: Names of the axes.
        view: Ranges of the axes.
        ticks: Ticks of the axes.
        formats: Formats of the numbers on the axes.
        is_log: Whether each axis is logarithmic.
        cells: Zones as boxes: left, bottom, right, top and the index of the zone; together they fill the view.
        words_below: Whether the label of a zone is at its lower end.
        zones: Label of each zone, the safest first.
        x: Horizontal position of each point, inside the view.
        y: Vertical position of each point, inside the view.
        bars: Ends of the strokes that show intervals, shape (4, bar).
        zone: Index of each point's zone.
        names: Names of the points; an empty name is not drawn.
        told: Text under the pointer for each point.
        outcome: Index into the possible outcomes: diverged, some did, survived, not known.
        is_faint: Whether the model is not applicable to a point.
        rules: Dashed lines: x, y, colour.
        note: Phrases under the title.
    """

    title: str
    axes: tuple[str, str]
    view: tuple[tuple[float, float], tuple[float, float]]
    ticks: tuple[Any, Any]
    formats: tuple[str, str]
    is_log: tuple[bool, bool]
    cells: list[tuple[float, float, float, float, int]]
    words_below: bool
    zones: tuple[str, str, str]
    x: np.ndarray
    y: np.ndarray
    bars: np.ndarray
    zone: np.ndarray
    names: tuple[str, ...]
    told: tuple[str, ...]
    outcome: np.ndarray
    is_faint: np.ndarray
    rules: list[tuple[list[float], list[float], str]]
    note: list[str]

    def pixels(self, x: Any, y: Any) -> np.ndarray:
        """Positions of the points on the frame, in pixels from its lower left corner, shape (point, 2)."""
        places = []
        for values, (low, high), is_log, side in zip((x, y), self.view, self.is_log, _SIZE, strict=True):
            scale = np.log if is_log else np.asarray
            places.append((scale(values) - scale(low)) / (scale(high) - scale(low)) * side)
        return np.stack(places, axis=-1)

    def point(self, left: float, bottom: float) -> tuple[float, float]:
        """The position of a pixel in the units of the axes."""
        found = []
        for at, (low, high), is_log, side in zip((left, bottom), self.view, self.is_log, _SIZE, strict=True):
            found.append(float(low * (high / low) ** (at / side) if is_log else low + (high - low) * at / side))
        return found[0], found[1]

    def words(self, zone: int) -> str:
        """The label of a zone: what to do, and how many of its runs diverged."""
        is_told = (self.zone == zone) & np.isin(self.outcome, (0, 2))
        if not is_told.any() or (self.outcome == 1).any():
            return self.zones[zone]
        return f"{self.zones[zone]}  {int((self.outcome[is_told] == 0).sum())}/{int(is_told.sum())} diverged"


def _published_chart(points: xr.Dataset, limits: xr.Dataset | None) -> DecisionChart:
    mass, condition, others, names = _read(points, ("near_unit_mass", "eigenvector_condition"), ())
    if limits is None:
        limits = published.decision_chart()
    is_placed = np.isfinite(mass) & ~np.isnan(condition)
    _check_some(is_placed, "near_unit_mass and eigenvector_condition")
    finite = condition[np.isfinite(condition)]
    borders = limits["eigenvector_condition"].values
    shown = [*finite, *borders[np.isfinite(borders)]]
    high = max(100.0, 1.6 * max(shown, default=1.0))
    # Room at the sides for points on the frame, and below for the labels: no condition number is less than 1.
    view = ((-0.03, 1.03), (high**-0.16, high**1.05))
    x_edges = [view[0][0], *limits["near_unit_mass"].values.tolist(), view[0][1]]
    y_edges = [view[1][0], *np.unique(borders[np.isfinite(borders)]).tolist(), view[1][1]]
    cells = []
    for left, right in pairwise(x_edges):
        for bottom, top in pairwise(y_edges):
            middle = (left + right) / 2, np.sqrt(bottom * top)
            zone = published.DECISION_ZONES.index(str(published.decision_zones(*middle, chart=limits)))
            cells.append((left, bottom, right, top, zone))
    found = published.decision_zones(mass, condition, chart=limits)
    note = [f"zones: {limits.attrs.get('source', 'the limits given').split(', ')[-1]}"]
    if not np.isfinite(borders).any():
        note.append("the paper gives no number for κ: M alone decides")
    elif not np.isfinite(borders).all():
        note.append("κ decides in one direction only")
    else:
        note.append(f"κ below {borders[0]:g} is modest, above {borders[1]:g} large (our numbers; the paper gives none)")
    if (n_infinite := int((np.isinf(condition) & is_placed).sum())) > 0:
        note.append(f"{n_infinite} with infinite κ at the top")
    note += _left_out(~is_placed)
    told = tuple(f"M {m:.3f}, κ {k:.3g}" for m, k in zip(mass, condition, strict=True))
    return _chart(
        others,
        names,
        is_placed,
        title="The paper's decision chart for a fresh model",
        axes=("near-unit mass M", "eigenvector condition κ"),
        view=view,
        ticks=([0.0, 0.3, 0.5, 1.0], decades(1.0, high, n_most=5)),
        formats=("plain", "plain"),
        is_log=(False, True),
        cells=cells,
        words_below=True,
        zones=("proceed", "caution", "high risk: use KSS"),
        x=mass,
        y=np.minimum(condition, high),
        bars=np.zeros((4, 0)),
        zone=np.array([published.DECISION_ZONES.index(name) if name else -1 for name in found.tolist()]),
        told=told,
        is_faint=np.zeros(len(mass), bool),
        rules=[],
        note=note,
    )


def _risk_chart(points: xr.Dataset, borders: tuple[float, float]) -> DecisionChart:
    edge = "largest_stable_rate"
    needed = ("probability", "learning_rate", edge)
    probability, rate, others, names = _read(
        points, needed, ("low", "high", f"{edge}_low", f"{edge}_high", "is_familiar")
    )
    stable = others[edge]
    if not (rate > 0).all():
        raise SchemaError("A learning rate of the points is not a positive number.")
    if (probability < 0).any() or (probability > 1).any():
        raise SchemaError("A probability of the points lies outside 0 to 1; predict it with wb.risk.")
    unknown = np.full(len(rate), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        x = rate / stable
        left, right = (rate / others.get(f"{edge}_{end}", unknown) for end in ("high", "low"))
    is_placed = np.isfinite(x) & (x > 0) & np.isfinite(probability)
    _check_some(is_placed, "probability and largest_stable_rate")
    reach = max(10.0, 1.5 * np.exp(np.abs(np.log(x[is_placed])).max()))
    low, high = others.get("low", unknown), others.get("high", unknown)
    bars = np.stack([x, low, x, high])
    across = np.stack([np.clip(left, 1 / reach, reach), probability, np.clip(right, 1 / reach, reach), probability])
    bars = np.concatenate([bars[:, is_placed], across[:, is_placed]], axis=1)
    is_crowded = is_placed.sum() > _MOST_INTERVALS and bool(np.isfinite(bars).all(0).any())
    is_familiar = others.get("is_familiar", np.ones(len(rate))).astype(bool)
    below, above = borders
    heights = [*_SHARES[:1], below, above, *_SHARES[1:]]
    level = f"{100 * points.attrs['level']:g} % " if "level" in points.attrs else ""
    note = [f"bars: {level}intervals"] if np.isfinite(bars).all(0).any() and not is_crowded else []
    note += ["intervals of so many points not shown"] if is_crowded else []
    if (is_placed & ~is_familiar).any():
        note.append("pale: unlike the runs that the model has seen")
    note += _left_out(~is_placed)
    told = tuple(
        f"{with_interval(p, a, b, write=percent)} at {r:.3g}, edge {s:.3g}"
        for p, a, b, r, s in zip(probability, low, high, rate, stable, strict=True)
    )
    return _chart(
        others,
        names,
        is_placed,
        title="Proceed, or stop: predicted risk of each run",
        axes=("learning rate relative to the predicted edge of stability", "probability of divergence"),
        view=((1 / reach, reach), _SHARES),
        ticks=([(at, f"{at:g}×") for at in decades(1 / reach, reach)], [0.0, below, 0.5, above, 1.0]),
        formats=("plain", "percent"),
        is_log=(True, False),
        cells=[(1 / reach, bottom, reach, top, i) for i, (bottom, top) in enumerate(pairwise(heights))],
        words_below=False,
        zones=("proceed", "caution", "stop"),
        x=x,
        y=probability,
        bars=bars[:, :0] if is_crowded else bars,
        zone=np.where(probability < below, 0, np.where(probability > above, 2, 1)),
        told=told,
        is_faint=~is_familiar,
        rules=[([1.0, 1.0], [*_SHARES], style.NEUTRAL)],
        note=note,
    )


def _read(
    points: xr.Dataset, needed: Sequence[str], optional: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], tuple[str, ...]]:
    """The first two variables, all variables and outcomes, and the names of the points."""
    source = "wb.published and wb.profile()" if needed[0] == "near_unit_mass" else "wb.risk"
    known = (*optional, "has_diverged", "divergence_rate")
    columns = columns_of(points, needed, optional=known, what="set of points", source=source)
    columns = {name: column.astype(float) for name, column in columns.items()}
    (dim,) = points[needed[0]].dims
    label = next((key for key in ("name", dim) if key in points.coords and points[key].dims == (dim,)), None)
    names = () if label is None or points[label].dtype.kind not in "OUST" else tuple(map(str, points[label].values))
    return columns[needed[0]], columns[needed[1]], columns, names


def _chart(others: dict[str, np.ndarray], names: tuple[str, ...], is_placed: np.ndarray, **given: Any) -> DecisionChart:
    """The chart of the points that can be drawn, with their outcomes."""
    n = len(is_placed)
    rate = others.get("has_diverged", others.get("divergence_rate", np.full(n, np.nan)))
    outcome = np.select([np.isnan(rate), rate >= 1, rate <= 0], [3, 0, 2], default=1)
    for key in ("x", "y", "zone", "is_faint"):
        given[key] = given[key][is_placed]
    kept = np.flatnonzero(is_placed)
    given["told"] = tuple(given["told"][i] for i in kept)
    return DecisionChart(names=tuple(names[i] for i in kept) if names else (), outcome=outcome[is_placed], **given)


def _check_some(is_placed: np.ndarray, what: str) -> None:
    if not is_placed.any():
        raise SchemaError(f"No point has a finite {what}; predict or measure at least one.")


def _left_out(is_missing: np.ndarray) -> list[str]:
    n = int(is_missing.sum())
    return [f"{n} point{'s' if n > 1 else ''} without a value not shown"] if n else []


def _draw_zones(draw: Primitives, chart: DecisionChart) -> list[Box]:
    """Draw the zones with labels where points are rarest; return the boxes that the labels fill."""
    for left, bottom, right, top, zone in chart.cells:
        draw.boxes(left, bottom, right, top, colors=_ZONE_COLORS[zone], alpha=_ZONE_ALPHAS[zone])
    taken = []
    for zone in range(3):
        boxes = [
            Box(*chart.pixels([left, right], [bottom, top]).ravel().tolist())
            for left, bottom, right, top, i in chart.cells
            if i == zone
        ]
        if not boxes:
            continue
        home = min(boxes, key=lambda box: (box.bottom, box.left - box.right))
        words = chart.words(zone)
        lines = words.split("  ") if chart.words_below else [words]
        first = home.bottom + 6 + len(lines) * (LINE + 2) if chart.words_below else home.top - 5
        for i, line in enumerate(lines):
            top = first - i * (LINE + 2)
            draw.words(*chart.point(home.left + 6, top), line, valign="top", is_bold=i == 0)
            taken.append(Box(home.left + 6, top - LINE, home.left + 6 + LETTER * len(line), top))
    return taken


def _draw_points(draw: Primitives, chart: DecisionChart) -> None:
    draw.bars(*chart.bars, color=draw.ink, width=1.2, alpha=0.55)
    names = np.array(chart.names or [""] * len(chart.x))
    told = np.array(chart.told)
    faces = (
        {"color": outcome_colors.DIVERGED, "marker": "square"},
        {"color": outcome_colors.DIVERGED, "marker": "triangle", "is_hollow": True},
        {"color": outcome_colors.SURVIVED, "marker": "circle", "is_hollow": True},
        {"color": draw.ink, "marker": "diamond"},
    )
    tips = [("", "@name"), ("", "@told")][not chart.names :]
    size = 9 if len(chart.x) <= _MOST_INTERVALS else 7
    for index in range(4):  # hollow ones on top of filled ones
        for is_faint in (False, True):
            is_it = (chart.outcome == index) & (chart.is_faint == is_faint)
            if is_it.any():
                columns = {"name": names[is_it], "told": told[is_it]}
                look = faces[index] | {"alpha": 0.35 if is_faint else 1.0, "size": size}
                label = "" if is_faint and (~chart.is_faint & (chart.outcome == index)).any() else _OUTCOMES[index]
                draw.dots(chart.x[is_it], chart.y[is_it], columns=columns, tips=tips, label=label, **look)


def _draw_names(draw: Primitives, chart: DecisionChart, taken: Sequence[Box]) -> int:
    """Draw names next to the points; return the number of names without room."""
    if not chart.names or len(chart.x) > _MOST_NAMES:
        return 0
    places = chart.pixels(chart.x, chart.y)
    bars = chart.bars[:, np.isfinite(chart.bars).all(0)]
    lower, upper = chart.pixels(*bars[:2]), chart.pixels(*bars[2:])
    strokes = [Box(*low, *high) for low, high in zip((lower - 1).tolist(), (upper + 1).tolist(), strict=True)]
    boxes = place_labels([tuple(place) for place in places.tolist()], chart.names, _SIZE, [*taken, *strokes])
    for (x, _), box, name in zip(places.tolist(), boxes, chart.names, strict=True):
        if box is not None:
            side = "left" if box.left >= x else "right" if box.right <= x else "center"
            at = {"left": box.left, "right": box.right, "center": (box.left + box.right) / 2}[side]
            draw.words(*chart.point(at, (box.bottom + box.top) / 2), name, align=side)
    return sum(box is None for box in boxes)
