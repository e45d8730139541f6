"""Report as one self-contained HTML file with embedded figures, without scripts and network access."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from workbench.formatting import capitalized
from workbench.reports.document import Document, Picture
from workbench.reports.pictures import as_address, image

if TYPE_CHECKING:
    import xarray as xr


def html(document: Document, tree: xr.DataTree) -> str:
    """Return the page of a report."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    folder = files("workbench.reports")
    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    environment.filters["kind"] = lambda block: type(block).__name__
    environment.filters["capital"] = capitalized
    images = {
        f"{index}{section.key}": as_address(*image(block, tree))
        for section in document.sections
        for index, block in enumerate(section.blocks)
        if isinstance(block, Picture)
    }
    return environment.from_string(folder.joinpath("page.html.jinja").read_text(encoding="utf-8")).render(
        document=document,
        places=document.places,
        images=images,
        css=Markup(folder.joinpath("page.css").read_text(encoding="utf-8")),
    )
