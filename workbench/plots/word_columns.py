"""Many texts of a panel as one element; `Primitives.words`, with one element per text, is slow for tens of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.plots import style

if TYPE_CHECKING:
    from workbench.plots.primitives import Primitives

_SIZE = style.TICK_SIZE - 0.5


def column_of_words(draw: Primitives, x: Any, y: Any, texts: Sequence[str], *, align: str = "left") -> None:
    """Write texts whose ``align`` edge is at the points."""
    if not len(texts):
        return
    x, y = np.broadcast_arrays(np.asarray(x, dtype=float), np.asarray(y, dtype=float))
    data = {str(draw.x): x, str(draw.y): y, "text": np.asarray(texts)}
    words = draw.hv.Labels(data, [draw.x, draw.y], "text")
    styling: dict[str, Any]
    if draw.is_bokeh:
        styling = {
            "text_align": align,
            "text_baseline": "middle",
            "text_color": draw.ink,
            "text_font_size": f"{_SIZE}pt",
        }
    else:
        styling = {"horizontalalignment": align, "verticalalignment": "center", "color": draw.ink, "size": _SIZE}
    draw.parts.append(words.opts(**styling, backend=draw.backend))
