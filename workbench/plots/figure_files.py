"""Figures as files: PNG and SVG for print, HTML that works anywhere and without a network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from workbench.errors import StoreError, require_lab
from workbench.io.atomic import check_free, replacing
from workbench.plots import style

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Stability Workbench</title>
<style>body {{ margin: 24px; }} @media (prefers-color-scheme: dark) {{ body {{ background: #111111; }} }}</style>
<script>{library}</script></head>
<body><div id="figure"></div><script>Bokeh.embed.embed_item({item}, "figure");</script></body></html>
"""
_BACKEND_OF = {".png": "matplotlib", ".svg": "matplotlib", ".pdf": "matplotlib", ".html": "bokeh"}


def save(figure: Any, path: str | os.PathLike[str], *, overwrite: bool = False, dpi: int = 200) -> Path:
    """Write a figure to a file, completely or not at all.

    Args:
        figure: Figure from ``eigenvalue_map()`` or another function of this package.
        path: File to write, ``.html`` for a figure of backend bokeh, ``.png``, ``.svg`` or ``.pdf`` for matplotlib.
        overwrite: Whether to replace an existing file.
        dpi: Pixels per inch of a PNG.

    Returns:
        The path.

    Raises:
        StoreError: If the ending does not fit the figure, the folder is missing, the file exists, or the disk is full.
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


def _html(figure: Any) -> bytes:
    import json
    from importlib.resources import files

    from bokeh.embed import json_item

    # bokeh's own file_html() adds links to all other loaded extensions; this page has none.
    library = files("bokeh").joinpath("server/static/js/bokeh.min.js").read_text(encoding="utf-8")
    item = json.dumps(json_item(bokeh_plot(figure).state)).replace("</", "<\\/")
    return _PAGE.format(library=library, item=item).encode()


def _image(figure: Any, kind: str, dpi: int) -> bytes:
    with style.drawing("matplotlib") as hv:
        renderer = hv.renderer("matplotlib").instance(fig=kind, dpi=dpi)
        content, _ = renderer(figure, fmt=kind)
        return content if isinstance(content, bytes) else content.encode()
