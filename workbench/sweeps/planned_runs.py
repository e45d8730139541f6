"""Conversion of training plans to and from the recorded settings of a sweep, and changes of the plan of a case."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from workbench.errors import OptionError, require_known
from workbench.schema.sweeps import SETTINGS, dtype_of
from workbench.training.training_plan import DEFAULT_RATE, SCHEDULES, TrainingPlan

if TYPE_CHECKING:
    import xarray as xr


def plan_of(training: Mapping[str, Any]) -> TrainingPlan:
    """Create a training plan from its settings."""
    known = tuple(item.name for item in fields(TrainingPlan))
    require_known("A training run", training, known, word="setting")
    if "n_steps" not in training:
        raise OptionError("A planned run needs n_steps, the number of updates; add it to its training plan.")
    return TrainingPlan(**training)


def describe_plan(plan: TrainingPlan, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that plan and configuration determine, with the names of ``schema.sweeps.SETTINGS``."""
    optimizer = plan.optimizer if isinstance(plan.optimizer, str) else ""
    if isinstance(plan.optimizer, torch.optim.Optimizer):
        optimizer = type(plan.optimizer).__name__
        defaults = dict(plan.optimizer.defaults)
    elif optimizer:
        any_model = nn.ParameterList([nn.Parameter(torch.zeros(1))])
        created = replace(plan, learning_rate=plan.learning_rate or DEFAULT_RATE).optimizer_for(any_model)
        optimizer, defaults = type(created).__name__, dict(created.defaults)
    else:
        defaults = {}
    betas = defaults.get("betas")
    rate = defaults.get("lr", DEFAULT_RATE) if plan.learning_rate is None else plan.learning_rate
    return {
        "family": config.get("family", ""),
        "norm": config.get("norm", ""),
        "initialization": config.get("initialization") or ("normal" if config.get("family") else ""),
        "init_std": float(config.get("init_std", math.nan)),
        "learning_rate": float(rate),
        "warmup": plan.warmup,
        "schedule": plan.schedule if isinstance(plan.schedule, str) else "custom",
        "mean_rate_share": float(np.mean([plan.rate_factor(step) for step in range(plan.n_steps)])),
        "optimizer": optimizer,
        "momentum": float(betas[0]) if betas else float(defaults.get("momentum", 0.0)),
        "weight_decay": float(defaults.get("weight_decay", 0.0) or 0.0),
        "clip_norm": math.nan if plan.clip_norm is None else float(plan.clip_norm),
        "n_steps": plan.n_steps,
        "seed": plan.seed,
    }


def replan(
    case: xr.Dataset,
    *,
    n_steps: int | None = None,
    learning_rate: float | None = None,
    warmup: int | None = None,
    schedule: str | Callable[[int], float] | None = None,
    optimizer: str | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
    clip_norm: float | Literal["unchanged"] | None = "unchanged",
) -> xr.Dataset:
    """Change the settings of cases without measuring them again; omitted settings keep their values.

    Args:
        case: Cases from `measure_case`, or rows of a sweep.
        n_steps: Number of updates.
        learning_rate: Peak learning rate.
        warmup: Steps over which the learning rate rises linearly to its peak.
        schedule: Schedule after the warm-up, as in `TrainingPlan`.
        optimizer: Name of a class in ``torch.optim``; without ``optimizer_options`` it has its default options.
        optimizer_options: Further arguments of the optimizer.
        clip_norm: Limit at which the norm of all gradients together is clipped; None disables clipping.

    Returns:
        The same cases with changed settings. With another optimizer or clipping ``overshoot_rate``,
        ``breaking_rate``, ``unit_change_rate`` and ``rehearsed_rate`` are NaN, because they were measured with the
        old one.

    Raises:
        OptionError: If a setting is invalid, or if the schedule of a case is a function or its optimizer is not from
            ``torch.optim``, because these cannot be restored from the record.

    Example:
        >>> import workbench as wb
        >>> cases = wb.samples.open("divergence_sweep", "held out").isel(run=slice(0, 2))
        >>> wb.sweeps.replan(cases, learning_rate=0.02)["learning_rate"].values
        array([0.02, 0.02])

    See Also:
        `workbench.sweeps.measure_case`: Measures a case.
        `workbench.risk.over_rates`: Predicts the risk of a case over a range of learning rates.
    """
    import xarray as xr

    given = {
        "n_steps": n_steps,
        "learning_rate": learning_rate,
        "warmup": warmup,
        "schedule": schedule,
        "optimizer": optimizer,
        "optimizer_options": optimizer_options,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if clip_norm != "unchanged":
        changes["clip_norm"] = clip_norm
    rows = []
    for i in range(case.sizes["run"]):
        one = case.isel(run=[i])
        text = json.loads(str(one["settings"].values[0]))
        before: dict[str, Any] = dict(text.get("training", text))
        before.pop("seed", None)
        if "optimizer" in changes and "optimizer_options" not in changes:
            before.pop("optimizer_options", None)
        for name, default, known in (
            ("schedule", SCHEDULES[0], set(SCHEDULES)),
            ("optimizer", "AdamW", set(vars(torch.optim))),
        ):
            value = before.get(name, default)
            if name not in changes and value not in known:
                raise OptionError(
                    f"The {name} of the case is '{value}', which cannot be restored from the record; pass {name}=."
                )
        plan = plan_of({**before, **changes})
        settings = describe_plan(plan, {})
        for name in ("family", "norm", "initialization", "init_std", "seed"):
            settings.pop(name)
        one = one.assign_coords(
            {
                name: (("run",), np.array([value], dtype=dtype_of(name, SETTINGS[name].kind)), SETTINGS[name].attrs)
                for name, value in settings.items()
            }
        )
        inner = {**before, **{name: getattr(plan, name) for name in changes}}
        outer = json.dumps({**text, "training": inner} if "training" in text else inner, default=str, sort_keys=True)
        one = one.assign_coords(settings=("run", np.array([outer]), SETTINGS["settings"].attrs))
        if {"optimizer", "optimizer_options", "clip_norm"} & set(changes):
            stale = {"overshoot_rate", "breaking_rate", "unit_change_rate", "rehearsed_rate"} & set(one.data_vars)
            one = one.assign({name: one[name] * np.nan for name in stale})
        rows.append(one)
    return xr.concat(rows, "run", combine_attrs="override") if len(rows) > 1 else rows[0]
