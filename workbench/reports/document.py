"""Content of a report, independent of its format: numbers of a tree with their places, sentences, tables, sections."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xarray as xr

from workbench.errors import SchemaError
from workbench.formatting import band_in_words, number_in_words, title_of, units_in_words

#: Words in names of variables that are fractions and are written in percent.
_FRACTIONS = {"probability", "share", "confidence", "mass"}


@dataclass(frozen=True)
class Quantity:
    """One value of a tree that a sentence cites, with its text, meaning, location and anchor in the report.

    Variables that are attributes begin with ``@``; ``band`` and ``state`` are those of a criterion, else empty.
    """

    path: str
    variable: str
    selection: tuple[tuple[str, int], ...]
    value: Any
    units: str
    text: str
    meaning: str
    where: str
    anchor: str
    band: str = ""
    state: str = ""

    @property
    def exact(self) -> str:
        """Value with all digits, for machines."""
        return repr(self.value) if isinstance(self.value, int | float) else str(self.value)


@dataclass
class Numbers:
    """Access to the numbers in a tree, or below one of its nodes."""

    tree: xr.DataTree
    at: str = ""
    _criterion_at: dict[tuple, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.has("criteria"):
            for name in self.names("criteria", "criterion"):
                path, variable, selection = self._place_of(name)
                if path:
                    selection = self._canonical(path, variable, selection)
                    self._criterion_at[self._absolute(path), variable, selection] = name

    def has(self, path: str) -> bool:
        """Return whether a node exists."""
        try:
            self.node(path)
        except SchemaError:
            return False
        return True

    def node(self, path: str) -> xr.Dataset:
        """Return the dataset at a path."""
        absolute = self._absolute(path)
        try:
            return self.tree[absolute].to_dataset()
        except (KeyError, AttributeError, ValueError) as error:
            raise SchemaError(f"The tree has no {absolute}, which its report cites; create the tree again.") from error

    def names(self, path: str, dim: str) -> list[str]:
        """Return the ids along a dimension of a node."""
        data = self.node(path)
        if dim not in data.coords:
            raise SchemaError(f"{self._absolute(path)} has no coordinate '{dim}'; create the tree again.")
        return [str(name) for name in np.atleast_1d(data[dim].values)]

    def texts(self, path: str, variable: str) -> list[str]:
        """Return the texts of a variable along its only dimension."""
        return [str(text) for text in np.atleast_1d(self._array(path, variable).values)]

    def text(self, path: str, variable: str, **selection: int) -> str:
        """Return a single text."""
        return str(self.value(path, variable, meaning="", **selection).value)

    def value(self, path: str, variable: str, *, meaning: str = "", **selection: int) -> Quantity:
        """Return the value of a variable at indices of its dimensions, as `criterion` if it is one."""
        given = tuple(sorted((dim, int(index)) for dim, index in selection.items()))
        given = self._canonical(path, variable, given)
        if criterion := self._criterion_at.get((self._absolute(path), variable, given)):
            return self.criterion(criterion)
        quantity = self._value(path, variable, given)
        return replace(quantity, meaning=meaning) if meaning else quantity

    def attribute(self, name: str, *, meaning: str = "") -> Quantity:
        """Return an attribute of the node."""
        where, attrs = self._absolute(""), self.node("").attrs
        if name not in attrs:
            raise SchemaError(f"The tree has no attribute '{name}' at {where} for its report; create the tree again.")
        value = _plain(attrs[name])
        return Quantity(
            path=where,
            variable=f"@{name}",
            selection=(),
            value=value,
            units="",
            text=number_in_words(value),
            meaning=meaning or title_of(name),
            where=f"{where} attribute {name}",
            anchor=_anchor(where, "attribute", name),
        )

    def has_attribute(self, name: str) -> bool:
        """Return whether the node has an attribute that is not empty."""
        return self.node("").attrs.get(name) not in (None, "")

    def count(self, path: str, variable: str, equals: str, *, meaning: str) -> Quantity:
        """Return the number of texts of a variable that equal a given one."""
        where, n = self._absolute(path), self.texts(path, variable).count(equals)
        return Quantity(
            path=where,
            variable=f"{variable} == '{equals}'",
            selection=(),
            value=n,
            units="",
            text=str(n),
            meaning=meaning,
            where=f"{where} rows where {variable} is '{equals}'",
            anchor=_anchor(where, variable, "is", equals),
        )

    def criterion(self, name: str) -> Quantity:
        """Return the number that a criterion evaluates, with its band and state, read from where it was measured."""
        ids = self.names("criteria", "criterion")
        if name not in ids:
            raise SchemaError.of("criterion", name, tuple(ids), remedy="create the tree again")
        row = ids.index(name)
        data = self.node("criteria").isel(criterion=row)
        path, variable, selection = self._place_of(name)
        evaluated = float(data["value"])
        units = str(data["units"].values)
        is_share = units == "1" and _is_share(path, variable)
        where = f"{self._absolute('criteria')} value, {name}"
        if path:
            selection = self._canonical(path, variable, selection)
            source = self._value(path, variable, selection)
            where = source.where
            if not _agree(source.value, evaluated):
                raise SchemaError(
                    f"The value of the criterion '{name}' is {evaluated:g}, but {where} is {source.text}; create the "
                    "tree again."
                )
        return Quantity(
            path=self._absolute(path or "criteria"),
            variable=variable or "value",
            selection=selection if path else (("criterion", row),),
            value=evaluated,
            units=units_in_words(units, evaluated),
            text=number_in_words(evaluated, is_fraction=is_share),
            meaning=str(data["title"].values),
            where=where,
            anchor=_anchor(self._absolute("criteria"), name),
            band=band_in_words(float(data["low"]), float(data["high"]), is_fraction=is_share),
            state=str(data["state"].values),
        )

    def _value(self, path: str, variable: str, selection: tuple[tuple[str, int], ...]) -> Quantity:
        array, where = self._array(path, variable), self._absolute(path)
        chosen = dict(selection)
        rest = [f"{dim} ({size})" for dim, size in array.sizes.items() if dim not in chosen and size > 1]
        shape = dict(array.sizes)
        if unknown := [dim for dim in chosen if dim not in shape]:
            raise SchemaError(
                f"{where} {variable} has no dimension '{unknown[0]}'; it has {', '.join(map(str, shape)) or 'none'}."
            )
        for dim, index in chosen.items():
            if not -shape[dim] <= index < shape[dim]:
                raise SchemaError(f"{where} {variable} has no {dim} {index}; it has {shape[dim]}.")
        if rest:
            raise SchemaError(f"{where} {variable} is not a single value; select along {', '.join(rest)}.")
        picked = array.isel(chosen).squeeze(drop=False)
        value = _plain(picked.values)
        units = str(array.attrs.get("units", ""))
        is_share = units in ("", "1") and _is_share(path, variable)
        labels = [number_in_words(_plain(array[d].values[i])) if d in array.coords else i for d, i in selection]
        places = [f"{dim} {label}" for (dim, _), label in zip(selection, labels, strict=True)]
        return Quantity(
            path=where,
            variable=variable,
            selection=selection,
            value=value,
            units=units_in_words(units, value),
            text=number_in_words(value, is_fraction=is_share),
            meaning=str(array.attrs.get("long_name") or title_of(variable)),
            where=", ".join([f"{where} {variable}", *places]),
            anchor=_anchor(where, variable, *(f"{dim}-{index}" for dim, index in selection)),
        )

    def _canonical(
        self, path: str, variable: str, selection: tuple[tuple[str, int], ...]
    ) -> tuple[tuple[str, int], ...]:
        """Return a selection in normal form: non-negative indices, without dimensions of length 1."""
        sizes = self._array(path, variable).sizes
        counted = ((dim, index + sizes.get(dim, 0) if index < 0 else index) for dim, index in selection)
        return tuple((dim, index) for dim, index in counted if sizes.get(dim) != 1 or index != 0)

    def _array(self, path: str, variable: str) -> xr.DataArray:
        data, where = self.node(path), self._absolute(path)
        if variable not in data.variables:
            raise SchemaError(f"The tree has no '{variable}' at {where} for its report; create the tree again.")
        return data[variable]

    def _place_of(self, criterion: str) -> tuple[str, str, tuple[tuple[str, int], ...]]:
        data = self.node("criteria")
        row = self.names("criteria", "criterion").index(criterion)
        missing = [name for name in ("path", "variable", "selection") if name not in data]
        if missing:
            raise SchemaError(f"{self._absolute('criteria')} lacks {', '.join(missing)}; create the tree again.")
        path, variable, selection = (str(data[name].values[row]) for name in ("path", "variable", "selection"))
        try:
            chosen = json.loads(selection) if selection else {}
            return path, variable, tuple(sorted((dim, int(index)) for dim, index in chosen.items()))
        except (ValueError, TypeError, AttributeError) as error:
            raise SchemaError(
                f"The selection of the criterion '{criterion}' is {selection!r}, expected JSON of dimension and index."
            ) from error

    def _absolute(self, path: str) -> str:
        return "/" + "/".join(part for part in (*self.at.split("/"), *path.split("/")) if part)


def _anchor(*parts: str) -> str:
    # Other characters are replaced by their codes, so that two locations never have the same anchor.
    words = [re.sub(r"[^A-Za-z0-9_/.-]", lambda sign: f"~{ord(sign[0]):x}", part) for part in parts]
    return re.sub(r"[/.]+", "-", f"n-{'-'.join(word.strip('/') for word in words)}").replace("~", "_")


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.ndarray | np.generic) else value
    return json.dumps(value) if isinstance(value, list | dict) else value


def _is_share(path: str, variable: str) -> bool:
    return bool(_FRACTIONS & set(variable.split("_")))


def _agree(source: Any, evaluated: float) -> bool:
    if not isinstance(source, int | float):
        return False
    return bool(np.isclose(float(source), evaluated, rtol=1e-4, atol=0, equal_nan=True))


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
    """Table with a caption, whose rows begin with a name; ``elsewhere`` says where they are if a format omits it."""

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
    """Content of a report: a verdict with its state, a sentence, facts, actions, numbered sections, and its origin."""

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
