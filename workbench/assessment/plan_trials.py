"""Try the first updates of a plan on copies: whether and when they diverge."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.callbacks.train import train
from workbench.errors import OptionError
from workbench.models.calling import call_model, on_device_of
from workbench.models.losses import prediction_of, token_loss
from workbench.models.probing import undisturbed
from workbench.tasks import as_task
from workbench.tasks.later_batches import LaterBatches
from workbench.tasks.task import require_whole
from workbench.training.training_plan import TrainingPlan

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor, nn

    from workbench.callbacks.kss import KSS

#: Updates of one trial, and number of trials: half of the recorded diverging runs do so within ten updates, 95 % within
#: 49.
N_UPDATES, N_TRIALS = 60, 2
#: Largest loss over the first one, where the scale of losses is not known: that of the default limit on 256 tokens.
_LARGEST_RISE = 10.0


def try_plan(
    model: nn.Module,
    task: Any,
    plan: TrainingPlan,
    *,
    n_updates: int = N_UPDATES,
    n_trials: int = N_TRIALS,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    kss: Callable[[], KSS] | None = None,
    on_update: Callable[[], object] = lambda: None,
) -> xr.Dataset:
    """Train copies of a model for the first updates of a plan, at its peak rate.

    A warm-up longer than half of a trial is shortened to that, and the later updates use the peak rate: a plan of many
    thousand steps is tried at its peak, not at the first hundredth of its warm-up. Optimizer, clipping, precision
    and the largest loss are the plan's; the gradient norm has no limit, as it is large in models that train where a
    token begins at zero. Each trial has separate batches, none of them the first ones of the run.

    Args:
        model: The model, which is not changed.
        task: See `workbench.tasks.as_task`.
        plan: Plan with an optimizer given by name or as a function.
        n_updates: Updates of one trial.
        n_trials: Number of trials.
        loss: Function of logits and targets, as in `workbench.train`. Of another one than the default, whose scale is
            not known, a value above ten times the first one counts as divergence, if it is above the plan's limit too.
        kss: Function that makes the KSS of each trial; None: no KSS.
        on_update: Called after each update.

    Returns:
        Dataset with dims ``trial`` and ``step``: ``loss`` and ``grad_norm`` (trial, step; NaN after a trial diverged),
        ``has_diverged``, ``divergence_step`` (NaN: it did not) and ``cause`` (trial); ``share_broken`` of the trials
        (0-dim); attributes ``n_updates``, ``warmup`` and ``learning_rate``, as tried.

    Raises:
        OptionError: If the optimizer is an existing one, which belongs to the model itself, or a number is below 1.
    """
    import torch
    import xarray as xr

    require_whole(1, n_updates=n_updates, n_trials=n_trials)
    if isinstance(plan.optimizer, torch.optim.Optimizer):
        raise OptionError(
            "A ready optimizer cannot be tried on a copy; name its class, or pass a function that makes it."
        )
    warmup = min(plan.warmup, n_updates // 2)
    tried = replace(plan, n_steps=n_updates, warmup=warmup, schedule="constant")
    tried = replace(tried, stops_at_divergence=True, grad_norm_limit=math.inf)
    settings = {item.name: getattr(tried, item.name) for item in fields(TrainingPlan)}
    task = as_task(task)
    if loss is not token_loss:
        settings["loss_limit"] = max(plan.loss_limit, _LARGEST_RISE * abs(_first_loss(model, task, loss)))
    numbers = np.full((2, n_trials, n_updates), math.nan)
    steps, causes = np.full(n_trials, math.nan), [""] * n_trials
    for trial in range(n_trials):
        later, trained = LaterBatches(task, first=(trial + 1) * n_updates), copy.deepcopy(model)
        for record in train(trained, later, loss=loss, kss=None if kss is None else kss(), **settings):
            numbers[:, trial, record.step] = record.loss, record.grad_norm
            on_update()
            if record.diverged:
                steps[trial], causes[trial] = record.step, record.cause
    dims = ("trial", "step")
    return xr.Dataset(
        {
            "loss": (dims, numbers[0], {"long_name": "loss", "units": "nat"}),
            "grad_norm": (dims, numbers[1], {"long_name": "gradient norm", "units": "1"}),
            "has_diverged": ("trial", np.isfinite(steps)),
            "share_broken": (
                (),
                float(np.isfinite(steps).mean()),
                {"long_name": "share of trials that broke", "units": "1"},
            ),
            "divergence_step": ("trial", steps, {"long_name": "step of divergence", "units": "step"}),
            "cause": ("trial", np.array(causes)),
        },
        {
            "trial": np.arange(n_trials),
            "step": np.arange(n_updates),
        },
        {"n_updates": n_updates, "warmup": warmup, "learning_rate": float(plan.learning_rate or math.nan)},
    )


def _first_loss(model: nn.Module, task: Any, loss: Callable[[Tensor, Tensor], Tensor]) -> float:
    inputs, targets = (on_device_of(model, part) for part in next(iter(task.stream(0))))
    with undisturbed(model):
        found = float(loss(prediction_of(call_model(model, inputs)), targets))
    return found if math.isfinite(found) else 0.0
