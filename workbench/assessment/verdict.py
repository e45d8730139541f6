"""Verdict and summary of an assessment, from the evaluated criteria and failure modes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from typing import Any

import numpy as np
import xarray as xr

from workbench.assessment.criteria import (
    BETWEEN_BLOCKS,
    BROKEN_TRIALS,
    EDGE_OF_SHARE,
    LIMIT,
    PILOT,
    RATE,
    SCALES,
    SLOW_RATE,
    STRUCTURE,
    Criterion,
    CriterionReading,
    HealthyBand,
    Sizes,
    evaluate,
)
from workbench.formatting import clause, fine_percent, listed, rounded, short
from workbench.schema.statuses import BAD_STATES, CriterionState, Verdict

#: A band extends beyond the healthy values by this fraction of their range on either side. It was chosen so that a
#: healthy model of a held-out architecture rarely falls outside (``false_alarms`` in the shipped reference).
MARGIN = 0.25
#: The smallest range that healthy values are assumed to have, on their scale.
_NARROWEST = 0.2


def healthy_bands() -> Mapping[str, HealthyBand]:
    """Return criterion -> band, from the recorded healthy models (``data/make_assessed_designs.py``)."""
    shipped = json.loads((files("workbench.assessment") / "shipped" / "healthy.json").read_text())
    return {name: HealthyBand(**band) for name, band in shipped["bands"].items()}


def band_of(values: Sequence[float], *, scale: str, margin: float = MARGIN) -> HealthyBand:
    """Return the band around healthy values, open if no value remains."""
    x = np.asarray(values, dtype=float)
    x = x[np.isfinite(x) & ((x > 0) | (scale != "log"))]
    if not len(x):
        return HealthyBand()
    there, back = SCALES[scale]
    x = there(x)
    width = max(float(np.ptp(x)), _NARROWEST)
    low, high = float(x.min()) - margin * width, float(x.max()) + margin * width
    ends = (low, high, low - (high - low), high + (high - low))
    low, high, failing_low, failing_high = (float(back(np.array(end))) for end in ends)
    if scale == "share":  # a side at which the band reaches 0 or 1 is open
        low, failing_low = (limit if limit > EDGE_OF_SHARE else -math.inf for limit in (low, failing_low))
        high, failing_high = (limit if limit < 1 - EDGE_OF_SHARE else math.inf for limit in (high, failing_high))
    return HealthyBand(low, high, failing_low, failing_high, len(x), "healthy recorded models")


@dataclass(frozen=True)
class FailureMode:
    """A way in which training fails: a title, and its description in one clause."""

    title: str
    meaning: str


#: Those of the structural catalog (SORT, ai.22) first, in its order, then those of a plan and its hardware.
FAILURE_MODES: dict[str, FailureMode] = {
    "gradient_flow_collapse": FailureMode("Gradient flow collapse",
        "gradients vanish or explode through the depth of the model"),
    "attention_degeneracy": FailureMode("Attention degeneracy",
        "heads attend to a single token, attention logits grow without bound, or all tokens become alike"),
    "routing_oscillation": FailureMode("Routing oscillation",
        "tokens keep switching experts, or a few experts receive almost all tokens"),
    "scale_dependent_divergence": FailureMode("Scale-dependent divergence",
        "a plan that works at a small size diverges at the target size"),
    "initialization_out_of_band": FailureMode("Initialization out of band",
        "the initialized model lies outside the range of healthy models"),
    "precision_headroom": FailureMode("Precision headroom",
        "number formats, accumulation or reduction lose precision that the updates need"),
    "unsuitable_rate": FailureMode("Unsuitable learning rate",
        "the planned rate is too small or too large to learn well, or makes trials diverge"),
}  # fmt: skip


CRITERIA: tuple[Criterion, ...] = (*STRUCTURE, *PILOT)
#: A state with less confidence than this does not determine the state of its failure mode.
LEAST_CONFIDENCE = 0.5
#: Why a mode remains undecided although none of its measured criteria is at risk or failing.
TOO_SHORT = "a few updates without divergence are no evidence about the rest of the training"


@dataclass(frozen=True)
class EvaluatedCriterion:
    """A criterion with its reading, state and confidence."""

    criterion: Criterion
    band: HealthyBand
    reading: CriterionReading
    state: CriterionState
    confidence: float
    reason: str
    is_outside: bool = False


def evaluate_criteria(
    tree: xr.DataTree, bands: Mapping[str, HealthyBand] | None = None
) -> tuple[xr.Dataset, xr.Dataset]:
    """Evaluate every criterion of an assessment and, from these, its failure modes.

    A band applies only to sizes within those of the healthy models that it was derived from; a value that is not finite
    is failing at any size. Trials of a few updates without divergence do not exclude divergence.

    Returns:
        Two datasets. The first has dim ``criterion``: ``failure_mode``, ``title``, ``value``, ``units``, ``low`` and
        ``high`` (the healthy band; NaN where it is open), ``failing_low`` and ``failing_high``, ``n_reference``,
        ``state``, ``confidence`` (NaN if not evaluated, or for a healthy value that excludes nothing), ``layer`` (-1 if
        none), ``path``, ``variable``, ``selection`` (JSON), ``reason`` and ``is_outside`` (whether no healthy model of
        this size was recorded). The second has dim ``failure_mode``: ``title``, ``meaning``, ``state``, ``confidence``
        (as above), ``worst_criterion`` and ``reason`` (of a mode that was not measured; may be empty).
    """
    bands, sizes = healthy_bands() if bands is None else bands, Sizes.of(tree)
    rows = [_evaluated(criterion, tree, bands, sizes) for criterion in CRITERIA]
    if "/hardware" in tree.groups:
        rows += _hazards(tree["/hardware"].to_dataset())
    # A healthy value of such a criterion does not exclude its failure mode, and so has no confidence.
    rows = [
        replace(row, confidence=math.nan)
        if row.state == CriterionState.HEALTHY and not row.criterion.rules_out
        else row
        for row in rows
    ]
    return _criteria(rows), _modes(rows)


def _evaluated(
    criterion: Criterion, tree: xr.DataTree, bands: Mapping[str, HealthyBand], sizes: Sizes | None
) -> EvaluatedCriterion:
    band = criterion.band or bands.get(criterion.name)
    if band is not None and not criterion.band:
        band = band.open_but(criterion.bad_side)
    found, is_outside = criterion.read(tree), False
    state, confidence, reason = CriterionState.NOT_MEASURED, math.nan, ""
    if isinstance(found, str):
        reason = found
    elif band is None:
        reason = "no healthy recorded run has this measurement"
    elif band.is_open:
        reason = "healthy recorded runs take any value, so the measurement is not informative"
    elif band.sizes and math.isfinite(found.value):
        reason = "the size of the measured model is unknown" if sizes is None else sizes.outside(band.sizes)
        is_outside = bool(reason)
    reading = CriterionReading(math.nan)
    if not (reason or isinstance(found, str) or band is None):
        reading = found
        state, confidence = evaluate(reading, band, scale=criterion.scale)
        reason = criterion.meaning if state != CriterionState.HEALTHY else ""
        if state == CriterionState.HEALTHY and reading.only_flags:
            state, confidence, reason = CriterionState.NOT_MEASURED, math.nan, reading.only_flags
            reading = CriterionReading(math.nan)
    return EvaluatedCriterion(criterion, band or HealthyBand(), reading, state, confidence, reason, is_outside)


def _hazards(hardware: xr.Dataset) -> list[EvaluatedCriterion]:
    """Return the hazards of the hardware plan that apply, with their measured states."""
    rows = []
    for i in np.flatnonzero(hardware["applies"].values).tolist():
        one = hardware.isel(hazard=i)
        name, title, unit, meaning = (str(one[key].values) for key in ("hazard", "title", "unit", "meaning"))
        high, failing = (
            math.inf if math.isnan(limit := float(one[key])) else limit for key in ("healthy_limit", "failing_limit")
        )
        band = HealthyBand(high=high, failing_high=failing)
        state = CriterionState(str(one["state"].values))
        criterion = Criterion(
            f"hazard_{name}", "precision_headroom", title, "/hardware", "effect", meaning, band, units=unit
        )
        confidence = math.nan if state is CriterionState.NOT_MEASURED else 1.0
        reading = CriterionReading(float(one["effect"]), 0.0, {"hazard": i})
        reason = meaning if state != CriterionState.HEALTHY else ""
        rows.append(EvaluatedCriterion(criterion, band, reading, state, confidence, reason))
    return rows


def _criteria(rows: Sequence[EvaluatedCriterion]) -> xr.Dataset:
    def place(row: EvaluatedCriterion, name: str) -> str:
        is_there = row.state is not CriterionState.NOT_MEASURED or row.criterion.path == "/hardware"
        return getattr(row.criterion, name) if is_there else ""

    columns: dict[str, list[Any]] = {
        "value": [row.reading.value for row in rows],
        **{
            name: [limit if math.isfinite(limit := getattr(row.band, name)) else math.nan for row in rows]
            for name in ("low", "high", "failing_low", "failing_high")
        },
        "spread": [float(row.reading.spread) for row in rows],
        "confidence": [float(row.confidence) for row in rows],
        "n_reference": [row.band.n_reference for row in rows],
        "layer": [row.reading.layer for row in rows],
        "is_outside": [row.is_outside for row in rows],
        **{name: [getattr(row.criterion, name) for row in rows] for name in ("failure_mode", "title", "units")},
        "state": [row.state for row in rows],
        **{name: [place(row, name) for row in rows] for name in ("path", "variable")},
        "reason": [row.reason for row in rows],
        "selection": [json.dumps(dict(row.reading.selection)) for row in rows],
    }
    return xr.Dataset(
        {name: ("criterion", np.asarray(values)) for name, values in columns.items()},
        {"criterion": [row.criterion.name for row in rows]},
    )


def _modes(rows: Sequence[EvaluatedCriterion]) -> xr.Dataset:
    """Return for each mode the worst state of its criteria with sufficient confidence, or "not measured"."""
    columns: dict[str, list[Any]] = {
        name: [] for name in ("title", "meaning", "state", "confidence", "worst_criterion", "reason")
    }
    for name, mode in FAILURE_MODES.items():
        measured = [
            row for row in rows if row.criterion.failure_mode == name and row.state != CriterionState.NOT_MEASURED
        ]
        own = [row for row in measured if row.criterion.rules_out or row.state != CriterionState.HEALTHY]
        confident = [row for row in own if row.confidence >= LEAST_CONFIDENCE] or own
        state, confidence, worst_one, reason = CriterionState.NOT_MEASURED, math.nan, "", TOO_SHORT if measured else ""
        if confident:
            worst = max(confident, key=lambda row: (row.state.severity, row.confidence))
            # The confidence of a healthy mode is that of its least confident criterion.
            is_healthy = worst.state == CriterionState.HEALTHY
            confidence = min(row.confidence for row in confident) if is_healthy else worst.confidence
            state, worst_one, reason = worst.state, worst.criterion.name, ""
        for column, value in zip(
            columns.values(), (mode.title, mode.meaning, state, confidence, worst_one, reason), strict=True
        ):
            column.append(value)
    return xr.Dataset(
        {name: ("failure_mode", values) for name, values in columns.items()}, {"failure_mode": list(FAILURE_MODES)}
    )


#: The recommended step if an assessment cannot decide, as a clause.
FIRST_STEP = (
    "find the useful learning rates at full size with wb.find_rate, or train at full size and the planned rate for a "
    "few hundred updates with wb.Recorder and wb.Alarms before committing the full budget"
)
#: The criteria of each column of the verdict: the structure of the design, and its plan in the pilot.
COLUMNS = {
    "structure": tuple(criterion.name for criterion in STRUCTURE),
    "pilot": tuple(criterion.name for criterion in PILOT),
}
#: The criterion that a column needs to be healthy: the gradient gain along depth, and the learning rate.
DECIDES = {"structure": "gain_by_depth", "pilot": RATE}


def column_state(criteria: xr.Dataset, column: str) -> CriterionState:
    """Return the state of a column, which is the worst state of its criteria with sufficient confidence."""
    own = criteria.sel(criterion=[name for name in criteria["criterion"].values if name in COLUMNS[column]])
    states = [CriterionState(state) for state in own["state"].values]
    bad = [
        state if confidence >= LEAST_CONFIDENCE else CriterionState.AT_RISK
        for state, confidence in zip(states, own["confidence"].values, strict=True)
        if state == CriterionState.FAILING or (state == CriterionState.AT_RISK and confidence >= LEAST_CONFIDENCE)
    ]
    if bad:
        return max(bad, key=lambda state: state.severity)
    is_decided = str(own["state"].sel(criterion=DECIDES[column]).values) != CriterionState.NOT_MEASURED
    return CriterionState.HEALTHY if is_decided and not own["is_outside"].any() else CriterionState.NOT_MEASURED


def verdict_of(criteria: xr.Dataset) -> Verdict:
    """Return the verdict, which follows from the worst criterion with sufficient confidence."""
    found = [column_state(criteria, column) for column in COLUMNS]
    known = {name for names in COLUMNS.values() for name in names}
    hazards = [name not in known for name in criteria["criterion"].values]
    found += [CriterionState(state) for state in criteria["state"].values[hazards] if state in BAD_STATES]
    worst = max(found, key=lambda state: state.severity)
    if worst in BAD_STATES:
        return Verdict.REFUSE if worst is CriterionState.FAILING else Verdict.AT_RISK
    return Verdict.CANNOT_SAY if CriterionState.NOT_MEASURED in found else Verdict.PROCEED


def summary_of(
    name: str, verdict: str, criteria: xr.Dataset, modes: xr.Dataset, sizes: Sizes | None = None,
    pilot: xr.Dataset | None = None,
) -> str:  # fmt: skip
    """Summarize the verdict in a few sentences."""
    if verdict == Verdict.PROCEED:
        return (
            f"{name} may proceed. Its structure is within the range of designs that trained, and the pilot found no "
            "evidence against the planned learning rate."
        )
    if verdict == Verdict.CANNOT_SAY:
        return (
            f"The assessment cannot say whether {name} will train as planned: {_why_open(criteria)}. No measured "
            f"criterion failed. As a next step, {FIRST_STEP}."
        )
    bad = modes.isel(failure_mode=[i for i, s in enumerate(modes["state"].values) if s in BAD_STATES])
    order = sorted(
        range(bad.sizes["failure_mode"]),
        key=lambda i: (-CriterionState(str(bad["state"].values[i])).severity, -float(bad["confidence"].values[i])),
    )
    first = bad.isel(failure_mode=order[0])
    reason = _with_value(criteria.sel(criterion=str(first["worst_criterion"].values)), sizes, pilot)
    others = [str(bad["title"].values[i]).lower() for i in order[1:]]
    more = f" Other likely failure modes: {listed(others)}." if others else ""
    words = (
        "should not be trained as planned" if verdict == Verdict.REFUSE else "is at risk if it is trained as planned"
    )
    return f"{name} {words}. {first['title'].values!s}: {reason}.{more}"


def _why_open(criteria: xr.Dataset) -> str:
    """Return the reason why the assessment found neither a fault nor a healthy state, as a clause."""
    outside = criteria["is_outside"].values
    if outside.any():
        first = criteria.isel(criterion=int(np.flatnonzero(outside)[0]))
        return f"the {first['title'].values} could not be evaluated, because {first['reason'].values}"
    if column_state(criteria, "structure") is CriterionState.NOT_MEASURED:
        reason = str(criteria.sel(criterion=DECIDES["structure"])["reason"].values)
        if reason == BETWEEN_BLOCKS:
            return reason
        return f"the gradient gain along its depth was not measured ({clause(reason)})"
    return f"its useful learning rates are unknown ({criteria.sel(criterion=RATE)['reason'].values})"


def _with_value(row: xr.Dataset, sizes: Sizes | None, pilot: xr.Dataset | None) -> str:
    """Return why a criterion is not healthy, with its value, the exceeded limit and the model that was measured."""
    value, low, high = (float(row[name]) for name in ("value", "low", "high"))
    text_of = partial(fine_percent, digits=3) if str(row["criterion"].values) == BROKEN_TRIALS else short
    limit = f"; healthy: {text_of(high)} or less" if value > high else ""
    limit = f"; healthy: {text_of(low)} or more" if value < low else limit
    where = ""
    if sizes is not None and sizes.is_stand_in and str(row["criterion"].values) in COLUMNS["pilot"]:
        where = f"; measured on {sizes.proxy}"
    ends = {RATE: ("largest", "useful_edge"), SLOW_RATE: ("smallest", "slow_edge")}
    if pilot is not None and (end := ends.get(str(row["criterion"].values))) and end[1] in pilot:
        planned, edge, least, most = (
            rounded(float(pilot[name])) for name in ("planned_rate", end[1], f"{end[1]}_low", f"{end[1]}_high")
        )
        useful = f"{end[0]} useful rate: about {edge}, {least} to {most}"
        if where and end[0] == "largest" and LIMIT in pilot:
            useful += f"; flagged above three times that end, {rounded(float(pilot[LIMIT]))}"
        return f"{row['reason'].values} (planned: {planned}; {useful}{where})"
    place = f" in block {int(row['layer'])}" if int(row["layer"]) >= 0 else ""
    return f"{row['reason'].values} ({row['title'].values}: {text_of(value)}{place}{limit}{where})"
