"""The pilot of an assessment: the useful learning rates of the planned training, estimated on the measured model."""

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
from workbench.rates.find_rate import FoundRates, extrapolated, find_rate, furthest, with_estimates
from workbench.tasks import as_task
from workbench.training.training_plan import DEFAULT_RATE, TrainingPlan

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor, nn

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
_NAMES = ("slow_edge", "best_rate", "useful_edge")


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

    Args:
        model: The model, which is not changed.
        task: See `workbench.tasks.as_task`.
        plan: Plan with an optimizer given by name or as a function.
        width_ratio: Width of the planned model over that of this model.
        budget: Maximum number of updates of the pilot.
        seconds: Time limit, after which only the finished rounds are used.
        loss: Function of logits and targets.
        on_update: Function that is called after each update; an exception that it raises ends the pilot.

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
    if width_ratio != 1 and _reads_images(task):
        return _described(None, plan, OF_IMAGES)
    end = time.monotonic() + seconds

    def tick(_: str) -> None:
        on_update()
        if time.monotonic() > end:
            raise _TimeIsUpError

    settings = {item.name: getattr(plan, item.name) for item in fields(TrainingPlan)}
    settings = {name: settings[name] for name in _SETTINGS}
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


def _reads_images(task: Any) -> bool:
    inputs, _ = next(iter(as_task(task).stream(0)))
    return isinstance(inputs, torch.Tensor) and inputs.is_floating_point()


#: Settings of the plan that the pilot uses.
_SETTINGS = ("warmup", "schedule", "optimizer", "optimizer_options", "clip_norm", "precision")


def _described(found: FoundRates | None, plan: TrainingPlan, reason: str) -> xr.Dataset:
    import xarray as xr

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
    """Return the updates of the longest round and its smallest loss over the rates, mean over seeds; NaN if unknown."""
    if "loss" not in pilot or not np.isfinite(pilot["loss"].values).any():
        return 0, math.nan
    losses = pilot["loss"].sortby("n_updates").dropna("n_updates", how="all").isel(n_updates=-1)
    return int(losses["n_updates"]), float(losses.mean("seed").min())
