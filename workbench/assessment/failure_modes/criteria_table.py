"""Judge all criteria of one assessment, as the two tables that reports read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from workbench.assessment.failure_modes.criterion import Criterion, CriterionReading, HealthyBand, judge
from workbench.assessment.failure_modes.modes import FAILURE_MODES
from workbench.assessment.failure_modes.pilot_criteria import PILOT
from workbench.assessment.failure_modes.reference import healthy_bands
from workbench.assessment.failure_modes.size_ranges import Sizes
from workbench.assessment.failure_modes.structure_criteria import STRUCTURE
from workbench.schema.statuses import CriterionState

if TYPE_CHECKING:
    import xarray as xr

CRITERIA: tuple[Criterion, ...] = (*STRUCTURE, *PILOT)
#: A state with less confidence than this does not decide about its failure mode.
LEAST_CONFIDENCE = 0.5
#: Why a mode stays undecided although none of its measured criteria is bad.
TOO_SHORT = "trials of a few updates that do not break say nothing of the rest"


@dataclass(frozen=True)
class JudgedCriterion:
    """One judged criterion."""

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
    acquits: bool = True


def judged(tree: xr.DataTree, bands: Mapping[str, HealthyBand] | None = None) -> tuple[xr.Dataset, xr.Dataset]:
    """Judge every criterion of an assessment and, from these, its failure modes.

    A band judges no model outside of the sizes of the healthy models behind it; a value that is not finite fails in any
    case. Trials of a few updates without divergence do not exclude one.

    Args:
        tree: The measured parts of an assessment, with its sizes as attributes.
        bands: Healthy bands by criterion; None: the shipped ones.

    Returns:
        Dataset with dim ``criterion``: ``failure_mode``, ``title``, ``value``, ``units``, ``low`` and ``high`` (the
        healthy band; NaN: open), ``failing_low`` and ``failing_high``, ``n_reference``, ``state``, ``confidence`` (NaN:
        not judged, or a healthy value that excludes nothing), ``layer`` (-1: none), ``path``, ``variable``,
        ``selection`` (JSON), ``reason`` and ``is_outside`` (no healthy model of this size was recorded). And one with
        dim ``failure_mode``: ``title``, ``meaning``, ``state``, ``confidence`` (as above), ``worst_criterion`` and
        ``reason`` (of a mode that was not measured; empty: none in particular).
    """
    bands, sizes = healthy_bands() if bands is None else bands, Sizes.of(tree)
    rows = [_judged(criterion, tree, bands, sizes) for criterion in CRITERIA]
    if "/hardware" in tree.groups:
        rows += _hazards(tree["/hardware"].to_dataset())
    rows = [row if row.acquits else _without_acquittal(row) for row in rows]
    return _criteria(rows), _modes(rows, TOO_SHORT)


def _without_acquittal(row: JudgedCriterion) -> JudgedCriterion:
    """A row whose healthy state does not exclude its failure mode."""
    return replace(row, acquits=False, confidence=math.nan if row.state == CriterionState.HEALTHY else row.confidence)


def _judged(
    criterion: Criterion, tree: xr.DataTree, bands: Mapping[str, HealthyBand], sizes: Sizes | None
) -> JudgedCriterion:
    band = criterion.band or bands.get(criterion.name)
    if band is not None and not criterion.band:
        band = band.open_but(criterion.bad_side)
    found, is_outside = criterion.reads(tree), False
    state, confidence, reason = CriterionState.NOT_MEASURED, math.nan, ""
    if isinstance(found, str):
        reason = found
    elif band is None:
        reason = "no healthy recorded run shows this number"
    elif band.is_open:
        reason = "healthy recorded runs show every value of it, so it tells nothing"
    elif band.sizes and math.isfinite(found.value):
        reason = "the size of what was measured is not known" if sizes is None else sizes.outside(band.sizes)
        is_outside = bool(reason)
    reading = CriterionReading(math.nan)
    if not (reason or isinstance(found, str) or band is None):
        reading = found
        state, confidence = judge(reading, band, scale=criterion.scale)
        reason = criterion.meaning if state != CriterionState.HEALTHY else ""
        if state == CriterionState.HEALTHY and reading.only_flags:
            state, confidence, reason = CriterionState.NOT_MEASURED, math.nan, reading.only_flags
            reading = CriterionReading(math.nan)
    is_measured = state is not CriterionState.NOT_MEASURED
    return JudgedCriterion(
        criterion.name, criterion.failure_mode, criterion.title, criterion.units, band or HealthyBand(), reading, state,
        confidence, criterion.path if is_measured else "", criterion.variable if is_measured else "", reason,
        is_outside, criterion.acquits,
    )  # fmt: skip


def _hazards(hardware: xr.Dataset) -> list[JudgedCriterion]:
    """Each hazard of the hardware plan that applies, with the state that its measurement found."""
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
            JudgedCriterion(
                f"hazard_{name}", "precision_headroom", str(one["title"].values), str(one["unit"].values), band,
                CriterionReading(float(one["effect"]), 0.0, {"hazard": i}), state,
                math.nan if state is CriterionState.NOT_MEASURED else 1.0,
                "/hardware", "effect", str(one["meaning"].values) if state != CriterionState.HEALTHY else "",
            )
        )  # fmt: skip
    return rows


def _or(value: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else value


def _criteria(rows: Iterable[JudgedCriterion]) -> xr.Dataset:
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
    whole = {
        "n_reference": [row.band.n_reference for row in rows],
        "layer": [row.reading.layer for row in rows],
        "is_outside": [row.is_outside for row in rows],
    }
    columns = {**{k: np.array(v, dtype=float) for k, v in numbers.items()}, **whole, **texts}
    return xr.Dataset(
        {name: ("criterion", np.asarray(values)) for name, values in columns.items()},
        {"criterion": [row.criterion for row in rows]},
    )


def _closed(limit: float) -> float:
    return limit if math.isfinite(limit) else math.nan


def _modes(rows: Iterable[JudgedCriterion], why_open: str) -> xr.Dataset:
    """The worst state of each mode's criteria that is confident enough; "not measured" if there is none.

    Args:
        rows: All criteria.
        why_open: Why a healthy criterion that excludes nothing leaves its mode undecided.
    """
    import xarray as xr

    found: list[tuple[CriterionState, float, str, str]] = []
    for name in FAILURE_MODES:
        judged_rows = [row for row in rows if row.failure_mode == name and row.state != CriterionState.NOT_MEASURED]
        own = [row for row in judged_rows if row.acquits or row.state != CriterionState.HEALTHY]
        sure = [row for row in own if row.confidence >= LEAST_CONFIDENCE] or own
        if not sure:
            found.append((CriterionState.NOT_MEASURED, math.nan, "", why_open if judged_rows else ""))
            continue
        worst = max(sure, key=lambda row: (row.state.severity, row.confidence))
        # The confidence of a healthy mode is that of its least confident criterion.
        confidence = min(row.confidence for row in sure) if worst.state == CriterionState.HEALTHY else worst.confidence
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
