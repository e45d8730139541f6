"""Figures as files: PNG and SVG for print, HTML that works anywhere and without a network."""

from __future__ import annotations

import io
import os
from functools import cache, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from workbench.errors import StoreError, require_lab
from workbench.io.atomic import check_free, replacing
from workbench.plots import style

if TYPE_CHECKING:
    from collections.abc import Callable

    import PIL.Image

F = TypeVar("F", bound="Callable[..., Any]")

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Stability Workbench</title>
<style>body {{ margin: 24px; }} @media (prefers-color-scheme: dark) {{ body {{ background: #111111; }} }}</style>
<script>{library}</script></head>
<body><div id="figure"></div><script>{fit}
const element = document.getElementById("figure");
Bokeh.embed.embed_item({item}, "figure").then((views) => {{
  const fit = fittedWidth([...views], element);
  new ResizeObserver(fit).observe(element);
}});</script></body></html>
"""
#: Pixels per inch and colours of the pictures that stay in a notebook.
_PICTURE_DPI, _N_COLORS = 100, 200
_BACKEND_OF = {".png": "matplotlib", ".svg": "matplotlib", ".pdf": "matplotlib", ".html": "bokeh"}


def save(figure: Any, path: str | os.PathLike[str], *, overwrite: bool = False, dpi: int = 200) -> Path:
    """Write a figure to a file, completely or not at all.

    Args:
        figure: Figure from ``eigenvalue_map()`` or another function of this package, for either backend.
        path: File to write: ``.html``, a page on which zoom and hover work, or ``.png``, ``.svg`` or ``.pdf``.
        overwrite: Whether to replace an existing file.
        dpi: Pixels per inch of a PNG.

    Returns:
        The path.

    Raises:
        StoreError: If the ending is unknown, the folder is missing, the file exists, or the disk is full; or if the
            figure was not drawn by a function of this package, and for another backend than the ending needs.
        MissingPackageError: If the packages that draw are not installed.

    Example:
        >>> import workbench as wb
        >>> figure = wb.plots.reliability(wb.risk.reliability([0.9, 0.1], [True, False]))
        >>> wb.plots.save(figure, "reliability.html").name
        'reliability.html'
    """
    path = Path(path)
    backend = _BACKEND_OF.get(path.suffix.lower())
    if backend is None:
        raise StoreError(f"'{path.name}' ends in '{path.suffix}', expected one of {', '.join(_BACKEND_OF)}.")
    require_lab("Figures", "holoviews", backend)
    figure = for_backend(figure, backend)
    drawn_for = drawn_backends(figure)
    if drawn_for and backend not in drawn_for:
        raise StoreError(
            f"A {path.suffix} file needs a figure of backend {backend}, this one is drawn for {drawn_for[0]}; "
            f"draw it with backend='{backend}' or choose another ending."
        )
    if not path.parent.is_dir():
        raise StoreError(f"The folder '{path.parent}' does not exist; make it first.")
    check_free(path, overwrite=overwrite)
    content = _html(figure) if backend == "bokeh" else _image(figure, path.suffix[1:].lower(), dpi)
    with replacing(path) as partial:
        partial.write_bytes(content)
    return path


def redrawable(function: F) -> F:
    """Let a function's figures know how they were drawn, so that `for_backend` can draw them again."""

    @wraps(function)
    def draw(*args: Any, backend: str = "bokeh", **options: Any) -> Any:
        figure = function(*args, backend=backend, **options)
        figure.drawn_by = partial(function, *args, **options)
        return figure

    return cast("F", draw)


def for_backend(figure: Any, backend: str) -> Any:
    """The same figure, drawn for a backend.

    A figure that does not come from a function of this package, or was composed of several, is taken as it is.
    """
    if backend in drawn_backends(figure) or not hasattr(figure, "drawn_by"):
        return figure
    return figure.drawn_by(backend=backend)


def picture_of(figure: Any) -> bytes:
    """A figure as a small PNG, about as wide as a page of a notebook."""
    from PIL import Image

    return small_png(Image.open(io.BytesIO(_image(for_backend(figure, "matplotlib"), "png", _PICTURE_DPI))))


def small_png(image: PIL.Image.Image) -> bytes:
    """An image as PNG with a palette, a third as large; lines and text do not change visibly."""
    from PIL import Image

    small = io.BytesIO()
    reduced = image.convert("RGB").quantize(_N_COLORS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    reduced.save(small, "png", optimize=True)
    return small.getvalue()


def bokeh_plot(figure: Any) -> Any:
    """The holoviews plot of a figure of backend bokeh, in a document of its own; ``.state`` is the bokeh layout."""
    from bokeh.document import Document

    with style.drawing("bokeh") as hv:
        # Several figures on one page lose their glyphs with webgl; an instance leaves the global renderer alone.
        renderer = hv.renderer("bokeh").instance(webgl=False)
        document = Document()
        plot = renderer.get_plot(figure, doc=document)
        document.clear()
        document.add_root(plot.state)
        _set_toolbars(plot.state)
        return plot


def _set_toolbars(layout: Any) -> None:
    """No logo; dragging selects modes if there are any to select. By default, bokeh starts with panning."""
    from bokeh.models import BoxSelectTool, Toolbar

    for toolbar in layout.select({"type": Toolbar}):
        toolbar.logo = None
        for tool in toolbar.tools:
            if isinstance(getattr(tool, "tools", [tool])[0], BoxSelectTool):
                toolbar.active_drag = tool


def drawn_backends(figure: Any) -> list[str]:
    """The backends that a holoviews object carries options for."""
    import holoviews as hv

    ids = {item.id for item in figure.traverse(lambda item: item) if item.id is not None}
    loaded = [backend for backend in style.BACKENDS if backend in hv.Store.renderers]
    return [backend for backend in loaded if ids & set(hv.Store.custom_options(backend=backend))]


@cache
def fit_script() -> str:
    """The script that makes a figure as wide as the page."""
    return Path(__file__).with_name("fit_width.js").read_text(encoding="utf-8")


def _html(figure: Any) -> bytes:
    import json
    from importlib.resources import files

    from bokeh.embed import json_item

    # bokeh's own file_html() adds links to all other loaded extensions; this page has none.
    library = files("bokeh").joinpath("server/static/js/bokeh.min.js").read_text(encoding="utf-8")
    item = json.dumps(json_item(bokeh_plot(figure).state)).replace("</", "<\\/")
    return _PAGE.format(library=library, item=item, fit=fit_script()).encode()


def _image(figure: Any, kind: str, dpi: int) -> bytes:
    with style.drawing("matplotlib") as hv:
        renderer = hv.renderer("matplotlib").instance(fig=kind, dpi=dpi)
        content, _ = renderer(figure, fmt=kind)
        return content if isinstance(content, bytes) else content.encode()
