"""Report as a notebook: its text, and cells that redraw its pictures from the tree saved next to it."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any

from workbench.reports.document import Document, Picture, ReportSection
from workbench.reports.markdown import foot, head, section_lines
from workbench.reports.pictures import image

if TYPE_CHECKING:
    import xarray as xr

_OPEN = """import workbench as wb
from workbench.widgets import show
from workbench.reports import pictures

tree = wb.open_run({name!r})  # all measurements, saved next to this notebook
tree"""


def notebook(document: Document, tree: xr.DataTree, data_name: str) -> dict[str, Any]:
    """Return the notebook, with the pictures of its cells as outputs."""
    from nbformat import v4

    opening = f"The next cell opens `{data_name}`, from which the cells below redraw the pictures."
    cells = [v4.new_markdown_cell(f"{head(document)}\n\n{opening}"), v4.new_code_cell(_OPEN.format(name=data_name))]
    for section in document.sections:
        cells += _section_cells(section, tree)
    cells.append(v4.new_markdown_cell(foot(document)))
    for place, cell in enumerate(cells):  # the ids of nbformat are random
        cell["id"] = f"cell-{place}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def _section_cells(section: ReportSection, tree: xr.DataTree) -> list[Any]:
    from nbformat import v4

    found: list[Picture] = []

    def mark(picture: Picture) -> str:
        found.append(picture)
        return f"\0{id(found)} {len(found) - 1}\0"  # which no name in the text can be

    cells = []
    # Text between two marks becomes one cell; a picture becomes a cell with its code and the image as output.
    lines = section_lines(section, mark)
    for place, text in enumerate(re.split(rf"\x00{id(found)} (\d+)\x00", "\n\n".join(lines))):
        if place % 2 == 0:
            if text.strip():
                cells.append(v4.new_markdown_cell(text.strip()))
            continue
        picture = found[int(text)]
        _, content = image(picture, tree, pixels=True)
        drawn = {"image/png": base64.b64encode(content).decode(), "text/plain": picture.alternative}
        output = v4.new_output("display_data", data=drawn)
        cells.append(v4.new_code_cell(f"show({picture.code})", outputs=[output]))
    return cells
