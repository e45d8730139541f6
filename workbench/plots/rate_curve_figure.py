"""Held-out loss against the learning rate, with the band of useful rates and the explosion edge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.option_checks import NonNegativeInt
from workbench.plots import outcome_colors, style
from workbench.plots.dataset_columns import by_name, require_variables
from workbench.plots.figure_files import redrawable
from workbench.plots.primitives import Primitives, decades
from workbench.plots.run_losses import draw_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr

_SIZE = (640, 340)
_NEEDED = ("loss", "mean_loss", "best_rate", "slow_edge", "useful_edge", "is_learned")
#: The axis ends above the trivial loss, by this fraction of the range from the best loss to it.
_HEADROOM = 0.25
#: Distance of the bars of useful rates of several designs, as a fraction of the height.
_BAR = 0.022


@redrawable
def rate_curve(
    outcome: xr.Dataset | Mapping[str, xr.Dataset],
    *,
    places: Mapping[str, NonNegativeInt] | None = None,
    backend: str = "bokeh",
) -> Any:
    """Draw the held-out loss against the learning rate: one line for each design, one dot for each run.

    The band is the range of useful rates; it extends to the end of the axis where an edge is unknown. Of several
    designs, the ranges are bars at the foot, one above the other, because bands would overlap. The large mark is the
    best rate, the dashed line the trivial loss, the dotted vertical line the explosion edge. Losses that are not
    finite or above the axis are triangles at the top.

    Args:
        outcome: Dataset from `workbench.rates.loss_over_rates`, or several of them by name.
        places: Style number (color, marker, dash) of each design, by name; None numbers them in the order given.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If a dataset lacks a variable, or has no finite loss.
        OptionError: If the backend does not exist, or a design has no style number.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> import xarray as xr
        >>> rate, loss = np.array([1e-3, 2e-3, 4e-3]), np.array([[2.2], [2.0], [2.6]])
        >>> band = {"best_rate": 2e-3, "slow_edge": 1.5e-3, "useful_edge": 2.5e-3, "is_learned": True}
        >>> losses = {"loss": (("rate", "seed"), loss), "mean_loss": ("rate", loss.mean(1))}
        >>> outcome = xr.Dataset({**losses, **band}, {"rate": rate, "seed": [0]})
        >>> len(wb.plots.rate_curve(outcome))  # panels
        1

    See Also:
        `workbench.rates.loss_over_rates`: Computes the losses and edges.
        `workbench.plots.rate_bands`: Draws the useful rates of many designs.
    """
    named = by_name(outcome, what="outcome", source="wb.rates.loss_over_rates()")
    for name, data in named.items():
        what = f"outcome '{name}'" if name else "outcome"
        require_variables(data, _NEEDED, what=what, source="wb.rates.loss_over_rates()")
        if not np.isfinite(data["loss"].values).any():
            raise SchemaError(f"The {what} has no finite loss; add runs at smaller learning rates.")
    order = style.model_places(list(named), places)
    rates = np.concatenate([data["rate"].values for data in named.values()])
    left, right = float(rates.min()) / 1.3, float(rates.max()) * 1.3
    bottom, top = _losses_shown(named.values())
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "learning rate", "held-out loss")
        notes: list[str] = []
        for row, ((name, data), place) in enumerate(zip(named.items(), order, strict=True)):
            height = None if len(named) == 1 else bottom + (0.5 + row) * _BAR * (top - bottom)
            notes += _draw(draw, name, data, style.model_style(place), (left, right), (bottom, top), height)
        panel = draw.panel(
            title="Held-out loss vs. learning rate",
            note=[*dict.fromkeys(notes)],
            view=((left, right), (bottom, top)),
            size=_SIZE,
            names=("learning rate", "held-out loss (nat)"),
            ticks=(decades(left, right), None),
            is_log=(True, False),
            legend=len(named) > 1,
        )
        return style.laid_out(hv, [panel], backend)


def _losses_shown(outcomes: Any) -> tuple[float, float]:
    outcomes, lows, highs = list(outcomes), [], []
    for data in outcomes:
        losses = data["loss"].values
        losses = losses[np.isfinite(losses)]
        trivial = float(data["trivial_loss"]) if "trivial_loss" in data else float(np.quantile(losses, 0.9))
        lows.append(float(losses.min()))
        highs.append(max(trivial, float(losses.min()) + 0.1))
    low, high = min(lows), max(highs)
    foot = 0.06 if len(outcomes) == 1 else 0.03 + 1.3 * _BAR * len(outcomes)
    return low - foot * (high - low), high + _HEADROOM * (high - low)


def _draw(
    draw: Primitives,
    name: str,
    data: xr.Dataset,
    styling: Mapping[str, str],
    rates: tuple[float, float],
    losses: tuple[float, float],
    height: float | None,
) -> Sequence[str]:
    """Draw one design, its useful rates as a bar at a height if there are several, and return what its marks mean."""
    color, notes = styling["color"], []
    rate, loss = data["rate"].values, data["loss"].values
    slow, edge = (float(data[one]) for one in ("slow_edge", "useful_edge"))
    if bool(data["is_learned"]):
        first, last = slow if np.isfinite(slow) else rates[0], edge if np.isfinite(edge) else rates[1]
        if height is None:
            draw.boxes(first, losses[0], last, losses[1], colors=color, alpha=0.14)
        else:
            draw.bars(first, height, last, height, color=color, width=5)
        notes.append("band: useful rates" if height is None else "bars at the foot: useful rates")
    if "trivial_loss" in data:
        trivial = float(data["trivial_loss"])
        draw.bars(rates[0], trivial, rates[1], trivial, color=style.NEUTRAL, width=1, dash="dashed")
        notes.append("dashed: trivial loss (target frequencies only)")
    if "explosion_edge" in data and np.isfinite(explosion := float(data["explosion_edge"])):
        draw.bars(explosion, losses[0], explosion, losses[1], color=color, width=2, dash="dotted")
        notes.append("dotted vertical line: explosion edge")
    mean = data["mean_loss"].values
    draw.line(rate, np.where(np.isfinite(mean), mean, np.nan), color=color, dash=styling["dash"], width=2.2, label=name)
    notes += draw_runs(draw, name, rate, loss, color, losses)
    best = float(data["best_rate"])
    if np.isfinite(best):
        place = int(np.argmin(np.abs(np.log(rate / best))))
        draw.dots(
            [best], [mean[place]], color=color, marker=styling["marker"], size=13, edge=outcome_colors.MARK_GROUND
        )
        notes.append("large mark: best rate")
    return notes
