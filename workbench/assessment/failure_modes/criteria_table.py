"""Evaluate all criteria of an assessment, as the two tables that reports read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np

from workbench.assessment.failure_modes.criteria import PILOT, STRUCTURE
from workbench.assessment.failure_modes.criterion import (
    EDGE_OF_SHARE,
    SCALES,
    Criterion,
    CriterionReading,
    HealthyBand,
    Sizes,
    evaluate,
)
from workbench.schema.statuses import CriterionState

if TYPE_CHECKING:
    import xarray as xr


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
    """Return the band around healthy values.

    Args:
        values: One value per healthy model, in the criterion's unit; values that are not finite (or not positive, on
            the scale "log") are ignored.
        scale: Scale of the margin: "linear", "log" or "share".
        margin: Fraction of the range of the values that is added at either end. A value is failing if its distance from
            the band exceeds the width of the band.

    Returns:
        The band with its number of models; an open band of zero models if no value remains.
    """
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
    """A way in which training fails.

    Attributes:
        title: Title shown to the user.
        meaning: Description in one clause.
    """

    title: str
    meaning: str


#: Those of the structural catalog (SORT, ai.22) first, in its order, then those of a plan and its hardware.
FAILURE_MODES: dict[str, FailureMode] = {
    "gradient_flow_collapse": FailureMode(
        "Gradient flow collapse", "gradients vanish or explode through the depth of the model"
    ),
    "attention_degeneracy": FailureMode(
        "Attention degeneracy",
        "heads attend to a single token, attention logits grow without bound, or all tokens become alike",
    ),
    "routing_oscillation": FailureMode(
        "Routing oscillation", "tokens keep switching experts, or a few experts receive almost all tokens"
    ),
    "scale_dependent_divergence": FailureMode(
        "Scale-dependent divergence", "a plan that works at a small size diverges at the target size"
    ),
    "initialization_out_of_band": FailureMode(
        "Initialization out of band", "the initialized model lies outside the range of healthy models"
    ),
    "precision_headroom": FailureMode(
        "Precision headroom", "number formats, accumulation or reduction lose precision that the updates need"
    ),
    "unsuitable_rate": FailureMode(
        "Unsuitable learning rate", "the planned rate is too small or too large to learn well, or makes trials diverge"
    ),
}


CRITERIA: tuple[Criterion, ...] = (*STRUCTURE, *PILOT)
#: A state with less confidence than this does not determine the state of its failure mode.
LEAST_CONFIDENCE = 0.5
#: Why a mode remains undecided although none of its measured criteria is at risk or failing.
TOO_SHORT = "a few updates without divergence are no evidence about the rest of the training"


@dataclass(frozen=True)
class EvaluatedCriterion:
    """A criterion with its reading, state and confidence."""

    criterion: str
    failure_mode: str
    title: str
    units: str
    band: HealthyBand
    reading: CriterionReading
    state: CriterionState
    confidence: float
    path: str
    variable: str
    reason: str
    is_outside: bool = False
    rules_out: bool = True


def evaluate_criteria(
    tree: xr.DataTree, bands: Mapping[str, HealthyBand] | None = None
) -> tuple[xr.Dataset, xr.Dataset]:
    """Evaluate every criterion of an assessment and, from these, its failure modes.

    A band applies only to sizes within those of the healthy models that it was derived from; a value that is not finite
    is failing at any size. Trials of a few updates without divergence do not exclude divergence.

    Args:
        tree: The measured parts of an assessment, with its sizes as attributes.
        bands: Healthy bands by criterion; None for the shipped ones.

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
        replace(row, confidence=math.nan) if not row.rules_out and row.state == CriterionState.HEALTHY else row
        for row in rows
    ]
    return _criteria(rows), _modes(rows, TOO_SHORT)


def _evaluated(
    criterion: Criterion, tree: xr.DataTree, bands: Mapping[str, HealthyBand], sizes: Sizes | None
) -> EvaluatedCriterion:
    band = criterion.band or bands.get(criterion.name)
    if band is not None and not criterion.band:
        band = band.open_but(criterion.bad_side)
    found, is_outside = criterion.reads(tree), False
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
    is_measured = state is not CriterionState.NOT_MEASURED
    return EvaluatedCriterion(
        criterion.name, criterion.failure_mode, criterion.title, criterion.units, band or HealthyBand(), reading, state,
        confidence, criterion.path if is_measured else "", criterion.variable if is_measured else "", reason,
        is_outside, criterion.rules_out,
    )  # fmt: skip


def _hazards(hardware: xr.Dataset) -> list[EvaluatedCriterion]:
    """Return the hazards of the hardware plan that apply, with their measured states."""
    rows = []
    for i, name in enumerate(hardware["hazard"].values):
        one = hardware.isel(hazard=i)
        if not bool(one["applies"]):
            continue
        band = HealthyBand(
            high=_or(float(one["healthy_limit"]), math.inf), failing_high=_or(float(one["failing_limit"]), math.inf)
        )
        state = CriterionState(str(one["state"].values))
        rows.append(
            EvaluatedCriterion(
                f"hazard_{name}", "precision_headroom", str(one["title"].values), str(one["unit"].values), band,
                CriterionReading(float(one["effect"]), 0.0, {"hazard": i}), state,
                math.nan if state is CriterionState.NOT_MEASURED else 1.0,
                "/hardware", "effect", str(one["meaning"].values) if state != CriterionState.HEALTHY else "",
            )
        )  # fmt: skip
    return rows


def _or(value: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else value


def _criteria(rows: Iterable[EvaluatedCriterion]) -> xr.Dataset:
    import xarray as xr

    rows = list(rows)
    numbers = {
        "value": [row.reading.value for row in rows],
        "low": [_closed(row.band.low) for row in rows],
        "high": [_closed(row.band.high) for row in rows],
        "failing_low": [_closed(row.band.failing_low) for row in rows],
        "failing_high": [_closed(row.band.failing_high) for row in rows],
        "spread": [row.reading.spread for row in rows],
        "confidence": [row.confidence for row in rows],
    }
    texts = {
        name: [getattr(row, name) for row in rows]
        for name in ("failure_mode", "title", "units", "state", "path", "variable", "reason")
    }
    texts["selection"] = [json.dumps(dict(row.reading.selection)) for row in rows]
    others = {
        "n_reference": [row.band.n_reference for row in rows],
        "layer": [row.reading.layer for row in rows],
        "is_outside": [row.is_outside for row in rows],
    }
    columns = {**{k: np.array(v, dtype=float) for k, v in numbers.items()}, **others, **texts}
    return xr.Dataset(
        {name: ("criterion", np.asarray(values)) for name, values in columns.items()},
        {"criterion": [row.criterion for row in rows]},
    )


def _closed(limit: float) -> float:
    return limit if math.isfinite(limit) else math.nan


def _modes(rows: Iterable[EvaluatedCriterion], why_open: str) -> xr.Dataset:
    """Return for each mode the worst state of its criteria with sufficient confidence, or "not measured"."""
    import xarray as xr

    found: list[tuple[CriterionState, float, str, str]] = []
    for name in FAILURE_MODES:
        measured = [row for row in rows if row.failure_mode == name and row.state != CriterionState.NOT_MEASURED]
        own = [row for row in measured if row.rules_out or row.state != CriterionState.HEALTHY]
        confident = [row for row in own if row.confidence >= LEAST_CONFIDENCE] or own
        if not confident:
            found.append((CriterionState.NOT_MEASURED, math.nan, "", why_open if measured else ""))
            continue
        worst = max(confident, key=lambda row: (row.state.severity, row.confidence))
        # The confidence of a healthy mode is that of its least confident criterion.
        confidence = (
            min(row.confidence for row in confident) if worst.state == CriterionState.HEALTHY else worst.confidence
        )
        found.append((worst.state, confidence, worst.criterion, ""))
    states, confidences, worst_ones, reasons = zip(*found, strict=True)
    return xr.Dataset(
        {
            "title": ("failure_mode", [mode.title for mode in FAILURE_MODES.values()]),
            "meaning": ("failure_mode", [mode.meaning for mode in FAILURE_MODES.values()]),
            "state": ("failure_mode", list(states)),
            "confidence": ("failure_mode", np.array(confidences, dtype=float)),
            "worst_criterion": ("failure_mode", list(worst_ones)),
            "reason": ("failure_mode", list(reasons)),
        },
        {"failure_mode": list(FAILURE_MODES)},
    )
