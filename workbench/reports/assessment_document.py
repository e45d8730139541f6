"""The report of an assessment: measurements, conclusions, decisions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from workbench.assessment.failure_modes.pilot_criteria import RATE, SLOW_RATE
from workbench.assessment.verdict import DECIDES
from workbench.formatting import capitalized, clause, listed, lowered, title_of
from workbench.reports import effect_space
from workbench.reports.document import (
    Block,
    Document,
    Fact,
    Heading,
    Item,
    Items,
    Lead,
    Paragraph,
    ReportSection,
    Sentence,
    say,
)
from workbench.reports.quantity import Numbers, Quantity
from workbench.schema.statuses import BAD_STATES, WORST_FIRST, CriterionState, DecisionKind, Verdict

if TYPE_CHECKING:
    import xarray as xr

VERDICT_STATE: dict[str, CriterionState] = {
    Verdict.PROCEED: CriterionState.HEALTHY,
    Verdict.CANNOT_SAY: CriterionState.NOT_MEASURED,
    Verdict.AT_RISK: CriterionState.AT_RISK,
    Verdict.REFUSE: CriterionState.FAILING,
}
_KINDS: dict[str, str] = {
    DecisionKind.PROCEED: "Proceed",
    DecisionKind.MEASURE: "Find out first",
    DecisionKind.CHANGE: "Change",
    DecisionKind.MONITOR: "Watch",
    DecisionKind.KSS: "Koopman Spectral Shaping",
    DecisionKind.STOP_RULE: "Stop the run when",
}
_N_ACTIONS = 3
#: Phrases for a number with a healthy band, by state.
_STANDING: dict[str, str] = {
    CriterionState.FAILING: "far outside",
    CriterionState.AT_RISK: "outside",
    CriterionState.HEALTHY: "inside",
}


def assessment_document(tree: xr.DataTree) -> Document:
    """The report of an assessment.

    Raises:
        SchemaError: If the tree lacks a number of its report.
    """
    numbers = Numbers(tree)
    verdict = numbers.attribute("verdict").text
    spoken = (observed(numbers), cause(numbers), decisions(numbers))
    # Facts and actions repeat the sections, but each needs its own link.
    facts, first = most_important(numbers), actions(numbers)
    cited = [quantity for section in spoken for quantity in section.cited]
    cited += [fact.quantity for fact in facts] + [quantity for sentence in first for quantity in sentence.quantities]
    return Document(
        kind="Structural assessment before training",
        subject=numbers.attribute("subject").text,
        verdict=verdict,
        state=VERDICT_STATE.get(verdict, CriterionState.NOT_MEASURED),
        summary=numbers.attribute("summary").text,
        facts=facts,
        actions=first,
        sections=(spoken[0], spoken[1], effect_space.assessment_section(numbers, cited), spoken[2]),
        about=effect_space.about(tree),
    )


def observed(numbers: Numbers) -> ReportSection:
    """V1: the numbers outside their bands, the useful rates, and what could not be measured."""
    size = say(
        "{subject} has {weights} weights in {depth} blocks of width {width}; it was looked at before training, and "
        "tried out for a few updates on copies (seed {seed}).",
        subject=numbers.attribute("subject").text,
        weights=numbers.attribute("n_weights", meaning="weights"),
        depth=numbers.attribute("depth", meaning="blocks"),
        width=numbers.attribute("width", meaning="width of the residual stream"),
        seed=numbers.attribute("seed"),
    )
    sizes = (size, _what_stood_in(numbers)) if is_stand_in(numbers) else (size,)
    blocks: list[Block] = [Lead("What was seen, before any cause is named."), Paragraph((*sizes, _tally(numbers)))]
    if rates := rate_sentences(numbers):
        blocks += [Heading("At which rate does it learn well?"), Paragraph(tuple(rates))]
    ids, states = numbers.names("criteria", "criterion"), numbers.texts("criteria", "state")
    for state, heading in ((CriterionState.FAILING, "Failing"), (CriterionState.AT_RISK, "At risk")):
        items = [_standing(numbers, name) for name, its in zip(ids, states, strict=True) if its == state]
        if items:
            blocks += [Heading(heading), Items(tuple(items))]
    if missing := _missing(numbers):
        blocks += [Heading("Not measured, or not judged"), Items(tuple(missing))]
    return ReportSection("v1", "Observed phenomenon", tuple(blocks))


def cause(numbers: Numbers) -> ReportSection:
    """V2: the failure modes that the numbers add up to, each with its evidence, and those ruled out."""
    blocks: list[Block] = [Lead("What the numbers add up to: the ways to fail, each with the evidence for it.")]
    modes = numbers.names("failure_modes", "failure_mode")
    states = numbers.texts("failure_modes", "state")
    headings: dict[str, str] = {
        CriterionState.FAILING: "Present",
        CriterionState.AT_RISK: "Possible",
        CriterionState.HEALTHY: "Not found",
        CriterionState.NOT_MEASURED: "Not measured",
    }
    for state in WORST_FIRST:
        items = [_mode(numbers, row, mode, state) for row, mode in enumerate(modes) if states[row] == state]
        if items:
            blocks += [Heading(headings[state]), Items(tuple(items))]
    return ReportSection("v2", "Structural cause", tuple(blocks))


def decisions(numbers: Numbers) -> ReportSection:
    """V4: what to do, by kind, in the order of the tree."""
    blocks: list[Block] = [Lead("What to do, in this order. Each step names the number that it rests on.")]
    kinds = numbers.texts("decisions", "kind")
    for kind in dict.fromkeys([*_KINDS, *kinds]):
        items = [_decision(numbers, row) for row, its in enumerate(kinds) if its == kind]
        if items:
            blocks += [
                Heading(_KINDS.get(kind, capitalized(kind))),
                Items(tuple(items), is_ordered=kind == DecisionKind.CHANGE),
            ]
    return ReportSection("v4", "Decisions", tuple(blocks))


def actions(numbers: Numbers) -> tuple[Sentence, ...]:
    """The first steps of V4, for the first screen."""
    order: list[str] = [DecisionKind.MEASURE, DecisionKind.CHANGE]
    order += [kind for kind in DecisionKind if kind not in order]
    kinds = numbers.texts("decisions", "kind")
    rows = sorted(range(len(kinds)), key=lambda row: (order.index(kinds[row]) if kinds[row] in order else 9, row))
    return tuple(_decision_sentence(numbers, row, stands_alone=True) for row in rows[:_N_ACTIONS])


#: How far to trust rates that were carried over; the figures are tested with the recorded designs.
_OF_THIN_MODELS = (
    "Published designs trained at .1 to 12 times such an estimate from a thin model, 3 times in the median; so a rate "
    "is flagged beyond three times the upper end only, and the planned one is {share} of that."
)


def most_important(numbers: Numbers) -> tuple[Fact, ...]:
    """The largest useful rate, where it is known, and what is bad: three numbers at most; if neither, the gain."""
    facts = []
    if knows_rates(numbers):
        edge, low, high = (_of_pilot(numbers, f"useful_edge{end}") for end in ("", "_low", "_high"))
        planned = _of_pilot(numbers, "planned_rate")
        of = f"; estimated on {stand_in_of(numbers)}" if is_stand_in(numbers) else ""
        facts.append(Fact(edge, "largest useful rate", f"{low.text} to {high.text}{of}; planned: {planned.text}"))
    for quantity in worst_criteria(numbers):
        if len(facts) == 3:
            break
        if facts and knows_rates(numbers) and quantity.variable in (RATE, SLOW_RATE):
            continue  # the first number tells the rates themselves
        if quantity.state in BAD_STATES or (not facts and quantity.variable == DECIDES["structure"]):
            facts.append(Fact(quantity, quantity.meaning, f"healthy: {quantity.band}"))
    return tuple(facts)


def knows_rates(numbers: Numbers) -> bool:
    """Whether the pilot found the useful rates."""
    if not (numbers.has("pilot") and "useful_edge" in numbers.node("pilot")):
        return False
    return not math.isnan(_of_pilot(numbers, "useful_edge").value)


def worst_criteria(numbers: Numbers) -> list[Quantity]:
    """Measured criteria, failing ones first, within a state by falling confidence."""
    ids, states = numbers.names("criteria", "criterion"), numbers.texts("criteria", "state")
    sure = [float(numbers.value("criteria", "confidence", criterion=row).value) for row in range(len(ids))]
    rows = [row for row in range(len(ids)) if states[row] != CriterionState.NOT_MEASURED]
    rows.sort(key=lambda row: (-CriterionState(states[row]).severity, -sure[row] if sure[row] == sure[row] else 0.0))
    return [numbers.criterion(ids[row]) for row in rows]


def rate_sentences(numbers: Numbers) -> list[Sentence]:
    """Sentences on the useful rates that the pilot found, or why it found none, and on the trials."""
    if not numbers.has("pilot"):
        return []
    if not knows_rates(numbers):
        why = str(numbers.node("pilot").attrs.get("reason", "")) or "no pilot was made"
        planned = _of_pilot(numbers, "planned_rate")
        told = say("Whether {planned} is a useful rate is not known: {why}.", planned=planned, why=lowered(clause(why)))
        return [told, *_trials(numbers)]
    names = ("slow_edge", "best_rate", "useful_edge", "useful_edge_low", "useful_edge_high", "planned_rate")
    n_steps = int(numbers.node("pilot").attrs["n_steps"])
    return [
        say(
            f"Over {n_steps:,} updates the best learning rate is about {{best_rate}}; rates from {{slow_edge}} up to "
            "{useful_edge} ({useful_edge_low} to {useful_edge_high}) learn about as well; planned is {planned_rate}.",
            **{name: _of_pilot(numbers, name) for name in names},
        ),
        *([say(_OF_THIN_MODELS, share=_of_pilot(numbers, "rate_over_edge"))] if is_stand_in(numbers) else []),
        *_trials(numbers),
    ]


def _trials(numbers: Numbers) -> list[Sentence]:
    """The outcome of the trials of the plan."""
    if not (numbers.has("trials") and "share_broken" in numbers.node("trials")):
        return []
    share = numbers.value("trials", "share_broken", meaning="share of the trials that broke")
    of = f" of {stand_in_of(numbers)}" if is_stand_in(numbers) else ""
    return [say(f"Of the trials of the first updates{of}, {{share}} broke.", share=share)]


def _of_pilot(numbers: Numbers, name: str) -> Quantity:
    return numbers.value("pilot", name)


def _what_stood_in(numbers: Numbers) -> Sentence:
    """A sentence on the stand-in of a design that is too large."""
    return say(
        "Models {width} wide stood in for it: for its structure with all blocks and its variances, so that signals and "
        "gradients pass as they would at the full width; in pilot and trials with {depth} blocks, as their library "
        "makes them, at rates that are larger by the ratio of the widths.",
        width=numbers.attribute("measured_width", meaning="width of the model that was run"),
        depth=numbers.attribute("measured_depth", meaning="blocks of the model that was run"),
    )


def is_stand_in(numbers: Numbers) -> bool:
    """Whether the model that was run is not the subject."""
    if numbers.has_attribute("is_stand_in"):
        return bool(numbers.attribute("is_stand_in").value)
    sizes = ("width", "depth")  # a tree of an older workbench
    return any(
        numbers.has_attribute(f"measured_{size}")
        and numbers.attribute(f"measured_{size}").value < numbers.attribute(size).value
        for size in sizes
    )


def stand_in_of(numbers: Numbers) -> str:
    """A description of the stand-in that was run; empty if the subject itself was."""
    if not is_stand_in(numbers):
        return ""
    width, depth = (numbers.attribute(f"measured_{size}").text for size in ("width", "depth"))
    return f"a stand-in {width} wide with {depth} blocks"


def _tally(numbers: Numbers) -> Sentence:
    states = numbers.texts("criteria", "state")
    counts = {
        state: numbers.count("criteria", "state", state, meaning=f"criteria that are {state}")
        for state in CriterionState
    }
    words = {state: state.value for state in CriterionState} | {CriterionState.NOT_MEASURED: "could not be judged"}
    there = [state for state in CriterionState if state in states]
    slots = {state.replace(" ", "_"): counts[state] for state in there}
    parts = []
    for state in there:
        verb = "" if state == CriterionState.NOT_MEASURED else "is " if counts[state].value == 1 else "are "
        parts.append(f"{{{state.replace(' ', '_')}}} {verb}{words[state]}")
    return say(f"Of the criteria, {listed(parts)}.", **slots)


def _standing(numbers: Numbers, name: str) -> Item:
    """The position of a criterion relative to its band."""
    row = numbers.names("criteria", "criterion").index(name)
    quantity = numbers.criterion(name)
    layer = int(numbers.value("criteria", "layer", criterion=row).value)
    place = f" in block {layer}" if layer >= 0 else ""
    n = numbers.value("criteria", "n_reference", criterion=row)
    behind = f", that of {n.text} healthy runs" if n.value > 0 else ""
    standing = _STANDING.get(quantity.state, "near the end of")
    sentence = say(
        f"It is {{value}}{place}, {standing} the healthy band ({{band}}{behind}).", value=quantity, band=quantity.band
    )
    return Item(capitalized(quantity.meaning), (sentence,), quantity.state)


def _missing(numbers: Numbers) -> list[Item]:
    """Criteria that could not be measured, those with one reason together."""
    by_reason: dict[str, list[Quantity]] = {}
    ids, states = numbers.names("criteria", "criterion"), numbers.texts("criteria", "state")
    for name, state, reason in zip(ids, states, numbers.texts("criteria", "reason"), strict=True):
        if state == CriterionState.NOT_MEASURED:
            by_reason.setdefault(capitalized(clause(reason)) or "No reason is known", []).append(
                numbers.criterion(name)
            )
    items = []
    for reason, found in by_reason.items():
        slots = {f"v{place}": quantity for place, quantity in enumerate(found)}
        told = listed(f"{quantity.meaning} ({{v{place}}})" for place, quantity in enumerate(found))
        items.append(Item("", (say(f"{{reason}}: {told}.", reason=reason, **slots),), CriterionState.NOT_MEASURED))
    return items


def _mode(numbers: Numbers, row: int, mode: str, state: str) -> Item:
    title = numbers.text("failure_modes", "title", failure_mode=row)
    meaning = numbers.text("failure_modes", "meaning", failure_mode=row)
    worst = numbers.text("failure_modes", "worst_criterion", failure_mode=row)
    ids, states = numbers.names("criteria", "criterion"), numbers.texts("criteria", "state")
    owners, reasons = numbers.texts("criteria", "failure_mode"), numbers.texts("criteria", "reason")
    sentences = []
    if worst:
        quantity = numbers.criterion(worst)
        told = {"meaning": capitalized(clause(meaning)) + ": " if meaning else "", "name": quantity.meaning}
        if state == CriterionState.HEALTHY:
            told["meaning"] = f"No evidence that {clause(meaning)}: "
        if state == CriterionState.NOT_MEASURED:
            sentences.append(say("{meaning}{name} is {value}.", **told, value=quantity))
        else:
            about = f"confidence: {lowered(title)}"
            sure = numbers.value("failure_modes", "confidence", failure_mode=row, meaning=about)
            sentences.append(
                say(
                    "{meaning}{name} is {value} (healthy: {band}); confidence {sure}.",
                    **told,
                    value=quantity,
                    band=quantity.band,
                    sure=sure,
                )
            )
    else:
        about = f"state: {lowered(title)}"
        kept = numbers.value("failure_modes", "state", failure_mode=row, meaning=about)
        has_reason = "reason" in numbers.node("failure_modes")
        why = clause(numbers.text("failure_modes", "reason", failure_mode=row)) if has_reason else ""
        said = say("Whether {meaning} was {state}{why}.", meaning=clause(meaning), state=kept, why=why and f": {why}")
        sentences.append(said)
    for name, its, owner, reason in zip(ids, states, owners, reasons, strict=True):
        if owner == mode and its in BAD_STATES and reason:
            quantity = numbers.criterion(name)
            sentences.append(
                say(
                    "{reason} ({name}: {value}).",
                    reason=capitalized(clause(reason)),
                    name=quantity.meaning,
                    value=quantity,
                )
            )
    return Item(title, tuple(sentences), state)


def _decision(numbers: Numbers, row: int) -> Item:
    kind, setting, current, proposed = (
        numbers.text("decisions", name, decision=row) for name in ("kind", "setting", "current", "proposed")
    )
    change = None
    if kind in (DecisionKind.CHANGE, DecisionKind.KSS) and setting and current and proposed:
        now = numbers.value("decisions", "current", decision=row, meaning=f"{title_of(setting)}, as planned")
        change = (title_of(setting), now, _proposed(numbers, row))
    effect = numbers.text("decisions", "effect", decision=row)
    remark = f"Expected effect: {clause(effect)}." if effect else ""
    return Item("", (_decision_sentence(numbers, row),), change=change, remark=remark)


def _decision_sentence(numbers: Numbers, row: int, *, stands_alone: bool = False) -> Sentence:
    """A decision with its supporting number; without a heading it includes the heading's text."""
    text = clause(numbers.text("decisions", "text", decision=row))
    is_stop = numbers.text("decisions", "kind", decision=row) == DecisionKind.STOP_RULE
    if stands_alone and is_stop and not text.startswith(("stop", "do not")):
        text = f"stop the run when {text}"
    text = text if text.startswith("wb.") else capitalized(text)  # a name of the library keeps its case
    criterion = numbers.text("decisions", "criterion", decision=row)
    # Where the rates speak for themselves, their ratio is not told once more.
    has_own = numbers.text("decisions", "setting", decision=row) in ("learning_rate", "loss")
    if criterion and not (has_own and criterion in (RATE, SLOW_RATE) and _proposed(numbers, row).text):
        quantity = numbers.criterion(criterion)
        if quantity.state == CriterionState.NOT_MEASURED:
            return say("{text} ({name} is {value}).", text=text, name=quantity.meaning, value=quantity)
        return say(
            "{text} ({name} is {value}, healthy: {band}).",
            text=text,
            name=quantity.meaning,
            value=quantity,
            band=quantity.band,
        )
    proposed = _proposed(numbers, row)
    if proposed.text:
        setting = title_of(numbers.text("decisions", "setting", decision=row))
        return say("{text} ({setting}{value}).", text=text, setting=f"{setting}: " if setting else "", value=proposed)
    return say("{text} (verdict: {verdict}).", text=text, verdict=numbers.attribute("verdict"))


def _proposed(numbers: Numbers, row: int) -> Quantity:
    setting = title_of(numbers.text("decisions", "setting", decision=row)) or capitalized(
        numbers.text("decisions", "kind", decision=row)
    )
    return numbers.value("decisions", "proposed", decision=row, meaning=f"{setting}, proposed")
