"""Trend of a quantity over the size of a model, and its extrapolation to a larger model."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.formatting import capitalized
from workbench.option_checks import NonNegativeInt, checked, one_of
from workbench.plots import outcome_colors, style
from workbench.plots.dataset_columns import by_name, require_variables
from workbench.plots.figure_files import redrawable
from workbench.plots.primitives import Primitives, decades, flowed
from workbench.schema.statuses import CoordinateState

if TYPE_CHECKING:
    from collections.abc import Mapping

    import xarray as xr

_SOURCE = "wb.scaling_study()"
_NEEDED = (
    "measured", "curve", "curve_low", "curve_high", "at_target", "at_target_low", "at_target_high", "is_supported",
    "reason", "scale",
)  # fmt: skip
_SIZE, _CHECK_WIDTH, _ROW = (520, 320), 330, 17
#: Width of a letter of a note.
_LETTER = 6.2
#: Largest number of glyphs for which holoviews shows a legend.
_MOST_GLYPHS = 1000
_CHECK_NOTE = "shaded: no significant growth or vanishing of updates with width"
_STATES: dict[str, str] = {
    CoordinateState.GROWS: "updates grow",
    CoordinateState.VANISHES: "updates vanish",
    CoordinateState.DIVERGED: "a run diverged",
}
_TITLES = {
    "explosion_edge": "explosion edge (learning rate)",
    "near_unit_mass": "near-unit mass M",
    "spectral_radius": "spectral radius",
    "nonlinearity_ratio": "nonlinearity ratio",
}


@checked
@redrawable
def scaling_trend(
    study: xr.Dataset | Mapping[str, xr.Dataset],
    *,
    quantity: str = "explosion_edge",
    along: Annotated[str, one_of(("width", "depth"))] | None = None,
    places: Mapping[str, NonNegativeInt] | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw a ladder of sizes: the measurements, the trend with its interval, and the prediction for the target.

    Small dots are individual seeds, the line is the trend and the shaded band its prediction interval. The large mark
    is the prediction, filled if the ladder supports it and hollow if not; a cross is the measurement at the target. For
    a single study with a coordinate check, a second panel shows for each layer group the exponent p in
    "size of the update ~ width^p": above the shaded range in the standard parametrization, within it in muP.

    Args:
        study: Dataset from `workbench.scaling_study`; several by name or along a dimension ``architecture``.
        quantity: Name of a quantity of the study.
        along: ``"width"`` or ``"depth"``; None selects the width if the first ladder has several widths.
        places: Style number (color, marker, dash) of each study, by name; None numbers them in the order given.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one or two panels with options for that backend only.

    Raises:
        SchemaError: If a dataset is not a scaling study, or lacks the quantity.
        OptionError: If the backend or the direction does not exist, or a study has no style number.

    Example:
        >>> import workbench as wb
        >>> study = wb.samples.scaling().isel(architecture=0)
        >>> figure = wb.plots.scaling_trend(study)
        >>> len(figure)  # panels
        2

    See Also:
        `workbench.scaling_study`: Measures the ladder and fits the trend.
    """
    studies = _studies(study)
    first = next(iter(studies.values()))
    along = along or ("width" if len(np.unique(first["width"])) > 1 else "depth")
    ladders = [Ladder.of(name, data, quantity, along) for name, data in studies.items()]
    order = style.model_places(list(studies), places)
    with style.drawing(backend) as hv:
        note = _note(ladders)
        if len(studies) == 1 and "coordinate_exponent" in first and np.isfinite(first["coordinate_exponent"]).any():
            note, of_check = _equally_high(note, _wrapped(_CHECK_NOTE, _CHECK_WIDTH))
            panels = [_check_panel(hv, backend, first, of_check)]
        else:
            panels = []
        panels.insert(0, _trend_panel(hv, backend, ladders, order, quantity, along, note))
        return style.laid_out(hv, panels, backend, n_columns=2)


@dataclass(frozen=True)
class Ladder:
    """Values of one study, ready to be drawn.

    Attributes:
        name: Name of the study.
        size: Width or depth of each run.
        value: Value measured in each run.
        curve_size: Widths or depths of the trend.
        curve: Trend, and lower and upper end of its interval, shape (3, point).
        goal: Width or depth of the target.
        at_target: Predicted value and the ends of its interval.
        measured_at_target: Mean over seeds, lower and upper end; NaN if not measured.
        is_supported: Whether the ladder supports the prediction.
        reason: Why the ladder does not support it.
        is_log: Whether the axis of the values is logarithmic.
        is_off: Whether the target differs from the ladder in the other dimension too.
    """

    name: str
    size: np.ndarray
    value: np.ndarray
    curve_size: np.ndarray
    curve: np.ndarray
    goal: float
    at_target: np.ndarray
    measured_at_target: np.ndarray
    is_supported: bool
    reason: str
    is_log: bool
    is_off: bool

    @classmethod
    def of(cls, name: str, data: xr.Dataset, quantity: str, along: str) -> Ladder:
        """Read the values from a study."""
        names = data["quantity"].values.tolist()
        if quantity not in names:
            raise SchemaError.of("quantity", quantity, tuple(names))
        one = data.sel(quantity=quantity)
        other = "depth" if along == "width" else "width"
        fixed = data[other].values.min() if other == "depth" else data[other].values.max()
        is_on = data[other].values == fixed
        sizes = np.repeat(data[along].values[is_on], data.sizes["seed"])
        of_curve = (data["curve_along"].values == along) & np.isfinite(data["curve_width"].values)
        curve = np.stack([one[f"curve{end}"].values[of_curve] for end in ("", "_low", "_high")]).astype(float)
        measured = np.full(3, np.nan)
        if "measured_at_target" in one and np.isfinite(one["measured_at_target"]):
            seeds = one["measured_at_target_of_seed"].values
            measured = np.array([float(one["measured_at_target"]), seeds.min(), seeds.max()])
            if quantity == "explosion_edge":
                measured[1:] = float(data["measured_edge_low"]), float(data["measured_edge_high"])
        target = {side: float(_setting(data, f"target_{side}")) for side in ("width", "depth")}
        return cls(
            name,
            sizes.astype(float),
            one["measured"].values[is_on].ravel(),
            data[f"curve_{along}"].values[of_curve].astype(float),
            curve,
            target[along],
            np.array([float(one[f"at_target{end}"]) for end in ("", "_low", "_high")]),
            measured,
            bool(one["is_supported"]),
            str(one["reason"].values),
            str(one["scale"].values) == "log",
            target[other] != fixed,
        )


def _studies(study: Any) -> dict[str, xr.Dataset]:
    """Return studies by name."""
    import xarray as xr

    if isinstance(study, xr.Dataset) and "architecture" in study.dims:
        study = {str(name): study.sel(architecture=name) for name in study["architecture"].values}
    name = study.attrs.get("subject", "") if isinstance(study, xr.Dataset) else ""
    studies = by_name(study, what="scaling study", source=_SOURCE, name=name)
    for label, data in studies.items():
        require_variables(data, _NEEDED, what=f"scaling study '{label}'" if label else "scaling study", source=_SOURCE)
    return studies


def _setting(data: xr.Dataset, name: str) -> Any:
    """Return a setting: an attribute of a single study, or a variable of several studies in one dataset."""
    return data[name].item() if name in data else data.attrs[name]


def _trend_panel(
    hv: Any, backend: str, ladders: list[Ladder], order: list[int], quantity: str, along: str, note: str
) -> Any:
    title = _TITLES.get(quantity, quantity.replace("_", " "))
    draw = Primitives(hv, backend, along, title)
    is_log = all(ladder.is_log for ladder in ladders)
    for ladder, place in zip(ladders, order, strict=True):
        _draw_ladder(draw, ladder, style.model_style(place), is_named=len(ladders) > 1)
    sizes = np.concatenate([[*ladder.size, ladder.goal] for ladder in ladders])
    values = np.concatenate([_extent(ladder) for ladder in ladders])
    values = values[np.isfinite(values) & ((values > 0) | (not is_log))]
    view_x = (sizes.min() / 1.25, sizes.max() * 1.25)
    view_y = _view(values, is_log)
    panel = draw.panel(
        title=f"{capitalized(title)} vs. {along}",
        note=[note],
        view=(view_x, view_y),
        size=_SIZE,
        names=(along, title),
        ticks=(sorted(set(sizes.tolist())), decades(*view_y) if is_log else None),
        is_log=(True, is_log),
        legend=True,
    )
    return panel.opts(legend_limit=_MOST_GLYPHS, backend="bokeh") if draw.is_bokeh else panel


def _draw_ladder(draw: Primitives, ladder: Ladder, styling: Mapping[str, str], *, is_named: bool) -> None:
    color, marker = styling["color"], styling["marker"]
    draw.band(ladder.curve_size, ladder.curve[1], ladder.curve[2], color=color, alpha=0.14)
    label = ladder.name if is_named or ladder.name else "trend"
    has_line = bool(np.isfinite(ladder.curve[0]).any())
    if has_line:
        draw.line(ladder.curve_size, ladder.curve[0], color=color, dash=styling["dash"], width=2.0, label=label)
    is_there = np.isfinite(ladder.value) & (ladder.value > 0 if ladder.is_log else True)
    tips = [("", ladder.name), ("width or depth", "$x"), ("value", "$y")]
    draw.dots(ladder.size[is_there], ladder.value[is_there], color=color, size=6, alpha=0.75, tips=tips)
    value, low, high = ladder.at_target
    if np.isfinite(value):
        draw.bars(ladder.goal, low, ladder.goal, high, color=color, width=2)
        tips = [("", ladder.name), ("prediction", "$y"), ("interval", f"{low:.3g} to {high:.3g}")]
        goal: dict[str, Any] = {"edge": outcome_colors.MARK_GROUND} if ladder.is_supported else {"is_hollow": True}
        label = "" if has_line else label
        draw.dots([ladder.goal], [value], color=color, marker=marker, size=13, tips=tips, label=label, **goal)
    value, low, high = ladder.measured_at_target
    if np.isfinite(value):
        place = ladder.goal * 1.06  # next to the prediction, so that neither hides the other
        draw.bars(place, low, place, high, color=color, width=1.2, dash="dashed")
        tips = [("", ladder.name), ("measured", "$y"), ("range", f"{low:.3g} to {high:.3g}")]
        draw.dots(
            [place], [value], color=color, size=9, is_hollow=True, alpha=0.0, tips=tips
        )  # invisible, for the tooltip
        draw.words(place, value, "×", color=color, align="center", size=17, is_bold=True)


def _extent(ladder: Ladder) -> np.ndarray:
    """Return the values that have to be in view; a wide interval may extend beyond it."""
    ends = ladder.at_target.copy()
    if ladder.is_log and np.isfinite(ends).all():
        ends[1:] = np.clip(ends[1:], ends[0] / 10, ends[0] * 10)
    return np.concatenate([ladder.value, ends, ladder.measured_at_target])


def _view(values: np.ndarray, is_log: bool) -> tuple[float, float]:
    if not len(values):
        return (0.1, 1.0)
    low, high = float(values.min()), float(values.max())
    if is_log:
        return low / 1.4, high * 1.4
    margin = 0.08 * (high - low) or 0.1
    return low - margin, high + margin


def _note(ladders: list[Ladder]) -> str:
    """Return the small lines: explanations of the marks, then each remark with the ladders that it applies to."""
    words = ["dots: seeds", "band: prediction interval", "large mark: prediction for the target"]
    if any(np.isfinite(ladder.measured_at_target[0]) for ladder in ladders):
        words.append("×: measured at the target")
    remarks: dict[str, list[str]] = {}
    for ladder in ladders:
        for sentence in _sentences(ladder):
            remarks.setdefault(sentence, []).append(ladder.name)
    lines = [flowed(words, n_characters=_SIZE[0] / _LETTER)]
    return "\n".join(
        lines + [_wrapped(f"{', '.join(names)}: {sentence}", _SIZE[0]) for sentence, names in remarks.items()]
    )


def _wrapped(sentence: str, width: int) -> str:
    return textwrap.fill(sentence, int(width / _LETTER), break_long_words=False, break_on_hyphens=False)


def _equally_high(*notes: str) -> list[str]:
    """Return the notes padded to the same number of lines: bokeh crops a frame that it has to move down."""
    n_breaks = max(note.count("\n") for note in notes)
    return [note + "\n" * (n_breaks - note.count("\n")) for note in notes]


def _sentences(ladder: Ladder) -> list[str]:
    """Return the remarks on one ladder."""
    parts = [] if ladder.is_supported else [f"not supported (hollow mark). {ladder.reason}"]
    n_outside = int((~np.isfinite(ladder.value)).sum())
    parts += [f"{n_outside} values outside the range tried are not shown."] if n_outside else []
    return parts + (["the target differs from the ladder in width and depth."] if ladder.is_off else [])


def _check_panel(hv: Any, backend: str, data: xr.Dataset, note: str) -> Any:
    groups = data["layer_group"].values
    exponent, low, high = (data[f"coordinate_exponent{end}"].values for end in ("", "_low", "_high"))
    is_there = np.isfinite(exponent)
    groups, exponent, low, high = groups[is_there], exponent[is_there], low[is_there], high[is_there]
    rows = np.arange(len(groups))[::-1].astype(float)
    draw = Primitives(hv, backend, "exponent", "layer group")
    least, most = (float(data["coordinate_exponent"].attrs[f"{name}_healthy"]) for name in ("smallest", "largest"))
    left = min(least, max(np.nanmin(low), exponent.min() - 1)) - 0.1  # a wide interval may extend beyond the view
    right = max(most, min(np.nanmax(high), exponent.max() + 1)) + 0.1
    draw.boxes(least, -0.7, most, len(groups) - 0.3, colors=style.NEUTRAL, alpha=0.15)
    draw.bars(0, -0.7, 0, len(groups) - 0.3, color=style.NEUTRAL, width=1, dash="dashed")
    for is_off, color in ((False, outcome_colors.CONVERGED), (True, outcome_colors.DIVERGED)):
        chosen = ((low > most) | (high < least)) == is_off
        if chosen.any():
            ends = np.clip(low[chosen], left, right), np.clip(high[chosen], left, right)
            draw.bars(ends[0], rows[chosen], ends[1], rows[chosen], color=color, width=1.4)
            columns = {"group": groups[chosen].astype(object)}
            tips = [("", "@group"), ("exponent", "$x")]
            draw.dots(exponent[chosen], rows[chosen], color=color, size=7, columns=columns, tips=tips)
    state = str(data["coordinate_state"].values)
    return draw.panel(
        title=f"Coordinate check: {_STATES.get(state, state)}",
        note=[note],
        view=((left, right), (-0.7, len(groups) - 0.3)),
        size=(_CHECK_WIDTH, max(_SIZE[1], _ROW * len(groups))),
        names=("exponent p of update size ~ width^p", ""),
        ticks=(None, [(float(row), str(group)) for row, group in zip(rows, groups, strict=True)]),
        at=(_SIZE[0] + 330, 0),
    )
