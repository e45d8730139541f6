"""Emulation of late gradients: the change of their direction, and the largest rate that decreases the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from workbench.callbacks.faults.communication import StaleReduction
from workbench.formatting import counted
from workbench.formatting import fine_percent as percent
from workbench.hardware.emulation import Emulation, Finding
from workbench.hardware.lost_updates import updating
from workbench.hardware.reduction import plan_buckets
from workbench.hardware.share_gradients import Batch, NotMeasured
from workbench.models.batches import count_examples, take_examples

N_UPDATES = 20
_ROWS = 4
#: Exponents of 2 of the smallest and largest learning rate tried, relative to the plan's rate.
_LOWEST, _HIGHEST = -6, 10
#: Last step of the search, in octaves; half an octave determines the edge to within a fifth.
_RESOLUTION = 0.5


def late_gradients(emulation: Emulation) -> Finding:
    """Measure the plan's learning rate over the largest one that decreases the loss with late gradients.

    A rate decreases the loss if none of twenty updates diverges by the plan's limits, and if over the last quarter of
    them the mean loss is lower than the initial loss of the same batches. The largest such rate is found by bisection,
    assuming that no larger rate decreases the loss; warm-up and schedule are ignored. For SGD on a parabola the result
    is known: a delay of k updates multiplies the largest rate by sin(pi / (4 k + 2)), which is 1/2 for one update.
    """
    hardware = emulation.plan.hardware
    delay = hardware.delay
    if not delay:
        raise NotMeasured("no gradient is late")
    buckets = plan_buckets(emulation)
    late = buckets if hardware.reduction == "stale" else buckets[-1:]
    rate = max(group["lr"] for group in updating(emulation, emulation.copy()).param_groups)
    is_lower, cosine = _run(emulation, 1.0, delay, late)
    power_late = _edge(lambda power: is_lower if power == 0 else _run(emulation, 2.0**power, delay, late)[0], 0)
    # The edge without delay is rarely far above that with delay, so the search starts there.
    start = min(max(power_late - _RESOLUTION / 2, _LOWEST), _HIGHEST)
    power = _edge(lambda power: _run(emulation, 2.0**power, 0, late)[0], start)
    edge_late, edge = rate * 2.0**power_late, rate * 2.0**power
    which = "all gradients" if hardware.reduction == "stale" else "the gradients of the last bucket"
    part = (
        "" if hardware.reduction == "stale" else f"; {percent(_fraction(emulation, late))} of the parameters are late"
    )
    updates = counted(delay, "update")
    if edge_late == math.inf:
        found = f"every learning rate tried decreases the loss, up to {rate * 2.0**_HIGHEST:.3g}"
    elif edge == 0:
        found = f"no learning rate down to {rate * 2.0**_LOWEST:.3g} decreases the loss, nor does any without delay"
    else:
        before = f"{edge:.3g}" if math.isfinite(edge) else f"more than {rate * 2.0**_HIGHEST:.3g}"
        found = (
            f"the largest learning rate that decreases the loss in {N_UPDATES} updates is {edge_late:.3g} instead of "
            f"{before}"
        )
    return Finding(
        effect=rate / edge_late if edge_late else math.inf,
        meaning=f"With {which} {updates} late, {found}; the plan's rate is {rate:.3g}"
        f"{'' if math.isnan(cosine) else f', at which the cosine of late and current gradient is {cosine:.2f}'}.",
        how=f"{N_UPDATES} updates of copies at constant learning rates, on batches of at most {_ROWS} examples, "
        f"compared with the same without delay{part}.",
        n_trials=1,
        shrinkage=1 - edge_late / edge if math.isfinite(edge) and edge else math.nan,
        cosine=cosine,
        remedy_value=f"synchronous, or learning_rate = {edge_late / 2:.2g}" if 0 < edge_late < 2 * rate else None,
    )


def _edge(decreases: Callable[[float], bool], start: float) -> float:
    """Return the largest exponent of 2, relative to the plan's rate, that decreases the loss; to a quarter octave.

    Args:
        decreases: Function that returns whether the rate of an exponent decreases the loss.
        start: First exponent; the steps from there double until the edge is passed.

    Returns:
        The exponent; minus infinity if no rate tried decreases the loss, infinity if all do.
    """
    is_upward = decreases(start)
    low, high, step = start, start, 1.0
    while True:
        if is_upward and low >= _HIGHEST:
            return math.inf
        if not is_upward and high <= _LOWEST:
            return -math.inf
        power = min(low + step, _HIGHEST) if is_upward else max(high - step, _LOWEST)
        is_lower = decreases(power)
        low, high = (power if is_lower else low), (high if is_lower else power)
        if is_lower != is_upward:
            break
        step *= 2
    while high - low > _RESOLUTION:
        middle = math.floor((low + high) / 2 / _RESOLUTION) * _RESOLUTION
        low, high = (middle, high) if decreases(middle) else (low, middle)
    return (low + high) / 2


def _run(emulation: Emulation, factor: float, delay: int, late: list[list[int]]) -> tuple[bool, float]:
    """Return whether updates at a multiple of the rate decrease the loss, and the mean cosine of the late gradients."""
    copy, plan = emulation.copy(), emulation.training
    optimizer = updating(emulation, copy, factor)
    fault = StaleReduction(delay=delay) if delay else None
    generator = emulation.generator("late")
    batches = _batches(emulation)
    kept: list[list[Tensor | None]] = []
    cosines: list[float] = []
    if "first losses" not in emulation.measured:
        emulation.measured["first losses"] = [copy.measure(batch) for batch in batches]
    changes = []
    for step in range(N_UPDATES):
        loss = copy.measure(batches[step % len(batches)])
        changes.append(loss - emulation.measured["first losses"][step % len(batches)])
        present = [g.clone() for g in copy.gradients()]
        if plan.cause_of_divergence(loss, float(torch.nn.utils.get_total_norm(present))):
            return False, _mean(cosines)
        if fault is not None:
            kept = [*kept[-delay:], list[Tensor | None](present)]
            used = cast(list[Tensor], fault.late(kept, late, generator))
            if step >= delay:
                cosines.append(_cosine(used, present))
            for parameter, gradient in zip(copy.parameters, used, strict=True):
                parameter.grad = gradient.clone()
        if plan.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(copy.parameters, plan.clip_norm)
        optimizer.step()
    return _mean(changes[-N_UPDATES // 4 :]) < 0, _mean(cosines)


def _batches(emulation: Emulation) -> list[Batch]:
    """Return batches of a few examples, so that many learning rates can be tried."""
    return [(take_examples(x, slice(0, min(_ROWS, count_examples(x)))), y[:_ROWS]) for x, y in emulation.batches]


def _fraction(emulation: Emulation, buckets: list[list[int]]) -> float:
    """Return the fraction of the parameters that is in some buckets."""
    sizes = [parameter.numel() for parameter in emulation.copy().parameters]
    return sum(sizes[i] for bucket in buckets for i in bucket) / sum(sizes)


def _cosine(a: list[Tensor], b: list[Tensor]) -> float:
    """Return the cosine between two gradients; NaN if one is zero."""

    def dot(u: list[Tensor], v: list[Tensor]) -> float:
        return sum(float((x.double() * y.double()).sum()) for x, y in zip(u, v, strict=True))

    lengths = math.sqrt(dot(a, a) * dot(b, b))
    return dot(a, b) / lengths if lengths else math.nan


def _mean(values: list[float]) -> float:
    """Return the mean; NaN without values."""
    return math.fsum(values) / len(values) if values else math.nan
