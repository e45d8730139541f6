"""The useful learning rates of several designs, one row each, and what they reach at the best of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.plots import outcome_colors, style
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

    The bar ends at slow and useful edge; where an edge was not within the rates tried, it ends in a hollow square at
    the last of them; without any edge there is no bar. The mark on the bar is the best rate, a hollow triangle the rate
    from which most runs diverge. The right panel has the held-out loss at the best rate.

    Args:
        outcomes: Dataset of `workbench.rates.rate_outcomes`.
        by: Coordinate whose values have a colour each, such as ``"study"``; None: one colour.
        places: Style number of each of these values (`style.model_style`); None: in the order of the designs.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of two panels with options for that backend only.

    Raises:
        SchemaError: If the dataset is another one, has no design, or lacks the coordinate.
        OptionError: If the backend or a place does not exist.

    Example:
        >>> import workbench as wb
        >>> study = wb.samples.rate_study("fit")
        >>> runs = study.isel(run=study.architecture.isin(["GPT-2", "Llama"]).values & (study.stage == "coarse").values)
        >>> len(wb.plots.rate_bands(wb.rates.rate_outcomes(runs)))  # panels
        2
    """
    _require(outcomes, by)
    kinds = [""] * outcomes.sizes["cell"] if by is None else [str(one) for one in outcomes[by].values]
    names = list(dict.fromkeys(kinds))
    looks = dict(zip(names, map(style.model_style, style.model_places(names, places)), strict=True))
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
            _draw_rates(left, one, at, looks[kind])
        for name, look in looks.items():
            is_it = np.array(kinds) == name
            loss, at = outcomes["best_loss"].values[is_it], np.array(heights)[is_it]
            right.dots(loss, at, color=look["color"], marker=look["marker"], label=name, tips=[("loss", "$x")])
        panels = [
            left.panel(
                title="Useful learning rates",
                note=["bar: useful rates", "mark on it: best rate", "hollow triangle: from here on most runs diverge"],
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
                names=("loss (nat)", ""),
                ticks=(None, ticks),
                bare=(False, True),
                at=(_WIDTHS[0] + 60, 0),
                legend=by is not None,
            ),
        ]
        return style.laid_out(hv, panels, backend, n_columns=2)


def _require(outcomes: xr.Dataset, by: str | None) -> None:
    needed = (*_NEEDED, "architecture", *(() if by is None else (by,)))
    if missing := [name for name in needed if name not in outcomes.variables]:
        raise SchemaError(f"The outcomes lack {', '.join(missing)}; take them from wb.rates.rate_outcomes.")
    if not np.isfinite(outcomes["best_loss"].values).any():
        raise SchemaError("No design has a finite loss; there is nothing to draw.")


def _rows(architectures: Sequence[str]) -> tuple[list[float], list[tuple[float, str]]]:
    """Heights of the designs, from 0 down with a gap between architectures, and a tick in the middle of each of these.

    The designs of an architecture are beside each other, in the order in which it occurs first.
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


def _draw_rates(draw: Primitives, one: Mapping[str, float], at: float, look: Mapping[str, str]) -> None:
    """One row: the band, the best rate, and the explosion edge."""
    color = look["color"]
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
        tips = [("best rate", "$x"), ("useful", f"{ends[0]:.2g} to {ends[1]:.2g}")]
        draw.dots(
            [one["best_rate"]], [at], color=color, marker=look["marker"], size=10, edge=outcome_colors.MARK_GROUND,
            tips=tips,
        )  # fmt: skip
    if np.isfinite(one["explosion_edge"]):
        draw.dots([one["explosion_edge"]], [at], color=color, marker="inverted_triangle", size=8, is_hollow=True)
