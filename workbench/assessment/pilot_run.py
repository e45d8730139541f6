"""Try the first updates of a plan on copies: whether and when they diverge, and monitors of attention and routing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.callbacks.train import train
from workbench.errors import OptionError
from workbench.models.anatomy import read_anatomy
from workbench.models.calling import on_device_of
from workbench.models.losses import token_loss
from workbench.monitors.probe_pass import ModelProbe
from workbench.tasks import as_task
from workbench.tasks.later_batches import LaterBatches
from workbench.tasks.task import require_whole
from workbench.training.training_plan import TrainingPlan

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor, nn

    from workbench.callbacks.kss import KSS
    from workbench.tasks import Task

#: Updates of one trial, and number of trials: half of the recorded diverging runs do so within ten updates, 95 % within
#: 49.
N_UPDATES, N_TRIALS = 60, 2
#: Updates between two measurements of attention and routing in the first trial, and token states of each.
LOOK_EVERY, N_LOOKED_AT = 5, 256
#: Measured quantities: name -> part of the probe's measurement, its variable, and the summary over layers and heads.
_LOOKED_AT: dict[str, tuple[str, str, Callable[[np.ndarray], Any]]] = {
    "attention_entropy_share_min": ("attention", "attention_entropy_share", np.nanmin),
    "attention_logit_max": ("attention", "attention_logit_max", np.nanmax),
    "routing_change": ("router", "routing_change", np.nanmax),
    "max_violation": ("router", "max_violation", np.nanmax),
    "dead_experts": ("router", "dead_experts", np.nanmax),
}
_MEANING = {
    "attention_entropy_share_min": ("smallest attention entropy share", "1"),
    "attention_logit_max": ("largest attention logit", "1"),
    "routing_change": ("largest routing change between two measurements", "1"),
    "max_violation": ("largest MaxVio", "1"),
    "dead_experts": ("most dead experts of a layer", "expert"),
}


def pilot_run(
    model: nn.Module,
    task: Any,
    plan: TrainingPlan,
    *,
    n_updates: int = N_UPDATES,
    n_trials: int = N_TRIALS,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    kss: Callable[[], KSS] | None = None,
) -> xr.Dataset:
    """Train copies of a model for the first updates of a plan, at its peak rate.

    A warm-up longer than half of a trial is shortened to that, and the later updates use the peak rate: a plan of many
    thousand steps is tried at its peak, not at the first hundredth of its warm-up. Optimizer, clipping, precision
    and the label of divergence are the plan's. Each trial has separate batches, none of them the first ones of the
    run.

    Args:
        model: The model, which is not changed.
        task: See `workbench.tasks.as_task`.
        plan: Plan with an optimizer given by name or as a function.
        n_updates: Updates of one trial.
        n_trials: Number of trials.
        loss: Function of logits and targets.
        kss: Function that makes the KSS of each trial; None: no KSS.

    Returns:
        Dataset with dims ``trial`` and ``step``: ``loss`` and ``grad_norm`` (trial, step; NaN after a trial diverged),
        ``has_diverged``, ``divergence_step`` (NaN: it did not) and ``cause`` (trial); ``share_broken`` of the trials
        (0-dim); of the first trial, dim
        ``look`` (coordinate ``look_step``): ``attention_entropy_share_min``, ``attention_logit_max``,
        ``routing_change`` since the one before, ``max_violation`` and ``dead_experts``, each the worst of all layers
        and heads, NaN where the model has no such part; attributes ``n_updates``, ``warmup`` and ``learning_rate``,
        as tried.

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
    tried = replace(plan, n_steps=n_updates, warmup=warmup, schedule="constant", stops_at_divergence=True)
    settings = {item.name: getattr(tried, item.name) for item in fields(TrainingPlan)}
    task = as_task(task)
    numbers = np.full((2, n_trials, n_updates), math.nan)
    steps, causes = np.full(n_trials, math.nan), [""] * n_trials
    looks: list[dict[str, float]] = []
    for trial in range(n_trials):
        later, trained = LaterBatches(task, first=(trial + 1) * n_updates), copy.deepcopy(model)
        probe = _probe_of(trained, task) if trial == 0 else None
        for record in train(trained, later, loss=loss, kss=None if kss is None else kss(), **settings):
            numbers[:, trial, record.step] = record.loss, record.grad_norm
            if record.diverged:
                steps[trial], causes[trial] = record.step, record.cause
            elif probe is not None and record.step % LOOK_EVERY == 0:
                looks.append({"look_step": record.step} | _measure(probe))
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
            **{
                name: ("look", [look[name] for look in looks], {"long_name": long_name, "units": unit})
                for name, (long_name, unit) in _MEANING.items()
            },
        },
        {
            "trial": np.arange(n_trials),
            "step": np.arange(n_updates),
            "look_step": ("look", np.array([look["look_step"] for look in looks], dtype=int)),
        },
        {"n_updates": n_updates, "warmup": warmup, "learning_rate": float(plan.learning_rate or math.nan)},
    )


def _probe_of(model: nn.Module, task: Task) -> ModelProbe:
    inputs = on_device_of(model, task.probe(N_LOOKED_AT))
    return ModelProbe(model, read_anatomy(model, inputs), inputs)


def _measure(probe: ModelProbe) -> dict[str, float]:
    taken = probe.take(("attention", "router"))
    found = {}
    for name, (part, variable, worst) in _LOOKED_AT.items():
        values = taken.get(part, {}).get(variable)
        found[name] = math.nan if values is None or not np.isfinite(values).any() else float(worst(values))
    return found
