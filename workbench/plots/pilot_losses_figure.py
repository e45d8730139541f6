"""Losses of a pilot against the learning rate, and the rates estimated for the planned training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.formatting import counted
from workbench.plots import style
from workbench.plots.dataset_columns import require_variables
from workbench.plots.figure_files import redrawable
from workbench.plots.primitives import Primitives, decades
from workbench.plots.run_losses import draw_runs
from workbench.rates.outcomes import mean_over_seeds

if TYPE_CHECKING:
    import xarray as xr

_SIZE = (640, 340)
_USEFUL = style.MODEL_COLORS[2]
_ESTIMATES = ("slow_edge", "best_rate", "useful_edge", "useful_edge_low", "useful_edge_high")
#: The axis ends above the trivial loss, by this fraction of the range.
_HEADROOM = 0.3


@redrawable
def pilot_losses(data: xr.Dataset, *, backend: str = "bokeh") -> Any:
    """Draw the held-out losses of a pilot: one line for each number of updates, one dot for each run.

    The green band is the estimated range of useful rates of the full training. The dotted line is the best rate, the
    solid vertical line the useful edge, and the bar at its foot the interval of that edge. In an assessment, the gray
    vertical lines are the planned rate and its limit. Estimates for another width are drawn with the losses at the
    rates that correspond to theirs at that width.

    Args:
        data: Field ``data`` of the result of `workbench.find_rate`, or node ``pilot`` of an assessment.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout of one panel with options for that backend only.

    Raises:
        SchemaError: If the dataset is not that of a pilot, or has no finite loss.
        OptionError: If the backend does not exist.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2, vocab_size=16, max_length=8)
        >>> task = wb.tasks.random_tokens(length=8, vocab_size=16, batch_size=2)
        >>> found = wb.find_rate(model, task, n_steps=1000, budget=200, progress=False)
        >>> len(wb.plots.pilot_losses(found.data))  # panels
        1

    See Also:
        `workbench.find_rate`: Runs the pilot.
        `workbench.plots.rate_curve`: Draws the losses of full training runs.
    """
    require_variables(data, ("loss", "trivial_loss", *_ESTIMATES), what="pilot", source="wb.find_rate()")
    loss = data["loss"].values
    if not np.isfinite(loss).any():
        raise SchemaError("The pilot has no finite loss; repeat it with a smaller wb.find_rate(..., start=).")
    factor = float(data.attrs.get("rate_factor", 1))
    rate, lengths = factor * data["rate"].values, data["n_updates"].values.tolist()
    slow, best, edge, low, high = (float(data[name]) for name in _ESTIMATES)
    planned, limit = (float(data.get(name, np.nan)) for name in ("planned_rate", "upper_rate_limit"))
    known = [one for one in (slow, best, high, planned, limit) if np.isfinite(one)]
    rates = min([float(rate.min()), *known]) / 1.3, max([float(rate.max()), *known]) * 1.3
    losses = _losses_shown(loss, float(data["trivial_loss"]))
    notes: list[str] = []
    with style.drawing(backend) as hv:
        draw = Primitives(hv, backend, "learning rate", "held-out loss")
        if np.isfinite(edge):
            draw.boxes(slow, losses[0], edge, losses[1], colors=_USEFUL, alpha=0.22)
            draw.bars(edge, losses[0], edge, losses[1], color=_USEFUL, width=2)
            height = losses[0] + 0.03 * (losses[1] - losses[0])
            draw.bars(low, height, high, height, color=_USEFUL, width=5)
            draw.bars(best, losses[0], best, losses[1], color=_USEFUL, width=2, dash="dotted")
            notes.append(f"green: useful rates for {counted(data.attrs['n_steps'], 'update')}")
            notes += ["bar: interval of the useful edge", "dotted: best rate"]
        for at, dash, name in ((planned, "solid", "planned rate"), (limit, "dashed", "limit of the planned rate")):
            if np.isfinite(at):
                draw.bars(at, losses[0], at, losses[1], color=style.NEUTRAL, width=2, dash=dash)
                notes.append(f"gray, {dash}: {name}")
        if np.isfinite(trivial := float(data["trivial_loss"])):
            draw.bars(rates[0], trivial, rates[1], trivial, color=style.NEUTRAL, width=1, dash="dashed")
            notes.append("dashed, horizontal: trivial loss (target frequencies only)")
        for at, (n_updates, color) in enumerate(zip(lengths, style.depth_colors(len(lengths)), strict=True)):
            name, is_tried = counted(n_updates, "update"), ~np.isnan(loss[at])
            is_any = is_tried.any(axis=1)
            mean = mean_over_seeds(loss[at])[is_any]
            draw.line(rate[is_any], np.where(np.isfinite(mean), mean, np.nan), color=color, width=2.2, label=name)
            notes += draw_runs(draw, name, rate, loss[at], color, losses)
        panel = draw.panel(
            title="Held-out loss of the pilot runs",
            note=[*dict.fromkeys(notes)],
            view=(rates, losses),
            size=_SIZE,
            names=("learning rate" if factor == 1 else "learning rate at the planned width", "held-out loss (nat)"),
            ticks=(decades(*rates), None),
            is_log=(True, False),
            legend=True,
        )
        return style.laid_out(hv, [panel], backend)


def _losses_shown(loss: np.ndarray, trivial: float) -> tuple[float, float]:
    finite = loss[np.isfinite(loss)]
    low = float(finite.min())
    high = max(trivial if np.isfinite(trivial) else float(np.quantile(finite, 0.8)), low + 0.1)
    return low - 0.06 * (high - low), high + _HEADROOM * (high - low)
