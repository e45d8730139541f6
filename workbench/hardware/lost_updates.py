"""Measurement of updates that are lost if parameters are stored only in low precision."""

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
    """Measure the fraction of the intended change of the parameters that rounding removes, with the plan's optimizer.

    The parameters of a copy are rounded to the plan's format. The optimizer computes in float32 from their gradients,
    and the updated parameters are rounded to the nearest number of the format. The lost fraction is
    1 - <actual, intended> / <intended, intended> over all parameters and a few updates. An update of less than half the
    distance to the next number is lost entirely. Because updates are proportional to the learning rate, each is rounded
    at the rates of the full schedule. The effect is the mean over the schedule, weighted by the rate: the fraction of
    the total change in the run. The state of the optimizer is not rounded.
    """
    hardware, training = emulation.plan.hardware, emulation.training
    kind = DTYPES[hardware.weight_dtype]
    copy = emulation.copy()
    optimizer = updating(emulation, copy)
    factors = np.array([training.rate_factor(int(s)) for s in np.linspace(0, training.n_steps - 1, _N_RATES)])
    rates, repetitions = np.unique(np.append(factors[factors > 0], 1.0), return_counts=True)
    counts = repetitions.astype(float)
    counts[-1] -= 1  # The peak was added to the rates of the schedule.
    n_parameters = len(copy.parameters)
    actual_along = np.zeros((n_parameters, len(rates)))
    error, length, n_frozen, n_intended = np.zeros(n_parameters), np.zeros(n_parameters), 0, 0
    with torch.no_grad():
        for parameter in copy.parameters:
            parameter.copy_(parameter.to(kind).float())
    for batch in islice(cycle(emulation.micro_batches), N_UPDATES):
        before = [parameter.detach().clone() for parameter in copy.parameters]
        copy.measure(batch)
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(copy.parameters, training.clip_norm)
        optimizer.step()
        with torch.no_grad():
            for i, (parameter, start) in enumerate(zip(copy.parameters, before, strict=True)):
                intended = (parameter - start).double()
                length[i] += float(intended.square().sum())
                for r, rate in enumerate(rates):
                    actual = (start + rate * intended).to(kind).double() - start.double()
                    actual_along[i, r] += float((actual * intended).sum()) / rate
                # The last rate is the peak, with which the copy continues.
                parameter.copy_((start + intended).to(kind).float())
                error[i] += float((actual - intended).square().sum())
                n_frozen += int(((actual == 0) & (intended != 0)).sum())
                n_intended += int((intended != 0).sum())
    if not length.sum() or not math.isfinite(length.sum()):
        raise NotMeasured("the updates are zero or not finite at the plan's learning rate")
    lost = 1 - actual_along.sum(0) / length.sum()
    mean = float(np.average(lost, weights=rates * np.maximum(counts, 1e-12)))
    with np.errstate(divide="ignore", invalid="ignore"):
        of_parameter = np.where(length > 0, 1 - actual_along[:, -1] / length, np.nan)
    worst = int(np.nanargmax(of_parameter))
    layers = emulation.layout_of(copy, n_shares=1).layers
    in_layer = [np.array(layers) == layer for layer in range(len(emulation.layer_names))]
    return Finding(
        effect=max(0.0, mean),
        meaning=f"Rounding to {hardware.weight_dtype} removes {percent(mean)} of the updates of "
        f"{type(optimizer).__name__} over the schedule ({percent(lost[-1])} at the peak learning rate, where "
        f"{percent(n_frozen / n_intended)} of the entries do not change); most in {copy.names[worst]} "
        f"({percent(of_parameter[worst])}).",
        how=f"{N_UPDATES} updates of a copy at the peak rate, each also rounded at {len(rates)} rates of the schedule.",
        n_trials=N_UPDATES,
        relative_error=float(np.sqrt(error.sum() / length.sum())),
        shrinkage=mean,
        layer_errors=np.array(
            [math.sqrt(error[i].sum() / n) if (n := length[i].sum()) else math.nan for i in in_layer]
        ),
    )


def updating(emulation: Emulation, copy: WorkingCopy, factor: float = 1.0) -> torch.optim.Optimizer:
    """Create the plan's optimizer for a copy, at a multiple of its peak learning rate."""
    optimizer = emulation.training.optimizer_for(copy.model)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise NotMeasured(f"{type(optimizer).__name__} needs several gradients for an update")
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"]) * factor
    return optimizer
