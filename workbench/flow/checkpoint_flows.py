"""The flow of a model at every checkpoint of its training."""

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
    n_singular: int = 8,
    n_tokens: int = 1024,
    n_jacobian_tokens: int = 8,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool | Callable[[str], None] = True,
) -> xr.Dataset:
    """`measure` at the checkpoints next to a run's store, on the same inputs.

    ``store`` is that of the run, such as ``runs/mine.zarr``; `workbench.train` with ``checkpoint_every`` writes its
    checkpoints next to it. A copy of ``model`` gets the parameters of each checkpoint of ``steps`` (None: of all); the
    model is not changed. The inputs must not be an iterator that can be read only once. ``progress`` shows how far it
    is, or is a function that gets each text. All other arguments are those of `measure`.

    Returns:
        As `measure`, with the dim ``step`` before all others.

    Raises:
        CheckpointError: If there is no checkpoint, or not of those steps, or its weights do not fit the model.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> task = wb.tasks.associative_recall(length=16)
        >>> records = list(wb.train(model, task, n_steps=4, store="mine.zarr", checkpoint_every=2))
        >>> flow = wb.flow.along_run("mine.zarr", model, task, jacobian=False)
        >>> flow["step"].values
        array([2, 4])
    """
    import xarray as xr

    folder = Path(store).with_suffix(".checkpoints")
    found = list_checkpoints(folder)
    if not found:
        raise CheckpointError(f"There are no checkpoints in {folder}; train with checkpoint_every=, or check the path.")
    chosen = sorted(found) if steps is None else sorted(steps)
    if missing := [step for step in chosen if step not in found]:
        known = ", ".join(map(str, found))
        raise CheckpointError(f"{folder} has no checkpoint of step {missing[0]}; there are: {known}.")
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
    whole = xr.concat(
        flows, dim=xr.IndexVariable("step", chosen), data_vars="all", coords="minimal", combine_attrs="override"
    )
    unseen = dict.fromkeys(line for flow in flows for line in flow.attrs["unseen"].splitlines())
    return whole.assign_attrs(unseen="\n".join(unseen), store=str(store))
