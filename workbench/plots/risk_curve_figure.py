"""The predicted risk of divergence over the learning rate, with its interval and the measured runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.formatting import percent
from workbench.plots import outcome_colors, style
from workbench.plots.primitives import Primitives, decades, stretches
from workbench.plots.risk_grid import RiskGrid, Runs

if TYPE_CHECKING:
    from collections.abc import Mapping

    import xarray as xr

_SIZE = (560, 300)
#: Vertical position of the runs: below 0 those that converged, above 1 those that diverged.
_RUG = 0.07


def risk_curve(
    risk: xr.Dataset,
    *,
    runs: xr.Dataset | None = None,
    places: Mapping[str, int] | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw the predicted probability of divergence over the learning rate, for one architecture or several.

    The strip around a line is its interval. The large dot is the stability edge, the largest rate with little risk, and
    the line through it its interval; the legend gives both as numbers. Where the model is not applicable the line
    is dotted, and the background is grey without a prediction. Measured runs are drawn below 0 % if they survived
    and above 100 % if they diverged.

    Args:
        risk: Dataset as for `workbench.plots.risk_map`.
        runs: Measured runs, as for `workbench.plots.risk_map`.
        places: Style number of each architecture (`style.model_style`), by name; None: in the order given.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If the risk or the runs lack a variable or dimension, or a probability or rate is invalid.
        OptionError: If the backend or an architecture's place does not exist.

    Example:
        >>> import workbench as wb
        >>> case = wb.samples.divergence_sweep("held out").isel(run=[0])
        >>> risk = wb.risk.over_rates(wb.risk.shipped("forward"), case, [1e-4, 1e-3, 1e-2])
        >>> figure = wb.plots.risk_curve(risk)
        >>> len(figure)  # panels
        1
    """
    grid = RiskGrid.of(risk)
    measured = Runs.of(runs, grid)
    order = style.model_places(grid.architectures, places)
    left, right = grid.bounds[[0, -1]]
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "learning rate", "probability")
        for piece in stretches(np.isnan(grid.probability).all(0)):
            start, stop = grid.bounds[piece.start], grid.bounds[piece.stop]
            draw.boxes(start, 0, stop, 1, colors=style.NEUTRAL, alpha=0.18)
        draw.bars(left, grid.below, right, grid.below, color=style.NEUTRAL, width=1, dash="dashed")
        for row, place in enumerate(order):
            _draw_architecture(draw, grid, row, style.model_style(place))
        _draw_rug(draw, measured, [style.model_style(place)["color"] for place in order])
        panel = draw.panel(
            title="Predicted risk of divergence",
            note=_note(grid, measured),
            view=((left, right), (-2 * _RUG, 1 + 2 * _RUG)),
            size=_SIZE,
            names=("learning rate", "probability of divergence"),
            ticks=(decades(left, right), [0.0, grid.below, 0.5, 0.8, 1.0]),
            formats=("plain", "percent"),
            is_log=(True, False),
            legend=True,
        )
        return style.laid_out(hv, [panel], backend)


def _draw_architecture(draw: Primitives, grid: RiskGrid, row: int, look: Mapping[str, str]) -> None:
    color, probability, is_familiar = look["color"], grid.probability[row], grid.is_familiar[row]
    draw.band(grid.rates, grid.low[row], grid.high[row], color=color)
    name = grid.architectures[row]
    words = grid.edge_in_words(row)
    label = f"{name}: stable up to {words}" if name else f"stable up to {words}"
    if np.isnan(grid.edges[0, row]):
        label = f"{name}: no stable rate predicted" if name else "no stable rate predicted"
    # The dotted line continues to the next familiar rate, so that the two lines meet.
    unfamiliar = ~is_familiar
    if unfamiliar.any():
        place = np.arange(len(unfamiliar))
        reach = (
            unfamiliar | np.roll(unfamiliar, 1) & (place > 0) | np.roll(unfamiliar, -1) & (place < len(unfamiliar) - 1)
        )
        draw.line(grid.rates, np.where(reach, probability, np.nan), color=color, dash="dotted", width=2)
    draw.line(
        grid.rates, np.where(is_familiar, probability, np.nan), color=color, dash=look["dash"], width=2.4, label=label
    )
    shown = np.array(
        [f"{percent(low)} to {percent(high)}" for low, high in zip(grid.low[row], grid.high[row], strict=True)]
    )
    is_known = np.isfinite(probability)
    if draw.is_bokeh and is_known.any():  # invisible, for the pointer
        tips = [("", name), ("learning rate", "$x"), ("risk", "$y{0 %}"), ("interval", "@shown")][not name :]
        dots: dict[str, Any] = {"color": color, "size": 10, "alpha": 0.0, "tips": tips}
        draw.dots(grid.rates[is_known], probability[is_known], columns={"shown": shown[is_known]}, **dots)
    edge, low, high = grid.edges[:, row]
    left, right = grid.bounds[[0, -1]]
    if low <= right and high >= left:
        ends = np.clip([low, high], left, right)
        draw.bars(ends[0], grid.below, ends[1], grid.below, color=color, width=3)
    if left <= edge <= right:
        draw.dots([edge], [grid.below], color=color, marker=look["marker"], size=13, edge=outcome_colors.MARK_GROUND)


def _draw_rug(draw: Primitives, runs: Runs, colors: list[str]) -> None:
    if not len(runs.row):
        return
    jitter = 0.35 * _RUG * runs.spots
    one_color = len(colors) == 1
    for row, color in enumerate(colors):
        for has_diverged in (False, True):
            is_it = (runs.row == row) & (runs.has_diverged == has_diverged)
            if is_it.any():
                outcome = outcome_colors.DIVERGED if has_diverged else outcome_colors.SURVIVED
                y = (1 + _RUG if has_diverged else -_RUG) + jitter[is_it]
                tips = [("", "diverged" if has_diverged else "survived"), ("learning rate", "$x")]
                look: dict[str, Any] = {
                    "color": outcome if one_color else color,
                    "is_hollow": not has_diverged,
                    "tips": tips,
                }
                draw.dots(runs.rate[is_it], y, size=6, alpha=0.8, **look)


def _note(grid: RiskGrid, runs: Runs) -> list[str]:
    words = [] if np.isnan(grid.edges[0]).all() else [f"large mark: {grid.edge_meaning}"]
    words += ["○ below: runs that survived", "● above: runs that diverged"] if len(runs.row) else []
    is_extrapolated = ~grid.is_familiar & np.isfinite(grid.probability)
    words += ["dotted: unlike the runs that the model has seen"] if is_extrapolated.any() else []
    words += ["no line: not predicted"] if np.isnan(grid.probability).any() else []
    return words + runs.remarks
