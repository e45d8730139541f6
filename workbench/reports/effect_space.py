"""Section 3 of every report: all cited numbers, and all other measurements."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import xarray as xr

from workbench.formatting import NO_BAND, lowered, number_in_words, title_of
from workbench.reports import pictures
from workbench.reports.document import (
    Block,
    Heading,
    Lead,
    Numbers,
    Quantity,
    ReportSection,
    ReportTable,
    TableCell,
    numbers_table,
    unique,
    without_empty_columns,
)

#: Variables along longer dimensions are summarized by their extremes.
_MOST_ROWS = 48
#: Largest number of columns with values, so that a table fits on a printed page.
MOST_COLUMNS = 5
_LEAD = (
    "All measurements. Tables with numbered rows contain the numbers that the sentences of this report cite; collapsed "
    "tables below each figure contain all others."
)
_TITLES = {
    "criteria": "Counts of criteria",
    "failure_modes": "Failure modes",
    "decisions": "Settings in decisions",
    "structure": "Structure at initialization",
    "flow": "Flow of signal and gradient",
    "spectra": "Koopman spectra of the blocks",
    "pilot": "Useful learning rates (pilot)",
    "trials": "Trials of the first updates",
    "changes": "Trials of changes to the plan",
    "hardware": "Precision, reduction and parallelism",
    "monitors": "Signals of the run",
    "causes": "Causes",
    "evidence": "Evidence",
    "experiments": "Experiments",
    "designs": "Designs",
}
#: Parts that have separate tables.
SEPARATE_PARTS = ("criteria", "failure_modes", "decisions")


def assessment_section(numbers: Numbers, cited: Iterable[Quantity]) -> ReportSection:
    """Return section 3 of an assessment."""
    cited = unique(cited)
    criteria = numbers.names("criteria", "criterion")
    evaluated = [numbers.criterion(name) for name in criteria]
    known = {quantity.anchor for quantity in evaluated}
    rest = [quantity for quantity in cited if quantity.anchor not in known]
    blocks: list[Block] = [
        Lead(_LEAD),
        Heading("Criteria and their healthy bands"),
        pictures.picture("criteria", "criteria"),
    ]
    blocks.append(criteria_table(numbers, evaluated))
    blocks += part_blocks(numbers, rest, leave_out=SEPARATE_PARTS)
    return ReportSection("v3", "Effect space", tuple(blocks))


def criteria_table(numbers: Numbers, evaluated: list[Quantity], *, of: str = "") -> ReportTable:
    """Return a table of all criteria with their healthy bands and the locations of their numbers."""
    n_reference = [numbers.value("criteria", "n_reference", criterion=row) for row in range(len(evaluated))]
    rows = tuple(
        (
            TableCell(quantity.meaning),
            TableCell(quantity.text, quantity=quantity, is_number=True),
            TableCell(quantity.units),
            TableCell(quantity.band),
            TableCell(
                n.text if n.value > 0 else "fixed rule" if quantity.band != NO_BAND else "", is_number=n.value > 0
            ),
            TableCell(quantity.state, state=quantity.state),
            TableCell(quantity.where),
        )
        for quantity, n in zip(evaluated, n_reference, strict=True)
    )
    columns = ("criterion", "value", "unit", "healthy band", "healthy runs", "state", "location in the tree")
    return without_empty_columns(ReportTable(f"Criteria{of and f' of {of}'}", columns, rows))


def part_blocks(
    numbers: Numbers, cited: Iterable[Quantity], *, leave_out: tuple[str, ...] = (), of: str = ""
) -> list[Block]:
    """Return for each part the numbers cited from it, its pictures, and all of its values."""
    cited = list(cited)
    root = numbers.tree[numbers.at or "/"]
    blocks: list[Block] = []
    for name in sorted(root.children, key=_place_of_part):
        path = f"{numbers.at.rstrip('/')}/{name}"
        cited_here = [quantity for quantity in cited if quantity.path == path]
        cited = [quantity for quantity in cited if quantity.path != path]
        title = _TITLES.get(name, title_of(name).capitalize()) + (f": {of}" if of else "")
        data = root[name].to_dataset()
        if not (cited_here or data.data_vars) or (name in leave_out and not cited_here):
            continue
        blocks.append(Heading(title))
        if cited_here:
            blocks.append(numbers_table(f"Numbers cited: {lowered(title)}", cited_here))
        if name not in leave_out:
            blocks += pictures.of_part(name, data, at=numbers.at)
            blocks += part_tables(data, title)
    if cited:
        caption = "The model and the plan" + (f": {of}" if of else "")
        blocks[:0] = [Heading(caption), numbers_table(f"Numbers cited: {lowered(caption)}", cited)]
    return blocks


def part_tables(data: xr.Dataset, title: str) -> list[ReportTable]:
    """Return collapsed tables of a dataset: single values, tables along each dimension, and extremes of the rest."""
    by_dims: dict[tuple[str, ...], list[str]] = {}
    for name, variable in data.data_vars.items():
        long = variable.ndim > 1 or variable.size > _MOST_ROWS
        dims = () if variable.size == 1 else tuple(map(str, variable.dims))
        by_dims.setdefault(("…",) if long and dims else dims, []).append(str(name))
    tables = []
    for dims, names in by_dims.items():
        if dims == ("…",):
            tables.append(_extremes(data, names, f"{title}: extremes of longer variables"))
        elif not dims:
            tables.append(_singles(data, names, f"{title}: single values"))
        else:
            for first in range(0, len(names), MOST_COLUMNS):
                part = names[first : first + MOST_COLUMNS]
                what = ", ".join(name_of(data[name]) for name in part)
                tables.append(_along(data, dims[0], part, f"{title} by {title_of(dims[0])}: {what}"))
    return tables


def about(tree: xr.DataTree) -> tuple[tuple[str, str], ...]:
    """Return the origin of a tree as labels and texts."""
    shown = ("created", "seed", "duration", "versions", "schema_version")
    return tuple((title_of(name), _about_text(name, tree.attrs[name])) for name in shown if name in tree.attrs)


def _about_text(name: str, value: Any) -> str:
    if name == "duration":
        return f"{number_in_words(float(value))} s"
    text = number_in_words(_plain(value))
    if name == "versions" and text.startswith("{"):
        return ", ".join(f"{key} {version}" for key, version in json.loads(text).items())
    return text


def _place_of_part(name: str) -> tuple[int, str]:
    order = [*_TITLES]
    return (order.index(name) if name in order else len(order), name)


def name_of(variable: xr.DataArray) -> str:
    """Return the title of a column with its unit."""
    units = str(variable.attrs.get("units", ""))
    name = str(variable.attrs.get("long_name") or title_of(str(variable.name)))
    return f"{name} [{units}]" if units not in ("", "1") else name


def _singles(data: xr.Dataset, names: list[str], caption: str) -> ReportTable:
    rows = tuple(
        (
            TableCell(str(data[name].attrs.get("long_name") or title_of(name))),
            _cell(data[name].values.reshape(())),
            TableCell(_units(data[name])),
            TableCell(str(data[name].attrs.get("meaning", ""))),
        )
        for name in names
    )
    return without_empty_columns(ReportTable(caption, ("quantity", "value", "unit", "meaning"), rows, is_folded=True))


def _along(data: xr.Dataset, dim: str, names: list[str], caption: str) -> ReportTable:
    labels = data[dim].values if dim in data.coords else np.arange(data.sizes[dim])
    rows = tuple(
        (TableCell(number_in_words(_plain(label))), *(_cell(data[name].values[index]) for name in names))
        for index, label in enumerate(labels)
    )
    return ReportTable(caption, (title_of(dim), *(name_of(data[name]) for name in names)), rows, is_folded=True)


def _extremes(data: xr.Dataset, names: list[str], caption: str) -> ReportTable:
    columns = ("quantity", "dimensions", "smallest", "median", "largest", "not measured")
    rows = []
    for name in names:
        variable = data[name]
        values = variable.values
        over = ", ".join(f"{dim} ({size})" for dim, size in variable.sizes.items())
        label = name_of(variable)
        if values.dtype.kind == "c":
            label, values = f"modulus of {label}", np.abs(values)
        if values.dtype.kind in "fiub":
            known = values[~np.isnan(values)] if values.dtype.kind == "f" else values.astype(float)
            ends = [known.min(), np.median(known), known.max()] if known.size else [np.nan] * 3
            cells = [TableCell(number_in_words(float(end)), is_number=True) for end in ends]
            rows.append((TableCell(label), TableCell(over), *cells, _cell(values.size - known.size)))
        else:
            n = len({str(value) for value in values.ravel()})
            rows.append(
                (
                    TableCell(label),
                    TableCell(over),
                    TableCell(f"{n} distinct texts"),
                    TableCell(""),
                    TableCell(""),
                    TableCell(""),
                )
            )
    return ReportTable(caption, columns, tuple(rows), is_folded=True)


def _cell(value: object) -> TableCell:
    value = _plain(value)
    return TableCell(number_in_words(value), is_number=isinstance(value, int | float | complex))


def _units(variable: xr.DataArray) -> str:
    units = str(variable.attrs.get("units", ""))
    return "" if units == "1" else units


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.ndarray | np.generic) else value
