"""Many words of a panel at once: one element, where `Pen.words` makes one each, which takes long for tens of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.plots import style

if TYPE_CHECKING:
    from workbench.plots.primitives import Pen

_SIZE = style.TICK_SIZE - 0.5


def column_of_words(pen: Pen, x: Any, y: Any, texts: Sequence[str], *, align: str = "left") -> None:
    """Texts whose ``align`` edge stands at the points; nothing if there are none.

    Args:
        pen: Of the panel.
        x: Horizontal places, or one for all.
        y: Vertical places.
        texts: As many as places.
        align: ``"left"``, ``"center"`` or ``"right"``.
    """
    if not len(texts):
        return
    x, y = np.broadcast_arrays(np.asarray(x, dtype=float), np.asarray(y, dtype=float))
    data = {str(pen.x): x, str(pen.y): y, "text": np.asarray(texts)}
    words = pen.hv.Labels(data, [pen.x, pen.y], "text")
    if pen.is_bokeh:
        look = {"text_align": align, "text_baseline": "middle", "text_color": pen.ink, "text_font_size": f"{_SIZE}pt"}
    else:
        look = {"horizontalalignment": align, "verticalalignment": "center", "color": pen.ink, "size": _SIZE}
    pen.parts.append(words.opts(**look, backend=pen.backend))
