"""Measurement of the hazards of a plan on a model, as one labeled dataset."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import xarray as xr
from torch import nn

from workbench.errors import OptionError, require_listed
from workbench.hardware.emulation import Emulation, Finding, Loss, NotMeasured
from workbench.hardware.hazards import HAZARDS, Hazard
from workbench.hardware.plan import AssessmentPlan, read_plan
from workbench.io.provenance import versions
from workbench.models.calling import on_device_of
from workbench.models.losses import token_loss
from workbench.models.model_sizes import model_sizes
from workbench.models.subject import Subject
from workbench.option_checks import checked
from workbench.option_kinds import PositiveInt, Seed
from workbench.schema.statuses import CriterionState
from workbench.tasks import as_task
from workbench.tasks.random_stream import RandomStream

_NUMBERS = {
    "relative_error": "Norm of the change of the gradient (or update) over its norm",
    "error_over_noise": "Norm of the change of the gradient over the sampling noise of the plan's batch",
    "shrinkage": "Fraction of the gradient (or update, or largest rate) that is missing along its own direction",
    "cosine": "Cosine between the gradients with and without the effect",
}


@checked
def assess_hardware(
    model: nn.Module | Subject,
    batches_or_task: Any = None,
    plan: Any = None,
    *,
    n_batches: PositiveInt = 4,
    seed: Seed = 0,
    hazards: Collection[str] | None = None,
    loss: Loss = token_loss,
    on_hazard: Callable[[str], None] | None = None,
) -> xr.Dataset:
    """Measure the numerical hazards of a plan by emulating them on a model.

    All effects are emulated on copies, in one process, with gradients of the model itself; the model and all random
    states are left unchanged. The run of the plan is represented as follows:

    - The global batch is split into ``data_parallel * accumulation`` shares. Gradients of up to 32 micro-batches are
      measured, each with the number of examples of a share, or fewer if there are too few examples. If this does not
      cover all shares, terms are resampled; see `workbench.hardware.emulation.ShareGradients.terms`.
    - Up to 1,024 terms are added directly. The error of more terms is extrapolated from these, which is recorded in
      ``is_extrapolated``, ``how`` and ``growth``.
    - The reference of a sum is the float64 sum of the same terms; the reference of a forward and backward pass is
      float32.
    - The sampling noise is that of the plan's global batch, estimated from the spread of the micro-batches.
    - A model that is narrower or shallower than the plan's target is a proxy for it: rounding in sums over the width,
      and the number of buckets, are those of the proxy.

    Args:
        model: Untrained or trained model, small enough to run; computed in float32 on its device.
        batches_or_task: A task, or a source as in `workbench.tasks.as_task`; None uses the task of the plan.
        plan: A plan, or a source as in `read_plan`.
        n_batches: Maximum number of batches.
        seed: Seed of all random draws.
        hazards: Names of the hazards to measure; None measures all.
        loss: Function of logits and targets that returns a 0-dim tensor.
        on_hazard: Called with the title of each hazard that applies, before it is emulated.

    Returns:
        Dataset with the dimensions ``hazard``, ``layer`` and ``n_terms``: ``effect``, which is compared with
        ``healthy_limit`` and ``failing_limit``, and further results. Values are NaN if they are not defined, if the
        hazard does not apply, or if it could not be emulated (``state`` is then "not measured").

    Raises:
        OptionError: If the plan, a name or a value is invalid, the batches contain fewer than two examples, or
            no parameter is trainable.
        SnapshotError: If gradients of the model are not finite.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> plan = {"hardware": {"data_parallel": 4, "gradient_dtype": "bfloat16"}, "training": {"sequence_length": 8}}
        >>> found = wb.hardware.assess_hardware(model, plan=plan, n_batches=1, hazards=["allreduce_error"])
        >>> found["hazard"].values.tolist(), found["effect"].item() > 0
        (['allreduce_error'], True)

    See Also:
        `workbench.assess`: Includes these hazards.
    """
    plan, start_time = read_plan(plan), time.monotonic()
    require_listed("hazards", hazards or (), [hazard.id for hazard in HAZARDS])
    chosen = [hazard for hazard in HAZARDS if hazards is None or hazard.id in hazards]
    module = model.model if isinstance(model, Subject) else model
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise OptionError("The model has no trainable parameters; set requires_grad on some of them.")
    if batches_or_task is None:
        sizes = model_sizes(module)
        batches_or_task = plan.make_task(
            sizes.vocabulary, max_length=sizes.max_length, image_size=sizes.image_size, n_channels=sizes.n_channels
        )
    task = as_task(batches_or_task)
    # A list of batches is repeated endlessly, and repeated examples would lead to an underestimate of the noise.
    n_different = min(n_batches, int(task.describe().get("n_batches", n_batches)))
    device = next(module.parameters()).device
    with RandomStream(seed, device=device).active():
        batches = [
            tuple(on_device_of(module, part) for part in batch)
            for batch in itertools.islice(task.stream(), n_different)
        ]
        emulation = Emulation(module, batches, plan, loss=loss, seed=seed)
        found = []
        for hazard in chosen:
            if on_hazard is not None and hazard.applies(plan):
                on_hazard(hazard.title)
            found.append(_measured(hazard, emulation))
    name = model.name if isinstance(model, Subject) else type(module).__name__
    attrs = {
        "subject": name,
        "task": str(task.describe().get("task", "")),
        "plan": json.dumps(plan.as_dict(), sort_keys=True),
        "n_weights": sum(parameter.numel() for parameter in module.parameters()),
        "n_micro_batches": len(emulation.micro_batches),
        "rows_per_micro_batch": emulation.rows,
        "seed": seed,
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "duration": time.monotonic() - start_time,
    }
    if any(hazard.applies(plan) for hazard in chosen):
        with suppress(NotMeasured):
            attrs |= {"gradient_norm": emulation.shares.norm, "sampling_noise": emulation.noise}
    return _dataset(chosen, found, plan, emulation.layer_names).assign_attrs(attrs)


def _measured(hazard: Hazard, emulation: Emulation) -> Finding:
    """Return the finding for a hazard; its effect is NaN if the hazard does not apply or cannot be emulated."""
    if not hazard.applies(emulation.plan):
        return Finding(effect=math.nan, meaning="It does not apply to this plan.", how="", n_trials=0)
    try:
        finding = hazard.measure(emulation)
    except NotMeasured as error:
        reason = str(error)
        return Finding(effect=math.nan, meaning=f"{reason[:1].upper()}{reason[1:]}.", how="", n_trials=0)
    return finding if math.isfinite(finding.effect) else replace(finding, effect=math.inf)


def _dataset(hazards: list[Hazard], found: list[Finding], plan: AssessmentPlan, layer_names: list[str]) -> xr.Dataset:
    """Combine the findings into one dataset."""
    applies = [hazard.applies(plan) for hazard in hazards]
    pairs = list(zip(hazards, found, strict=True))
    states = [
        hazard.state_of(finding.effect) if is_on else CriterionState.HEALTHY
        for (hazard, finding), is_on in zip(pairs, applies, strict=True)
    ]
    columns: dict[str, tuple[list[Any], type, str]] = {
        "title": ([hazard.title for hazard in hazards], str, "Title"),
        "setting": ([hazard.setting for hazard in hazards], str, "Key of the plan that causes it"),
        "unit": ([hazard.unit for hazard in hazards], str, "Unit of effect and limits"),
        "state": (states, str, "healthy, at risk (above healthy_limit), failing (above failing_limit), not measured"),
        "meaning": ([finding.meaning for finding in found], str, "Result as a sentence"),
        "how": ([finding.how for finding in found], str, "How it was emulated; empty if it was not"),
        "limits_reason": ([hazard.reason for hazard in hazards], str, "Reason of the limits"),
        "remedy_setting": ([hazard.remedy_setting for hazard in hazards], str, "Key of the plan to change"),
        "remedy_value": ([f.remedy_value or h.remedy_value for h, f in pairs], str, "Proposed value of that key"),
        "effect": ([each.effect for each in found], float, "Measured effect, in `unit`; above the limits is worse"),
        "healthy_limit": ([hazard.healthy_limit for hazard in hazards], float, "Effects above it are at risk"),
        "failing_limit": ([hazard.failing_limit for hazard in hazards], float, "Effects above it are failing"),
        **{name: ([getattr(each, name) for each in found], float, meaning) for name, meaning in _NUMBERS.items()},
        "applies": (applies, bool, "Whether it applies to the plan"),
        "is_extrapolated": (
            [finding.is_extrapolated for finding in found], bool, "Whether the plan has more terms than were emulated"),
        "n_trials": ([finding.n_trials for finding in found], int, "Number of emulations"),
    }  # fmt: skip
    counts = sorted({n for finding in found for n in finding.growth})
    layer_error = np.full((len(found), len(layer_names)), np.nan)
    growth = np.full((len(found), len(counts)), np.nan)
    worst = np.full(len(found), -1)
    for i, finding in enumerate(found):
        if finding.layer_errors is not None and len(finding.layer_errors):
            layer_error[i] = finding.layer_errors
            worst[i] = -1 if np.isnan(layer_error[i]).all() else int(np.nanargmax(layer_error[i]))
        for n, error in finding.growth.items():
            growth[i, counts.index(n)] = error
    one = {"units": "1"}
    variables: dict[str, Any] = {
        name: ("hazard", np.array(values, dtype=kind), {"long_name": meaning} | (one if kind in (float, int) else {}))
        for name, (values, kind, meaning) in columns.items()
    }
    variables |= {
        "worst_layer": ("hazard", worst, {"long_name": "Block with the largest relative error; -1 if none", **one}),
        "layer_error": (("hazard", "layer"), layer_error, {"long_name": "Relative error in a block", **one}),
        "growth": (("hazard", "n_terms"), growth, {"long_name": "Relative error of a sum of n_terms terms", **one}),
    }
    coords = {
        "hazard": np.array([hazard.id for hazard in hazards], dtype=str),
        "layer": np.arange(len(layer_names)),
        "layer_name": ("layer", np.array(layer_names, dtype=str)),
        "n_terms": np.array(counts, dtype=int),
    }
    return xr.Dataset(variables, coords)
