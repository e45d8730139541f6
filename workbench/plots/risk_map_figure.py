"""Where training will diverge: predicted risk over learning rate and architecture, with the runs that were measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.formatting import percent, with_interval
from workbench.plots import outcome_colors, style
from workbench.plots.primitives import Primitives, decades
from workbench.plots.risk_grid import RiskGrid, Runs

if TYPE_CHECKING:
    import xarray as xr

_WIDTH, _ROW, _KEY = 580, 48, (240, 12)
#: Share of the frame's width right of the cells, for text.
_WORDS = 0.3
#: Number of strokes of the hatching that marks a cell as "not familiar".
_N_STROKES = 3


def risk_map(risk: xr.Dataset, *, runs: xr.Dataset | None = None, backend: str = "bokeh") -> Any:
    """Draw the predicted probability of divergence: one row per architecture, learning rates to the right.

    The vertical bar in a row is the stability edge, the largest rate with little risk, and the line through it its
    interval; the numbers are on the right. Hatched cells are unlike the runs that the model has seen, grey ones
    have no prediction. Dots are measured runs, filled if they diverged; runs of one rate are stacked.

    Args:
        risk: Dataset with dims ``architecture`` (may be missing: one row) and ``learning_rate``: probability; where
            known low, high and is_familiar; by architecture largest_stable_rate, largest_stable_rate_low and
            largest_stable_rate_high; attrs ``below`` (share of risk at the edge; .20 where it is missing) and
            ``level`` (of the intervals). NaN: not predicted.
        runs: Measured runs, dim ``run``: architecture, learning_rate and has_diverged, such as a sweep; None: none.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of the map and its colour key, with options for that backend only.

    Raises:
        SchemaError: If the risk or the runs lack a variable or dimension, or a probability or rate is invalid.
        OptionError: If the backend does not exist.

    Example:
        >>> import workbench as wb
        >>> case = wb.samples.divergence_sweep("held out").isel(run=[0])
        >>> risk = wb.risk.over_rates(wb.risk.shipped("forward"), case, [1e-4, 1e-3, 1e-2])
        >>> figure = wb.plots.risk_map(risk)
        >>> len(figure)  # panels
        2
    """
    grid = RiskGrid.of(risk)
    measured = Runs.of(runs, grid)
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "learning rate", "architecture")
        _draw_cells(draw, grid)
        _draw_edges(draw, grid)
        _draw_runs(draw, measured)
        left, right = grid.bounds[[0, -1]]
        end = right * (right / left) ** (_WORDS / (1 - _WORDS))
        n_rows = len(grid.architectures)
        if has_edges := not np.isnan(grid.edges[0]).all():
            start = right * (right / left) ** 0.03
            draw.words(start, 0.54, "stable up to", valign="bottom", is_bold=True)
            for row in range(n_rows):
                draw.words(start, -row, grid.edge_in_words(row))
        key = Primitives(hv, backend, "probability of divergence", "key")
        outcome_colors.draw_color_key(key)
        marks = sorted({0.0, grid.below, 0.5, 1.0})
        panels = [
            draw.panel(
                title="Predicted risk of divergence",
                note=_note(grid, measured),
                view=((left, end if has_edges else right), (0.5 - n_rows, 0.5 + 0.4 * has_edges)),
                size=(_WIDTH, round(_ROW * (n_rows + 0.4 * has_edges))),
                names=("learning rate", ""),
                ticks=(decades(left, right), [(-float(i), name) for i, name in enumerate(grid.architectures)]),
                is_log=(True, False),
                grid=False,
                bounds=(left, right),
                at=(0, 90),
            ),
            key.panel(
                title="",
                view=((0, 1), (0, 1)),
                size=_KEY,
                names=("risk of divergence", ""),
                ticks=(marks, [(0.0, "")]),
                formats=("percent", "plain"),
                grid=False,
                bare=(False, True),
            ),
        ]
        return style.laid_out(hv, panels, backend)


def _draw_cells(draw: Primitives, grid: RiskGrid) -> None:
    bounds = grid.bounds
    row, rate = np.divmod(np.arange(grid.probability.size), len(grid.rates))
    left, right = bounds[rate], bounds[rate + 1]
    probability, is_familiar = grid.probability.ravel(), grid.is_familiar.ravel()
    words = np.array(
        [_in_words(*cell) for cell in zip(probability, grid.low.ravel(), grid.high.ravel(), is_familiar, strict=True)]
    )
    columns = {"name": np.array(grid.architectures)[row], "rate": grid.rates[rate], "words": words}
    tips = [("", "@name"), ("learning rate", "@rate"), ("risk", "@words")][not any(grid.architectures) :]
    colors = outcome_colors.probability_colors(probability)
    draw.boxes(left, -row - 0.46, right, -row + 0.46, colors=colors, columns=columns, tips=tips)
    # A few strokes side by side from the lower left to the upper right of each.
    cell = np.repeat(np.flatnonzero(~is_familiar), _N_STROKES)
    place = np.tile(np.arange(_N_STROKES), len(cell) // _N_STROKES) / _N_STROKES
    width = np.log(right[cell] / left[cell])
    start, stop = left[cell] * np.exp(width * place), left[cell] * np.exp(width * (place + 1 / _N_STROKES))
    draw.bars(start, -row[cell] - 0.46, stop, -row[cell] + 0.46, color="#6f6f6f", width=1)


def _draw_edges(draw: Primitives, grid: RiskGrid) -> None:
    left, right = grid.bounds[[0, -1]]
    for row, (edge, low, high) in enumerate(grid.edges.T):
        if low <= right and high >= left:
            ends = np.clip([low, high], left, right)
            for color, width in ((outcome_colors.MARK_GROUND, 4.5), (outcome_colors.MARK, 2)):
                draw.bars(ends[0], -row, ends[1], -row, color=color, width=width)
        if left <= edge <= right:
            for color, width in ((outcome_colors.MARK_GROUND, 6.5), (outcome_colors.MARK, 3.5)):
                draw.bars(edge, -row - 0.42, edge, -row + 0.42, color=color, width=width)


def _draw_runs(draw: Primitives, runs: Runs) -> None:
    y = -runs.row + 0.34 * runs.spots
    for has_diverged in (False, True):
        is_it = runs.has_diverged == has_diverged
        if is_it.any():
            face = outcome_colors.MARK if has_diverged else outcome_colors.MARK_GROUND
            tips = [("", "diverged" if has_diverged else "survived"), ("learning rate", "$x")]
            draw.dots(runs.rate[is_it], y[is_it], color=face, edge=outcome_colors.MARK, size=6, tips=tips)


def _in_words(probability: float, low: float, high: float, is_familiar: bool) -> str:
    unlike = "" if is_familiar else "unlike the runs that the model has seen"
    if np.isnan(probability):
        return f"not predicted: {unlike}" if unlike else "not predicted"
    return with_interval(probability, low, high, write=percent) + (f", {unlike}" if unlike else "")


def _note(grid: RiskGrid, runs: Runs) -> list[str]:
    words = [] if np.isnan(grid.edges[0]).all() else [f"┃ {grid.edge_meaning}"]
    words += ["○ survived", "● diverged"] if len(runs.row) else []
    words += ["hatched: unlike the runs that the model has seen"] if (~grid.is_familiar).any() else []
    words += ["grey: not predicted"] if np.isnan(grid.probability).any() else []
    return words + runs.remarks
