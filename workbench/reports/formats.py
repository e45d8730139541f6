"""Formats of a report: one HTML page without scripts and network access, Markdown, and a notebook that redraws it."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import xarray as xr

from workbench.formatting import capitalized
from workbench.reports.document import (
    Document,
    Heading,
    Item,
    Items,
    Lead,
    Paragraph,
    Picture,
    Quantity,
    ReportSection,
    ReportTable,
    Sentence,
    TableCell,
)
from workbench.reports.pictures import as_address, image
from workbench.schema.statuses import CriterionState


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


#: State -> symbol next to its word.
_SYMBOLS: dict[str, str] = {
    CriterionState.HEALTHY: "●",
    CriterionState.AT_RISK: "▲",
    CriterionState.FAILING: "■",
    CriterionState.NOT_MEASURED: "○",
}


def markdown(document: Document, show: Callable[[Picture], str]) -> str:
    """Return a report as Markdown text."""
    parts = [head(document)]
    for section in document.sections:
        parts += section_lines(section, show)
    parts.append(foot(document))
    return "\n\n".join(parts) + "\n"


def head(document: Document) -> str:
    """Return title, verdict, summary, the most important numbers and the first actions."""
    lines = [f"# {plain(document.subject)}", plain(document.kind)]
    word = f"**{_symbol(document.state)}{plain(capitalized(document.verdict))}.** " if document.verdict else ""
    lines.append(f"{word}{plain(document.summary)}")
    if document.facts:
        lines.append(
            "\n".join(
                f"- {plain(capitalized(fact.label))}: **{number(fact.quantity)}**"
                + (f" ({plain(fact.remark)})" if fact.remark else "")
                for fact in document.facts
            )
        )
    if document.actions:
        lines.append("**Recommended actions**")
        lines.append("\n".join(f"{i}. {sentence(action)}" for i, action in enumerate(document.actions, 1)))
    return "\n\n".join(lines)


def foot(document: Document) -> str:
    """Return the origin of the report."""
    about = "; ".join(f"{plain(label)}: {plain(text)}" for label, text in document.about)
    return f"---\n\n{about}\n\nCreated by the Stability Workbench. Each number links to its row in section 3."


def section_lines(section: ReportSection, show: Callable[[Picture], str]) -> list[str]:
    """Return the lines of a section."""
    lines = [f'<span id="{section.key}"></span>\n\n## {section.key[1:]} {plain(section.title)}']
    for block in section.blocks:
        match block:
            case Lead():
                lines.append(f"*{plain(block.text)}*")
            case Heading():
                lines.append(f"### {plain(block.text)}")
            case Paragraph():
                lines.append(" ".join(map(sentence, block.sentences)))
            case Items():
                lines.append(
                    "\n".join(_item(item, i if block.is_ordered else 0) for i, item in enumerate(block.items, 1))
                )
            case Picture():
                lines.append(f"{show(block)}\n\n*{plain(block.title)}. {plain(block.caption)}*")
            case ReportTable():
                written = table(block)
                if block.elsewhere:
                    written = f"*{plain(block.caption)}: omitted here; {plain(block.elsewhere)}*"
                elif block.is_folded:
                    written = f"<details><summary>{plain(block.caption)}</summary>\n\n{written}\n\n</details>"
                else:
                    written = f"**{plain(block.caption)}**\n\n{written}"
                lines.append(written)
    return lines


def sentence(statement: Sentence) -> str:
    """Return a statement whose numbers are links."""
    return "".join(plain(part) if isinstance(part, str) else number(part) for part in statement.parts)


def number(quantity: Quantity) -> str:
    """Return a link to the row of a number, with its unit."""
    units = f" {plain(quantity.units)}" if quantity.units else ""
    return f"[{plain(quantity.text)}](#{quantity.anchor}){units}"


def table(block: ReportTable) -> str:
    """Return a table with the anchors of its numbers."""
    rows = [" | ".join(map(plain, block.columns)), " | ".join("---" for _ in block.columns)]
    rows += [" | ".join(_cell(cell) for cell in row) for row in block.rows]
    return "\n".join(f"| {row} |" for row in rows)


def plain(text: str) -> str:
    """Return a text escaped for Markdown, on one line."""
    text = re.sub(r"[ \t\r\n]+", " ", text)
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|#$~])", r"\\\1", text)


def _cell(cell: TableCell) -> str:
    if cell.quantity:
        return f'<span id="{cell.quantity.anchor}"></span>{plain(cell.text)}'
    if cell.link:
        return number(cell.link)
    return f"{_symbol(cell.state)}{plain(cell.text)}"


def _item(item: Item, place: int) -> str:
    start = f"{place}. " if place else "- "
    title = f"**{_symbol(item.state)}{plain(item.title)}**: " if item.title else ""
    lines = [start + title + " ".join(map(sentence, item.sentences))]
    indent = " " * len(start)
    if item.change:
        setting, old, new = item.change
        lines.append(f"{indent}- {plain(setting)}: {number(old)} → {number(new)}")
    if item.remark:
        lines.append(f"{indent}- {plain(item.remark)}")
    return "\n".join(lines)


def _symbol(state: str) -> str:
    return f"{_SYMBOLS[state]} " if state in _SYMBOLS else ""


_OPENING = """import workbench as wb
from workbench.widgets import show
from workbench.reports import pictures

tree = wb.open_run({name!r})  # all measurements, saved next to this notebook
tree"""


def notebook(document: Document, tree: xr.DataTree, data_name: str) -> dict[str, Any]:
    """Return the notebook, with the pictures of its cells as outputs."""
    from nbformat import v4

    opening = f"The next cell opens `{data_name}`, from which the cells below redraw the pictures."
    cells = [v4.new_markdown_cell(f"{head(document)}\n\n{opening}"), v4.new_code_cell(_OPENING.format(name=data_name))]
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
