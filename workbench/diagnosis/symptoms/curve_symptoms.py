"""Symptoms of the curves that most logs contain: the loss, the gradient norm and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from workbench.diagnosis.failed_run import Record, finite_log10
from workbench.diagnosis.failure import Failure
from workbench.diagnosis.symptoms.symptom import Symptom, fold, in_steps, ramp
from workbench.formatting import capitalized, short
from workbench.schema.statuses import FailureKind, SymptomKind

#: The rate jumps if it rises by this factor from one step to the next; jumps in the first few steps are ignored.
_JUMP, _FIRST = 1.5, 4
#: A jump may precede the failure by at most the first number of steps, or follow it by at most the second, because
#: noise makes the onset uncertain.
_BEFORE, _AFTER = 40, 20
#: Number of steps on either side of a burst that it is compared with.
_SIDE = 15
#: The rate counts as decayed below this fraction of its peak.
_DECAYED = 0.1


def curve_symptoms(record: Record, failure: Failure) -> Iterator[Symptom]:
    """Yield the symptoms of loss, gradient norm and learning rate."""
    yield from _of_the_loss(record, failure)
    yield from _of_the_gradients(record, failure)
    yield from _of_the_rate(record, failure)


def _of_the_loss(record: Record, failure: Failure) -> Iterator[Symptom]:
    steps, loss = record.steps, record.values("monitors", "loss")
    first, low = float(loss[0]), float(np.nanmin(failure.smooth))
    n_before = failure.step - int(steps[0])
    place: dict[str, Any] = {"path": "/monitors", "variable": "loss", "step": failure.step}
    is_divergence, is_spike = failure.kind is FailureKind.DIVERGED, failure.kind is FailureKind.SPIKE
    yield Symptom(
        "fails_at_once",
        ramp(math.log10(1 + n_before), 1.5, 0.3) if is_divergence else 0.0,
        n_before,
        math.nan,
        f"{capitalized(failure.words)}; the failure began {n_before} steps after the first step.",
        units="step",
        **place,
    )
    yield Symptom(
        "diverges",
        1.0 if is_divergence else 0.0,
        float(record.diverged_at or math.nan),
        math.nan,
        f"The run diverged at step {record.diverged_at}." if is_divergence else "The run did not diverge.",
        units="step",
        **place,
    )
    drop = (first - low) / first if first > 0 else math.nan
    is_flat = failure.is_stalled and float(failure.smooth[0]) - low <= failure.floor  # also if a trained model goes on
    if math.isfinite(drop) and not is_flat:
        sentence = f"The loss decreased by {100 * drop:.0f} % of its first value, from {first:.3g} to {low:.3g} nat."
        yield Symptom(
            "hardly_learns", ramp(drop, 0.3, 0.05) if failure.is_stalled else 0.0, drop, 0.3, sentence, **place
        )
        yield Symptom("learns", ramp(drop, 0.05, 0.6, high=1), drop, 0.3, sentence, **place)
    learned = float(failure.smooth[0]) - low
    if learned > 0:
        undone = float(failure.smooth[-1]) - low
        lost = undone / learned if undone > failure.floor else 0.0  # noise alone undoes all of a decrease by noise
        yield Symptom(
            "ends_above_its_best",
            ramp(lost, 0.1, 0.5, high=1),
            lost,
            0.1,
            f"At the end, {100 * min(lost, 1):.0f} % of the earlier decrease of the loss had been undone.",
            path="/monitors",
            variable="loss",
            step=int(steps[-1]),
        )
    yield Symptom(
        "spike_recovers",
        failure.recovered if is_spike else 0.0,
        failure.recovered,
        math.nan,
        f"Of a rise of {failure.rise:.3g} nat, {100 * failure.recovered:.0f} % was recovered by the end."
        if is_spike
        else "The loss shows no rise that was recovered.",
        **place,
    )
    if is_spike or is_divergence:
        tall = failure.smooth[failure.row :] - failure.smooth[failure.row]
        n_rising = int(np.argmax(tall >= 0.5 * np.nanmax(tall))) if np.nanmax(tall) > 0 else 1
        yield Symptom(
            "abrupt",
            ramp(math.log10(1 + n_rising), 1.6, 0.8),
            n_rising,
            math.nan,
            f"Half of the rise of the loss occurred within {in_steps(max(n_rising, 1))}.",
            units="step",
            **place,
        )
        yield from _of_a_burst(loss, failure, place)
    yield from _of_the_scatter(loss, steps)
    noise = _relative_noise(loss, failure)
    if math.isfinite(noise):
        sentence = f"The noise of the loss from step to step is {100 * noise:.2g} % of its level."
        yield Symptom("loss_noise", ramp(finite_log10(noise), -1.3, -0.5, low=-1), noise, 0.05, sentence, **place)
    if (n_classes := record.n_classes) and n_classes > 1:
        guess = math.log(n_classes)
        yield Symptom(
            "first_loss",
            ramp(first / guess, 1.3, 3.0, high=3),
            first,
            guess,
            f"The first loss is {first:.3g} nat; that of a uniform guess is {guess:.3g} nat.",
            units="nat",
            step=int(steps[0]),
            path="/monitors",
            variable="loss",
        )


def _of_a_burst(loss: np.ndarray, failure: Failure, place: dict[str, Any]) -> Iterator[Symptom]:
    """Yield how far the loss lies above the steps before and after a burst, relative to its noise."""
    rises = failure.smooth - np.minimum.accumulate(failure.smooth)
    peak, first = int(np.argmax(rises)), failure.row + 1
    back = np.flatnonzero(rises[peak:] < 0.5 * rises[peak])
    last = peak + int(back[0]) if len(back) else len(loss)
    sides = [loss[max(0, first - _SIDE) : first], loss[last : last + _SIDE]]
    inside = loss[first:last]
    if min(len(inside), *map(len, sides)) < 3 or not failure.noise > 0:
        return
    height = float(np.nanmedian(inside) - max(np.nanmedian(side) for side in sides)) / failure.noise
    yield Symptom(
        "loss_stands_above_both_sides",
        ramp(height, 1.0, 5.0, low=-0.5),
        height,
        math.nan,
        f"For {in_steps(len(inside))} the loss exceeded that before and after by {short(height)} times its noise.",
        **place,
    )


def _of_the_scatter(loss: np.ndarray, steps: np.ndarray) -> Iterator[Symptom]:
    """Yield the growth of the loss's relative noise from step to step since the start."""
    known = np.flatnonzero(np.isfinite(loss) & (loss > 0))
    if len(known) < 4 * _SIDE:
        return
    moves = np.abs(np.diff(loss[known])) / loss[known][:-1]
    parts = [float(np.median(part)) for part in np.array_split(moves[3:], 4)]
    rise = max(parts[1:]) / parts[0] if parts[0] > 0 else math.nan
    if math.isfinite(rise):
        yield Symptom(
            "loss_scatters_more",
            ramp(finite_log10(rise), 0.2, 0.8, low=-0.5),
            rise,
            1.0,
            f"The noise of the loss from step to step is up to {short(rise)} times that at the start.",
            path="/monitors",
            variable="loss",
            step=int(steps[-1]),
        )


def _relative_noise(loss: np.ndarray, failure: Failure) -> float:
    """Return the relative noise of the loss from step to step shortly before the failure, or at the end."""
    end = len(loss) if failure.is_stalled else max(failure.row + 1, 8)
    part = loss[max(0, end - 80) : end]
    part = part[np.isfinite(part)]
    if len(part) < 8:
        return math.nan
    level = float(np.median(part))
    return 1.48 * float(np.median(np.abs(np.diff(part)))) / math.sqrt(2) / level if level > 0 else math.nan


def _of_the_gradients(record: Record, failure: Failure) -> Iterator[Symptom]:
    norm = record.monitor("grad_norm")
    if norm is None:
        return
    steps, row = record.steps, failure.row
    first = norm[np.isfinite(norm)][0]
    place: dict[str, Any] = {"path": "/monitors", "variable": "grad_norm"}
    yield Symptom(
        "first_gradient",
        ramp(finite_log10(first), 0.7, 2.0, high=3),
        float(first),
        5.0,
        f"The first gradient norm is {short(first)}.",
        step=int(steps[0]),
        **place,
    )
    logs = np.log10(np.maximum(np.where(np.isfinite(norm), norm, np.nan), 1e-12))
    window = logs[max(0, row - 60) : row + 1]
    window = window[np.isfinite(window)]
    if len(window) >= 10:
        scatter = float(1.48 * np.median(np.abs(np.diff(window))) / math.sqrt(2))
        yield Symptom(
            "gradient_noise",
            ramp(scatter, 0.08, 0.25, low=-1),
            scatter,
            0.08,
            f"The gradient norm fluctuates from step to step by a factor of {10**scatter:.2f}.",
            units="decade",
            step=failure.step,
            **place,
        )
    if failure.is_stalled:
        late = logs[-max(5, len(logs) // 10) :]
        change = float(np.nanmedian(late) - np.nanmedian(logs[: max(5, len(logs) // 10)]))
        yield Symptom(
            "gradients_fade",
            ramp(change, -0.3, -1.3),
            10**change,
            1.0,
            f"At the end, the gradient norm is {short(10**change)} times that at the start.",
            step=int(steps[-1]),
            **place,
        )
        return
    before = logs[max(0, row - 40) : max(1, row - 8)]
    build_up = (
        float(np.nanmedian(logs[max(0, row - 3) : row + 1]) - np.nanmedian(before)) if len(before) >= 3 else math.nan
    )
    if math.isfinite(build_up):
        yield Symptom(
            "gradients_build_up",
            ramp(build_up, 0.1, 0.6, low=-0.5),
            10**build_up,
            1.0,
            f"When the loss began to rise, the gradient norm was {short(10**build_up)} times that of 8 to 40 steps "
            "before.",
            step=failure.step,
            **place,
        )
        burst = float(np.nanmax(logs[row : row + 15]) - np.nanmedian(before))
        yield Symptom(
            "gradients_burst",
            ramp(burst, 0.3, 1.3, high=2),
            10**burst,
            1.0,
            f"Within 15 steps after the loss began to rise, the gradient norm reached {short(10**burst)} times its "
            "earlier level.",
            step=failure.step,
            **place,
        )


def _of_the_rate(record: Record, failure: Failure) -> Iterator[Symptom]:
    rate = record.monitor("learning_rate")
    if rate is None or not np.nanmax(rate) > 0:
        return
    steps, row = record.steps, failure.row
    peak = float(np.nanmax(rate))
    place: dict[str, Any] = {"path": "/monitors", "variable": "learning_rate", "kind": SymptomKind.LOG}
    factors = np.ones(len(rate))
    with np.errstate(divide="ignore", invalid="ignore"):
        factors[1:] = rate[1:] / np.maximum(rate[:-1], peak * 1e-6)
    factors[:_FIRST] = 1.0
    near = slice(max(0, row - _BEFORE), min(len(rate), row + _AFTER + 1)) if not failure.is_stalled else slice(None)
    factors = np.where(np.isfinite(factors), factors, 1.0)
    at = int(np.argmax(factors[near])) + near.indices(len(rate))[0]
    factor = float(factors[at])
    has_jumped = factor >= _JUMP
    yield Symptom(
        "rate_jumps",
        ramp(math.log10(factor), 0.1, 0.7) if has_jumped else 0.0,
        factor,
        1.0,
        f"The learning rate rose {fold(factor)} from one step to the next at step {steps[at]}"
        f"{_distance(failure.step - int(steps[at])) if not failure.is_stalled else ''}."
        if has_jumped
        else "The learning rate did not jump before the failure.",
        step=int(steps[at]),
        **place,
    )
    decayed = float(np.mean(rate[int(np.nanargmax(rate)) :] < _DECAYED * peak)) if len(rate) > 1 else 0.0
    yield Symptom(
        "rate_is_spent",
        ramp(decayed, 0.25, 0.7) if failure.is_stalled else 0.0,
        decayed,
        0.25,
        f"In {100 * decayed:.0f} % of the steps after its peak, the learning rate was below a tenth of the peak.",
        step=int(steps[-1]),
        **place,
    )
    start = float(rate[0] / np.nanmax(rate[: max(2, len(rate) // 3)]))
    yield Symptom(
        "starts_at_full_rate",
        ramp(start, 0.3, 0.9, high=1),
        start,
        0.05,
        f"The first learning rate is {100 * start:.0f} % of the largest one in the first third of the run.",
        step=int(steps[0]),
        **place,
    )
    # First row at which the rate was as high as at the failure.
    top = int(np.argmax(rate >= 0.98 * np.nanmax(rate[: max(row + 1, 2)])))
    is_rising = not failure.is_stalled and row > 0 and rate[row] < 0.98 * peak and top >= row - 2
    yield Symptom(
        "fails_in_warm_up",
        1.0 if is_rising else 0.0,
        float(rate[row]),
        peak,
        f"The run failed while the learning rate was rising, at {rate[row]:.3g}."
        if is_rising
        else f"The run failed at a learning rate of {rate[row]:.3g}, not during the warm-up.",
        step=failure.step,
        **place,
    )


def _distance(n: int) -> str:
    """Return the distance to the failure in steps, as the end of a sentence."""
    if n == 0:
        return ", the step of the failure"
    return f", {in_steps(abs(n))} {'before' if n > 0 else 'after'} the failure"
