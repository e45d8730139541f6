"""Colors of the outcomes of runs."""

from __future__ import annotations

from workbench.plots import style

#: Blue and vermilion: distinguishable with any color vision, and with enough contrast on white and on #111111.
CONVERGED, DIVERGED = style.MODEL_COLORS[0], style.MODEL_COLORS[1]
#: Color around marks on colored cells.
MARK_GROUND = "#ffffff"
