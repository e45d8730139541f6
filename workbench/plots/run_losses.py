"""Losses of individual runs as dots over their learning rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from workbench.plots.primitives import Primitives


def draw_runs(
    draw: Primitives, name: str, rate: np.ndarray, loss: np.ndarray, color: str, losses: tuple[float, float]
) -> list[str]:
    """Draw a dot for each run, and a triangle at the top for each run whose loss is not finite or above the axis.

    Args:
        draw: Primitives of the panel.
        name: Name of the runs in tooltips; may be empty.
        rate: Shape (rate,).
        loss: Shape (rate, seed); NaN where there is no run.
        color: Color of the marks.
        losses: Ends of the axis of losses.
    """
    at, seed = np.nonzero(~np.isnan(loss))
    value = loss[at, seed]
    is_high = ~(value <= losses[1])
    tips = [("", name), ("learning rate", "$x"), ("held-out loss (nat)", "@shown")][not name :]
    for of, marker in ((~is_high, "circle"), (is_high, "triangle")):
        if of.any():
            shown = np.array([f"{one:.3f}" if np.isfinite(one) else "not finite" for one in value[of]])
            y = np.where(is_high[of], losses[1] - 0.02 * (losses[1] - losses[0]), value[of])
            draw.dots(
                rate[at][of], y, color=color, marker=marker, size=6, alpha=0.7, columns={"shown": shown}, tips=tips
            )
    return ["triangles: loss above the axis or not finite"] if is_high.any() else []
