"""Measure updates that are lost where weights are stored in low precision only."""

from __future__ import annotations

import math
from itertools import cycle, islice

import numpy as np
import torch

from workbench.formatting import fine_percent as percent
from workbench.hardware.emulation import Emulation, Finding
from workbench.hardware.plan_sections import DTYPES
from workbench.hardware.share_gradients import NotMeasured, WorkingCopy

N_UPDATES = 8
_N_RATES = 8


def lost_updates(emulation: Emulation) -> Finding:
    """Measure the share of the weights' intended change that rounding removes, with the plan's own optimizer.

    A copy has weights on the grid of the plan's format; its optimizer computes in float32 from their gradients, and
    its update is rounded to the nearest number of the grid. The share lost is 1 - <kept, wanted> / <wanted, wanted>
    over all weights and a few updates. An update of less than half the distance to the next number is lost entirely.
    As updates are proportional to the rate, each is rounded at the rates of the complete schedule, and the effect is
    the mean over it, weighted by the rate: the share of the run's total change. The optimizer's own state is not
    rounded.
    """
    hardware, training = emulation.plan.hardware, emulation.training
    kind = DTYPES[hardware.weight_dtype]
    copy = emulation.copy()
    optimizer = updating(emulation, copy)
    factors = np.array([training.rate_factor(int(s)) for s in np.linspace(0, training.n_steps - 1, _N_RATES)])
    rates, counted = np.unique(np.append(factors[factors > 0], 1.0), return_counts=True)
    counts = counted.astype(float)
    counts[-1] -= 1  # the peak itself, which is always included
    kept_along = np.zeros((len(copy.weights), len(rates)))
    error, length, n_frozen, n_wanted = np.zeros(len(copy.weights)), np.zeros(len(copy.weights)), 0, 0
    with torch.no_grad():
        for weight in copy.weights:
            weight.copy_(weight.to(kind).float())
    for batch in islice(cycle(emulation.micro_batches), N_UPDATES):
        before = [weight.detach().clone() for weight in copy.weights]
        copy.measure(batch)
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(copy.weights, training.clip_norm)
        optimizer.step()
        with torch.no_grad():
            for i, (weight, start) in enumerate(zip(copy.weights, before, strict=True)):
                wanted = (weight - start).double()
                length[i] += float(wanted.square().sum())
                for r, rate in enumerate(rates):
                    kept = (start + rate * wanted).to(kind).double() - start.double()
                    kept_along[i, r] += float((kept * wanted).sum()) / rate
                # The last rate is the peak, at which the copy continues.
                weight.copy_((start + wanted).to(kind).float())
                error[i] += float((kept - wanted).square().sum())
                n_frozen += int(((kept == 0) & (wanted != 0)).sum())
                n_wanted += int((wanted != 0).sum())
    if not length.sum() or not math.isfinite(length.sum()):
        raise NotMeasured("the updates are zero or not finite at the plan's rate")
    lost = 1 - kept_along.sum(0) / length.sum()
    mean = float(np.average(lost, weights=rates * np.maximum(counts, 1e-12)))
    with np.errstate(divide="ignore", invalid="ignore"):
        of_weight = np.where(length > 0, 1 - kept_along[:, -1] / length, np.nan)
    worst = int(np.nanargmax(of_weight))
    layers = emulation.layout_of(copy, n_shares=1).layers
    in_layer = [np.array(layers) == layer for layer in range(len(emulation.layer_names))]
    return Finding(
        effect=max(0.0, mean),
        meaning=f"Of the movement that {type(optimizer).__name__} wants, {percent(mean)} is rounded away in "
        f"{hardware.weight_dtype} weights over the schedule ({percent(lost[-1])} at the peak rate, where "
        f"{percent(n_frozen / n_wanted)} of the weights do not move); most in {copy.names[worst]} "
        f"({percent(of_weight[worst])}).",
        how=f"{N_UPDATES} updates of a copy at the peak rate, each also rounded at {len(rates)} rates of the schedule.",
        n_trials=N_UPDATES,
        relative_error=float(np.sqrt(error.sum() / length.sum())),
        shrinkage=mean,
        layer_errors=np.array(
            [math.sqrt(error[i].sum() / n) if (n := length[i].sum()) else math.nan for i in in_layer]
        ),
    )


def updating(emulation: Emulation, copy: WorkingCopy, factor: float = 1.0) -> torch.optim.Optimizer:
    """The plan's optimizer over the weights of a copy, at a multiple of its peak rate.

    Raises:
        NotMeasured: If it needs several gradients for an update, which the emulations do not support.
    """
    optimizer = emulation.training.optimizer_for(copy.model)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise NotMeasured(f"{type(optimizer).__name__} takes several gradients an update")
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"]) * factor
    return optimizer
