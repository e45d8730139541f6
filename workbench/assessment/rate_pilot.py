"""The pilot of an assessment: the useful rates of the planned training, found on the model that was run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.errors import OptionError
from workbench.models.losses import token_loss
from workbench.rates.drift import extrapolated, furthest
from workbench.rates.find_rate import FoundRates, find_rate, with_estimates
from workbench.tasks import as_task
from workbench.training.training_plan import DEFAULT_RATE, TrainingPlan

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor, nn

#: Updates of the pilot, and seconds after which it ends with the rounds that are finished.
BUDGET, SECONDS = 400, 30.0
TOO_SLOW = "No round of the pilot ended within {:.0f} seconds; find the useful rates with wb.find_rate."
#: Published rates are up to 2.1 times the upper end that a thin model gives them, probably because its batches are
#: small.
BEYOND = 3.0
#: Four published vision models trained at rates 7 to 28 times the largest that this pilot would give them.
OF_IMAGES = "How rates change with the width was measured on sequences, not on images; run wb.find_rate at full width."
_NAMES = ("slow_edge", "best_rate", "useful_edge")


class _TimeIsUpError(KeyboardInterrupt):
    """Ends a pilot as an interrupt does: with what its finished rounds found."""


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
    """Find the useful rates of a plan on a model, and carry them over to the planned width.

    A training longer than rates may be extrapolated to is judged as one of that length: as useful rates fall with the
    number of updates, what is too large for that one is too large for the planned one.

    Args:
        model: The model, which is not changed.
        task: See `workbench.tasks.as_task`.
        plan: Plan with an optimizer given by name or as a function.
        width_ratio: Width of the planned model over that of this one.
        budget: Updates of the pilot.
        seconds: After this time it ends with the rounds that are finished.
        loss: Function of logits and targets.
        on_update: Called after each update; its exceptions end the pilot.

    Returns:
        The data of `workbench.find_rate`, with the estimates at the planned width, and, 0-dim, ``planned_rate``;
        ``rate_over_edge``: the planned rate over the upper end of the useful edge's interval (carried over: over three
        times that); ``rate_over_slow_edge``: over the lower end of the slow edge's interval, NaN if a shorter training
        was judged; both NaN where the edges are not known; ``loss_at_best`` (nat): the smallest held-out loss of the
        longest round, whose updates its attribute ``n_updates`` tells; NaN: no round ended. Attributes: ``n_steps`` (of
        the training that the rates are for), ``reason`` (why they are not known; empty: they are) and ``sentence``.
    """
    if width_ratio != 1 and _reads_images(task):
        return _described(None, plan, OF_IMAGES)
    end = time.monotonic() + seconds

    def tick(_: str) -> None:
        on_update()
        if time.monotonic() > end:
            raise _TimeIsUpError

    settings = {item.name: getattr(plan, item.name) for item in fields(TrainingPlan)}
    settings = {name: settings[name] for name in _TAKEN}
    try:
        found = find_rate(model, task, n_steps=plan.n_steps, budget=budget, loss=loss, progress=tick, **settings)
    except _TimeIsUpError:
        return _described(None, plan, TOO_SLOW.format(seconds))
    if found.is_interrupted and time.monotonic() <= end:
        raise KeyboardInterrupt  # by a person, who wants the assessment to end
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


def _reads_images(task: Any) -> bool:
    inputs, _ = next(iter(as_task(task).stream(0)))
    return isinstance(inputs, torch.Tensor) and inputs.is_floating_point()


_TAKEN = ("warmup", "schedule", "optimizer", "optimizer_options", "clip_norm", "precision")


def _described(found: FoundRates | None, plan: TrainingPlan, reason: str) -> xr.Dataset:
    import xarray as xr

    data = xr.Dataset() if found is None else found.data
    is_known, n_steps = not reason, plan.n_steps if found is None else found.n_steps
    rate = DEFAULT_RATE if plan.learning_rate is None else plan.learning_rate
    data["planned_rate"] = ((), rate, {"long_name": "planned learning rate", "units": "1"})
    beyond = BEYOND if found is not None and found.width_ratio != 1 else 1.0
    for name, long_name, end, factor in (
        ("rate_over_edge", "planned rate over the largest useful rate", "useful_edge_high", beyond),
        ("rate_over_slow_edge", "planned rate over the smallest useful rate", "slow_edge_low", 1.0),
    ):
        is_told = is_known and (name == "rate_over_edge" or n_steps == plan.n_steps)
        value = rate / (factor * float(data[end])) if is_told else math.nan
        data[name] = ((), value, {"long_name": long_name, "units": "1", **({"unseen": reason} if reason else {})})
    n_updates, loss = _last_round(data)
    about = {"long_name": "loss at the best rate of the longest round", "units": "nat", "n_updates": n_updates}
    data["loss_at_best"] = ((), loss, about)
    if not is_known:
        for name in (f"{name}{end}" for name in _NAMES for end in ("", "_low", "_high")):
            data[name] = ((), math.nan)
    return data.assign_attrs(
        n_steps=n_steps,
        reason=reason,
        sentence=reason if found is None or reason else str(found),
    )


def _last_round(pilot: xr.Dataset) -> tuple[int, float]:
    """Updates of the longest round, and its smallest loss over the rates, mean over seeds; NaN: there is none."""
    if "loss" not in pilot or not np.isfinite(pilot["loss"].values).any():
        return 0, math.nan
    losses = pilot["loss"].sortby("n_updates").dropna("n_updates", how="all").isel(n_updates=-1)
    return int(losses["n_updates"]), float(losses.mean("seed").min())
