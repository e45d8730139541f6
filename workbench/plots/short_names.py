"""Names of models shortened to the available width in a figure."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.plots.style import TITLE_SIZE

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont


@cache
def shortened(name: str, width: float) -> str:
    """Return a name shortened to a width in pixels; both ends are kept, because they distinguish runs."""
    font, title = _title_font(), name
    n_kept = len(name)
    while font.getlength(title) > width and n_kept > 2:
        n_kept -= 1
        title = f"{name[: (n_kept + 1) // 2].rstrip()}…{name[-(n_kept // 2) :].lstrip()}"
    return title


@cache
def _title_font() -> FreeTypeFont:
    """Return a font as wide as any that a page uses for titles; it is part of matplotlib."""
    from matplotlib import get_data_path
    from PIL import ImageFont

    pixels = TITLE_SIZE * 96 / 72
    return ImageFont.truetype(Path(get_data_path(), "fonts", "ttf", "DejaVuSans-Bold.ttf"), pixels)
