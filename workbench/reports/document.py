"""Content of a report, independent of its file format: sentences with numbers, tables, pictures, sections."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.reports.quantity import Quantity


@dataclass(frozen=True)
class Sentence:
    """Statement: texts with at least one quantity between them."""

    parts: tuple[str | Quantity, ...]

    @property
    def quantities(self) -> list[Quantity]:
        """Quantities that support the statement."""
        return [part for part in self.parts if isinstance(part, Quantity)]

    @property
    def text(self) -> str:
        """Text without links."""
        return "".join(part if isinstance(part, str) else (f"{part.text} {part.units}".rstrip()) for part in self.parts)


def sentence_of(template: str, **slots: str | Quantity) -> Sentence:
    """Return a sentence from a text with slots, such as ``sentence_of("The risk is {risk}.", risk=quantity)``."""
    parts: list[str | Quantity] = []
    for text, slot, _, _ in string.Formatter().parse(template):
        parts.append(text)
        if slot is not None:
            parts.append(slots[slot])
    joined: list[str | Quantity] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    if not any(isinstance(part, Quantity) for part in joined):
        raise ValueError(f"'{template}' cites no number of the tree.")
    return Sentence(tuple(joined))


@dataclass(frozen=True)
class Lead:
    """Line that introduces a section without a statement."""

    text: str


@dataclass(frozen=True)
class Heading:
    """Heading of a part of a section."""

    text: str


@dataclass(frozen=True)
class Paragraph:
    """Paragraph of sentences."""

    sentences: tuple[Sentence, ...]


@dataclass(frozen=True)
class Item:
    """Entry of a list: a state, a title and sentences; ``change`` is a setting with its old and new value."""

    title: str
    sentences: tuple[Sentence, ...]
    state: str = ""
    change: tuple[str, Quantity, Quantity] | None = None
    remark: str = ""


@dataclass(frozen=True)
class Items:
    """List of items; ordered if the order is one of priority."""

    items: tuple[Item, ...]
    is_ordered: bool = False


@dataclass(frozen=True)
class TableCell:
    """Cell of a table; a cell with a quantity is the target of links in sentences."""

    text: str
    quantity: Quantity | None = None
    state: str = ""
    is_number: bool = False
    link: Quantity | None = None


@dataclass(frozen=True)
class ReportTable:
    """Table with a caption; the first cell of each row is its name.

    Attributes:
        caption: Caption of the table.
        columns: Titles of the columns.
        rows: Cells of each row, one per column.
        is_folded: Whether the table is initially collapsed.
        elsewhere: Location of the rows in the tree, for formats that omit collapsed tables; empty if never omitted.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    is_folded: bool = False
    elsewhere: str = ""


@dataclass(frozen=True)
class Picture:
    """Figure of the data in the tree."""

    title: str
    caption: str
    alternative: str
    draw: Any
    code: str
    has_many_marks: bool = False


Block = Lead | Heading | Paragraph | Items | ReportTable | Picture


@dataclass(frozen=True)
class ReportSection:
    """One of the four sections of a report."""

    key: str
    title: str
    blocks: tuple[Block, ...]

    def each(self, kind: type) -> Iterator[Any]:
        """Return the blocks of one kind."""
        return (block for block in self.blocks if isinstance(block, kind))

    @property
    def sentences(self) -> list[Sentence]:
        """All statements of the section."""
        found: list[Sentence] = []
        for block in self.blocks:
            if isinstance(block, Paragraph):
                found += block.sentences
            if isinstance(block, Items):
                found += [sentence for item in block.items for sentence in item.sentences]
        return found

    @property
    def cited(self) -> list[Quantity]:
        """Quantities that the statements and changes of the section cite."""
        found = [quantity for sentence in self.sentences for quantity in sentence.quantities]
        for items in self.each(Items):
            found += [quantity for item in items.items if item.change for quantity in item.change[1:]]
        return found


@dataclass(frozen=True)
class Fact:
    """One of the few numbers in the summary of a report."""

    quantity: Quantity
    label: str
    remark: str = ""


@dataclass(frozen=True)
class Document:
    """Content of a report.

    Attributes:
        kind: Kind of report, such as "Structural assessment".
        subject: Subject of the report, which is its title.
        verdict: Verdict as text; empty if there is none.
        state: State that determines the shape and color of the verdict.
        summary: Summary in one sentence.
        facts: The most important numbers.
        actions: The first recommended actions.
        sections: What was observed, why, all measurements, and what to do; numbered from 1.
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
        """Pictures of all sections."""
        return [picture for section in self.sections for picture in section.each(Picture)]

    @property
    def places(self) -> dict[str, int]:
        """Anchor -> number of the row, counted through all tables; printed reports use it in place of links."""
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
    """Return the quantities without duplicates, in order of appearance."""
    return list({quantity.anchor: quantity for quantity in reversed(list(quantities))}.values())[::-1]


def numbers_table(caption: str, quantities: Sequence[Quantity]) -> ReportTable:
    """Return a table with value, unit and location of each quantity: the targets of links in sentences."""
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
        ReportTable(caption, ("quantity", "value", "unit", "healthy band", "location in the tree"), rows)
    )


def without_empty_columns(table: ReportTable) -> ReportTable:
    """Return a table without its empty columns."""
    kept = [place for place in range(len(table.columns)) if any(row[place].text for row in table.rows)]
    rows = tuple(tuple(row[place] for place in kept) for row in table.rows)
    return replace(table, columns=tuple(table.columns[place] for place in kept), rows=rows)
