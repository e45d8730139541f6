"""The content of a report, independent of its file format: sentences with numbers, tables, figures, sections."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.reports.quantity import Quantity


@dataclass(frozen=True)
class Sentence:
    """A statement: texts and the quantities between them, at least one."""

    parts: tuple[str | Quantity, ...]

    @property
    def quantities(self) -> list[Quantity]:
        """The quantities that support it."""
        return [part for part in self.parts if isinstance(part, Quantity)]

    @property
    def text(self) -> str:
        """The text without links."""
        return "".join(part if isinstance(part, str) else _with_units(part) for part in self.parts)


def say(template: str, **slots: str | Quantity) -> Sentence:
    """A sentence from a text with slots, such as ``say("The risk is {risk}.", risk=quantity)``.

    Raises:
        ValueError: If no slot holds a quantity, as every statement of a report needs a supporting number.
    """
    parts: list[str | Quantity] = []
    for text, slot, _, _ in string.Formatter().parse(template):
        parts.append(text)
        if slot is not None:
            parts.append(slots[slot])
    # Adjacent texts are joined.
    joined: list[str | Quantity] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    if not any(isinstance(part, Quantity) for part in joined):
        raise ValueError(f"'{template}' rests on no number of the tree.")
    return Sentence(tuple(joined))


@dataclass(frozen=True)
class Lead:
    """One line that introduces a section and makes no statement."""

    text: str


@dataclass(frozen=True)
class Heading:
    """The heading of a part of a section."""

    text: str


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of sentences."""

    sentences: tuple[Sentence, ...]


@dataclass(frozen=True)
class Item:
    """One entry of a list: a state, a title and sentences; ``change`` is a setting with its old and new value."""

    title: str
    sentences: tuple[Sentence, ...]
    state: str = ""
    change: tuple[str, Quantity, Quantity] | None = None
    remark: str = ""


@dataclass(frozen=True)
class Items:
    """A list; ordered if the order is one of priority."""

    items: tuple[Item, ...]
    is_ordered: bool = False


@dataclass(frozen=True)
class TableCell:
    """A cell of a table; one with a quantity is the target of links in sentences."""

    text: str
    quantity: Quantity | None = None
    state: str = ""
    is_number: bool = False
    link: Quantity | None = None


@dataclass(frozen=True)
class ReportTable:
    """Rows under a caption; the first cell of each row is its name.

    Attributes:
        caption: Caption of the table.
        columns: Titles.
        rows: Cells of each row, one per column.
        is_folded: Whether it is collapsed at first.
        elsewhere: Place of the rows in the tree, for formats that omit folded tables; empty: not omitted.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    is_folded: bool = False
    elsewhere: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure of the tree.

    Attributes:
        title: Title of the figure.
        caption: How to read it.
        alternative: Alternative text, for readers who cannot see it.
        draw: Function from tree and backend to a figure.
        code: Python code that draws it, for a notebook in which the tree is called ``tree``.
        has_many_marks: Whether it is smaller as pixels than as lines.
    """

    title: str
    caption: str
    alternative: str
    draw: Any
    code: str
    has_many_marks: bool = False


Block = Lead | Heading | Paragraph | Items | ReportTable | Picture


@dataclass(frozen=True)
class ReportSection:
    """One of the four sections."""

    key: str
    title: str
    blocks: tuple[Block, ...]

    def each(self, kind: type) -> Iterator[Any]:
        """The blocks of one kind."""
        return (block for block in self.blocks if isinstance(block, kind))

    @property
    def sentences(self) -> list[Sentence]:
        """All statements."""
        found: list[Sentence] = []
        for block in self.blocks:
            if isinstance(block, Paragraph):
                found += block.sentences
            if isinstance(block, Items):
                found += [sentence for item in block.items for sentence in item.sentences]
        return found

    @property
    def cited(self) -> list[Quantity]:
        """The quantities that its statements and changes cite."""
        found = [quantity for sentence in self.sentences for quantity in sentence.quantities]
        for items in self.each(Items):
            found += [quantity for item in items.items if item.change for quantity in item.change[1:]]
        return found


@dataclass(frozen=True)
class Fact:
    """One of the few numbers on the first screen."""

    quantity: Quantity
    label: str
    remark: str = ""


@dataclass(frozen=True)
class Document:
    """The content of a report.

    Attributes:
        kind: Kind of report, such as "Structural assessment".
        subject: Subject of the report; its title.
        verdict: Verdict as text; empty if there is none.
        state: State that sets the shape and colour of the verdict.
        summary: Summary in one sentence.
        facts: The most important numbers.
        actions: Recommended actions, in short.
        sections: V1 to V4.
        about: Origin of the report, as labels and texts.
    """

    kind: str
    subject: str
    verdict: str
    state: str
    summary: str
    facts: tuple[Fact, ...]
    actions: tuple[Sentence, ...]
    sections: tuple[ReportSection, ...]
    about: tuple[tuple[str, str], ...] = field(default=())

    @property
    def pictures(self) -> list[Picture]:
        """The quantities of all sections."""
        return [picture for section in self.sections for picture in section.each(Picture)]

    @property
    def places(self) -> dict[str, int]:
        """Anchor -> its number, counted through all tables; printed reports use it instead of links."""
        anchors = [
            cell.quantity.anchor
            for section in self.sections
            for table in section.each(ReportTable)
            for row in table.rows
            for cell in row
            if cell.quantity
        ]
        return {anchor: number for number, anchor in enumerate(dict.fromkeys(anchors), 1)}


def unique(quantities: Iterable[Quantity]) -> list[Quantity]:
    """The quantities without duplicates, in order of appearance."""
    return list({quantity.anchor: quantity for quantity in reversed(list(quantities))}.values())[::-1]


def numbers_table(caption: str, quantities: Sequence[Quantity]) -> ReportTable:
    """Value, unit and place of each quantity: the target of links in sentences."""
    rows = tuple(
        (
            TableCell(quantity.meaning),
            TableCell(quantity.text, quantity=quantity, is_number=True),
            TableCell(quantity.units),
            TableCell(quantity.band),
            TableCell(quantity.where),
        )
        for quantity in quantities
    )
    return without_empty_columns(
        ReportTable(caption, ("number", "value", "unit", "healthy band", "where in the tree"), rows)
    )


def without_empty_columns(table: ReportTable) -> ReportTable:
    """The same table without empty columns."""
    kept = [place for place in range(len(table.columns)) if any(row[place].text for row in table.rows)]
    rows = tuple(tuple(row[place] for place in kept) for row in table.rows)
    return replace(table, columns=tuple(table.columns[place] for place in kept), rows=rows)


def _with_units(quantity: Quantity) -> str:
    return f"{quantity.text} {quantity.units}".rstrip()
