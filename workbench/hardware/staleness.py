"""Emulate late gradients: the change of their direction, and the largest rate that lowers the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from workbench.callbacks.faults.communication import StaleReduction
from workbench.formatting import fine_percent as percent
from workbench.hardware.emulation import Emulation, Finding
from workbench.hardware.lost_updates import updating
from workbench.hardware.reduction import plan_buckets
from workbench.hardware.share_gradients import Batch, NotMeasured
from workbench.models.batches import count_rows, take_rows

N_UPDATES = 20
_ROWS = 4
#: Lowest and highest tried rate, as a power of 2 times the plan's rate.
_LOWEST, _HIGHEST = -6, 10
#: Last step of the search, in octaves; half an octave determines the edge to a fifth.
_RESOLUTION = 0.5


def late_gradients(emulation: Emulation) -> Finding:
    """Measure the plan's rate as a share of the largest one that lowers the loss with late gradients.

    A rate lowers the loss if none of twenty updates diverges by the plan's label and the loss, over the last quarter of
    them, is lower on average than that of the same batches before. Between rates the edge is found by bisection,
    assuming that no larger one lowers it; warm-up and schedule are ignored. For SGD on a parabola the result is known:
    with a delay of k updates the largest such rate shrinks to sin(pi / (4 k + 2)) of it, to a half for one update.
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
    # The search for the edge without delay starts there, as it is rarely far above.
    start = min(max(power_late - _RESOLUTION / 2, _LOWEST), _HIGHEST)
    power = _edge(lambda power: _run(emulation, 2.0**power, 0, late)[0], start)
    edge_late, edge = rate * 2.0**power_late, rate * 2.0**power
    which = "all gradients" if hardware.reduction == "stale" else "the gradients of the last bucket"
    part = "" if hardware.reduction == "stale" else f", {percent(_share(emulation, late))} of the weights late"
    updates = f"{delay} update{'' if delay == 1 else 's'}"
    if edge_late == math.inf:
        found = f"every rate tried lowers the loss, up to {rate * 2.0**_HIGHEST:.3g}"
    elif edge == 0:
        found = f"no rate lowers the loss, nor without delay, down to {rate * 2.0**_LOWEST:.3g}"
    else:
        shrinks = f"from {edge:.3g}" if math.isfinite(edge) else f"from more than {rate * 2.0**_HIGHEST:.3g}"
        found = f"the largest rate that lowers the loss in {N_UPDATES} updates shrinks {shrinks} to {edge_late:.3g}"
    return Finding(
        effect=rate / edge_late if edge_late else math.inf,
        meaning=f"With {which} {updates} late {found}; the plan's rate is {rate:.3g}"
        f"{'' if math.isnan(cosine) else f', at which the cosine of late and present gradient is {cosine:.2f}'}.",
        how=f"{N_UPDATES} updates of copies at constant rates, batches of at most {_ROWS} rows, beside the same "
        f"without delay{part}.",
        n_trials=1,
        shrinkage=1 - edge_late / edge if math.isfinite(edge) and edge else math.nan,
        cosine=cosine,
        remedy_value=f"synchronous, or learning_rate = {edge_late / 2:.2g}" if 0 < edge_late < 2 * rate else None,
    )


def _edge(lowers: Callable[[float], bool], start: float) -> float:
    """The largest power of two, as a multiple of the plan's rate, that lowers the loss; to a quarter of an octave.

    Args:
        lowers: Whether the rate of a power lowers the loss.
        start: First power; the steps from there double until the edge is passed.

    Returns:
        The power; minus infinity: no tried rate does; infinity: all do.
    """
    goes_up = lowers(start)
    low, high, step = start, start, 1.0
    while True:
        if goes_up and low >= _HIGHEST:
            return math.inf
        if not goes_up and high <= _LOWEST:
            return -math.inf
        power = min(low + step, _HIGHEST) if goes_up else max(high - step, _LOWEST)
        is_fine = lowers(power)
        low, high = (power if is_fine else low), (high if is_fine else power)
        if is_fine != goes_up:
            break
        step *= 2
    while high - low > _RESOLUTION:
        middle = math.floor((low + high) / 2 / _RESOLUTION) * _RESOLUTION
        low, high = (middle, high) if lowers(middle) else (low, middle)
    return (low + high) / 2


def _run(emulation: Emulation, factor: float, delay: int, late: list[list[int]]) -> tuple[bool, float]:
    """Whether updates at a multiple of the rate lower the loss, and the mean cosine of late and present gradient."""
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
            for weight, gradient in zip(copy.weights, used, strict=True):
                weight.grad = gradient.clone()
        if plan.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(copy.weights, plan.clip_norm)
        optimizer.step()
    return _mean(changes[-N_UPDATES // 4 :]) < 0, _mean(cosines)


def _batches(emulation: Emulation) -> list[Batch]:
    """Batches of a few rows, so that many rates can be tried."""
    return [(take_rows(x, slice(0, min(_ROWS, count_rows(x)))), y[:_ROWS]) for x, y in emulation.batches]


def _share(emulation: Emulation, buckets: list[list[int]]) -> float:
    sizes = [weight.numel() for weight in emulation.copy().weights]
    return sum(sizes[i] for bucket in buckets for i in bucket) / sum(sizes)


def _cosine(a: list[Tensor], b: list[Tensor]) -> float:
    def dot(u: list[Tensor], v: list[Tensor]) -> float:
        return sum(float((x.double() * y.double()).sum()) for x, y in zip(u, v, strict=True))

    lengths = math.sqrt(dot(a, a) * dot(b, b))
    return dot(a, b) / lengths if lengths else math.nan


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
