"""Useful learning rates of several designs, one row each, and the loss at the best rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.plots import outcome_colors, style
from workbench.plots.dataset_columns import require_variables
from workbench.plots.figure_files import redrawable
from workbench.plots.primitives import Primitives, decades

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import xarray as xr

_WIDTHS, _HEIGHT_OF_ROW = (520, 220), 15
_NEEDED = (
    "best_rate", "best_loss", "slow_edge", "useful_edge", "explosion_edge", "smallest_rate", "largest_rate",
)  # fmt: skip


@redrawable
def rate_bands(
    outcomes: xr.Dataset, *, by: str | None = None, places: Mapping[str, int] | None = None, backend: str = "bokeh"
) -> Any:
    """Draw the useful learning rates of several designs: one row each, grouped by architecture.

    The bar extends from the slow edge to the useful edge. If an edge is outside of the rates that were tried, the bar
    ends in a hollow square at the last of them; without any edge there is no bar. The mark on the bar is the best rate,
    the hollow triangle the explosion edge. The right panel shows the held-out loss at the best rate.

    Args:
        outcomes: Dataset from `workbench.rates.rate_outcomes`.
        by: Coordinate whose values have different colors, such as ``"study"``; None draws one color.
        places: Style number (color, marker, dash) of each of these values; None numbers them in the order given.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of two panels with options for that backend only.

    Raises:
        SchemaError: If the dataset lacks a variable or the coordinate, or has no finite loss.
        OptionError: If the backend does not exist, or a value of the coordinate has no style number.

    Example:
        >>> import workbench as wb
        >>> study = wb.samples.open("rate_study", "fit")
        >>> runs = study.isel(run=study.architecture.isin(["GPT-2", "Llama"]).values & (study.stage == "coarse").values)
        >>> len(wb.plots.rate_bands(wb.rates.rate_outcomes(runs)))  # panels
        2

    See Also:
        `workbench.rates.rate_outcomes`: Computes the rates of each design.
        `workbench.plots.rate_curve`: Draws the losses behind them.
    """
    needed = (*_NEEDED, "architecture", *(() if by is None else (by,)))
    require_variables(outcomes, needed, what="table of outcomes", source="wb.rates.rate_outcomes()")
    if not np.isfinite(outcomes["best_loss"].values).any():
        raise SchemaError("No design has a finite loss; add runs at smaller learning rates.")
    kinds = [""] * outcomes.sizes["cell"] if by is None else [str(one) for one in outcomes[by].values]
    names = list(dict.fromkeys(kinds))
    styles = dict(zip(names, map(style.model_style, style.model_places(names, places)), strict=True))
    heights, ticks = _rows(outcomes["architecture"].values.tolist())
    bottom = min(heights) - 1.0
    rates = float(outcomes["smallest_rate"].min()) / 1.3, float(outcomes["largest_rate"].max()) * 1.3
    losses = outcomes["best_loss"].values[np.isfinite(outcomes["best_loss"].values)]
    margin = 0.08 * float(np.ptp(losses)) or 0.1
    height = round(_HEIGHT_OF_ROW * (1.0 - bottom))
    with style.drawing(backend) as hv:
        left, right = Primitives(hv, backend, "learning rate", "row"), Primitives(hv, backend, "best loss", "row")
        for i, (kind, at) in enumerate(zip(kinds, heights, strict=True)):
            one = {name: float(outcomes[name].values[i]) for name in _NEEDED}
            _draw_rates(left, one, at, styles[kind])
        for name, styling in styles.items():
            is_it = np.array(kinds) == name
            loss, at = outcomes["best_loss"].values[is_it], np.array(heights)[is_it]
            right.dots(
                loss, at, color=styling["color"], marker=styling["marker"], label=name, tips=[("held-out loss", "$x")]
            )
        panels = [
            left.panel(
                title="Useful learning rates",
                note=["bar: useful rates", "mark: best rate", "hollow triangle: explosion edge"],
                view=(rates, (bottom, 1.0)),
                size=(_WIDTHS[0], height),
                names=("learning rate", ""),
                ticks=(decades(*rates), ticks),
                is_log=(True, False),
            ),
            right.panel(
                title="Loss at the best rate",
                note=["held-out examples"],
                view=((float(losses.min()) - margin, float(losses.max()) + margin), (bottom, 1.0)),
                size=(_WIDTHS[1], height),
                names=("held-out loss (nat)", ""),
                ticks=(None, ticks),
                bare=(False, True),
                at=(_WIDTHS[0] + 60, 0),
                legend=by is not None,
            ),
        ]
        return style.laid_out(hv, panels, backend, n_columns=2)


def _rows(architectures: Sequence[str]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the heights of the designs, from 0 downwards, and a tick at the center of each architecture.

    The designs of one architecture are adjacent; architectures are in order of first occurrence, with gaps between.
    """
    heights, ticks, at = [0.0] * len(architectures), [], 0.0
    for name in dict.fromkeys(architectures):
        members = [i for i, one in enumerate(architectures) if one == name]
        for i in members:
            heights[i] = at
            at -= 1.0
        ticks.append((at + (len(members) + 1) / 2, name))
        at -= 0.6 if len(members) > 1 else 0.0
    return heights, ticks


def _draw_rates(draw: Primitives, one: Mapping[str, float], at: float, styling: Mapping[str, str]) -> None:
    """Draw one row: the band, the best rate, and the explosion edge."""
    color = styling["color"]
    edges = one["slow_edge"], one["useful_edge"]
    is_known = np.isfinite(one["best_rate"])
    ends = [
        edge if np.isfinite(edge) else limit
        for edge, limit in zip(edges, (one["smallest_rate"], one["largest_rate"]), strict=True)
    ]
    if np.isfinite(edges).any() and is_known:
        draw.bars(ends[0], at, ends[1], at, color=color, width=5, alpha=0.55)
        for edge, end in zip(edges, ends, strict=True):
            if np.isnan(edge):
                draw.dots([end], [at], color=color, marker="square", size=7, is_hollow=True)
        tips = [("best rate", "$x"), ("useful rates", f"{ends[0]:.2g} to {ends[1]:.2g}")]
        draw.dots(
            [one["best_rate"]], [at], color=color, marker=styling["marker"], size=10, edge=outcome_colors.MARK_GROUND,
            tips=tips,
        )  # fmt: skip
    if np.isfinite(one["explosion_edge"]):
        draw.dots([one["explosion_edge"]], [at], color=color, marker="inverted_triangle", size=8, is_hollow=True)
