"""Report as Markdown, with pictures in a folder next to it."""

from __future__ import annotations

import re
from collections.abc import Callable

from workbench.formatting import capitalized
from workbench.reports.document import (
    Document,
    Heading,
    Item,
    Items,
    Lead,
    Paragraph,
    Picture,
    ReportSection,
    ReportTable,
    Sentence,
    TableCell,
)
from workbench.reports.quantity import Quantity
from workbench.schema.statuses import CriterionState

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
