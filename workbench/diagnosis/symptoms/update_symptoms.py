"""Symptoms of the updates: their norm relative to weights and rate, and Adam's moments relative to the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from workbench.diagnosis.failed_run import Record, finite_log10
from workbench.diagnosis.failure import Failure
from workbench.diagnosis.symptoms.symptom import Symptom, ramp
from workbench.formatting import short

#: A sudden increase of the updates may precede the failure by at most the first number of steps, or follow it by at
#: most the second.
_BEFORE, _AFTER = 40, 20
#: Updates have faded if they are below this fraction of the largest.
_FADED = 0.1


def update_symptoms(record: Record, failure: Failure) -> Iterator[Symptom]:
    """Yield the symptoms of the part ``optimizer``, as medians over the blocks."""
    if not record.has("optimizer", "update_ratio"):
        return
    steps = record.steps_of("optimizer")
    ratio = _over_blocks(record, "update_ratio")
    at = failure.last_row(steps)
    place: dict[str, Any] = {"path": "/optimizer", "step": int(steps[at])}
    size = float(np.nanmax(ratio[: at + 1]))
    yield Symptom(
        "update_size",
        ramp(finite_log10(size), -1.0, 0.0, low=-1.5),
        size,
        0.1,
        f"Before the failure, an update changed the weights of a block by up to {100 * size:.3g} % of their norm.",
        variable="update_ratio",
        **place,
    )
    yield Symptom(
        "first_update",
        ramp(finite_log10(float(ratio[0])), -1.0, 0.0, low=-1.5),
        float(ratio[0]),
        0.1,
        f"At step {steps[0]} the update changed the weights of a block by {100 * ratio[0]:.3g} % of their norm.",
        variable="update_ratio",
        path="/optimizer",
        step=int(steps[0]),
    )
    yield from _course(record, failure, steps, ratio)
    yield from _noise(record, steps, at)
    yield from _shortfall(record, steps, at)
    yield from _unchanged(record, steps, at)
    if record.has("optimizer", "gradient_rms_over_eps"):
        over = float(np.nanmedian(_over_blocks(record, "gradient_rms_over_eps")[: at + 1]))
        yield Symptom(
            "eps_rules",
            ramp(finite_log10(over), 1.5, 0.0, low=-1),
            over,
            1e4,
            f"The RMS of the gradients is {short(over)} times the optimizer's eps; below about 1, eps determines the "
            "update.",
            variable="gradient_rms_over_eps",
            **place,
        )
    if record.has("optimizer", "adam_staleness"):
        stale = np.nanmax(record.values("optimizer", "adam_staleness"), axis=1)
        near = stale[max(0, at - 1) : at + 3]
        found = float(np.nanmax(near)) if np.isfinite(near).any() else math.nan
        if math.isfinite(found):
            yield Symptom(
                "staleness",
                ramp(finite_log10(found), 0.2, 0.8, high=2),
                found,
                1.0,
                f"Around the failure, the gradients were {short(found)} times as large as Adam's second moment "
                "implies.",
                variable="adam_staleness",
                **place,
            )
    if record.has("optimizer", "module_weight_norm"):
        weights = _over_blocks(record, "module_weight_norm")
        growth = float(weights[-1] / weights[0])
        yield Symptom(
            "weights_grow",
            ramp(finite_log10(growth), 0.2, 1.0, low=-0.5, high=2),
            growth,
            1.3,
            f"At the end, the weight norm of a block is {short(growth)} times that at step {steps[0]}.",
            variable="module_weight_norm",
            path="/optimizer",
            step=int(steps[-1]),
        )


def _course(record: Record, failure: Failure, steps: np.ndarray, ratio: np.ndarray) -> Iterator[Symptom]:
    """Yield how the norm of the updates changes over the run: at the start, suddenly near the failure, or fading."""
    if len(ratio) < 4 or not np.isfinite(ratio).all() or not (ratio > 0).all():
        return
    place: dict[str, Any] = {"path": "/optimizer", "variable": "update_ratio"}
    start = float(ratio[0] / np.max(ratio[: max(2, len(ratio) // 3)]))
    yield Symptom(
        "starts_with_full_updates",
        ramp(start, 0.3, 0.9, high=1),
        start,
        0.2,
        f"The first measured update, at step {steps[0]}, has {100 * start:.0f} % of the largest norm in the first "
        "third of the run.",
        step=int(steps[0]),
        **place,
    )
    near = np.arange(2, len(ratio))
    if not failure.is_stalled:
        near = near[(steps[near] >= failure.step - _BEFORE) & (steps[near] <= failure.step + _AFTER)]
    leaps = ratio[near] / ratio[near - 1]
    at = int(near[np.argmax(leaps)]) if len(near) else 1
    leap = float(ratio[at] / ratio[at - 1]) if len(near) else 1.0
    yield Symptom(
        "updates_leap",
        ramp(math.log10(leap), 0.2, 0.7),
        leap,
        1.0,
        f"From step {steps[at - 1]} to step {steps[at]} the norm of the updates changed by a factor of {short(leap)}.",
        step=int(steps[at]),
        **place,
    )
    peak = int(np.argmax(ratio))
    faded = float(np.mean(ratio[peak:] < _FADED * ratio[peak]))
    yield Symptom(
        "updates_fade",
        ramp(faded, 0.25, 0.7) if failure.is_stalled else 0.0,
        faded,
        0.2,
        f"Of the updates after the largest one, {100 * faded:.0f} % were smaller than a tenth of it.",
        step=int(steps[-1]),
        **place,
    )


def _noise(record: Record, steps: np.ndarray, at: int) -> Iterator[Symptom]:
    """Yield the smallest noise fraction of the gradients (McCandlish et al. 2018, arXiv:1812.06162)."""
    if not record.has("optimizer", "gradient_signal_share"):
        return
    signal = _over_blocks(record, "gradient_signal_share")[: at + 1]
    if not np.isfinite(signal).any():
        return
    best = int(np.nanargmax(signal))
    found = float(np.clip(signal[best], 0, 1))
    yield Symptom(
        "gradients_are_noise",
        ramp(found, 0.5, 0.0, low=-1),
        found,
        0.5,
        f"At most {100 * found:.2g} % of the mean squared gradient was common to successive batches (at step "
        f"{steps[best]}); the rest was noise.",
        path="/optimizer",
        variable="gradient_signal_share",
        step=int(steps[best]),
    )


def _unchanged(record: Record, steps: np.ndarray, at: int) -> Iterator[Symptom]:
    """Yield the fraction of weights that an update leaves exactly unchanged, which rounding causes."""
    if not record.has("optimizer", "unchanged_share"):
        return
    unchanged = _over_blocks(record, "unchanged_share")[: at + 1]
    if (rate := record.monitor("learning_rate")) is not None:  # at a rate of 0 no weight should change
        unchanged = np.where(np.interp(steps[: at + 1], record.steps, rate) > 0, unchanged, np.nan)
    if not np.isfinite(unchanged).any():
        return
    found = float(np.nanmedian(unchanged))
    yield Symptom(
        "weights_stay_unchanged",
        ramp(found, 0.1, 0.6, low=-0.2),
        found,
        0.0,
        f"In the median, an update left {100 * found:.0f} % of the weights with a nonzero gradient unchanged.",
        path="/optimizer",
        variable="unchanged_share",
        step=int(steps[at]),
    )


def _shortfall(record: Record, steps: np.ndarray, at: int) -> Iterator[Symptom]:
    """Yield whether updates have the magnitude that the rate implies: for Adam about the rate per weight and step."""
    rate = record.monitor("learning_rate")
    needed = ("module_weight_norm", "module_grad_norm", "gradient_rms")
    if rate is None or not all(record.has("optimizer", name) for name in needed):
        return
    weight, norm, rms = (record.values("optimizer", name) for name in needed)
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.sqrt(
            np.nanmedian(np.where(rms > 0, (norm / rms) ** 2, np.nan), axis=0)
        )  # root of the number of weights
        moved = record.values("optimizer", "update_ratio") * weight / size
    rate_there = np.interp(steps, record.steps, rate)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.nanmedian(moved[:, _blocks(record)], axis=1) / np.where(rate_there > 0, rate_there, np.nan)
    known = relative[: at + 1][np.isfinite(relative[: at + 1])]
    if not len(known):
        return
    found = float(np.median(known))
    yield Symptom(
        "updates_fall_short",
        ramp(finite_log10(found), -0.4, -1.6, low=-1, high=2),
        found,
        0.5,
        f"An update changes a weight by {found:.3g} times the learning rate; with Adam, about 0.5 to 1 is usual.",
        path="/optimizer",
        variable="update_ratio",
        step=int(steps[at]),
    )
    if record.has("optimizer", "gradient_rms_over_eps"):
        over = np.nanmedian(_over_blocks(record, "gradient_rms_over_eps")[: at + 1])
        is_small = ramp(finite_log10(float(over)), 0.7, 2.0, high=1)
        yield Symptom(
            "updates_get_lost",
            is_small * ramp(abs(finite_log10(found) + 0.25), 0.3, 0.9),
            found,
            0.5,
            f"An update changes a weight by {found:.3g} times the learning rate, although the gradients are {over:.3g} "
            "times eps.",
            path="/optimizer",
            variable="update_ratio",
            step=int(steps[at]),
        )


def _blocks(record: Record) -> np.ndarray:
    """Return the indices of the blocks among the modules; all indices if no module is a block."""
    part = record.parts["optimizer"]
    layer = part["layer"].values if "layer" in part.coords else np.arange(part.sizes["module"])
    found = np.flatnonzero(layer >= 0)
    return found if len(found) else np.arange(part.sizes["module"])


def _over_blocks(record: Record, name: str) -> np.ndarray:
    """Return the median over the blocks of a variable of the optimizer, shape (step,)."""
    return np.nanmedian(record.values("optimizer", name)[:, _blocks(record)], axis=1)
