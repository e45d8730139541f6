"""The report of a diagnosis: the failure of a run, its likely causes, the deciding experiments."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from workbench.formatting import capitalized, clause, listed, lowered, percent, title_of, units_in_words
from workbench.reports import effect_space, pictures
from workbench.reports.document import (
    Block,
    Document,
    Heading,
    Item,
    Items,
    Lead,
    Paragraph,
    ReportSection,
    ReportTable,
    Sentence,
    TableCell,
    numbers_table,
    say,
    unique,
)
from workbench.reports.quantity import Numbers, Quantity
from workbench.schema.statuses import CauseKind, CriterionState, SymptomKind

if TYPE_CHECKING:
    import xarray as xr

_LEAD = (
    "Everything that the diagnosis rests on. Tables with numbered rows hold the numbers that the sentences of this "
    "report rest on; the folded ones hold the rest."
)
_N_ACTIONS = 3
#: Number of observed symptoms in the text; the table has all.
_N_TOLD = 10
#: Numbers of symptoms for and against a cause in the text; the table has all.
_N_SYMPTOMS = 4
#: Evidence that stands in a sentence of its own: how it is introduced, its sign, and the kinds of symptoms.
_MECHANISM, _SETTINGS = (SymptomKind.MECHANISM,), (SymptomKind.LOG, SymptomKind.CONFIGURATION)
_GROUPS = (
    ("For it, from what the run did", 1, _MECHANISM), ("For it, from its settings", 1, _SETTINGS),
    ("Against it, from what the run did", -1, _MECHANISM), ("Against it, from its settings", -1, _SETTINGS),
)  # fmt: skip
#: As many causes in the set, and more, are not listed in the headline.
_MANY = 4
#: Symptoms that no sentence cites, and that change the odds by less than half, are folded away.
_WEAK = 0.4


def diagnosis_document(tree: xr.DataTree) -> Document:
    """The report of a diagnosis.

    Raises:
        SchemaError: If the tree lacks a number of its report.
    """
    numbers = Numbers(tree)
    spoken = (observed(numbers), cause(numbers), decisions(numbers))
    possible, is_healthy, is_open = _possible(numbers), _is_healthy(numbers), _is_open(numbers)
    first = () if is_healthy or is_open else _first_actions(numbers)
    cited = [quantity for section in spoken for quantity in section.cited]
    cited += [quantity for sentence in first for quantity in sentence.quantities]
    return Document(
        kind="Diagnosis of a training run",
        subject=numbers.attribute("subject").text,
        verdict=_verdict(numbers, possible),
        state=_state(is_healthy=is_healthy, is_open=is_open),
        summary=numbers.attribute("summary").text,
        facts=(),  # the summary tells the causes with their probabilities, and the step
        actions=first,
        sections=(spoken[0], spoken[1], _effect_space(numbers, cited), spoken[2]),
        about=effect_space.about(tree),
    )


def _possible(numbers: Numbers) -> list[int]:
    """Rows of the causes in the set, likeliest first; of trees of older versions that of the likeliest alone."""
    if "is_possible" not in numbers.node("causes"):
        return [0]
    return [row for row, is_in in enumerate(numbers.node("causes")["is_possible"].values) if is_in]


def _is_open(numbers: Numbers) -> bool:
    """Whether a tree of an older version, which knows no healthy runs, shows no failure."""
    return "is_possible" not in numbers.node("causes") and not _has_failed(numbers)


def _state(*, is_healthy: bool, is_open: bool) -> CriterionState:
    if is_open:
        return CriterionState.NOT_MEASURED
    return CriterionState.HEALTHY if is_healthy else CriterionState.FAILING


def _is_healthy(numbers: Numbers) -> bool:
    """Whether most likely nothing is wrong."""
    return numbers.names("causes", "cause")[0] == "nothing"


def _verdict(numbers: Numbers, possible: list[int]) -> str:
    """The causes in the set, in a few words."""
    if _is_healthy(numbers):
        return "Most likely nothing is wrong"
    if _is_open(numbers):
        return "No failure seen"
    names = numbers.names("causes", "cause")
    titles = [lowered(numbers.text("causes", "title", cause=row)) for row in possible if names[row] != "nothing"]
    return f"The cause: {listed(titles, 'or')}" if len(titles) < _MANY else f"One of {len(titles)} causes"


def observed(numbers: Numbers) -> ReportSection:
    """V1: when it failed, and the observed symptoms, each once."""
    blocks: list[Block] = [Lead("What the record of the run shows, before any cause is named.")]
    if _has_step(numbers):
        blocks.append(Paragraph((_how_it_failed(numbers),)))
    symptoms, n_symptoms = _strongest(numbers)
    if symptoms:
        blocks += [Heading("Symptoms"), Items(tuple(Item("", (_symptom(numbers, row),)) for row in symptoms))]
    if n_symptoms > len(symptoms):
        blocks.append(Lead("The table of evidence in V3 has the other symptoms, which weigh less."))
    return ReportSection("v1", "Observed phenomenon", tuple(blocks))


def _strongest(numbers: Numbers) -> tuple[list[int], int]:
    """Rows of the symptoms with the largest weights, strongest first, and the number of all symptoms."""
    weights = numbers.node("evidence")["weight"].values
    texts = numbers.texts("evidence", "sentence")
    rows: dict[str, int] = {}
    for row in sorted(range(len(texts)), key=lambda row: (-abs(float(weights[row])), row)):
        rows.setdefault(texts[row], row)
    return list(rows.values())[:_N_TOLD], len(rows)


def cause(numbers: Numbers) -> ReportSection:
    """V2: the causes by falling probability, with the evidence for and against each."""
    ids, possible = numbers.names("causes", "cause"), _possible(numbers)
    owners = numbers.texts("evidence", "cause")
    lead = "Which cause explains the symptoms, and how surely."
    if numbers.has_attribute("coverage"):
        share = percent(float(numbers.attribute("coverage").value))
        lead += f" Of the recorded runs of each cause that the limits were set on, {share} had it in their set."
    blocks: list[Block] = [Lead(lead)]
    items, unlikely = [], []
    for row, name in enumerate(ids):
        probability = _probability(numbers, row)
        if row not in possible:
            unlikely.append((numbers.text("causes", "title", cause=row), probability))
            continue
        sentences = [_share_of(numbers, row, probability)]
        mine = [index for index, owner in enumerate(owners) if owner == name]
        for words, sign, kinds in _GROUPS:
            of_kind = [index for index in mine if _kind(numbers, index) in kinds]
            weights = [
                numbers.value("evidence", "weight", evidence=index, meaning=_about(numbers, index)) for index in of_kind
            ]
            chosen = [
                (index, weight) for index, weight in zip(of_kind, weights, strict=True) if sign * weight.value > 0
            ]
            if chosen:
                sentences.append(_spoken_for(numbers, words, chosen))
        items.append(Item(capitalized(numbers.text("causes", "title", cause=row)), tuple(sentences)))
    blocks.append(Items(tuple(items)))
    if unlikely:
        slots = {f"p{place}": probability for place, (_, probability) in enumerate(unlikely)}
        told = listed(f"{lowered(title)} ({{p{place}}})" for place, (title, _) in enumerate(unlikely))
        blocks += [Heading("Not in the set"), Paragraph((say(f"Less speaks for {told}.", **slots),))]
    return ReportSection("v2", "Structural cause", tuple(blocks))


def decisions(numbers: Numbers) -> ReportSection:
    """V4: the deciding experiments in the order of the tree, and the outcomes of those that were run."""
    lead = "What to do, in this order. Each step names the numbers that it rests on."
    if _is_healthy(numbers):
        lead = "Nothing needs to be done, unless the run should have learned more. Then, in this order:"
    blocks: list[Block] = [Lead(lead)]
    if rows := _experiments_in_order(numbers):
        items = tuple(_experiment(numbers, row) for row in rows)
        blocks += [Heading("Experiments that tell the causes apart"), Items(items, is_ordered=True)]
    else:
        blocks.append(Paragraph((_change_of_the_cause(numbers),)))
    return ReportSection("v4", "Decisions", tuple(blocks))


def _first_actions(numbers: Numbers) -> tuple[Sentence, ...]:
    """The outcomes of the experiments that were run, and the next ones."""
    rows = sorted(_experiments_in_order(numbers), key=lambda row: not _outcome_of(numbers, row))
    if not rows:
        return (_change_of_the_cause(numbers),)
    return tuple(
        _tried(numbers, row) if _outcome_of(numbers, row) else _to_do(numbers, row) for row in rows[:_N_ACTIONS]
    )


def _experiments_in_order(numbers: Numbers) -> list[int]:
    if not numbers.has("experiments") or "experiment" not in numbers.node("experiments").dims:
        return []
    order = numbers.node("experiments")["order"].values
    return sorted(range(len(order)), key=lambda row: float(order[row]))


def _change_of_the_cause(numbers: Numbers) -> Sentence:
    title = lowered(numbers.text("causes", "title", cause=0))
    return say("Change what is at fault: {title} ({probability}).", title=title, probability=_probability(numbers, 0))


def _effect_space(numbers: Numbers, cited: list[Quantity]) -> ReportSection:
    cited = unique(cited)
    told = {"/causes", "/evidence", "/experiments"}
    blocks: list[Block] = [Lead(_LEAD), Heading("Causes"), *pictures.causes(), _causes_table(numbers)]
    blocks += [Heading("Evidence"), *pictures.evidence(numbers.node("evidence")), *_evidence_tables(numbers, cited)]
    experiments = [quantity for quantity in cited if quantity.path == "/experiments"]
    if experiments:
        blocks += [Heading("Experiments"), numbers_table("Experiments: numbers cited", experiments)]
        blocks += effect_space.whole_part(numbers.node("experiments"), "Experiments")
    rest = [quantity for quantity in cited if quantity.path not in told]
    leave_out = tuple(path.strip("/") for path in told)
    return ReportSection("v3", "Effect space", (*blocks, *effect_space.part_blocks(numbers, rest, leave_out=leave_out)))


def _causes_table(numbers: Numbers) -> ReportTable:
    rows: list[tuple[TableCell, ...]] = []
    possible = _possible(numbers)
    for row, _ in enumerate(numbers.names("causes", "cause")):
        layer = int(numbers.value("causes", "layer", cause=row).value)
        probability = _probability(numbers, row)
        rows.append(
            (
                TableCell(capitalized(numbers.text("causes", "title", cause=row))),
                TableCell(numbers.text("causes", "kind", cause=row)),
                TableCell(probability.text, quantity=probability, is_number=True),
                *_alone_cell(numbers, row, probability),
                TableCell("yes" if row in possible else ""),
                TableCell(f"block {layer}" if layer >= 0 else ""),
                TableCell(probability.where),
            )
        )
    by_mechanism = ("by mechanism",) if _tells_mechanism(numbers) else ()
    columns = ("cause", "kind", "probability", *by_mechanism, "in the set", "where at fault", "where in the tree")
    return ReportTable("Causes by probability", columns, tuple(rows))


def _tells_mechanism(numbers: Numbers) -> bool:
    """Whether the tree has probabilities from what the run did alone; those of older versions have none."""
    return "mechanism_probability" in numbers.node("causes")


def _alone(numbers: Numbers, row: int, probability: Quantity) -> Quantity:
    """The probability of a cause from what the run did alone."""
    return numbers.value("causes", "mechanism_probability", cause=row, meaning=f"{probability.meaning}, by mechanism")


def _alone_cell(numbers: Numbers, row: int, probability: Quantity) -> tuple[TableCell, ...]:
    if not _tells_mechanism(numbers):
        return ()
    alone = _alone(numbers, row, probability)
    return (TableCell(alone.text, quantity=alone, is_number=True),)


def _evidence_tables(numbers: Numbers, cited: list[Quantity]) -> list[ReportTable]:
    """What is cited or weighs much, and the rest, folded."""
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
    columns = ("symptom", "value", "unit", "usual", "step", "speaks of", "log-odds", "where in the tree")
    tables = [
        ReportTable("Evidence; positive log-odds speak for the cause, negative against it", columns, tuple(shown))
    ]
    if weak:
        caption = f"{len(weak)} more symptoms, each of which changes the odds of its cause by less than half"
        elsewhere = f'they stand with the others in tree["evidence"], where the weight is below {_WEAK}'
        tables.append(ReportTable(caption, columns, tuple(weak), is_folded=True, elsewhere=elsewhere))
    return tables


def _titles(numbers: Numbers) -> dict[str, str]:
    return dict(zip(numbers.names("causes", "cause"), numbers.texts("causes", "title"), strict=True))


def _probability(numbers: Numbers, row: int) -> Quantity:
    title = numbers.text("causes", "title", cause=row)
    return numbers.value("causes", "probability", cause=row, meaning=f"probability: {lowered(title)}")


def _value(numbers: Numbers, row: int) -> Quantity:
    """The value of a symptom, with the unit of its row."""
    units = numbers.text("evidence", "units", evidence=row)
    quantity = numbers.value("evidence", "value", evidence=row, meaning=_name(numbers, row))
    if math.isnan(quantity.value):  # a loss that diverged, not one that was not measured
        return replace(quantity, text="not finite")
    return replace(quantity, units=units_in_words(units, quantity.value))


def _name(numbers: Numbers, row: int) -> str:
    """The name of a symptom; several may use the same variable."""
    known = numbers.node("evidence")
    which = next(name for name in ("symptom", "sign", "quantity") if name in known)  # the latter of older versions
    return title_of(numbers.text("evidence", which, evidence=row))


def _kind(numbers: Numbers, row: int) -> str:
    """What a symptom was read from; trees of older versions do not say it."""
    if "kind" not in numbers.node("evidence"):
        return SymptomKind.MECHANISM
    return numbers.text("evidence", "kind", evidence=row)


def _about(numbers: Numbers, row: int) -> str:
    return f"log-odds from {_name(numbers, row)}"


def _symptom(numbers: Numbers, row: int) -> Sentence:
    text = capitalized(clause(numbers.text("evidence", "sentence", evidence=row)))
    value = _value(numbers, row)
    return say("{text} ({name}: {value}).", text=text, name=value.meaning, value=value)


def _share_of(numbers: Numbers, row: int, probability: Quantity) -> Sentence:
    layer = int(numbers.value("causes", "layer", cause=row).value)
    place = f", in block {layer}" if layer >= 0 else ""
    kind = numbers.text("causes", "kind", cause=row)
    what = "" if kind == CauseKind.NONE else f" (a fault of the {kind}{place})"
    if not _tells_mechanism(numbers):
        return say("Its probability is {probability}{what}.", probability=probability, what=what)
    return say(
        "Its probability is {probability}{what}, {alone} from what the run did alone.",
        probability=probability, what=what, alone=_alone(numbers, row, probability),
    )  # fmt: skip


def _spoken_for(numbers: Numbers, word: str, chosen: list[tuple[int, Quantity]]) -> Sentence:
    chosen = sorted(chosen, key=lambda pair: -abs(pair[1].value))
    rest, chosen = len(chosen) - _N_SYMPTOMS, chosen[:_N_SYMPTOMS]
    slots: dict[str, Quantity] = {}
    parts = []
    for place, (index, weight) in enumerate(chosen):
        value = _value(numbers, index)
        slots |= {f"v{place}": value, f"w{place}": weight}
        parts.append(f"{value.meaning} ({{v{place}}}; log-odds {{w{place}}})")
    more = f", and {rest} weaker ones" if rest > 0 else ""
    return say(f"{word}: {listed(parts)}{more}.", **slots)


def _experiment(numbers: Numbers, row: int) -> Item:
    sentences = [_to_do(numbers, row)] + ([_done(numbers, row)] if _outcome_of(numbers, row) else [])
    right, wrong = (numbers.text("experiments", f"expected_if_{word}", experiment=row) for word in ("right", "wrong"))
    change = _change_in_words(numbers.text("experiments", "change", experiment=row))
    remark = f"Change: {change}. If it is the cause, {clause(right)}; if not, {clause(wrong)}."
    if numbers.text("experiments", "cause", experiment=row) == "learning_rate":
        remark += " Before the next run, wb.find_rate finds the rates that learn well."
    return Item("", tuple(sentences), remark=remark)


def _to_do(numbers: Numbers, row: int) -> Sentence:
    title = numbers.text("experiments", "title", experiment=row)
    of = {
        name: numbers.value("experiments", name, experiment=row, meaning=f"{lowered(title)}: {word}")
        for name, word in (("n_steps", "steps"), ("from_step", "first step"), ("cost", "cost"))
    }
    return say(
        "{title}: replay {n_steps} from step {from_step} on with and without it, at {cost} times the steps of the run.",
        title=capitalized(clause(title)),
        **of,
    )


def _outcome_of(numbers: Numbers, row: int) -> str:
    """Empty if it was not run."""
    has_outcomes = "outcome" in numbers.node("experiments")
    return numbers.text("experiments", "outcome", experiment=row) if has_outcomes else ""


def _done(numbers: Numbers, row: int) -> Sentence:
    """The outcome of an experiment; a loss that is not finite is described by its sentence only."""
    about = lowered(numbers.text("experiments", "title", experiment=row))
    words = {"value": "loss with the change", "twin_value": "loss without it"}
    slots = {
        name: numbers.value("experiments", name, experiment=row, meaning=f"{about}: {word}")
        for name, word in words.items()
    }
    losses = [f"{words[name]} {{{name}}}; " for name, quantity in slots.items() if math.isfinite(quantity.value)]
    supports = numbers.value("experiments", "supports", experiment=row, meaning=f"{about}: speaks for the cause")
    return say(
        f"It was done: {{outcome}} ({''.join(losses)}speaks for {{cause}}: {{supports}}).",
        cause=lowered(_titles(numbers)[numbers.text("experiments", "cause", experiment=row)]),
        outcome=lowered(clause(_outcome_of(numbers, row))),
        supports=supports,
        **slots,
    )


def _tried(numbers: Numbers, row: int) -> Sentence:
    """The same in short."""
    title = numbers.text("experiments", "title", experiment=row)
    about = lowered(title)
    value = numbers.value("experiments", "value", experiment=row, meaning=f"{about}: loss with the change")
    end = "the loss came to {value}" if math.isfinite(value.value) else "it diverged all the same"
    return say(
        f"{{title}}: tried, {end}; speaks for {{cause}}: {{supports}}.",
        title=capitalized(clause(title)),
        cause=lowered(_titles(numbers)[numbers.text("experiments", "cause", experiment=row)]),
        supports=numbers.value("experiments", "supports", experiment=row, meaning=f"{about}: speaks for the cause"),
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
        return say("The loss began to rise at step {step}.", step=step)
    if numbers.has_attribute("what_happened"):
        what = clause(numbers.attribute("what_happened").text)
        return say("{what}; the symptoms are read as of step {step}.", what=what, step=step)
    return say("The loss shows no failure; the symptoms are read as of step {step}.", step=step)


def _has_failed(numbers: Numbers) -> bool:
    """Whether the record shows a failure; trees of older versions take it for granted."""
    is_shown = not numbers.has_attribute("shows_failure") or bool(numbers.attribute("shows_failure").value)
    return is_shown and _has_step(numbers)


def _has_step(numbers: Numbers) -> bool:
    if not numbers.has_attribute("failure_step"):
        return False
    step = _failure_step(numbers).value
    return isinstance(step, int | float) and not math.isnan(step) and step >= 0


def _failure_step(numbers: Numbers) -> Quantity:
    return numbers.attribute("failure_step", meaning="step of the failure")
