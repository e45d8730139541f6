"""Report of a diagnosis: the failure of a run, its likely causes, and experiments that distinguish them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import xarray as xr

from workbench.formatting import capitalized, clause, listed, lowered, title_of, units_in_words
from workbench.reports import effect_space, pictures
from workbench.reports.document import (
    Block,
    Document,
    Heading,
    Item,
    Items,
    Lead,
    Numbers,
    Paragraph,
    Quantity,
    ReportSection,
    ReportTable,
    Sentence,
    TableCell,
    numbers_table,
    sentence_of,
    unique,
)
from workbench.schema.statuses import CriterionState, DiagnosisState, SymptomKind
from workbench.schema.symptoms import symptom_title

_LEAD = (
    "All data of the diagnosis. Tables with numbered rows contain the numbers that the sentences of this report cite; "
    "collapsed tables contain all others."
)
#: State of a diagnosis without a cause -> how its decisions begin. No probability of health is stated anywhere.
_WITHOUT_CAUSE: dict[str, str] = {
    DiagnosisState.NOTHING_FOUND: "Nothing was found. If the run should have learned more, in order:",
    DiagnosisState.NO_CAUSE: "No cause was found. To find it, in order:",
}
_N_ACTIONS = 3
#: Number of observed symptoms in the text; the table lists all.
_N_LISTED = 10
#: Number of symptoms for and against a cause in the text; the table lists all.
_N_SYMPTOMS = 4
#: Groups of evidence with one sentence each: introduction, sign, and kinds of symptoms.
_MECHANISM, _SETTINGS = (SymptomKind.MECHANISM,), (SymptomKind.LOG, SymptomKind.CONFIGURATION)
_GROUPS = (
    ("Facts for it", 1, (SymptomKind.FACT,)), ("Facts against it", -1, (SymptomKind.FACT,)),
    ("Evidence for it from measurements", 1, _MECHANISM), ("Evidence for it from settings", 1, _SETTINGS),
    ("Evidence against it from measurements", -1, _MECHANISM), ("Evidence against it from settings", -1, _SETTINGS),
)  # fmt: skip
#: The headline does not list the causes if the set holds at least this many.
_MANY = 4
#: Symptoms with a smaller weight that no sentence cites are in a collapsed table.
_WEAK = 0.4


def diagnosis_document(tree: xr.DataTree) -> Document:
    """Return the content of the report of a diagnosis."""
    numbers = Numbers(tree)
    texts = (observed(numbers), cause(numbers), decisions(numbers))
    possible, is_open = _possible(numbers), _is_open(numbers)
    is_nothing = _state(numbers) == DiagnosisState.NOTHING_FOUND
    first = () if is_nothing or is_open else _first_actions(numbers)
    summary = numbers.attribute("summary").text
    is_old = "state" not in numbers.tree.attrs  # whose summaries state a probability that nothing is wrong
    cited = [quantity for section in texts for quantity in section.cited]
    cited += [quantity for sentence in first for quantity in sentence.quantities]
    return Document(
        kind="Diagnosis of a training run",
        subject=numbers.attribute("subject").text,
        verdict=_verdict(numbers, possible),
        state=CriterionState.NOT_MEASURED if is_nothing or is_open else CriterionState.FAILING,
        summary=f"{_verdict(numbers, possible)}." if is_old and is_nothing and not is_open else summary,
        facts=(),  # the summary states the causes and the step
        actions=first,
        sections=(texts[0], texts[1], _effect_space(numbers, cited), texts[2]),
        about=effect_space.about(tree),
    )


def _possible(numbers: Numbers) -> list[int]:
    """Return the rows of the causes that are not excluded; trees of earlier versions have only the first."""
    if "is_possible" not in numbers.node("causes"):
        return [0]
    return [row for row, is_in in enumerate(numbers.node("causes")["is_possible"].values) if is_in]


def _is_open(numbers: Numbers) -> bool:
    """Return whether a tree of an earlier version, which had no healthy runs, shows no failure."""
    return "is_possible" not in numbers.node("causes") and not _has_failed(numbers)


def _state(numbers: Numbers) -> str:
    """Return the state of a diagnosis; that of trees of earlier versions follows from their first cause."""
    if numbers.has_attribute("state"):
        return numbers.attribute("state").text
    is_nothing = numbers.names("causes", "cause")[0] == "nothing"
    return DiagnosisState.NOTHING_FOUND if is_nothing else DiagnosisState.LIKELY


def _verdict(numbers: Numbers, possible: list[int]) -> str:
    """Return the causes in the set as a headline."""
    if (state := _state(numbers)) in _WITHOUT_CAUSE:
        return f"{capitalized(state)} in what was recorded"
    if _is_open(numbers):
        return "No failure observed"
    names = numbers.names("causes", "cause")
    if state == DiagnosisState.FOUND:
        established = json.loads(numbers.attribute("established").text)
        titles = [lowered(numbers.text("causes", "title", cause=names.index(name))) for name in established]
        return f"Found: {listed(titles)}" if titles else "Something is wrong, by a fact about the run"
    titles = [lowered(numbers.text("causes", "title", cause=row)) for row in possible if names[row] != "nothing"]
    if len(titles) >= _MANY:
        return f"One of {len(titles)} causes"
    others = f"; {listed(titles[1:])} {'is' if len(titles) == 2 else 'are'} not excluded" if titles[1:] else ""
    return f"{'Points to' if _is_shown(numbers) else 'If it learned too little'}: {titles[0]}{others}"


def observed(numbers: Numbers) -> ReportSection:
    """Return section 1: when the run failed, and the observed symptoms, each once."""
    blocks: list[Block] = [Lead("Observations in the record of the run, before any cause is considered.")]
    if _has_step(numbers):
        blocks.append(Paragraph((_how_it_failed(numbers),)))
    symptoms, n_symptoms = _strongest(numbers)
    if symptoms:
        blocks += [Heading("Symptoms"), Items(tuple(Item("", (_symptom(numbers, row),)) for row in symptoms))]
    if n_symptoms > len(symptoms):
        blocks.append(Lead("The table of evidence in section 3 lists the other symptoms, which have smaller weights."))
    return ReportSection("v1", "Observed phenomenon", tuple(blocks))


def _strongest(numbers: Numbers) -> tuple[list[int], int]:
    """Return the rows of the symptoms with the largest weights in decreasing order, and the number of all symptoms."""
    weights = numbers.node("evidence")["weight"].values
    texts = numbers.texts("evidence", "sentence")
    rows: dict[str, int] = {}
    for row in sorted(range(len(texts)), key=lambda row: (-abs(float(weights[row])), row)):
        rows.setdefault(texts[row], row)
    return list(rows.values())[:_N_LISTED], len(rows)


def cause(numbers: Numbers) -> ReportSection:
    """Return section 2: the causes in the order of their evidence, with the evidence for and against each."""
    ids, possible = numbers.names("causes", "cause"), _possible(numbers)
    owners = numbers.texts("evidence", "cause")
    items, others = [], []
    for row, name in enumerate(ids):
        if row not in possible:
            others += [lowered(numbers.text("causes", "title", cause=row))] * (name != "nothing")
            continue
        sentences = []
        of_cause = [index for index, owner in enumerate(owners) if owner == name]
        for words, sign, kinds in _GROUPS:
            of_kind = [index for index in of_cause if _kind(numbers, index) in kinds]
            weights = [
                numbers.value("evidence", "weight", evidence=index, meaning=_about(numbers, index)) for index in of_kind
            ]
            chosen = [
                (index, weight) for index, weight in zip(of_kind, weights, strict=True) if sign * weight.value > 0
            ]
            if chosen:
                sentences.append(_evidence_sentence(numbers, words, chosen))
        items.append(Item(_title_and_kind(numbers, row), tuple(sentences)))
    lead = "Causes that the evidence does not exclude, in their order."
    lead += f" There is less evidence for {listed(others)}." if others else ""
    return ReportSection("v2", "Structural cause", (Lead(lead), Items(tuple(items))))


def decisions(numbers: Numbers) -> ReportSection:
    """Return section 4: the experiments in the order of the tree, with the outcomes of those that were run."""
    usual = "Recommended actions, in order. Each states the numbers that support it."
    blocks: list[Block] = [Lead(_WITHOUT_CAUSE.get(_state(numbers), usual))]
    if rows := _experiments_in_order(numbers):
        items = tuple(_experiment(numbers, row) for row in rows)
        blocks += [Heading("Experiments that distinguish the causes"), Items(items, is_ordered=True)]
    else:
        blocks.append(Paragraph((_correction(numbers),)))
    return ReportSection("v4", "Decisions", tuple(blocks))


def _first_actions(numbers: Numbers) -> tuple[Sentence, ...]:
    """Return the outcomes of the experiments that were run, then the next experiments."""
    rows = sorted(_experiments_in_order(numbers), key=lambda row: not _outcome_of(numbers, row))
    if not rows:
        return (_correction(numbers),)
    return tuple(
        _tried(numbers, row) if _outcome_of(numbers, row) else _to_do(numbers, row) for row in rows[:_N_ACTIONS]
    )


def _experiments_in_order(numbers: Numbers) -> list[int]:
    if not numbers.has("experiments") or "experiment" not in numbers.node("experiments").dims:
        return []
    order = numbers.node("experiments")["order"].values
    return sorted(range(len(order)), key=lambda row: float(order[row]))


def _correction(numbers: Numbers) -> Sentence:
    if _state(numbers) in _WITHOUT_CAUSE:
        return sentence_of(
            "None of {n} symptoms stands out: make the checks that the summary names, which no record replaces.",
            n=numbers.attribute("n_symptoms", meaning="symptoms that were read"),
        )
    title = lowered(numbers.text("causes", "title", cause=0))
    value = _value(numbers, _strongest(numbers)[0][0])
    words = "Correct what the evidence points to: {title} (the strongest is {name}: {value})."
    return sentence_of(words, title=title, name=value.meaning, value=value)


def _effect_space(numbers: Numbers, cited: list[Quantity]) -> ReportSection:
    cited = unique(cited)
    separate = {"/causes", "/evidence", "/experiments"}
    blocks: list[Block] = [Lead(_LEAD), Heading("Causes"), pictures.picture("causes", "causes"), _causes_table(numbers)]
    blocks += [Heading("Evidence"), *pictures.evidence(numbers.node("evidence")), *_evidence_tables(numbers, cited)]
    experiments = [quantity for quantity in cited if quantity.path == "/experiments"]
    if experiments:
        blocks += [Heading("Experiments"), numbers_table("Experiments: numbers cited", experiments)]
        blocks += effect_space.part_tables(numbers.node("experiments"), "Experiments")
    rest = [quantity for quantity in cited if quantity.path not in separate]
    leave_out = tuple(path.strip("/") for path in separate)
    return ReportSection("v3", "Effect space", (*blocks, *effect_space.part_blocks(numbers, rest, leave_out=leave_out)))


def _causes_table(numbers: Numbers) -> ReportTable:
    rows: list[tuple[TableCell, ...]] = []
    possible = _possible(numbers)
    for row, _ in enumerate(numbers.names("causes", "cause")):
        layer = numbers.value("causes", "layer", cause=row)
        rows.append(
            (
                TableCell(capitalized(numbers.text("causes", "title", cause=row))),
                TableCell(numbers.text("causes", "kind", cause=row)),
                TableCell("yes" if row in possible else ""),
                TableCell(str(int(layer.value)) if layer.value >= 0 else ""),
                TableCell(layer.where),
            )
        )
    columns = ("cause", "kind", "not excluded", "block", "location in the tree")
    return ReportTable("Causes by their evidence", columns, tuple(rows))


def _evidence_tables(numbers: Numbers, cited: list[Quantity]) -> list[ReportTable]:
    """Return a table of the evidence that is cited or has a large weight, and a collapsed one of the rest."""
    titles = _titles(numbers)
    anchors = {quantity.anchor for quantity in cited}
    shown: list[Any] = []
    weak: list[Any] = []
    for row, owner in enumerate(numbers.texts("evidence", "cause")):
        value = _value(numbers, row)
        weight = numbers.value("evidence", "weight", evidence=row, meaning=_about(numbers, row))
        reference = numbers.value("evidence", "reference", evidence=row)
        step = numbers.value("evidence", "step", evidence=row)
        has_step = not (isinstance(step.value, float) and math.isnan(step.value)) and step.value >= 0
        is_shown = abs(weight.value) >= _WEAK or not anchors.isdisjoint((value.anchor, weight.anchor))
        (shown if is_shown else weak).append(
            (
                TableCell(value.meaning),
                TableCell(value.text, quantity=value, is_number=True),
                TableCell(value.units),
                TableCell("" if math.isnan(reference.value) else reference.text, is_number=True),
                TableCell(step.text if has_step else "", is_number=True),
                TableCell(titles[owner]),
                TableCell(weight.text, quantity=weight, is_number=True),
                TableCell(value.where),
            )
        )
    columns = ("symptom", "value", "unit", "reference", "step", "cause", "log-odds", "location in the tree")
    tables = [
        ReportTable(
            "Evidence: positive log-odds are for the cause, negative log-odds against it", columns, tuple(shown)
        )
    ]
    if weak:
        caption = f"{len(weak)} more symptoms, each of which changes the odds of its cause by less than half"
        elsewhere = f'they are in tree["evidence"], with weights below {_WEAK}'
        tables.append(ReportTable(caption, columns, tuple(weak), is_folded=True, elsewhere=elsewhere))
    return tables


def _titles(numbers: Numbers) -> dict[str, str]:
    return dict(zip(numbers.names("causes", "cause"), numbers.texts("causes", "title"), strict=True))


def _value(numbers: Numbers, row: int) -> Quantity:
    """Return the value of a symptom with the unit of its row."""
    units = numbers.text("evidence", "units", evidence=row)
    quantity = numbers.value("evidence", "value", evidence=row, meaning=_name(numbers, row))
    if math.isnan(quantity.value):  # the loss diverged; this is not a missing measurement
        return replace(quantity, text="not finite")
    return replace(quantity, units=units_in_words(units, quantity.value))


def _name(numbers: Numbers, row: int) -> str:
    """Return the title of a symptom; several symptoms may use the same variable."""
    known = numbers.node("evidence")
    which = next(name for name in ("symptom", "sign", "quantity") if name in known)  # the last two in earlier versions
    return symptom_title(numbers.text("evidence", which, evidence=row))


def _kind(numbers: Numbers, row: int) -> str:
    """Return the source of a symptom; trees of earlier versions have none and count as measurements."""
    if "kind" not in numbers.node("evidence"):
        return SymptomKind.MECHANISM
    return numbers.text("evidence", "kind", evidence=row)


def _about(numbers: Numbers, row: int) -> str:
    return f"log-odds from {_name(numbers, row)}"


def _symptom(numbers: Numbers, row: int) -> Sentence:
    text = capitalized(clause(numbers.text("evidence", "sentence", evidence=row)))
    value = _value(numbers, row)
    return sentence_of("{text} ({name}: {value}).", text=text, name=value.meaning, value=value)


def _title_and_kind(numbers: Numbers, row: int) -> str:
    title, kind = (numbers.text("causes", name, cause=row) for name in ("title", "kind"))
    layer = int(numbers.value("causes", "layer", cause=row).value)
    if numbers.names("causes", "cause")[row] == "nothing":
        return capitalized(title)
    return f"{capitalized(title)} (kind of cause: {kind}{f', block {layer}' if layer >= 0 else ''})"


def _evidence_sentence(numbers: Numbers, introduction: str, chosen: list[tuple[int, Quantity]]) -> Sentence:
    chosen = sorted(chosen, key=lambda pair: -abs(pair[1].value))
    rest, chosen = len(chosen) - _N_SYMPTOMS, chosen[:_N_SYMPTOMS]
    slots: dict[str, Quantity] = {}
    parts = []
    for place, (index, weight) in enumerate(chosen):
        value = _value(numbers, index)
        slots |= {f"v{place}": value, f"w{place}": weight}
        parts.append(f"{value.meaning} ({{v{place}}}; log-odds {{w{place}}})")
    more = f", and {rest} with smaller weights" if rest > 0 else ""
    return sentence_of(f"{introduction}: {listed(parts)}{more}.", **slots)


def _experiment(numbers: Numbers, row: int) -> Item:
    sentences = [_to_do(numbers, row)] + ([_done(numbers, row)] if _outcome_of(numbers, row) else [])
    right, wrong = (numbers.text("experiments", f"expected_if_{word}", experiment=row) for word in ("right", "wrong"))
    change = _change_in_words(numbers.text("experiments", "change", experiment=row))
    remark = f"Change: {change}. If this is the cause, {clause(right)}; otherwise, {clause(wrong)}."
    if numbers.text("experiments", "cause", experiment=row) == "learning_rate":
        remark += " Use wb.find_rate before the next run to find useful learning rates."
    return Item("", tuple(sentences), remark=remark)


def _to_do(numbers: Numbers, row: int) -> Sentence:
    title = numbers.text("experiments", "title", experiment=row)
    of = {
        name: numbers.value("experiments", name, experiment=row, meaning=f"{lowered(title)}: {word}")
        for name, word in (("n_steps", "steps"), ("from_step", "first step"), ("cost", "cost"))
    }
    return sentence_of(
        "{title}: replay {n_steps} from step {from_step} with and without the change; cost: {cost} times the steps of "
        "the run.",
        title=capitalized(clause(title)),
        **of,
    )


def _outcome_of(numbers: Numbers, row: int) -> str:
    """Return the outcome of an experiment; empty if it was not run."""
    has_outcomes = "outcome" in numbers.node("experiments")
    return numbers.text("experiments", "outcome", experiment=row) if has_outcomes else ""


def _done(numbers: Numbers, row: int) -> Sentence:
    """Return the outcome of an experiment; a loss that is not finite is only described by the recorded sentence."""
    about = lowered(numbers.text("experiments", "title", experiment=row))
    words = {"value": "loss with the change", "twin_value": "loss without the change"}
    slots = {
        name: numbers.value("experiments", name, experiment=row, meaning=f"{about}: {word}")
        for name, word in words.items()
    }
    losses = [f"{words[name]} {{{name}}}; " for name, quantity in slots.items() if math.isfinite(quantity.value)]
    supports = numbers.value("experiments", "supports", experiment=row, meaning=f"{about}: supports the cause")
    return sentence_of(
        f"Result: {{outcome}} ({''.join(losses)}supports {{cause}}: {{supports}}).",
        cause=lowered(_titles(numbers)[numbers.text("experiments", "cause", experiment=row)]),
        outcome=lowered(clause(_outcome_of(numbers, row))),
        supports=supports,
        **slots,
    )


def _tried(numbers: Numbers, row: int) -> Sentence:
    """Return the outcome of an experiment in short form."""
    title = numbers.text("experiments", "title", experiment=row)
    about = lowered(title)
    value = numbers.value("experiments", "value", experiment=row, meaning=f"{about}: loss with the change")
    end = "loss {value}" if math.isfinite(value.value) else "the run diverged nevertheless"
    return sentence_of(
        f"{{title}}: done, {end}; supports {{cause}}: {{supports}}.",
        title=capitalized(clause(title)),
        cause=lowered(_titles(numbers)[numbers.text("experiments", "cause", experiment=row)]),
        supports=numbers.value("experiments", "supports", experiment=row, meaning=f"{about}: supports the cause"),
        value=value,
    )


def _change_in_words(change: str) -> str:
    try:
        settings = json.loads(change)
    except ValueError:
        return change
    if not isinstance(settings, dict):
        return change
    return ", ".join(f"{title_of(str(key))} = {value}" for key, value in settings.items())


def _how_it_failed(numbers: Numbers) -> Sentence:
    step = _failure_step(numbers)
    if _has_failed(numbers):
        return sentence_of("The failure began at step {step}.", step=step)
    if numbers.has_attribute("what_happened"):
        what = clause(numbers.attribute("what_happened").text)
        return sentence_of("{what}; the symptoms are evaluated at step {step}.", what=what, step=step)
    return sentence_of("The loss shows no failure; the symptoms are evaluated at step {step}.", step=step)


def _is_shown(numbers: Numbers) -> bool:
    """Return whether the loss shows a failure; trees of earlier versions imply it."""
    return not numbers.has_attribute("shows_failure") or bool(numbers.attribute("shows_failure").value)


def _has_failed(numbers: Numbers) -> bool:
    return _is_shown(numbers) and _has_step(numbers)


def _has_step(numbers: Numbers) -> bool:
    if not numbers.has_attribute("failure_step"):
        return False
    step = _failure_step(numbers).value
    return isinstance(step, int | float) and not math.isnan(step) and step >= 0


def _failure_step(numbers: Numbers) -> Quantity:
    return numbers.attribute("failure_step", meaning="step of the failure")
