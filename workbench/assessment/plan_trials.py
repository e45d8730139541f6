"""Trials of the first updates of a plan on copies of a model, and of changes to a plan whose trials diverged."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.callbacks.kss import KSS
from workbench.callbacks.train import train
from workbench.errors import OptionError
from workbench.models.calling import call_model, on_device_of
from workbench.models.losses import prediction_of, token_loss
from workbench.models.probing import undisturbed
from workbench.tasks import as_task
from workbench.tasks.later_batches import LaterBatches
from workbench.training.training_plan import DEFAULT_RATE, TrainingPlan

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor, nn

#: Updates of one trial, and number of trials. Half of the recorded diverging runs diverge within 10 updates, and 95 %
#: within 49.
N_UPDATES, N_TRIALS = 60, 2
#: Largest loss relative to the first loss if the scale of the loss is unknown; the default limit has about this ratio
#: to the initial loss of a vocabulary of 256 tokens.
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
    """Train copies of a model for the first updates of a plan, up to its peak learning rate.

    A warm-up longer than half of a trial is shortened to that length, and the remaining updates use the peak rate.
    Thus a plan of many thousand steps is tried at its peak rate, not at the first hundredth of its warm-up. Optimizer,
    clipping, precision and the loss limit are those of the plan. The gradient norm has no limit, because it is large in
    some models that train well, namely those whose token embeddings start at zero. The trials use different batches,
    none of which are the first ones of the run.

    Args:
        model: The model, which is not changed.
        task: See `workbench.tasks.as_task`.
        plan: Plan with an optimizer given by name or as a function.
        n_updates: Updates of one trial.
        n_trials: Number of trials.
        loss: Function of logits and targets, as in `workbench.train`. The scale of a loss other than the default is
            unknown; it counts as diverged above ten times its first value, if it also exceeds the plan's limit.
        kss: Function that returns the KSS callback of a trial; None for no KSS.
        on_update: Function that is called after each update.

    Returns:
        Dataset with dims ``trial`` and ``step``: ``loss`` and ``grad_norm`` (trial, step), NaN after a trial diverged;
        ``has_diverged``, ``divergence_step`` (NaN if it did not diverge) and ``cause`` (trial); ``share_broken``, the
        fraction of trials that diverged (0-dim). Attributes: ``n_updates``, ``warmup`` and ``learning_rate`` of the
        trials.
    """
    import torch
    import xarray as xr

    if isinstance(plan.optimizer, torch.optim.Optimizer):
        raise OptionError(
            "An optimizer object cannot be tried on a copy of the model; pass the name of its class, or a function "
            "that creates it from parameters."
        )
    warmup = min(plan.warmup, n_updates // 2)
    tried = replace(plan, n_steps=n_updates, warmup=warmup, schedule="constant")
    tried = replace(tried, stops_at_divergence=True, grad_norm_limit=math.inf)
    settings = {item.name: getattr(tried, item.name) for item in fields(TrainingPlan)}
    task = as_task(task)
    if loss is not token_loss:
        settings["loss_limit"] = max(plan.loss_limit, _LARGEST_RISE * abs(_first_loss(model, task, loss)))
    metrics = np.full((2, n_trials, n_updates), math.nan)
    steps, causes = np.full(n_trials, math.nan), [""] * n_trials
    for trial in range(n_trials):
        later, trained = LaterBatches(task, first=(trial + 1) * n_updates), copy.deepcopy(model)
        for record in train(trained, later, loss=loss, kss=None if kss is None else kss(), **settings):
            metrics[:, trial, record.step] = record.loss, record.grad_norm
            on_update()
            if record.diverged:
                steps[trial], causes[trial] = record.step, record.cause
    dims = ("trial", "step")
    return xr.Dataset(
        {
            "loss": (dims, metrics[0], {"long_name": "loss", "units": "nat"}),
            "grad_norm": (dims, metrics[1], {"long_name": "gradient norm", "units": "1"}),
            "has_diverged": ("trial", np.isfinite(steps)),
            "share_broken": (
                (),
                float(np.isfinite(steps).mean()),
                {"long_name": "fraction of trials that diverged", "units": "1"},
            ),
            "divergence_step": ("trial", steps, {"long_name": "step of divergence", "units": "step"}),
            "cause": ("trial", np.array(causes)),
        },
        {"trial": np.arange(n_trials), "step": np.arange(n_updates)},
        {"n_updates": n_updates, "warmup": warmup, "learning_rate": float(plan.learning_rate or math.nan)},
    )


def _first_loss(model: nn.Module, task: Any, loss: Callable[[Tensor, Tensor], Tensor]) -> float:
    inputs, targets = (on_device_of(model, part) for part in next(iter(task.stream(0))))
    with undisturbed(model):
        found = float(loss(prediction_of(call_model(model, inputs)), targets))
    return found if math.isfinite(found) else 0.0


@dataclass(frozen=True)
class Change:
    """One change to a plan.

    Attributes:
        setting: The changed setting.
        current, proposed: Its current and its proposed value, as text.
        plan: The plan with the change.
        kss: Whether KSS is turned on.
    """

    setting: str
    current: str
    proposed: str
    plan: TrainingPlan
    kss: bool = False


def possible_changes(plan: TrainingPlan, best_rate: float) -> list[Change]:
    """Return the single changes to try for a plan whose trials diverged, the one that slows training least first.

    Args:
        plan: The plan of the trials.
        best_rate: Best learning rate of the pilot; NaN if it found none; a quarter of the plan's is tried then.
    """
    rate = DEFAULT_RATE if plan.learning_rate is None else plan.learning_rate
    lower = min(best_rate, rate / 1.5) if math.isfinite(best_rate) and best_rate > 0 else rate / 4
    lower = float(f"{lower:.2g}")
    changes = []
    if plan.clip_norm is None:
        changes.append(Change("clip_norm", "none", "1", replace(plan, clip_norm=1.0)))
    longer = max(2 * plan.warmup, 100)
    changes.append(Change("warmup", str(plan.warmup), str(longer), replace(plan, warmup=longer)))
    changes.append(Change("kss", "off", "KSS.recommended()", plan, kss=True))
    changes.append(Change("learning_rate", f"{rate:g}", f"{lower:g}", replace(plan, learning_rate=lower)))
    return changes


def try_changes(
    model: nn.Module,
    task: Any,
    changes: list[Change],
    *,
    n_updates: int,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    report: Callable[[str], None] | None = None,
) -> xr.Dataset:
    """Run trials of each change.

    Args:
        model: The model, which is not changed.
        task: As in `try_plan`.
        changes: Changes from `possible_changes`.
        n_updates: Updates of each trial.
        loss: As in `try_plan`.
        report: Function that receives a short text before each change; an exception that it raises ends the trials.

    Returns:
        Dataset with dim ``change``: ``setting``, ``current``, ``proposed``, ``n_trials``, ``n_broken`` (number of
        trials that diverged), ``first_loss``, ``last_loss`` (mean over the trials that did not diverge; NaN if all did)
        and ``largest_grad_norm``.
    """
    import xarray as xr

    rows = []
    for change in changes:
        if report is not None:
            report(f"{change.setting} {change.current} → {change.proposed}")
        tried = try_plan(
            model,
            task,
            change.plan,
            n_updates=n_updates,
            n_trials=N_TRIALS,
            loss=loss,
            kss=KSS.recommended if change.kss else None,
        )
        rows.append((change.setting, change.current, change.proposed, *_outcome(tried)))
    names = ("setting", "current", "proposed", "n_trials", "n_broken", "first_loss", "last_loss", "largest_grad_norm")
    columns = [np.array(column) for column in zip(*rows, strict=True)] if rows else [np.array([])] * len(names)
    return xr.Dataset({name: ("change", column) for name, column in zip(names, columns, strict=True)})


def _outcome(tried: xr.Dataset) -> tuple[int, int, float, float, float]:
    has_diverged = tried["has_diverged"].values
    kept = tried["loss"].values[~has_diverged]
    last = float(kept[:, -min(10, kept.shape[1]) :].mean()) if len(kept) else math.nan
    largest = float(np.nanmax(tried["grad_norm"].values)) if np.isfinite(tried["grad_norm"].values).any() else math.nan
    return len(has_diverged), int(has_diverged.sum()), float(np.nanmean(tried["loss"].values[:, 0])), last, largest
