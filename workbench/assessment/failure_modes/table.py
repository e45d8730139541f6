"""All criteria judged over one assessment, as the two tables that reports read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.assessment.failure_modes.criterion import NOT_MEASURED, STATES, Band, Criterion, Reading, judge
from workbench.assessment.failure_modes.flow_criteria import FLOW
from workbench.assessment.failure_modes.modes import FAILURE_MODES
from workbench.assessment.failure_modes.plan_criteria import PLAN
from workbench.assessment.failure_modes.reference import healthy_bands

if TYPE_CHECKING:
    import xarray as xr

CRITERIA: tuple[Criterion, ...] = (*FLOW, *PLAN)
#: A state that is less sure than this does not decide about its failure mode.
LEAST_CONFIDENCE = 0.5


@dataclass(frozen=True)
class Row:
    """One judged criterion."""

    criterion: str
    failure_mode: str
    title: str
    units: str
    band: Band
    reading: Reading
    state: str
    confidence: float
    path: str
    variable: str
    reason: str


def judged(tree: xr.DataTree, bands: Mapping[str, Band] | None = None) -> tuple[xr.Dataset, xr.Dataset]:
    """Every criterion of an assessment, and what follows for the failure modes.

    Args:
        tree: The measured parts of an assessment.
        bands: Healthy bands by criterion; None: the shipped ones.

    Returns:
        Dataset with dim ``criterion``: ``failure_mode``, ``title``, ``value``, ``units``, ``low`` and ``high`` (the
        healthy band; NaN: open), ``failing_low`` and ``failing_high``, ``n_reference``, ``state``, ``confidence``,
        ``layer`` (-1: none), ``path``, ``variable``, ``selection`` (JSON) and ``reason``. And one with dim
        ``failure_mode``: ``title``, ``meaning``, ``state``, ``confidence`` and ``worst_criterion``.
    """
    bands = healthy_bands() if bands is None else bands
    rows = [_judged(criterion, tree, bands) for criterion in CRITERIA]
    if "/hardware" in tree.groups:
        rows += _hazards(tree["/hardware"].to_dataset())
    return _criteria(rows), _modes(rows)


def _judged(criterion: Criterion, tree: xr.DataTree, bands: Mapping[str, Band]) -> Row:
    band = criterion.band or bands.get(criterion.name)
    if band is not None and not criterion.band:
        band = band.open_but(criterion.bad_side)
    reading = criterion.reads(tree)
    if isinstance(reading, Reading) and band is None:
        reading = "no healthy recorded run shows this number"
    if isinstance(reading, Reading) and band.is_open:
        reading = "healthy recorded runs show every value of it, so it tells nothing"
    if isinstance(reading, str):
        reading, state, confidence, reason = Reading(math.nan), NOT_MEASURED, 0.0, reading
    else:
        state, confidence = judge(reading, band, scale=criterion.scale)
        reason = criterion.meaning if state != STATES[0] else ""
    path = criterion.path if criterion.path in tree.groups else "/flow_numbers"
    return Row(
        criterion.name, criterion.failure_mode, criterion.title, criterion.units, band or Band(), reading, state,
        confidence, path if state != NOT_MEASURED else "", criterion.variable if state != NOT_MEASURED else "", reason,
    )  # fmt: skip


def _hazards(hardware: xr.Dataset) -> list[Row]:
    """Each hazard of the hardware plan that applies, as its own room judged it."""
    rows = []
    for i, name in enumerate(hardware["hazard"].values):
        one = hardware.isel(hazard=i)
        if not bool(one["applies"]):
            continue
        band = Band(
            high=_or(float(one["healthy_limit"]), math.inf), failing_high=_or(float(one["failing_limit"]), math.inf)
        )
        state = str(one["state"].values)
        rows.append(
            Row(
                f"hazard_{name}", "precision_headroom", str(one["title"].values), str(one["unit"].values), band,
                Reading(float(one["effect"]), 0.0, {"hazard": i}), state, 0.0 if state == NOT_MEASURED else 1.0,
                "/hardware", "effect", str(one["meaning"].values) if state != STATES[0] else "",
            )
        )  # fmt: skip
    return rows


def _or(value: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else value


def _criteria(rows: Iterable[Row]) -> xr.Dataset:
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
    }
    columns = {**{k: np.array(v, dtype=float) for k, v in numbers.items()}, **whole, **texts}
    return xr.Dataset(
        {name: ("criterion", np.asarray(values)) for name, values in columns.items()},
        {"criterion": [row.criterion for row in rows]},
    )


def _closed(limit: float) -> float:
    return limit if math.isfinite(limit) else math.nan


def _modes(rows: Iterable[Row]) -> xr.Dataset:
    """The worst sure state of each mode's criteria; what none of them could measure is not measured."""
    import xarray as xr

    found = []
    for name in FAILURE_MODES:
        own = [row for row in rows if row.failure_mode == name and row.state != NOT_MEASURED]
        sure = [row for row in own if row.confidence >= LEAST_CONFIDENCE] or own
        if not sure:
            found.append((NOT_MEASURED, 0.0, ""))
            continue
        worst = max(sure, key=lambda row: (STATES.index(row.state), row.confidence))
        # A healthy mode is as sure as the least sure of its criteria.
        confidence = min(row.confidence for row in sure) if worst.state == STATES[0] else worst.confidence
        found.append((worst.state, confidence, worst.criterion))
    state, confidence, worst = zip(*found, strict=True)
    return xr.Dataset(
        {
            "title": ("failure_mode", [mode.title for mode in FAILURE_MODES.values()]),
            "meaning": ("failure_mode", [mode.meaning for mode in FAILURE_MODES.values()]),
            "state": ("failure_mode", list(state)),
            "confidence": ("failure_mode", np.array(confidence, dtype=float)),
            "worst_criterion": ("failure_mode", list(worst)),
        },
        {"failure_mode": list(FAILURE_MODES)},
    )
