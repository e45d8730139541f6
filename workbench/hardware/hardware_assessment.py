"""Measure every hazard of a plan on a model, into one labelled dataset."""

from __future__ import annotations

import itertools
import json
import math
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from workbench.errors import OptionError
from workbench.hardware.emulation import Emulation, Finding
from workbench.hardware.hazards import HAZARDS, Hazard
from workbench.hardware.plan_files import AssessmentPlan, read_plan
from workbench.hardware.share_gradients import NotMeasured
from workbench.io.provenance import versions
from workbench.models.calling import on_device_of
from workbench.models.losses import token_loss
from workbench.models.model_sizes import model_sizes
from workbench.models.subject import Subject
from workbench.schema.statuses import CriterionState
from workbench.tasks import as_task
from workbench.tasks.random_stream import RandomStream
from workbench.tasks.task import require_seed, require_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import xarray as xr

    from workbench.hardware.share_gradients import Loss

_NUMBERS = {
    "relative_error": "Norm of the change of the gradient (or update) over its norm",
    "error_over_noise": "Norm of the change of the gradient over the sampling noise of the plan's batch",
    "shrinkage": "Share of the gradient (or update, or largest rate) that is missing along itself",
    "cosine": "Cosine between the gradient with and without",
}


def assess_hardware(
    model: nn.Module | Subject,
    batches_or_task: Any = None,
    plan: Any = None,
    *,
    n_batches: int = 4,
    seed: int = 0,
    hazards: Collection[str] | None = None,
    loss: Loss = token_loss,
    say: Callable[[str], None] | None = None,
) -> xr.Dataset:
    """Measure the numerical hazards of a plan by emulating them on a model.

    Everything is emulated on copies, in one process, with the real gradients of the model; the model and all random
    states are left unchanged. How the plan's run is represented:

    - The global batch is cut into ``data_parallel * accumulation`` shares. Gradients of up to 32 micro-batches are
      measured, each of as many sequences as a share has, or fewer where the batches hold too few. If these are not all
      shares, terms are resampled from them; see `workbench.hardware.share_gradients.ShareGradients.terms`.
    - Up to 1,024 terms are added up directly; the error of more is extrapolated from those counts, which the result
      records (``is_extrapolated``, ``how``, ``growth``).
    - The reference of a sum is the float64 sum of the same terms; of a forward and backward pass, float32.
    - Sampling noise is that of the plan's global batch, estimated from the spread of the micro-batches.
    - A model thinner or shallower than the plan's target stands for it: rounding in sums over its width, and the
      number of buckets, are its own.

    Args:
        model: Fresh or trained, small enough to run; computed in float32 on its device.
        batches_or_task: A task, or anything `workbench.tasks.as_task` takes; None: the plan's own task.
        plan: A plan, or a source that `read_plan` takes.
        n_batches: Number of batches to measure; fewer where there are fewer.
        seed: Seed of all draws.
        hazards: Names of the hazards to measure; None: all.
        loss: Function of logits and targets that returns a 0-dim tensor.
        say: Called with the title of each hazard that applies, before it is emulated; an exception ends the assessment.

    Returns:
        Dataset with the dimensions ``hazard``, ``layer`` and ``n_terms``: ``effect``, which is compared with
        ``healthy_limit`` and ``failing_limit``, and further findings. NaN: not measured, as the hazard does not
        apply or, as ``state`` records, could not be emulated; or there is no such number.

    Raises:
        OptionError: If the plan, a name or a number is impossible, the batches hold fewer than two sequences, or
            nothing is trainable.
        SnapshotError: If gradients of the model are not finite.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> plan = {"hardware": {"data_parallel": 4, "gradient_dtype": "bfloat16"}, "training": {"sequence_length": 8}}
        >>> found = wb.hardware.assess_hardware(model, plan=plan, n_batches=1, hazards=["allreduce_error"])
        >>> found["hazard"].values.tolist(), found["effect"].item() > 0
        (['allreduce_error'], True)
    """
    plan, begun = read_plan(plan), time.monotonic()
    require_whole(1, n_batches=n_batches)
    require_seed(seed)
    chosen = _chosen(hazards)
    module = model.model if isinstance(model, Subject) else model
    if not any(weight.requires_grad for weight in module.parameters()):
        raise OptionError("The model has no trainable weights; set requires_grad on some of them.")
    if batches_or_task is None:
        sizes = model_sizes(module)
        batches_or_task = plan.make_task(
            sizes.vocabulary,
            max_length=sizes.max_length,
            image_size=sizes.image_size,
            n_channels=sizes.n_channels,
        )
    task = as_task(batches_or_task)
    # A list of batches is repeated endlessly: examples used twice would underestimate the noise.
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
            if say is not None and hazard.applies(plan):
                say(hazard.title)
            found.append(_measured(hazard, emulation))
    name = model.name if isinstance(model, Subject) else type(module).__name__
    attrs = {
        "subject": name,
        "task": str(task.describe().get("task", "")),
        "plan": json.dumps(plan.as_dict(), sort_keys=True),
        "n_weights": sum(weight.numel() for weight in module.parameters()),
        "n_micro_batches": len(emulation.micro_batches),
        "rows_per_micro_batch": emulation.rows,
        "seed": seed,
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "duration": time.monotonic() - begun,
    }
    if any(hazard.applies(plan) for hazard in chosen):
        with suppress(NotMeasured):
            attrs |= {"gradient_norm": emulation.shares.norm, "sampling_noise": emulation.noise}
    return _dataset(chosen, found, plan, emulation.layer_names).assign_attrs(attrs)


def _chosen(names: Collection[str] | None) -> list[Hazard]:
    from workbench.hardware.plan_sections import nearest

    known = [hazard.id for hazard in HAZARDS]
    for name in names or ():
        if name not in known:
            raise OptionError(
                f"'{name}' is no hazard; the nearest is '{nearest(str(name), known)}', of {', '.join(known)}."
            )
    return [hazard for hazard in HAZARDS if names is None or hazard.id in names]


def _measured(hazard: Hazard, emulation: Emulation) -> Finding:
    """The finding on a hazard; NaN where it does not apply or cannot be emulated."""
    if not hazard.applies(emulation.plan):
        return Finding(effect=math.nan, meaning="It does not follow from this plan.", how="", n_trials=0)
    try:
        finding = hazard.measure(emulation)
    except NotMeasured as error:
        reason = str(error)
        return Finding(effect=math.nan, meaning=f"{reason[:1].upper()}{reason[1:]}.", how="", n_trials=0)
    return finding if math.isfinite(finding.effect) else replace(finding, effect=math.inf)


def _dataset(hazards: list[Hazard], found: list[Finding], plan: AssessmentPlan, layer_names: list[str]) -> xr.Dataset:
    import xarray as xr

    applies = [hazard.applies(plan) for hazard in hazards]
    states = [
        hazard.state_of(finding.effect) if is_on else CriterionState.HEALTHY
        for hazard, finding, is_on in zip(hazards, found, applies, strict=True)
    ]
    texts = {
        "title": ([hazard.title for hazard in hazards], "What it is called"),
        "setting": ([hazard.setting for hazard in hazards], "Key of the plan that it follows from"),
        "unit": ([hazard.unit for hazard in hazards], "Unit of effect and limits"),
        "state": (states, "healthy, at risk (above healthy_limit), failing (above failing_limit), not measured"),
        "meaning": ([finding.meaning for finding in found], "What was found"),
        "how": ([finding.how for finding in found], "How it was emulated; empty: it was not"),
        "limits_reason": ([hazard.reason for hazard in hazards], "Why these limits"),
        "remedy_setting": ([hazard.remedy_setting for hazard in hazards], "Key of the plan to change"),
        "remedy_value": (
            [finding.remedy_value or hazard.remedy_value for hazard, finding in zip(hazards, found, strict=True)],
            "To what",
        ),
    }
    numbers = {
        "effect": ([finding.effect for finding in found], "Measured effect, in `unit`; above the limits is worse"),
        "healthy_limit": ([hazard.healthy_limit for hazard in hazards], "Effects above it are at risk"),
        "failing_limit": ([hazard.failing_limit for hazard in hazards], "Effects above it are failing"),
    } | {name: ([getattr(finding, name) for finding in found], meaning) for name, meaning in _NUMBERS.items()}
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
    return xr.Dataset(
        {
            **{name: ("hazard", np.array(v, dtype=str), {"long_name": m}) for name, (v, m) in texts.items()},
            **{
                name: ("hazard", np.array(values, dtype=float), {"long_name": meaning, **one})
                for name, (values, meaning) in numbers.items()
            },
            "applies": ("hazard", np.array(applies, dtype=bool), {"long_name": "Whether it follows from the plan"}),
            "is_extrapolated": (
                "hazard",
                np.array([finding.is_extrapolated for finding in found], dtype=bool),
                {"long_name": "Whether the plan has more terms than were emulated"},
            ),
            "n_trials": (
                "hazard",
                np.array([finding.n_trials for finding in found]),
                {"long_name": "Emulations behind the effect", **one},
            ),
            "worst_layer": ("hazard", worst, {"long_name": "Block with the largest relative error; -1: none", **one}),
            "layer_error": (("hazard", "layer"), layer_error, {"long_name": "Relative error within a block", **one}),
            "growth": (
                ("hazard", "n_terms"),
                growth,
                {"long_name": "Relative error of a sum of so many terms", **one},
            ),
        },
        coords={
            "hazard": np.array([hazard.id for hazard in hazards], dtype=str),
            "layer": np.arange(len(layer_names)),
            "layer_name": ("layer", np.array(layer_names, dtype=str)),
            "n_terms": np.array(counts, dtype=int),
        },
    )
