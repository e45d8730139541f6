"""Symptoms of a single block that differs from the others, and of a stack that is unusual from the start."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from workbench.diagnosis.failed_run import Record, finite_log10
from workbench.diagnosis.failure import Failure
from workbench.diagnosis.symptoms.symptom import Symptom, fold, ramp
from workbench.formatting import short

#: log10 of the factor by which a block differs from the others: largest usual factor, and factor of strength 1.
_ALIKE, _UNLIKE = 0.35, 1.0
#: log10 of the largest usual spectral radius of the first block, and of the others.
_FIRST_RADIUS, _RADIUS = 1.75, 1.5


def block_symptoms(record: Record, failure: Failure) -> Iterator[Symptom]:
    """Yield the symptoms of differences between the blocks, at the first measurement of each quantity."""
    if record.has("optimizer", "module_weight_norm"):
        yield from _of_modules(record)
    if record.has("activations", "state_norm"):
        yield from _of_states(record, failure)
    if "spectra" in record.parts:
        yield from _of_spectra(record)
    if record.weights is not None and not record.has("optimizer", "module_weight_norm"):
        sizes = record.weights.norm
        yield from _odd_block(
            "odd_weights",
            sizes,
            np.arange(len(sizes)),
            record.weights.step,
            "the weight norm of block {} is {} times that of the other blocks",
            path="",
            variable="",
        )


def odd_one(values: np.ndarray) -> tuple[int, float]:
    """Return the value that differs most from the median of the others, as its index and log10 of the ratio.

    (-1, 0) if there are fewer than three finite values.
    """
    logs = np.log10(np.maximum(np.asarray(values, dtype=np.float64), 1e-12))
    known = np.flatnonzero(np.isfinite(logs))
    if len(known) < 3:
        return -1, 0.0
    ratio = {int(i): float(logs[i] - np.median(logs[known[known != i]])) for i in known}
    place = max(ratio, key=lambda i: abs(ratio[i]))
    return place, ratio[place]


def _odd_block(
    name: str, values: np.ndarray, layers: np.ndarray, step: int, words: str, *, path: str, variable: str
) -> Iterator[Symptom]:
    place, log_ratio = odd_one(values)
    if place < 0:
        return
    layer, factor = int(layers[place]), 10**log_ratio
    strength = ramp(abs(log_ratio), _ALIKE, _UNLIKE, high=2.5)
    sentence = words.format(layer, short(factor))
    dim = "module" if path == "/optimizer" else "layer"
    yield Symptom(
        name,
        strength,
        factor,
        1.0,
        f"At step {step} {sentence}{_usual(strength)}.",
        step=step,
        layer=layer if strength > 0 else -1,
        path=path,
        variable=variable,
        selection={dim: layer},
    )


def _of_modules(record: Record) -> Iterator[Symptom]:
    part = record.parts["optimizer"]
    layers = part["layer"].values if "layer" in part.coords else np.arange(part.sizes["module"])
    own, step = np.flatnonzero(layers >= 0), int(part["step"].values[0])
    for name, variable, words in (
        ("odd_weights", "module_weight_norm", "the weight norm of block {} is {} times that of the other blocks"),
        ("odd_gradients", "module_grad_norm", "the gradient norm of block {} is {} times that of the other blocks"),
        ("odd_updates", "update_ratio", "the relative update of block {} is {} times that of the other blocks"),
    ):
        if record.has("optimizer", variable):
            values = record.values("optimizer", variable)[0][own]
            yield from _odd_block(name, values, layers[own], step, words, path="/optimizer", variable=variable)
    if record.has("optimizer", "module_grad_norm"):
        norm = record.values("optimizer", "module_grad_norm")[0][own]
        if np.isfinite(norm).sum() > 1 and np.nanmax(norm) > 0:
            spread = finite_log10(float(np.nanmax(norm) / max(np.nanmin(norm), 1e-12)))
            yield Symptom(
                "gradients_differ_by_depth",
                ramp(spread, 0.9, 2.0, high=2),
                10**spread,
                3.0,
                f"At step {step} the gradient norms of the blocks differ {fold(10**spread)}.",
                step=step,
                path="/optimizer",
                variable="module_grad_norm",
            )


def _of_states(record: Record, failure: Failure) -> Iterator[Symptom]:
    steps, norm = record.steps_of("activations"), record.values("activations", "state_norm")
    first = norm[0]
    place: dict[str, Any] = {"path": "/activations", "variable": "state_norm"}
    if np.isfinite(first).sum() >= 2:
        growth = first[-1] / first[0]
        yield Symptom(
            "stream_grows_by_depth",
            ramp(abs(finite_log10(growth)), 0.7, 1.7, high=2),
            float(growth),
            2.0,
            f"At step {steps[0]} the norm of the residual stream after the last block is {short(growth)} times that "
            "after the first.",
            step=int(steps[0]),
            **place,
        )
        gains = np.nan_to_num(np.abs(np.diff(np.log10(np.maximum(first, 1e-12)))))
        jump = int(np.argmax(gains))
        yield Symptom(
            "stream_jumps_at_a_block",
            ramp(float(gains[jump]), 0.5, 1.3, high=2),
            float(first[jump + 1] / first[jump]),
            1.5,
            f"At step {steps[0]} block {jump + 1} changes the norm of the residual stream "
            f"{fold(first[jump + 1] / first[jump])}{_usual(gains[jump] - 0.5)}.",
            step=int(steps[0]),
            layer=jump + 1 if gains[jump] > 0.5 else -1,
            selection={"layer": jump + 1},
            **place,
        )
    at = failure.last_row(steps)
    later = float(np.nanmedian(norm[at] / first)) if np.isfinite(norm[at] / first).any() else math.nan
    if math.isfinite(later) and at:
        yield Symptom(
            "stream_grows_in_training",
            ramp(finite_log10(later), 0.7, 2.0, low=-0.5, high=2),
            later,
            5.0,
            f"By step {steps[at]} the norm of the residual stream has grown {fold(later)} since step {steps[0]}.",
            step=int(steps[at]),
            **place,
        )


def _of_spectra(record: Record) -> Iterator[Symptom]:
    """Yield the symptoms of the first recorded spectra, which are those at initialization if recorded at step 0."""
    if not record.has("spectra", "spectral_radius"):
        return
    part = record.parts["spectra"]
    step, layers, radius = (
        int(part["step"].values[0]),
        part["layer"].values,
        record.values("spectra", "spectral_radius")[0],
    )
    if not np.isfinite(radius).any():
        return
    # The input of the first block is the embedding, which is small and of low rank, so a larger amplification is usual.
    excess = np.log10(np.maximum(radius, 1e-12)) - np.where(np.arange(len(radius)) == 0, _FIRST_RADIUS, _RADIUS)
    place: dict[str, Any] = {"path": "/spectra", "variable": "spectral_radius", "step": step}
    top, low = int(np.nanargmax(excess)), int(np.nanargmin(radius))
    yield Symptom(
        "block_blows_up",
        ramp(float(excess[top]), 0.0, 0.8, low=-0.5, high=2.5),
        float(radius[top]),
        3.0,
        f"At step {step} block {layers[top]} amplifies its largest mode {fold(radius[top])}{_usual(excess[top])}.",
        layer=int(layers[top]) if excess[top] > 0 else -1,
        selection={"layer": int(layers[top])},
        **place,
    )
    forgets = ramp(float(radius[low]), 0.97, 0.5)
    yield Symptom(
        "block_forgets",
        forgets,
        float(radius[low]),
        1.0,
        f"At step {step} the spectral radius of block {layers[low]} is {radius[low]:.2g}; that of a residual block is "
        "usually at least 1.",
        layer=int(layers[low]) if forgets > 0 else -1,
        selection={"layer": int(layers[low])},
        **place,
    )
    if record.has("spectra", "near_unit_mass"):
        mass = float(np.nanmean(record.values("spectra", "near_unit_mass")[0]))
        yield Symptom(
            "near_unit_mass",
            ramp(mass, 0.3, 0.95),
            mass,
            0.2,
            f"At step {step}, {100 * mass:.0f} % of the modes lie near the unit circle, as in models without "
            "normalization.",
            step=step,
            path="/spectra",
            variable="near_unit_mass",
        )


def _usual(excess: float) -> str:
    """Return the remark on the most extreme value of a run if it is still within the usual range."""
    return "" if excess > 0 else ", which is not unusual"
