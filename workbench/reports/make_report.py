"""Report of a tree as one HTML page, Markdown or a notebook."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import xarray as xr

from workbench.errors import SchemaError, StoreError, require_lab
from workbench.formatting import listed
from workbench.io.atomic import check_free, replacing
from workbench.io.store import export_netcdf
from workbench.reports import assessment_document as assessment
from workbench.reports import effect_space, formats, pictures
from workbench.reports.assessment_document import assessment_document
from workbench.reports.diagnosis_document import diagnosis_document
from workbench.reports.document import (
    Block,
    Document,
    Fact,
    Heading,
    Item,
    Items,
    Lead,
    Numbers,
    Paragraph,
    Picture,
    Quantity,
    ReportSection,
    ReportTable,
    Sentence,
    TableCell,
    sentence_of,
    unique,
)
from workbench.schema.statuses import CriterionState, Verdict

_LEAD = (
    "All designs side by side, followed by the measurements of each. Tables with numbered rows contain the numbers "
    "that the sentences of this report cite; collapsed tables contain all others."
)
_ENDS = {"edge": "", "low": "_low", "high": "_high"}
#: Number of decisions of each design that are repeated here.
_N_DECISIONS = 3


def comparison_document(tree: xr.DataTree) -> Document:
    """Return the content of the report of a comparison of designs."""
    numbers = Numbers(tree)
    names = numbers.names("designs", "design")
    if missing := [name for name in names if name not in tree.children]:
        raise SchemaError(f"The comparison has no tree of the design '{missing[0]}'; use wb.compare_designs().")
    designs = {name: Numbers(tree, at=f"/{name}") for name in names}
    ranked = _ranked(numbers, designs, names)
    best = ranked[0]
    verdict = _verdict(numbers, names, best)
    texts = (_observed(numbers, designs, names), _causes(designs), _decisions(numbers, designs, names, ranked))
    facts = tuple(
        Fact(_verdict(numbers, names, name), name, _rates_in_words(numbers, designs[name], names.index(name)))
        for name in ranked[:3]
    )
    first = tuple(sentence for block in texts[2].each(Paragraph) for sentence in block.sentences)
    cited = [quantity for section in texts for quantity in section.cited] + [fact.quantity for fact in facts]
    summary = str(tree.attrs.get("summary", "")) or " ".join(sentence.text for sentence in first)
    return Document(
        kind=f"Comparison of {len(names)} designs before training",
        subject=str(tree.attrs.get("subject", "")) or listed(names),
        verdict=f"{best}: {verdict.text}",
        state=assessment.VERDICT_STATE.get(verdict.text, CriterionState.NOT_MEASURED),
        summary=summary,
        facts=facts,
        actions=first,
        sections=(texts[0], texts[1], _effect_space(numbers, designs, names, cited), texts[2]),
        about=effect_space.about(tree),
    )


def _observed(numbers: Numbers, designs: dict[str, Numbers], names: list[str]) -> ReportSection:
    items = []
    for row, name in enumerate(names):
        verdict = _verdict(numbers, names, name)
        n_weights = _of(numbers, row, name, "n_weights")
        sentences = [
            sentence_of(
                "The verdict is {verdict}; the design has {n_weights} parameters.", verdict=verdict, n_weights=n_weights
            )
        ]
        if assessment.knows_rates(designs[name]):
            of = {key: _of(numbers, row, name, f"useful_edge{end}") for key, end in _ENDS.items()}
            sentences.append(sentence_of("The largest useful rate is {edge} (interval {low} to {high}).", **of))
        else:
            sentences += assessment.rate_sentences(designs[name])
        items.append(
            Item(name, tuple(sentences), assessment.VERDICT_STATE.get(verdict.text, CriterionState.NOT_MEASURED))
        )
    lead = Lead("Measurements of each design under the same training plan.")
    return ReportSection("v1", "Observed phenomenon", (lead, Items(tuple(items))))


def _causes(designs: dict[str, Numbers]) -> ReportSection:
    """Return section 2: criteria whose states differ, and criteria that are not healthy for any design."""
    different: list[Any] = []
    shared: list[Any] = []
    common = [
        criterion
        for criterion in next(iter(designs.values())).names("criteria", "criterion")
        if all(criterion in numbers.names("criteria", "criterion") for numbers in designs.values())
    ]
    for criterion in common:
        found = {name: numbers.criterion(criterion) for name, numbers in designs.items()}
        states = {quantity.state for quantity in found.values()}
        if len(states) == 1 and states <= {CriterionState.HEALTHY, CriterionState.NOT_MEASURED}:
            continue
        slots = {f"v{place}": quantity for place, quantity in enumerate(found.values())}
        values = listed(f"{name} {{v{place}}} ({found[name].state})" for place, name in enumerate(found))
        first = next(iter(found.values()))
        sentence = sentence_of(f"Healthy band {{band}}: {values}.", band=first.band, **slots)
        (different if len(states) > 1 else shared).append(Item(first.meaning, (sentence,)))
    blocks: list[Block] = [
        Lead("Criteria whose states differ between the designs, and criteria that are healthy for none of them.")
    ]
    blocks += [Heading("Differences"), Items(tuple(different))] if different else []
    blocks += [Heading("Shared problems"), Items(tuple(shared))] if shared else []
    if not (different or shared):
        counts = {
            f"n{place}": numbers.count(
                "criteria", "state", CriterionState.HEALTHY, meaning=f"healthy criteria of {name}"
            )
            for place, (name, numbers) in enumerate(designs.items())
        }
        healthy = listed(f"{name} ({{n{place}}} healthy criteria)" for place, name in enumerate(designs))
        blocks.append(Paragraph((sentence_of(f"No criterion distinguishes the designs: {healthy}.", **counts),)))
    return ReportSection("v2", "Structural cause", tuple(blocks))


def _decisions(numbers: Numbers, designs: dict[str, Numbers], names: list[str], ranked: list[str]) -> ReportSection:
    blocks: list[Block] = [Lead("The recommended design, and the remaining actions for each design.")]
    blocks.append(Paragraph(tuple(_choice(numbers, designs, names, ranked))))
    for name in ranked:
        items = tuple(Item("", (sentence,)) for sentence in assessment.actions(designs[name])[:_N_DECISIONS])
        blocks += [Heading(name), Items(items, is_ordered=True)]
    return ReportSection("v4", "Decisions", tuple(blocks))


_STARTS: dict[str, str] = {
    Verdict.CANNOT_SAY: "None can be recommended from these measurements; the best candidate is",
    Verdict.AT_RISK: "Choose",
    Verdict.REFUSE: "Choose none unchanged; the best candidate is",
}


def _choice(numbers: Numbers, designs: dict[str, Numbers], names: list[str], ranked: list[str]) -> list[Sentence]:
    starts = (_STARTS.get(_verdict(numbers, names, ranked[0]).text, "Choose"), "The next best is")
    sentences = []
    for start, name in zip(starts, ranked, strict=False):
        slots: dict[str, str | Quantity] = {"name": name, "verdict": _verdict(numbers, names, name)}
        text = f"{start} {{name}}: verdict {{verdict}}, "
        if assessment.knows_rates(designs[name]):
            edge = _of(numbers, names.index(name), name, "useful_edge")
            sentences.append(sentence_of(f"{text}learning rates up to {{edge}} are useful.", **slots, edge=edge))
        else:
            sentences.append(sentence_of(f"{text}useful learning rates unknown.", **slots))
    return sentences


def _effect_space(
    numbers: Numbers, designs: dict[str, Numbers], names: list[str], cited: list[Quantity]
) -> ReportSection:
    cited = unique(cited)
    blocks: list[Block] = [Lead(_LEAD), Heading("Designs"), *_designs_tables(numbers, names)]
    for name, of in designs.items():
        evaluated = [of.criterion(criterion) for criterion in of.names("criteria", "criterion")]
        blocks += [Heading(f"Criteria: {name}"), pictures.picture("criteria", "criteria", at=name)]
        blocks.append(effect_space.criteria_table(of, evaluated, of=name))
        known = {quantity.anchor for quantity in evaluated}
        cited_here = [
            q for q in cited if q.anchor not in known and (q.path == f"/{name}" or q.path.startswith(f"/{name}/"))
        ]
        blocks += effect_space.part_blocks(of, cited_here, leave_out=effect_space.SEPARATE_PARTS, of=name)
    return ReportSection("v3", "Effect space", tuple(blocks))


def _designs_tables(numbers: Numbers, names: list[str]) -> list[ReportTable]:
    """Return tables of all variables of all designs, a few columns per table; every cell can be linked to."""
    data = numbers.node("designs")
    columns = [str(key) for key in data.data_vars if data[key].dims == ("design",)]
    tables = []
    for first in range(0, len(columns), effect_space.MOST_COLUMNS):
        part = columns[first : first + effect_space.MOST_COLUMNS]
        rows = []
        for row, name in enumerate(names):
            cells = [_of(numbers, row, name, key) for key in part]
            rows.append(
                (
                    TableCell(name),
                    *(TableCell(q.text, quantity=q, is_number=not isinstance(q.value, str)) for q in cells),
                )
            )
        titles = [effect_space.name_of(data[key]) for key in part]
        tables.append(ReportTable(f"Designs: {', '.join(titles)}", ("design", *titles), tuple(rows)))
    return tables


def _ranked(numbers: Numbers, designs: dict[str, Numbers], names: list[str]) -> list[str]:
    """Return the names sorted by verdict, then by the loss at the best rate of the pilot; unknown losses last."""

    def place(name: str) -> tuple[int, float]:
        verdict = _verdict(numbers, names, name).text
        loss = _of(numbers, names.index(name), name, "loss_at_best").value
        severity = Verdict(verdict).severity if verdict in list(Verdict) else len(Verdict)
        return (severity, math.inf if math.isnan(loss) else loss)

    return sorted(names, key=place)


def _verdict(numbers: Numbers, names: list[str], name: str) -> Quantity:
    return _of(numbers, names.index(name), name, "verdict")


def _of(numbers: Numbers, row: int, name: str, variable: str) -> Quantity:
    quantity = numbers.value("designs", variable, design=row)
    return replace(quantity, meaning=f"{quantity.meaning} of {name}")


def _rates_in_words(numbers: Numbers, design: Numbers, row: int) -> str:
    if not assessment.knows_rates(design):
        return "useful learning rates unknown"
    return f"learning rates useful up to {numbers.value('designs', 'useful_edge', design=row).text}"


SUFFIXES = (".html", ".md", ".ipynb")
_DOCUMENTS = {"assessment": assessment_document, "diagnosis": diagnosis_document, "comparison": comparison_document}


def report(tree: xr.DataTree, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write a report of an assessment, a diagnosis or a comparison: observations, causes, measurements, decisions.

    Every statement links to its supporting number. Nothing is computed: if the tree lacks a number, an exception is
    raised and no file is written.

    Args:
        tree: Tree from ``wb.assess``, ``wb.diagnose`` or ``wb.compare_designs``, or opened by ``wb.open_run``; or one
            design of a comparison, such as ``comparison["gpt2"]``.
        path: File to write. The suffix selects the format. ``.html``: one page that needs no network and no other
            file. ``.md``: Markdown with its pictures in the folder ``NAME_pictures`` next to it. ``.ipynb``: a notebook
            with the same text, whose cells redraw the pictures from ``NAME.nc`` next to it, the tree as a netCDF file.
        overwrite: Whether to replace existing files.

    Returns:
        The path.

    Raises:
        SchemaError: If the tree is of another kind, or lacks a number that its report cites.
        StoreError: If the suffix is unknown, a file exists already, or the folder cannot be written.
        MissingPackageError: If the packages that draw the pictures are not installed.

    Example:
        >>> import workbench as wb
        >>> tree = wb.diagnose(wb.samples.failed_run("architecture"))
        >>> wb.report(tree, "report.md").name
        'report.md'

    See Also:
        `workbench.assess`: Assesses a design before training.
        `workbench.diagnose`: Diagnoses a failed run.
        `workbench.compare_designs`: Compares designs.
    """
    path = Path(path)
    companion = check_target(path, overwrite=overwrite)
    tree = detached(tree)
    document, pictures_by_name = document_of(tree), dict[str, bytes]()

    def show(picture: Picture) -> str:
        mime, content = pictures.image(picture, tree)
        words = re.sub(r"[^a-z0-9]+", "-", picture.title.lower()).strip("-")
        name = f"{len(pictures_by_name) + 1:02d}-{words}.{'png' if mime == 'image/png' else 'svg'}"
        pictures_by_name[name] = content
        return f"![{picture.alternative}]({quote(f'{companion.name}/{name}')})" if companion is not None else ""

    if companion is None:
        text = formats.html(document, tree)
    elif path.suffix.lower() == ".md":
        text = formats.markdown(document, show)
        with replacing(companion) as partial:
            partial.mkdir()
            for name, content in pictures_by_name.items():
                (partial / name).write_bytes(content)
    else:
        import nbformat

        text = nbformat.writes(formats.notebook(document, tree, companion.name))
        export_netcdf(tree, companion, overwrite=True)
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return path


def check_target(path: Path, *, overwrite: bool = False) -> Path | None:
    """Return the second file or folder that `report` would write, after checking that it can write both."""
    if path.suffix.lower() not in SUFFIXES:
        raise StoreError(f"'{path.name}' has the suffix '{path.suffix}', expected one of {', '.join(SUFFIXES)}.")
    require_lab("The pictures of a report", "holoviews", "matplotlib", "PIL")
    companion = {".md": path.with_name(f"{path.stem}_pictures"), ".ipynb": path.with_suffix(".nc")}.get(
        path.suffix.lower()
    )
    for place in filter(None, (path, companion)):
        check_free(place, overwrite=overwrite)
    return companion


def detached(tree: xr.DataTree) -> xr.DataTree:
    """Return the tree itself, or a separate tree with the same data if it is part of a comparison."""
    return tree if getattr(tree, "parent", None) is None else tree.copy()


def document_of(tree: xr.DataTree) -> Document:
    """Return the content of the report of a tree."""
    if not isinstance(tree, xr.DataTree):
        raise SchemaError.of("tree", tree, "a DataTree", remedy="create one with wb.assess()")
    kind = tree.attrs.get("kind")
    if kind not in _DOCUMENTS:
        raise SchemaError(
            f"The kind of the tree is {kind!r}, expected one of {', '.join(_DOCUMENTS)}; create it with wb.assess(), "
            "wb.diagnose() or wb.compare_designs()."
        )
    return _DOCUMENTS[kind](tree)
