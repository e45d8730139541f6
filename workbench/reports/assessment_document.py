"""Report of an assessment: measurements, conclusions, decisions."""

from __future__ import annotations

import math

import xarray as xr

from workbench.assessment.criteria import LIMIT, RATE, SLOW_RATE
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
    Numbers,
    Paragraph,
    Quantity,
    ReportSection,
    Sentence,
    sentence_of,
)
from workbench.schema.statuses import BAD_STATES, WORST_FIRST, CriterionState, DecisionKind, Verdict

VERDICT_STATE: dict[str, CriterionState] = {
    Verdict.PROCEED: CriterionState.HEALTHY,
    Verdict.CANNOT_SAY: CriterionState.NOT_MEASURED,
    Verdict.AT_RISK: CriterionState.AT_RISK,
    Verdict.REFUSE: CriterionState.FAILING,
}
_KINDS: dict[str, str] = {
    DecisionKind.PROCEED: "Proceed",
    DecisionKind.MEASURE: "Measure first",
    DecisionKind.CHANGE: "Change",
    DecisionKind.MONITOR: "Monitor",
    DecisionKind.KSS: "Koopman Spectral Shaping",
    DecisionKind.STOP_RULE: "Stop the run when",
}
_N_ACTIONS = 3
#: State -> position of a number relative to its healthy band.
_POSITIONS: dict[str, str] = {
    CriterionState.FAILING: "far outside",
    CriterionState.AT_RISK: "outside",
    CriterionState.HEALTHY: "inside",
}


def assessment_document(tree: xr.DataTree) -> Document:
    """Return the content of the report of an assessment."""
    numbers = Numbers(tree)
    verdict = numbers.attribute("verdict").text
    texts = (observed(numbers), cause(numbers), decisions(numbers))
    # Facts and actions repeat the sections, but their links need targets as well.
    facts, first = most_important(numbers), actions(numbers)
    cited = [quantity for section in texts for quantity in section.cited]
    cited += [fact.quantity for fact in facts] + [quantity for sentence in first for quantity in sentence.quantities]
    return Document(
        kind="Structural assessment before training",
        subject=numbers.attribute("subject").text,
        verdict=verdict,
        state=VERDICT_STATE.get(verdict, CriterionState.NOT_MEASURED),
        summary=numbers.attribute("summary").text,
        facts=facts,
        actions=first,
        sections=(texts[0], texts[1], effect_space.assessment_section(numbers, cited), texts[2]),
        about=effect_space.about(tree),
    )


def observed(numbers: Numbers) -> ReportSection:
    """Return section 1: numbers outside their bands, useful rates, and what could not be measured."""
    size = sentence_of(
        "{subject} has {weights} parameters in {depth} blocks of width {width}. The measurements before training and "
        "the trials of the first updates used seed {seed}.",
        subject=numbers.attribute("subject").text,
        weights=numbers.attribute("n_weights", meaning="parameters"),
        depth=numbers.attribute("depth", meaning="blocks"),
        width=numbers.attribute("width", meaning="width of the residual stream"),
        seed=numbers.attribute("seed"),
    )
    sizes = (size, _about_proxy(numbers)) if is_proxy(numbers) else (size,)
    blocks: list[Block] = [Lead("Measurements, before any cause is considered."), Paragraph((*sizes, _tally(numbers)))]
    if rates := rate_sentences(numbers):
        blocks += [Heading("Useful learning rates"), Paragraph(tuple(rates))]
    ids, states = numbers.names("criteria", "criterion"), numbers.texts("criteria", "state")
    for state, heading in ((CriterionState.FAILING, "Failing"), (CriterionState.AT_RISK, "At risk")):
        items = [_standing(numbers, name) for name, its in zip(ids, states, strict=True) if its == state]
        if items:
            blocks += [Heading(heading), Items(tuple(items))]
    if missing := _missing(numbers):
        blocks += [Heading("Not measured or not evaluated"), Items(tuple(missing))]
    return ReportSection("v1", "Observed phenomenon", tuple(blocks))


def cause(numbers: Numbers) -> ReportSection:
    """Return section 2: the failure modes that the numbers indicate, each with its evidence, and those ruled out."""
    blocks: list[Block] = [Lead("Failure modes that the measurements indicate, each with its evidence.")]
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
    """Return section 4: the recommended actions by kind, in the order of the tree."""
    blocks: list[Block] = [Lead("Recommended actions, in order. Each states the number that supports it.")]
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
    """Return the first actions of section 4 for the summary."""
    order: list[str] = [DecisionKind.MEASURE, DecisionKind.CHANGE]
    order += [kind for kind in DecisionKind if kind not in order]
    kinds = numbers.texts("decisions", "kind")
    rows = sorted(range(len(kinds)), key=lambda row: (order.index(kinds[row]) if kinds[row] in order else 9, row))
    return tuple(_decision_sentence(numbers, row, stands_alone=True) for row in rows[:_N_ACTIONS])


#: Accuracy of rates estimated on proxy models, from the recorded designs (docs/results/assessment.md).
_PROXY_ACCURACY = (
    "Published designs were trained at 0.1 to 12 times such an estimate from a narrow proxy model (median: 3 times). "
    "Therefore a rate is flagged only above its limit, three times the upper end; the planned rate is {ratio} times "
    "this limit."
)


def most_important(numbers: Numbers) -> tuple[Fact, ...]:
    """Return up to three numbers: the largest useful rate, where known, and bad criteria; without either, the gain."""
    facts = []
    if knows_rates(numbers):
        edge, low, high = (_of_pilot(numbers, f"useful_edge{end}") for end in ("", "_low", "_high"))
        planned = _of_pilot(numbers, "planned_rate")
        of = f"; estimated on {proxy_of(numbers)}" if is_proxy(numbers) else ""
        limit = f"; limit: {_of_pilot(numbers, LIMIT).text}" if of and LIMIT in numbers.node("pilot") else ""
        text = f"{low.text} to {high.text}{of}; planned: {planned.text}{limit}"
        facts.append(Fact(edge, "largest useful rate", text))
    for quantity in worst_criteria(numbers):
        if len(facts) == 3:
            break
        if facts and knows_rates(numbers) and quantity.variable in (RATE, SLOW_RATE):
            continue  # the first fact already states the rates
        if quantity.state in BAD_STATES or (not facts and quantity.variable == DECIDES["structure"]):
            facts.append(Fact(quantity, quantity.meaning, f"healthy: {quantity.band}"))
    return tuple(facts)


def knows_rates(numbers: Numbers) -> bool:
    """Return whether the pilot found the useful rates."""
    if not (numbers.has("pilot") and "useful_edge" in numbers.node("pilot")):
        return False
    return not math.isnan(_of_pilot(numbers, "useful_edge").value)


def worst_criteria(numbers: Numbers) -> list[Quantity]:
    """Return the measured criteria, the worst state first and within a state by decreasing confidence."""
    ids, states = numbers.names("criteria", "criterion"), numbers.texts("criteria", "state")
    confidence = [float(numbers.value("criteria", "confidence", criterion=row).value) for row in range(len(ids))]
    rows = [row for row in range(len(ids)) if states[row] != CriterionState.NOT_MEASURED]
    rows.sort(
        key=lambda row: (
            -CriterionState(states[row]).severity,
            -confidence[row] if confidence[row] == confidence[row] else 0.0,
        )
    )
    return [numbers.criterion(ids[row]) for row in rows]


def rate_sentences(numbers: Numbers) -> list[Sentence]:
    """Return sentences on the useful rates that the pilot found, or why it found none, and on the trials."""
    if not numbers.has("pilot"):
        return []
    if not knows_rates(numbers):
        why = str(numbers.node("pilot").attrs.get("reason", "")) or "no pilot was run"
        planned = _of_pilot(numbers, "planned_rate")
        unknown = sentence_of(
            "It is unknown whether {planned} is a useful learning rate: {why}.",
            planned=planned,
            why=lowered(clause(why)),
        )
        return [unknown, *_trials(numbers)]
    names = ("slow_edge", "best_rate", "useful_edge", "useful_edge_low", "useful_edge_high", "planned_rate")
    n_steps = int(numbers.node("pilot").attrs["n_steps"])
    return [
        sentence_of(
            f"For {n_steps:,} updates, the best learning rate is about {{best_rate}}, and rates from {{slow_edge}} to "
            "{useful_edge} (interval {useful_edge_low} to {useful_edge_high}) are useful; the planned rate is "
            "{planned_rate}.",
            **{name: _of_pilot(numbers, name) for name in names},
        ),
        *([sentence_of(_PROXY_ACCURACY, ratio=_of_pilot(numbers, RATE))] if is_proxy(numbers) else []),
        *_trials(numbers),
    ]


def _trials(numbers: Numbers) -> list[Sentence]:
    """Return a sentence on the trials of the plan."""
    if not (numbers.has("trials") and "share_broken" in numbers.node("trials")):
        return []
    diverged = numbers.value("trials", "share_broken", meaning="fraction of trials that diverged")
    of = f" of {proxy_of(numbers)}" if is_proxy(numbers) else ""
    return [sentence_of(f"Of the trials of the first updates{of}, {{diverged}} diverged.", diverged=diverged)]


def _of_pilot(numbers: Numbers, name: str) -> Quantity:
    return numbers.value("pilot", name)


def _about_proxy(numbers: Numbers) -> Sentence:
    """Return a sentence on the proxy models of a design that is too large."""
    return sentence_of(
        "Proxy models of width {width} were measured in its place. For the structure, they have all blocks and the "
        "variances of the full width, so that signals and gradients propagate as at that width. For pilot and trials, "
        "they have {depth} blocks, the initialization of their library, and learning rates multiplied by the ratio of "
        "the widths.",
        width=numbers.attribute("measured_width", meaning="width of the model that was run"),
        depth=numbers.attribute("measured_depth", meaning="blocks of the model that was run"),
    )


def is_proxy(numbers: Numbers) -> bool:
    """Return whether a proxy model was run in place of the subject."""
    if numbers.has_attribute("is_stand_in"):
        return bool(numbers.attribute("is_stand_in").value)
    sizes = ("width", "depth")  # a tree of an earlier version
    return any(
        numbers.has_attribute(f"measured_{size}")
        and numbers.attribute(f"measured_{size}").value < numbers.attribute(size).value
        for size in sizes
    )


def proxy_of(numbers: Numbers) -> str:
    """Return a description of the proxy model that was run; empty if the subject itself was run."""
    if not is_proxy(numbers):
        return ""
    width, depth = (numbers.attribute(f"measured_{size}").text for size in ("width", "depth"))
    return f"a proxy model of width {width} with {depth} blocks"


def _tally(numbers: Numbers) -> Sentence:
    """Return a sentence on the number of criteria in each state."""
    states = numbers.texts("criteria", "state")
    counts = {
        state: numbers.count("criteria", "state", state, meaning=f"criteria that are {state}")
        for state in CriterionState
    }
    words = {state: state.value for state in CriterionState} | {CriterionState.NOT_MEASURED: "could not be evaluated"}
    present = [state for state in CriterionState if state in states]
    slots = {state.replace(" ", "_"): counts[state] for state in present}
    parts = []
    for state in present:
        verb = "" if state == CriterionState.NOT_MEASURED else "is " if counts[state].value == 1 else "are "
        parts.append(f"{{{state.replace(' ', '_')}}} {verb}{words[state]}")
    return sentence_of(f"Of the criteria, {listed(parts)}.", **slots)


def _standing(numbers: Numbers, name: str) -> Item:
    """Return the position of a criterion relative to its band."""
    row = numbers.names("criteria", "criterion").index(name)
    quantity = numbers.criterion(name)
    layer = int(numbers.value("criteria", "layer", criterion=row).value)
    place = f" in block {layer}" if layer >= 0 else ""
    n = numbers.value("criteria", "n_reference", criterion=row)
    origin = f", from {n.text} healthy runs" if n.value > 0 else ""
    position = _POSITIONS.get(quantity.state, "near the end of")
    sentence = sentence_of(
        f"The value is {{value}}{place}, {position} the healthy band ({{band}}{origin}).",
        value=quantity,
        band=quantity.band,
    )
    return Item(capitalized(quantity.meaning), (sentence,), quantity.state)


def _missing(numbers: Numbers) -> list[Item]:
    """Return the criteria that could not be measured, grouped by reason."""
    by_reason: dict[str, list[Quantity]] = {}
    ids, states = numbers.names("criteria", "criterion"), numbers.texts("criteria", "state")
    for name, state, reason in zip(ids, states, numbers.texts("criteria", "reason"), strict=True):
        if state == CriterionState.NOT_MEASURED:
            by_reason.setdefault(capitalized(clause(reason)) or "The reason is unknown", []).append(
                numbers.criterion(name)
            )
    items = []
    for reason, found in by_reason.items():
        slots = {f"v{place}": quantity for place, quantity in enumerate(found)}
        names = listed(f"{quantity.meaning} ({{v{place}}})" for place, quantity in enumerate(found))
        items.append(
            Item("", (sentence_of(f"{{reason}}: {names}.", reason=reason, **slots),), CriterionState.NOT_MEASURED)
        )
    return items


def _mode(numbers: Numbers, row: int, mode: str, state: str) -> Item:
    """Return a failure mode with its worst criterion, and the reasons of its bad criteria."""
    title = numbers.text("failure_modes", "title", failure_mode=row)
    meaning = numbers.text("failure_modes", "meaning", failure_mode=row)
    worst = numbers.text("failure_modes", "worst_criterion", failure_mode=row)
    ids, states = numbers.names("criteria", "criterion"), numbers.texts("criteria", "state")
    owners, reasons = numbers.texts("criteria", "failure_mode"), numbers.texts("criteria", "reason")
    sentences = []
    if worst:
        quantity = numbers.criterion(worst)
        texts = {"meaning": capitalized(clause(meaning)) + ": " if meaning else "", "name": quantity.meaning}
        if state == CriterionState.HEALTHY:
            texts["meaning"] = f"No evidence that {clause(meaning)}: "
        if state == CriterionState.NOT_MEASURED:
            sentences.append(sentence_of("{meaning}{name} is {value}.", **texts, value=quantity))
        else:
            about = f"confidence: {lowered(title)}"
            confidence = numbers.value("failure_modes", "confidence", failure_mode=row, meaning=about)
            sentences.append(
                sentence_of(
                    "{meaning}{name} is {value} (healthy: {band}); confidence {confidence}.",
                    **texts,
                    value=quantity,
                    band=quantity.band,
                    confidence=confidence,
                )
            )
    else:
        about = f"state: {lowered(title)}"
        kept = numbers.value("failure_modes", "state", failure_mode=row, meaning=about)
        has_reason = "reason" in numbers.node("failure_modes")
        why = clause(numbers.text("failure_modes", "reason", failure_mode=row)) if has_reason else ""
        sentences.append(
            sentence_of(
                "Whether {meaning} was {state}{why}.", meaning=clause(meaning), state=kept, why=why and f": {why}"
            )
        )
    for name, its, owner, reason in zip(ids, states, owners, reasons, strict=True):
        if owner == mode and its in BAD_STATES and reason:
            quantity = numbers.criterion(name)
            sentences.append(
                sentence_of(
                    "{reason} ({name}: {value}).",
                    reason=capitalized(clause(reason)),
                    name=quantity.meaning,
                    value=quantity,
                )
            )
    return Item(title, tuple(sentences), state)


def _decision(numbers: Numbers, row: int) -> Item:
    """Return a decision with its change of a setting and its expected effect."""
    kind, setting, current, proposed = (
        numbers.text("decisions", name, decision=row) for name in ("kind", "setting", "current", "proposed")
    )
    change = None
    if kind in (DecisionKind.CHANGE, DecisionKind.KSS) and setting and current and proposed:
        now = numbers.value("decisions", "current", decision=row, meaning=f"{_setting_name(setting)}, as planned")
        change = (_setting_name(setting), now, _proposed(numbers, row))
    effect = numbers.text("decisions", "effect", decision=row)
    remark = f"Expected effect: {clause(effect)}." if effect else ""
    return Item("", (_decision_sentence(numbers, row),), change=change, remark=remark)


def _decision_sentence(numbers: Numbers, row: int, *, stands_alone: bool = False) -> Sentence:
    """Return a decision with its supporting number; with ``stands_alone`` it includes the text of its heading."""
    text = clause(numbers.text("decisions", "text", decision=row))
    is_stop = numbers.text("decisions", "kind", decision=row) == DecisionKind.STOP_RULE
    if stands_alone and is_stop and not text.startswith(("stop", "do not")):
        text = f"stop the run when {text}"
    text = text if text.startswith("wb.") else capitalized(text)  # names of the library keep their case
    criterion = numbers.text("decisions", "criterion", decision=row)
    # If the decision states the rates, their ratio would be redundant.
    has_own = numbers.text("decisions", "setting", decision=row) in ("learning_rate", "loss")
    if criterion and not (has_own and criterion in (RATE, SLOW_RATE) and _proposed(numbers, row).text):
        quantity = numbers.criterion(criterion)
        if quantity.state == CriterionState.NOT_MEASURED:
            return sentence_of("{text} ({name} is {value}).", text=text, name=quantity.meaning, value=quantity)
        return sentence_of(
            "{text} ({name} is {value}, healthy: {band}).",
            text=text,
            name=quantity.meaning,
            value=quantity,
            band=quantity.band,
        )
    proposed = _proposed(numbers, row)
    if proposed.text:
        setting = _setting_name(numbers.text("decisions", "setting", decision=row))
        return sentence_of(
            "{text} ({setting}{value}).", text=text, setting=f"{setting}: " if setting else "", value=proposed
        )
    return sentence_of("{text} (verdict: {verdict}).", text=text, verdict=numbers.attribute("verdict"))


def _setting_name(setting: str) -> str:
    """Return the name of a setting in words, such as "number of steps" for ``n_steps``."""
    return f"number of {title_of(setting[2:])}" if setting.startswith("n_") else title_of(setting)


def _proposed(numbers: Numbers, row: int) -> Quantity:
    setting = _setting_name(numbers.text("decisions", "setting", decision=row)) or capitalized(
        numbers.text("decisions", "kind", decision=row)
    )
    return numbers.value("decisions", "proposed", decision=row, meaning=f"{setting}, proposed")
