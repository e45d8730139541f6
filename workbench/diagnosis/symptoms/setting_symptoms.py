"""Symptoms of the settings: the batch size recorded at every step, and the plan recorded in the store.

No setting is assumed to be wrong in itself; the fit of the rules determines how much evidence each is. The recorded
study also evaluates the diagnosis without settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from workbench.diagnosis.failed_run import Record, finite_log10
from workbench.diagnosis.failure import Failure
from workbench.diagnosis.symptoms.symptom import Symptom, ramp
from workbench.schema.statuses import SymptomKind
from workbench.training.training_plan import SCHEDULES


def setting_symptoms(record: Record, failure: Failure) -> Iterator[Symptom]:
    """Yield the symptoms of the batch size and the plan of the run."""
    yield from _of_batches(record, failure)
    yield from _of_plan(record)


def _of_batches(record: Record, failure: Failure) -> Iterator[Symptom]:
    rows = record.monitor("batch_size")
    if rows is None:
        given = record.setting("task", "batch_size")
        if given:
            yield _small(float(given), kind=SymptomKind.CONFIGURATION)
        return
    at = len(rows) - 1 if failure.is_stalled else min(failure.row + 1, len(rows) - 1)
    there, first = float(np.nanmedian(rows[max(0, at - 5) : at + 1])), float(np.nanmedian(rows[:5]))
    place: dict[str, Any] = {"kind": SymptomKind.LOG, "path": "/monitors", "variable": "batch_size"}
    yield _small(there, step=int(record.steps[at]), **place)
    last = float(np.nanmedian(rows[-5:]))
    drop = math.log2(first / last) if first > 0 and last > 0 else 0.0
    yield Symptom(
        "batches_shrink",
        ramp(drop, 0.3, 2.0, low=-1),
        last / first if first > 0 else math.nan,
        1.0,
        f"A batch has {first:.0f} examples at the start and {last:.0f} at the end.",
        **place,
    )


def _small(rows: float, **place: Any) -> Symptom:
    return Symptom(
        "few_rows",
        ramp(math.log2(max(rows, 1)), 3.5, 1.0, low=-0.5),
        rows,
        16.0,
        f"A batch has {rows:.0f} examples.",
        units="example",
        **place,
    )


def _of_plan(record: Record) -> Iterator[Symptom]:
    training = record.setting("training", default={})
    if not training:
        return
    optimizer = str(training.get("optimizer", "")).lower()
    options = training.get("optimizer_options") or {}
    found = options.get("eps", 1e-8 if "adam" in optimizer else None)
    eps = float(found) if isinstance(found, int | float) else None
    if eps is not None:
        yield _setting(
            "eps_setting", ramp(finite_log10(eps, 1e-30), -6.5, -2.0), eps, 1e-8, f"The optimizer's eps is {eps:.3g}."
        )
    warmup = training.get("warmup")
    if warmup is not None:
        yield _setting(
            "no_warm_up_setting",
            1.0 if not warmup else 0.0,
            float(warmup),
            50.0,
            f"The warm-up takes {warmup} steps.",
            units="step",
        )
    schedule = str(training.get("schedule", "constant"))
    is_custom = schedule not in SCHEDULES
    yield _setting(
        "own_schedule_setting",
        1.0 if is_custom else 0.0,
        float(is_custom),
        0.0,
        f"The schedule is {'a custom function' if is_custom else schedule}.",
    )
    clip = training.get("clip_norm")
    yield _setting(
        "no_clipping_setting",
        0.0 if clip else 1.0,
        float(clip or math.nan),
        1.0,
        f"Gradients are {f'clipped at {clip:g}' if clip else 'not clipped'}.",
    )
    norm = record.setting("model", "config", "norm")
    if norm is not None:
        yield _setting(
            "no_norm_setting",
            1.0 if norm == "none" else 0.0,
            float(norm == "none"),
            0.0,
            f"The normalization is {norm}.",
        )
    balance = record.setting("model", "config", "balance_coefficient")
    if balance is not None:
        odd = 1.0 if balance <= 0 else ramp(abs(math.log10(balance / 0.01)), 1.0, 3.0)
        yield _setting("balance_setting", odd, balance, 0.01, f"The balance loss has a coefficient of {balance:g}.")
    precision = training.get("precision")
    if precision is not None:
        yield _setting(
            "low_precision_setting",
            0.0 if precision == "float32" else 1.0,
            float(precision != "float32"),
            0.0,
            f"The precision is {precision}.",
        )


def _setting(name: str, strength: float, value: float, reference: float, sentence: str, units: str = "1") -> Symptom:
    return Symptom(name, strength, value, reference, sentence, units, kind=SymptomKind.CONFIGURATION)
