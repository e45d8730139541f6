"""Flows of a model at the checkpoints of its training."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workbench.errors import CheckpointError
from workbench.flow.flow_measurement import measure
from workbench.flow.gradient_targets import Loss
from workbench.io.progress import Progress
from workbench.models.run_checkpoints import list_checkpoints, load_weights
from workbench.models.subject import Subject
from workbench.option_checks import PositiveInt, Seed

if TYPE_CHECKING:
    import xarray as xr


def along_run(
    store: str | os.PathLike[str],
    model: nn.Module | Subject,
    inputs: Any,
    *,
    steps: Collection[int] | None = None,
    targets: Any = None,
    loss: Loss | None = None,
    stack: str | None = None,
    batch_first: bool | None = None,
    jacobian: bool = True,
    n_singular: PositiveInt = 8,
    n_tokens: PositiveInt = 1024,
    n_jacobian_tokens: PositiveInt = 8,
    dtype: torch.dtype | None = None,
    seed: Seed = 0,
    progress: bool | Callable[[str], None] = True,
) -> xr.Dataset:
    """Measure the flow at the checkpoints of a run, on the same inputs.

    `workbench.train` with ``checkpoint_every`` writes checkpoints next to the store of its run. The parameters of each
    checkpoint are loaded into a copy of the model, which itself is not changed.

    Args:
        store: Store of the run, such as ``runs/mine.zarr``.
        model: Model that was trained.
        inputs: As for `measure`, but not an iterator that can be read only once.
        steps: Steps of the checkpoints; None for all.
        targets: As for `measure`, like all further arguments but ``progress``.
        loss: As for `measure`.
        stack: As for `measure`.
        batch_first: As for `measure`.
        jacobian: As for `measure`.
        n_singular: As for `measure`.
        n_tokens: As for `measure`.
        n_jacobian_tokens: As for `measure`.
        dtype: As for `measure`.
        seed: As for `measure`.
        progress: Whether to show progress; or a function that receives each progress text.

    Returns:
        Dataset as from `measure`, with the additional first dim ``step``.

    Raises:
        CheckpointError: If there is no checkpoint, or none of a requested step, or its weights do not fit the model.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> task = wb.tasks.associative_recall(length=16)
        >>> records = list(wb.train(model, task, n_steps=4, store="mine.zarr", checkpoint_every=2))
        >>> flow = wb.flow.along_run("mine.zarr", model, task, jacobian=False)
        >>> flow["step"].values
        array([2, 4])

    See Also:
        `workbench.flow.measure`: Measures one model.
        `workbench.train`: Writes checkpoints with ``checkpoint_every=``.
    """
    import xarray as xr

    folder = Path(store).with_suffix(".checkpoints")
    found = list_checkpoints(folder)
    if not found:
        raise CheckpointError(
            f"There are no checkpoints in {folder}; use wb.train(..., checkpoint_every=), or check the path.",
            name="store",
            value=str(store),
            expected="the store of a run with checkpoints",
        )
    chosen = sorted(found) if steps is None else sorted(steps)
    if missing := [step for step in chosen if step not in found]:
        known = ", ".join(map(str, found))
        raise CheckpointError(
            f"{folder} has no checkpoint of step {missing[0]}; the steps are {known}.",
            name="steps",
            value=missing[0],
            expected=tuple(found),
        )
    copied = copy.deepcopy(model.model if isinstance(model, Subject) else model)
    viewed = replace(model, model=copied) if isinstance(model, Subject) else copied
    flows = []
    with Progress(progress, "measured", total=len(chosen), unit="checkpoint") as bar:
        for step in chosen:
            load_weights(copied, found[step])
            flow = measure(
                viewed, inputs, targets=targets, loss=loss, stack=stack, batch_first=batch_first, jacobian=jacobian,
                n_singular=n_singular, n_tokens=n_tokens, n_jacobian_tokens=n_jacobian_tokens, dtype=dtype, seed=seed,
            )  # fmt: skip
            flows.append(flow)
            bar.update()
    combined = xr.concat(
        flows, dim=xr.IndexVariable("step", chosen), data_vars="all", coords="minimal", combine_attrs="override"
    )
    unseen = dict.fromkeys(line for flow in flows for line in flow.attrs["unseen"].splitlines())
    return combined.assign_attrs(unseen="\n".join(unseen), store=str(store))
