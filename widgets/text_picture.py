"""Text, a table and an image as one small PNG, for the static picture of a widget."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from PIL import Image

from workbench.plots import style
from workbench.plots.figure_files import small_png

#: In pixels; the last one in pixels per inch.
_WIDTH, _MARGIN, _GAP, _DPI = 1000, 16, 22, 100
_TITLE = FontProperties(size=13, weight="bold")
_TEXT, _CELL, _HEAD = FontProperties(size=10.5), FontProperties(size=9.5), FontProperties(size=9.5, weight="bold")
_RULE = "#cccccc"


def text_picture(
    title: str, paragraphs: Sequence[str] = (), table: Sequence[Sequence[str]] | None = None, image: bytes | None = None
) -> bytes:
    """Draw a title, paragraphs, a table (first row the header) and a PNG from top to bottom; text is wrapped."""
    paper = _Paper()
    paper.write(title, _TITLE)
    for paragraph in paragraphs:
        paper.write(paragraph, _TEXT)
    if table:
        paper.tabulate(table)
    picture = paper.image()
    if image is not None:
        picture = _above(picture, Image.open(io.BytesIO(image)).convert("RGB"))
    return small_png(picture)


class _Paper:
    """Lines of text from top to bottom; positions are in pixels until the height is known."""

    def __init__(self) -> None:
        self._figure = Figure(figsize=(_WIDTH / _DPI, 1), dpi=_DPI, facecolor="white")
        self._canvas = FigureCanvasAgg(self._figure)
        self._measure = self._canvas.get_renderer().get_text_width_height_descent
        self._lines: list[tuple[float, float, str, FontProperties]] = []
        self._rules: list[float] = []
        self._y: float = _MARGIN

    def write(self, text: str, font: FontProperties) -> None:
        """Write a paragraph over the full width."""
        self._y = 5 + self._put(text, _MARGIN, _WIDTH - 2 * _MARGIN, font)

    def tabulate(self, table: Sequence[Sequence[str]]) -> None:
        """Write a table; columns are as wide as their cells, or narrower if the page is too narrow."""
        widths = self._column_widths(table)
        self._y += 6
        for row in table:
            x, bottom, font = float(_MARGIN), self._y, _CELL if self._rules else _HEAD
            for cell, width in zip(row, widths, strict=True):
                bottom = max(bottom, self._put(cell, x, width, font))
                x += width + _GAP
            self._rules.append(bottom + 2)
            self._y = bottom + 7

    def image(self) -> Image.Image:
        """Return everything written so far as an image."""
        height = math.ceil(self._y + _MARGIN / 2)
        self._figure.set_size_inches(_WIDTH / _DPI, height / _DPI)
        for x, y, text, font in self._lines:
            look: dict[str, Any] = {"fontproperties": font, "color": style.INK, "parse_math": False}
            self._figure.text(x / _WIDTH, 1 - y / height, text, va="top", **look)
        for y in self._rules:
            ends = _MARGIN / _WIDTH, 1 - _MARGIN / _WIDTH
            self._figure.add_artist(Line2D(ends, [1 - y / height] * 2, color=_RULE, linewidth=0.8))
        self._canvas.draw()
        return Image.fromarray(np.asarray(self._canvas.buffer_rgba())).convert("RGB")

    def _width(self, text: str, font: FontProperties) -> float:
        return self._measure(text, font, ismath=False)[0] if text else 0.0

    def _column_widths(self, table: Sequence[Sequence[str]]) -> list[float]:
        widths = [max(self._width(cell, _HEAD) for cell in column) + 1 for column in zip(*table, strict=True)]
        # The widest columns shrink first: each gets at most an equal part of the width that narrower columns leave.
        remaining, limit = float(_WIDTH - 2 * _MARGIN - _GAP * (len(widths) - 1)), 0.0
        for place, width in enumerate(sorted(widths)):
            limit = max(limit, remaining / (len(widths) - place))
            remaining -= min(width, limit)
        return [min(width, limit) for width in widths]

    def _put(self, text: str, x: float, width: float, font: FontProperties) -> float:
        """Write a wrapped text at the current height and return its lower end."""
        height, y = 1.4 * font.get_size_in_points() * _DPI / 72, self._y
        for line in self._wrapped(text, width, font):
            self._lines.append((x, y, line, font))
            y += height
        return y

    def _wrapped(self, text: str, width: float, font: FontProperties) -> list[str]:
        lines = [""]
        for word in text.split():
            longer = f"{lines[-1]} {word}".strip()
            if self._width(longer, font) <= width:
                lines[-1] = longer
                continue
            lines.append("")
            for letter in word:  # a name may be longer than a line
                if lines[-1] and self._width(lines[-1] + letter, font) > width:
                    lines.append("")
                lines[-1] += letter
        return lines if lines[0] or len(lines) == 1 else lines[1:]


def _above(top: Image.Image, bottom: Image.Image) -> Image.Image:
    """Return an image of two images, one above the other; the lower one is scaled to the width of the upper one."""
    if bottom.width > top.width:
        bottom = bottom.resize((top.width, round(bottom.height * top.width / bottom.width)), Image.Resampling.LANCZOS)
    picture = Image.new("RGB", (top.width, top.height + bottom.height), "white")
    picture.paste(top, (0, 0))
    picture.paste(bottom, (0, top.height))
    return picture
