"""Trials of a plan on copies of a model: the pilot of its rates, its first updates, and changes if these diverge."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from workbench.callbacks.kss import KSS
from workbench.callbacks.train import train
from workbench.errors import OptionError
from workbench.models.calling import call_model, on_device_of
from workbench.models.losses import prediction_of, token_loss
from workbench.models.probing import undisturbed
from workbench.rates.find_rate import SOURCES, FoundRates, extrapolated, find_rate, furthest, with_estimates
from workbench.tasks import as_task
from workbench.tasks.task import LaterBatches
from workbench.training.training_plan import DEFAULT_RATE, TrainingPlan

#: Maximum number of updates of the pilot, and time limit in seconds, after which only finished rounds are used.
BUDGET, SECONDS = 400, 30.0
TOO_SLOW = "No round of the pilot finished within {:.0f} seconds; find the useful rates with wb.find_rate."
#: Factor by which a planned rate may exceed the upper end of the interval estimated with a narrow model. Published
#: rates are up to 2.1 times that end, probably because the batches of the pilot are small.
BEYOND = 3.0
#: Why there is no estimate for images: four published vision models were trained at rates 7 to 28 times the largest
#: useful rate that this pilot would estimate.
OF_IMAGES = (
    "The dependence of the useful rates on the width was measured for sequences, not for images; run wb.find_rate at "
    "full width."
)


class _TimeIsUpError(KeyboardInterrupt):
    """Signal that ends a pilot like an interrupt, with the results of its finished rounds."""


def rate_pilot(
    model: nn.Module,
    task: Any,
    plan: TrainingPlan,
    *,
    width_ratio: float = 1.0,
    budget: int = BUDGET,
    seconds: float = SECONDS,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    on_update: Callable[[], object] = lambda: None,
) -> xr.Dataset:
    """Find the useful learning rates of a plan on a model, and transfer them to the planned width.

    Rates can be extrapolated only up to a certain length of training. A longer training is evaluated at that length:
    useful rates decrease with the number of updates, so a rate that is too large for the shorter training is also too
    large for the planned one.

    Returns:
        The data of `workbench.find_rate` with the estimates at the planned width, and these 0-dim variables:

        - ``planned_rate``;
        - ``upper_rate_limit``: upper end of the interval of the useful edge (three times that end if it was transferred
          between widths), NaN if the edge is unknown; ``rate_over_edge``: planned rate over this limit;
        - ``lower_rate_limit``: lower end of the interval of the slow edge, NaN if the edge is unknown or a shorter
          training was evaluated; ``rate_over_slow_edge``: planned rate over this limit;
        - ``loss_at_best``: smallest held-out loss of the longest round, in nat, NaN if no round finished. Its attribute
          ``n_updates`` is the number of updates of that round.

        Attributes: ``n_steps`` (length of the training that the rates apply to), ``reason`` (why the rates are unknown;
        empty if they are known) and ``sentence``.
    """
    inputs, _ = next(iter(as_task(task).stream(0))) if width_ratio != 1 else (None, None)
    if isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
        return _described(None, plan, OF_IMAGES)
    end = time.monotonic() + seconds

    def tick(_: str) -> None:
        on_update()
        if time.monotonic() > end:
            raise _TimeIsUpError

    settings: Any = {name: getattr(plan, name) for name in _SETTINGS}
    try:
        found = find_rate(model, task, n_steps=plan.n_steps, budget=budget, loss=loss, progress=tick, **settings)
    except _TimeIsUpError:
        return _described(None, plan, TOO_SLOW.format(seconds))
    if found.is_interrupted and time.monotonic() <= end:
        raise KeyboardInterrupt  # the user interrupted the assessment
    edge = found.last_with_edge
    if found.reason and edge is not None and found.has_learned and furthest(edge) < plan.n_steps:
        shorter = replace(plan, n_steps=furthest(edge))
        found = with_estimates(found, extrapolated(edge, shorter))
        found = replace(found, reason="", n_steps=shorter.n_steps)
    if width_ratio != 1 and not found.reason:
        try:
            found = found.for_width(width_ratio)
        except OptionError as error:
            return _described(found, plan, str(error))
    return _described(found, plan, found.reason)


#: Settings of the plan that the pilot uses.
_SETTINGS = ("warmup", "schedule", "optimizer", "optimizer_options", "clip_norm", "precision")


def _described(found: FoundRates | None, plan: TrainingPlan, reason: str) -> xr.Dataset:
    data = xr.Dataset() if found is None else found.data
    is_known, n_steps = not reason, plan.n_steps if found is None else found.n_steps
    rate = DEFAULT_RATE if plan.learning_rate is None else plan.learning_rate
    data["planned_rate"] = ((), rate, {"long_name": "planned learning rate", "units": "1"})
    beyond = BEYOND if found is not None and found.width_ratio != 1 else 1.0
    for name, limit, end, factor in (
        ("rate_over_edge", "upper", "useful_edge_high", beyond),
        ("rate_over_slow_edge", "lower", "slow_edge_low", 1.0),
    ):
        is_valid = is_known and (limit == "upper" or n_steps == plan.n_steps)
        value = factor * float(data[end]) if is_valid else math.nan
        data[f"{limit}_rate_limit"] = ((), value, {"long_name": f"{limit} limit of the planned rate", "units": "1"})
        words: dict[str, Any] = {"long_name": f"planned rate over its {limit} limit", "units": "1"}
        data[name] = ((), rate / value, words | ({"unseen": reason} if reason else {}))
    n_updates, loss = 0, math.nan
    if "loss" in data and np.isfinite(data["loss"].values).any():
        losses = data["loss"].sortby("n_updates").dropna("n_updates", how="all").isel(n_updates=-1)
        n_updates, loss = int(losses["n_updates"]), float(losses.mean("seed").min())
    about = {"long_name": "loss at the best rate of the longest round", "units": "nat", "n_updates": n_updates}
    data["loss_at_best"] = ((), loss, about)
    if not is_known:
        for name in (f"{name}{end}" for name in SOURCES for end in ("", "_low", "_high")):
            data[name] = ((), math.nan)
    sentence = reason if found is None or reason else str(found)
    return data.assign_attrs(n_steps=n_steps, reason=reason, sentence=sentence)


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

    Returns:
        Dataset with dims ``trial`` and ``step``: ``loss`` and ``grad_norm`` (trial, step), NaN after a trial diverged;
        ``has_diverged``, ``divergence_step`` (NaN if it did not diverge) and ``cause`` (trial); ``share_broken``, the
        fraction of trials that diverged (0-dim). Attributes: ``n_updates``, ``warmup`` and ``learning_rate`` of the
        trials.
    """
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
        inputs, targets = (on_device_of(model, part) for part in next(iter(task.stream(0))))
        with undisturbed(model):
            first = abs(float(loss(prediction_of(call_model(model, inputs)), targets)))
        settings["loss_limit"] = max(plan.loss_limit, _LARGEST_RISE * first if math.isfinite(first) else 0.0)
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
    about = {"long_name": "fraction of trials that diverged", "units": "1"}
    return xr.Dataset(
        {
            "loss": (dims, metrics[0], {"long_name": "loss", "units": "nat"}),
            "grad_norm": (dims, metrics[1], {"long_name": "gradient norm", "units": "1"}),
            "has_diverged": ("trial", np.isfinite(steps)),
            "share_broken": ((), float(np.isfinite(steps).mean()), about),
            "divergence_step": ("trial", steps, {"long_name": "step of divergence", "units": "step"}),
            "cause": ("trial", np.array(causes)),
        },
        {"trial": np.arange(n_trials), "step": np.arange(n_updates)},
        {"n_updates": n_updates, "warmup": warmup, "learning_rate": float(plan.learning_rate or math.nan)},
    )


@dataclass(frozen=True)
class Change:
    """One change to a plan."""

    setting: str
    current: str
    proposed: str
    plan: TrainingPlan
    kss: bool = False


def possible_changes(plan: TrainingPlan, best_rate: float) -> list[Change]:
    """Return the single changes to try for a plan whose trials diverged, the one that slows training least first."""
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
    """Run trials of each change; return a dataset along ``change``, with losses of the trials that converged."""
    rows = []
    for change in changes:
        if report is not None:
            report(f"{change.setting} {change.current} → {change.proposed}")
        kss = KSS.recommended if change.kss else None
        tried = try_plan(model, task, change.plan, n_updates=n_updates, n_trials=N_TRIALS, loss=loss, kss=kss)
        losses, has_diverged, norms = (tried[name].values for name in ("loss", "has_diverged", "grad_norm"))
        kept = losses[~has_diverged]
        rows.append(
            {
                "setting": change.setting, "current": change.current, "proposed": change.proposed,
                "n_trials": len(has_diverged), "n_broken": int(has_diverged.sum()),
                "first_loss": float(np.nanmean(losses[:, 0])),
                "last_loss": float(kept[:, -min(10, kept.shape[1]) :].mean()) if len(kept) else math.nan,
                "largest_grad_norm": float(np.nanmax(norms)) if np.isfinite(norms).any() else math.nan,
            }
        )  # fmt: skip
    return xr.Dataset({name: ("change", np.array([row[name] for row in rows])) for name in rows[0]})
