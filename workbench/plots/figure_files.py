"""Figures as files: PNG, SVG and PDF for print, and HTML that needs no network."""

from __future__ import annotations

import io
import os
from functools import cache, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from workbench.errors import StoreError, require_lab
from workbench.io.atomic import check_free, replacing
from workbench.option_kinds import PositiveInt
from workbench.plots import style

if TYPE_CHECKING:
    from collections.abc import Callable

    import PIL.Image
    from holoviews.core import Dimensioned

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
#: Pixels per inch and number of colors of the pictures that are saved in a notebook.
_PICTURE_DPI, _N_COLORS = 100, 200
_BACKEND_OF = {".png": "matplotlib", ".svg": "matplotlib", ".pdf": "matplotlib", ".html": "bokeh"}


def save(figure: Dimensioned, path: str | os.PathLike[str], *, overwrite: bool = False, dpi: PositiveInt = 200) -> Path:
    """Write a figure to a file atomically.

    Args:
        figure: Figure from a function of `workbench.plots`, for either backend; ``figure.savefig(path)`` does the same.
        path: File to write. The suffix selects the format: ``.html`` (with zoom and tooltips), ``.png``, ``.svg`` or
            ``.pdf``.
        overwrite: Whether to replace an existing file.
        dpi: Pixels per inch of a PNG.

    Returns:
        The path.

    Raises:
        StoreError: If the suffix is unknown, the folder is missing, the file exists, the disk is full, or the figure
            was not drawn by a function of this package and is for another backend than the suffix needs.
        MissingPackageError: If the drawing packages are not installed.

    Example:
        >>> import workbench as wb
        >>> figure = wb.plots.reliability(wb.risk.reliability([0.9, 0.1], [True, False]))
        >>> wb.plots.save(figure, "reliability.html").name
        'reliability.html'

    See Also:
        `workbench.report`: Writes several figures, tables and text to one file.
        `workbench.widgets.show`: Shows a figure in a notebook.
    """
    path = Path(path)
    backend = _BACKEND_OF.get(path.suffix.lower())
    if backend is None:
        raise StoreError(f"'{path.name}' has the suffix '{path.suffix}', expected one of {', '.join(_BACKEND_OF)}.")
    require_lab("Figures", "holoviews", backend)
    figure = for_backend(figure, backend)
    drawn_for = drawn_backends(figure)
    if drawn_for and backend not in drawn_for:
        raise StoreError(
            f"A {path.suffix} file needs a figure for {backend}, this one is drawn for {drawn_for[0]}; "
            f"draw it with backend='{backend}' or choose another suffix."
        )
    if not path.parent.is_dir():
        raise StoreError(f"The folder '{path.parent}' does not exist; create it first.")
    check_free(path, overwrite=overwrite)
    content = _html(figure) if backend == "bokeh" else _image(figure, path.suffix[1:].lower(), dpi)
    with replacing(path) as partial:
        partial.write_bytes(content)
    return path


def redrawable(function: F) -> F:
    """Store in each figure of a function how it was drawn, so that `for_backend` can redraw it, and ``savefig``."""

    @wraps(function)
    def draw(*args: Any, backend: str = "bokeh", **options: Any) -> Any:
        figure = function(*args, backend=backend, **options)
        figure.drawn_by = partial(function, *args, **options)
        figure.savefig = partial(save, figure)  # the name that everyone knows from matplotlib
        return figure

    return cast("F", draw)


def for_backend(figure: Any, backend: str) -> Any:
    """Return the same figure drawn for a backend; one that this package did not draw is returned unchanged."""
    if backend in drawn_backends(figure) or not hasattr(figure, "drawn_by"):
        return figure
    return figure.drawn_by(backend=backend)


def picture_of(figure: Any) -> bytes:
    """Return a figure as a small PNG, about as wide as a page of a notebook."""
    from PIL import Image

    return small_png(Image.open(io.BytesIO(_image(for_backend(figure, "matplotlib"), "png", _PICTURE_DPI))))


def small_png(image: PIL.Image.Image) -> bytes:
    """Return an image as PNG with a palette: a third of the size, without a visible change of lines and text."""
    from PIL import Image

    small = io.BytesIO()
    reduced = image.convert("RGB").quantize(_N_COLORS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    reduced.save(small, "png", optimize=True)
    return small.getvalue()


def bokeh_plot(figure: Any) -> Any:
    """Return the holoviews plot of a bokeh figure in a new document; its ``.state`` is the bokeh layout."""
    from bokeh.document import Document

    with style.drawing("bokeh") as hv:
        # With webgl, several figures on one page lose their glyphs. The instance leaves the global renderer unchanged.
        renderer = hv.renderer("bokeh").instance(webgl=False)
        document = Document()
        plot = renderer.get_plot(figure, doc=document)
        document.clear()
        document.add_root(plot.state)
        from bokeh.models import BoxSelectTool, Toolbar

        for toolbar in plot.state.select({"type": Toolbar}):
            toolbar.logo = None
            for tool in toolbar.tools:
                if isinstance(getattr(tool, "tools", [tool])[0], BoxSelectTool):
                    toolbar.active_drag = tool
        return plot


def drawn_backends(figure: Any) -> list[str]:
    """Return the backends for which a holoviews object has options."""
    import holoviews as hv

    ids = {item.id for item in figure.traverse(lambda item: item) if item.id is not None}
    loaded = [backend for backend in style.BACKENDS if backend in hv.Store.renderers]
    return [backend for backend in loaded if ids & set(hv.Store.custom_options(backend=backend))]


@cache
def fit_script() -> str:
    """Return the script that fits the width of a figure to the page."""
    return Path(__file__).with_name("fit_width.js").read_text(encoding="utf-8")


def _html(figure: Any) -> bytes:
    import json
    from importlib.resources import files

    from bokeh.embed import json_item

    # bokeh's file_html() would add links to all other loaded extensions.
    library = files("bokeh").joinpath("server/static/js/bokeh.min.js").read_text(encoding="utf-8")
    item = json.dumps(json_item(bokeh_plot(figure).state)).replace("<", "\\u003c")
    return _PAGE.format(library=library, item=item, fit=fit_script()).encode()


def _image(figure: Any, kind: str, dpi: int) -> bytes:
    with style.drawing("matplotlib") as hv:
        renderer = hv.renderer("matplotlib").instance(fig=kind, dpi=dpi)
        content, _ = renderer(figure, fmt=kind)
        return content if isinstance(content, bytes) else content.encode()
