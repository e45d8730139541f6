"""Colors of the outcomes of runs and of predicted risks: a pair of colors and a ramp between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.plots import style

if TYPE_CHECKING:
    from workbench.plots.primitives import Primitives

#: Blue and vermilion: distinguishable with any color vision, and with enough contrast on white and on #111111.
CONVERGED, DIVERGED = style.MODEL_COLORS[0], style.MODEL_COLORS[1]
#: Paler than these two, so that marks and text are readable on a cell.
_RAMP = ("#5f9fe2", "#f7f4ee", "#ea8a3e")
#: Color of a cell without a prediction.
UNKNOWN = "#b4b4b4"
#: Colors of marks on colored cells; the cells are equally bright in a dark theme.
MARK, MARK_GROUND = "#1a1a1a", "#ffffff"


def probability_colors(probability: np.ndarray) -> np.ndarray:
    """Return colors from that of convergence (0) over a pale middle (0.5) to that of divergence (1); gray for NaN."""
    anchors = np.array([[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in _RAMP])
    flat = np.asarray(probability, dtype=float).ravel()
    known = np.where(np.isnan(flat), 0.0, flat)
    rgb = np.stack([np.interp(known, [0, 0.5, 1], channel) for channel in anchors.T], axis=-1).round().astype(int)
    colors = ["#{:02x}{:02x}{:02x}".format(*row) for row in rgb]
    return np.where(np.isnan(flat), UNKNOWN, colors).reshape(np.shape(probability))


def draw_color_key(draw: Primitives) -> None:
    """Draw a strip from 0 to 1 in the colors of `probability_colors`."""
    edges = np.linspace(0, 1, 61)
    draw.boxes(edges[:-1], 0, edges[1:], 1, colors=probability_colors((edges[:-1] + edges[1:]) / 2))
