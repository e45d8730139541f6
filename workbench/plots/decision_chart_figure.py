"""Decision chart of the RKSP paper for models at initialization, with the outcomes of their runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workbench.errors import SchemaError
from workbench.plots import outcome_colors, style
from workbench.plots.dataset_columns import columns_of, require_variables
from workbench.plots.figure_files import redrawable
from workbench.plots.primitives import Primitives, decades
from workbench.studies import published

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr


_SIZE = (600, 360)
#: Largest number of points whose names are drawn; the names of more points appear only in tooltips.
_MOST_NAMES = 20
#: Largest number of points that have large markers.
_MOST_LARGE = 40
_AXES = ("near-unit mass M", "eigenvector condition κ")
#: Labels of `published.DECISION_ZONES`.
_ZONES = ("proceed", "caution", "high risk: use KSS")
_ZONE_COLORS = (outcome_colors.CONVERGED, style.NEUTRAL, outcome_colors.DIVERGED)
_ZONE_ALPHAS = (0.16, 0.10, 0.18)
_OUTCOMES = ("diverged", "some runs diverged", "converged", "outcome unknown")


@redrawable
def decision_chart(points: xr.Dataset, *, limits: xr.Dataset | None = None, backend: str = "bokeh") -> Any:
    """Draw models at initialization in the decision chart of RKSP (Fig. 7), with the outcomes of their runs.

    The axes are the near-unit mass M and the eigenvector condition kappa; the zones are the paper's proceed, caution
    and high risk. The paper states no threshold for kappa: without ``limits`` only M decides. Points that diverged are
    filled, those that converged hollow. Each zone states how many of its runs diverged. Up to 20 points are named.

    Args:
        points: Dataset with one dimension: near_unit_mass and eigenvector_condition, one value per model (mean over
            layers at initialization), and optionally has_diverged or divergence_rate. Names are taken from its
            coordinate or from ``name``.
        limits: Boundaries of the zones, from `workbench.published.decision_chart`; None selects the published ones.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If the points lack a variable, or no point has both values.
        OptionError: If the backend does not exist.

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

    See Also:
        `workbench.published.decision_chart`: Boundaries of the zones.
        `workbench.summarize`: Reduces spectra to one value per model.
    """
    chart = chart_of(points, limits)
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, *_AXES)
        taken = _draw_zones(draw, chart)
        _draw_points(draw, chart)
        n_unnamed = _draw_names(draw, chart, taken)
        panel = draw.panel(
            title="RKSP decision chart at initialization",
            note=[*chart.note, f"{n_unnamed} names not shown" if n_unnamed else ""],
            view=chart.view,
            size=_SIZE,
            names=_AXES,
            ticks=([0.0, 0.3, 0.5, 1.0], decades(1.0, chart.largest, n_most=5)),
            formats=("plain", "plain"),
            is_log=(False, True),
            legend=True,
            grid=False,
        )
        return style.laid_out(hv, [panel], backend)


@dataclass(frozen=True)
class DecisionChart:
    """Points and zones of a chart, ready to be drawn.

    Attributes:
        view: Ranges of the axes.
        largest: Largest eigenvector condition with a tick; points above it are drawn at this value.
        cells: Zones as boxes (left, bottom, right, top, index of the zone), which together fill the view.
        x: Near-unit mass of each point.
        y: Eigenvector condition of each point, at most ``largest``.
        zone: Index of the zone of each point.
        names: Names of the points; an empty name is not drawn.
        tips: Text of the tooltip of each point.
        outcome: Index of the outcome: 0 diverged, 1 some runs diverged, 2 converged, 3 unknown.
        note: Phrases under the title.
    """

    view: tuple[tuple[float, float], tuple[float, float]]
    largest: float
    cells: list[tuple[float, float, float, float, int]]
    x: np.ndarray
    y: np.ndarray
    zone: np.ndarray
    names: tuple[str, ...]
    tips: tuple[str, ...]
    outcome: np.ndarray
    note: list[str]

    def pixels(self, x: Any, y: Any) -> np.ndarray:
        """Return positions on the frame in pixels from its lower left corner, shape (point, 2)."""
        (left, right), (bottom, top) = self.view
        up = np.log(np.asarray(y) / bottom) / np.log(top / bottom)
        return np.stack([(np.asarray(x) - left) / (right - left) * _SIZE[0], up * _SIZE[1]], axis=-1)

    def point(self, left: float, bottom: float) -> tuple[float, float]:
        """Return the position of a pixel in the units of the axes."""
        (x, right), (y, top) = self.view
        return float(x + (right - x) * left / _SIZE[0]), float(y * (top / y) ** (bottom / _SIZE[1]))

    def words(self, zone: int) -> list[str]:
        """Return the lines of the label of a zone: the recommendation, and how many of its runs diverged."""
        is_known = (self.zone == zone) & np.isin(self.outcome, (0, 2))
        if not is_known.any() or (self.outcome == 1).any():
            return [_ZONES[zone]]
        return [_ZONES[zone], f"{int((self.outcome[is_known] == 0).sum())}/{int(is_known.sum())} diverged"]


def chart_of(points: xr.Dataset, limits: xr.Dataset | None = None) -> DecisionChart:
    """Return the points and zones that `decision_chart` draws."""
    needed = ("near_unit_mass", "eigenvector_condition")
    columns = columns_of(
        points, needed, optional=("has_diverged", "divergence_rate"), what="set of points",
        source="wb.published and wb.profile()",
    )  # fmt: skip
    columns = {name: column.astype(float) for name, column in columns.items()}
    mass, condition = (columns[name] for name in needed)
    is_placed = np.isfinite(mass) & ~np.isnan(condition)
    if not is_placed.any():
        raise SchemaError("No point has both near_unit_mass and eigenvector_condition; measure at least one.")
    if limits is None:
        limits = published.decision_chart()
    require_variables(limits, needed, what="chart", source="wb.published.decision_chart()")
    finite = condition[np.isfinite(condition)]
    borders = limits["eigenvector_condition"].values
    high = max(100.0, 1.6 * max([*finite, *borders[np.isfinite(borders)]], default=1.0))
    # The margins hold points on the frame and, below 1, the labels: no condition number is less than 1.
    view = ((-0.03, 1.03), (high**-0.16, high**1.05))
    x_edges = [view[0][0], *limits["near_unit_mass"].values.tolist(), view[0][1]]
    y_edges = [view[1][0], *np.unique(borders[np.isfinite(borders)]).tolist(), view[1][1]]
    cells = []
    for left, right in pairwise(x_edges):
        for bottom, top in pairwise(y_edges):
            middle = (left + right) / 2, np.sqrt(bottom * top)
            zone = published.DECISION_ZONES.index(str(published.decision_zones(*middle, chart=limits)))
            cells.append((left, bottom, right, top, zone))
    note = [f"zones: {limits.attrs.get('source', 'custom').split(', ')[-1]}"]
    if not np.isfinite(borders).any():
        note.append("the paper states no threshold for κ; only M decides")
    elif not np.isfinite(borders).all():
        note.append("κ has one threshold only")
    else:
        note.append(
            f"κ is moderate below {borders[0]:g}, large above {borders[1]:g} (our thresholds; the paper states none)"
        )
    if (n_infinite := int((np.isinf(condition) & is_placed).sum())) > 0:
        note.append(f"{n_infinite} with infinite κ, drawn at the top")
    if n_left_out := int((~is_placed).sum()):
        note.append(f"{n_left_out} point{'s' if n_left_out > 1 else ''} without a value not shown")
    found = published.decision_zones(mass, condition, chart=limits)[is_placed]
    rate = columns.get("has_diverged", columns.get("divergence_rate", np.full(len(mass), np.nan)))[is_placed]
    (dim,) = points["near_unit_mass"].dims
    label = next((key for key in ("name", dim) if key in points.coords and points[key].dims == (dim,)), None)
    is_named = label is not None and points[label].dtype.kind in "OUST"
    mass, condition = mass[is_placed], condition[is_placed]
    return DecisionChart(
        view=view,
        largest=high,
        cells=cells,
        x=mass,
        y=np.minimum(condition, high),
        zone=np.array([published.DECISION_ZONES.index(name) if name else -1 for name in found.tolist()]),
        names=tuple(str(name) for name in points[label].values[is_placed]) if is_named else (),
        tips=tuple(f"M {m:.3f}, κ {k:.3g}" for m, k in zip(mass, condition, strict=True)),
        outcome=np.select([np.isnan(rate), rate >= 1, rate <= 0], [3, 0, 2], default=1),
        note=note,
    )


def _draw_zones(draw: Primitives, chart: DecisionChart) -> list[Box]:
    """Draw the zones with labels at the bottom, where points are rare; return the boxes that the labels fill."""
    for left, bottom, right, top, zone in chart.cells:
        draw.boxes(left, bottom, right, top, colors=_ZONE_COLORS[zone], alpha=_ZONE_ALPHAS[zone])
    taken = []
    for zone in range(len(_ZONES)):
        boxes = [
            Box(*chart.pixels([left, right], [bottom, top]).ravel().tolist())
            for left, bottom, right, top, i in chart.cells
            if i == zone
        ]
        if not boxes:
            continue
        home = min(boxes, key=lambda box: (box.bottom, box.left - box.right))
        lines = chart.words(zone)
        first = home.bottom + 6 + len(lines) * (LINE + 2)
        for i, line in enumerate(lines):
            top = first - i * (LINE + 2)
            draw.words(*chart.point(home.left + 6, top), line, valign="top", is_bold=i == 0)
            taken.append(Box(home.left + 6, top - LINE, home.left + 6 + LETTER * len(line), top))
    return taken


def _draw_points(draw: Primitives, chart: DecisionChart) -> None:
    names = np.array(chart.names or [""] * len(chart.x))
    texts = np.array(chart.tips)
    faces: tuple[dict[str, Any], ...] = (
        {"color": outcome_colors.DIVERGED, "marker": "square"},
        {"color": outcome_colors.DIVERGED, "marker": "triangle", "is_hollow": True},
        {"color": outcome_colors.CONVERGED, "marker": "circle", "is_hollow": True},
        {"color": draw.ink, "marker": "diamond"},
    )
    tips = [("", "@name"), ("", "@text")][not chart.names :]
    size = 9 if len(chart.x) <= _MOST_LARGE else 7
    for index, face in enumerate(faces):  # hollow markers on top of filled ones
        is_it = chart.outcome == index
        if is_it.any():
            columns = {"name": names[is_it], "text": texts[is_it]}
            draw.dots(
                chart.x[is_it], chart.y[is_it], columns=columns, tips=tips, label=_OUTCOMES[index], size=size, **face
            )


def _draw_names(draw: Primitives, chart: DecisionChart, taken: Sequence[Box]) -> int:
    """Draw names next to the points; return the number of names that do not fit."""
    if not chart.names or len(chart.x) > _MOST_NAMES:
        return 0
    places = chart.pixels(chart.x, chart.y)
    boxes = place_labels([tuple(place) for place in places.tolist()], chart.names, _SIZE, taken)
    for (x, _), box, name in zip(places.tolist(), boxes, chart.names, strict=True):
        if box is not None:
            side = "left" if box.left >= x else "right" if box.right <= x else "center"
            at = {"left": box.left, "right": box.right, "center": (box.left + box.right) / 2}[side]
            draw.words(*chart.point(at, (box.bottom + box.top) / 2), name, align=side)
    return sum(box is None for box in boxes)


#: Width of a letter and height of a line of `workbench.plots.primitives.Primitives.words`, in pixels.
LETTER, LINE = 6.9, 13.0
_GAP, _RADIUS = 8.0, 5.0


class Box(NamedTuple):
    """A rectangle on the frame, in pixels from its lower left corner."""

    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: Box) -> bool:
        """Return whether two boxes overlap."""
        is_disjoint = self.right <= other.left or other.right <= self.left
        return not (is_disjoint or self.top <= other.bottom or other.top <= self.bottom)


def place_labels(
    points: Sequence[tuple[float, float]],
    labels: Sequence[str],
    frame: tuple[float, float],
    taken: Sequence[Box] = (),
) -> list[Box | None]:
    """Choose the position of each label: next to, above or below its point, the first that is free.

    Returns:
        Box of each label; None if no position is free. Earlier labels choose first.
    """
    filled = [*taken, *(Box(x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS) for x, y in points)]
    boxes: list[Box | None] = []
    for (x, y), label in zip(points, labels, strict=True):
        width, half = LETTER * len(label), LINE / 2
        corners = [
            (x + _GAP, y - half),
            (x - _GAP - width, y - half),
            (x - width / 2, y + _GAP),
            (x - width / 2, y - _GAP - LINE),
            *((x + dx, y + dy) for dy in (_GAP - 2, 2 - _GAP - LINE) for dx in (_GAP - 4, 4 - _GAP - width)),
        ]
        candidates = [Box(left, bottom, left + width, bottom + LINE) for left, bottom in corners]
        inside = [box for box in candidates if box.left >= 0 and box.right <= frame[0] and box.bottom >= 0]
        inside = [box for box in inside if box.top <= frame[1]]
        free = [box for box in inside if not any(box.meets(other) for other in filled)]
        boxes.append(free[0] if free and label else None)
        filled += [box for box in boxes[-1:] if box is not None]
    return boxes
