"""Convert plans to and from the settings that a sweep records, and change the plan of a case."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import torch
from torch import nn

from workbench.errors import OptionError
from workbench.schema.sweeps import SETTINGS, dtype_of
from workbench.training.training_plan import DEFAULT_RATE, SCHEDULES, TrainingPlan

if TYPE_CHECKING:
    import xarray as xr


class ShortRunOptions(TypedDict, total=False):
    """Fields of `TrainingPlan` that all short runs of a plan share: all but length, rate and seed."""

    warmup: int
    schedule: str | Callable[[int], float]
    optimizer: str | torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    optimizer_options: Mapping[str, Any]
    clip_norm: float | None
    precision: str
    loss_limit: float
    grad_norm_limit: float
    stops_at_divergence: bool


class ReplayOptions(ShortRunOptions, total=False):
    """Fields of `TrainingPlan` for a run of given length; fields left out keep their value."""

    learning_rate: float | None
    seed: int


class TrainingOptions(ReplayOptions, total=False):
    """Every field of `TrainingPlan`; fields left out keep their value."""

    n_steps: int


def plan_of(training: Mapping[str, Any]) -> TrainingPlan:
    """Make a plan from the settings of a call.

    Raises:
        OptionError: If one is unknown or impossible.
    """
    known = [item.name for item in fields(TrainingPlan)]
    for name in training:
        if name not in known:
            raise OptionError(f"'{name}' is no setting of a training run, expected one of {', '.join(known)}.")
    if "n_steps" not in training:
        raise OptionError("A planned run needs n_steps, the number of updates; pass n_steps=.")
    return TrainingPlan(**training)


def describe_plan(plan: TrainingPlan, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run by the names of ``sweep_schema.SETTINGS``, as far as plan and configuration have them."""
    optimizer = plan.optimizer if isinstance(plan.optimizer, str) else ""
    if isinstance(plan.optimizer, torch.optim.Optimizer):
        optimizer = type(plan.optimizer).__name__
        defaults = dict(plan.optimizer.defaults)
    elif optimizer:
        any_weight = nn.ParameterList([nn.Parameter(torch.zeros(1))])
        ready = replace(plan, learning_rate=plan.learning_rate or DEFAULT_RATE).optimizer_for(any_weight)
        optimizer, defaults = type(ready).__name__, dict(ready.defaults)
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


def replan(case: xr.Dataset, **changes: Unpack[TrainingOptions]) -> xr.Dataset:
    """Change the settings of cases without measuring them again.

    Args:
        case: Cases from `measure_case`, or rows of a sweep.
        **changes: Fields of `TrainingPlan` by name: ``n_steps``, ``learning_rate``, ``warmup``, ``schedule``,
            ``clip_norm``, ``optimizer``, ``optimizer_options``; those left out stay as each case has them.

    Returns:
        The same cases with the settings changed. With another optimizer or clipping ``overshoot_rate``,
        ``breaking_rate`` and ``rehearsed_rate`` are NaN, because they were measured with the old one.

    Raises:
        OptionError: If a setting is unknown or impossible, or the case's own schedule is a function or its optimizer
            not one of torch's, which cannot be made from the record.
    """
    import xarray as xr

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
                raise OptionError(f"The {name} of the case is '{value}', which is not in the record; pass {name}=.")
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
            for name in ("overshoot_rate", "breaking_rate", "rehearsed_rate"):
                one[name] = one[name] * np.nan
        rows.append(one)
    return xr.concat(rows, "run", combine_attrs="override") if len(rows) > 1 else rows[0]
