"""Changes to a plan whose trials diverged, and trials of each change."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.assessment.plan_trials import try_plan
from workbench.callbacks.kss import KSS
from workbench.models.losses import token_loss
from workbench.training.training_plan import DEFAULT_RATE

if TYPE_CHECKING:
    from collections.abc import Callable

    import xarray as xr
    from torch import Tensor, nn

    from workbench.training.training_plan import TrainingPlan

#: Number of trials of each change; a trial has as many updates as a trial of the plan.
N_TRIALS = 2


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
