"""Runs whose stages of a pipeline have a store each, ``NAME.stage0.zarr`` and so on, read as one run of one model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import StoreError
from workbench.io.far_places import FarPlace
from workbench.schema.statuses import RunState

if TYPE_CHECKING:
    import xarray as xr

#: Metrics of the examples, which the first stage reads; the others are those of the last stage that knows them.
_OF_INPUTS = ("batch_size", "n_tokens", "token_entropy", "repeated_examples", "repeated_batch")
#: Norms that each stage writes of its own parameters, see `workbench.callbacks.recorder.options.OF_STAGE`.
_OWN_NORMS = ("stage_grad_norm", "stage_change_norm", "stage_weight_norm")
#: States of a run; that of all stages is the first that one of them is in.
_STATES = ("unreadable", RunState.RUNNING, RunState.UNCLOSED, RunState.STOPPED, RunState.INTERRUPTED, RunState.DIVERGED)


def stage_name(name: str, index: int) -> str:
    """Return the name of the store of one stage of a run."""
    stem = name.removesuffix(".zarr")
    return f"{stem}.stage{index}{name[len(stem) :]}"


def stages_at(place: Path | FarPlace) -> list[Any]:
    """Return the places of the stores of all stages of a run; empty if the run has one store, or is missing.

    Raises:
        StoreError: If the store of a stage is missing.
    """
    if _is_there(place) or not _is_there(first := _beside(place, 0)):
        return []
    try:
        root = first.read("zarr.json") if isinstance(first, FarPlace) else (first / "zarr.json").read_bytes()
        n_stages = int(json.loads(root or b"")["attributes"]["n_stages"])
    except (OSError, ValueError, LookupError, TypeError):
        return []
    found = [_beside(place, i) for i in range(n_stages)]
    if missing := [each for each in found if not _is_there(each)]:
        raise StoreError(f"The run at {place} has {n_stages} stages, but {missing[0]} is missing; copy it there.")
    return found


def _beside(place: Path | FarPlace, index: int) -> Path | FarPlace:
    name = stage_name(place.name, index)
    return place.beside(name) if isinstance(place, FarPlace) else place.with_name(name)


def _is_there(place: Path | FarPlace) -> bool:
    return place.stamp("zarr.json") is not None if isinstance(place, FarPlace) else place.exists()


def state_of(states: Sequence[str]) -> str:
    """Return the state of a run from those of its stages."""
    return next((str(state) for state in _STATES if state in states), states[-1])


def joined(runs: Sequence[xr.DataTree]) -> xr.DataTree:
    """Return the runs of all stages, in their order, as one run of one model, whose values are loaded.

    Layers and modules follow each other, and the norms of gradients and of updates are those of all parameters. Rows
    that a stage has not written are left out: NaN in them would look like values that are not finite.
    """
    import xarray as xr

    names = dict.fromkeys(name for run in runs for name in run.children)
    parts = {
        name: {i: run[name].to_dataset().load() for i, run in enumerate(runs) if name in run.children} for name in names
    }
    n_layers = [0] * len(runs)
    for i, part in ((i, part) for of_stages in parts.values() for i, part in of_stages.items()):
        if "layer" in part.coords and part["layer"].size:
            n_layers[i] = max(n_layers[i], int(part["layer"].max()) + 1)
    firsts = [sum(n_layers[:i]) for i in range(len(runs))]
    found: dict[str, xr.Dataset] = {}
    for name, of_stages in parts.items():
        if name == "events":
            found[name] = _events(of_stages, firsts)
            continue
        if name == "evidence":
            found[name] = xr.concat([*of_stages.values()], "stage", join="outer").max("stage", keep_attrs=True)
            continue
        of_stages = _at_common_steps(of_stages)
        if name == "monitors" and len(of_stages) == len(runs):
            found[name] = _monitors([*of_stages.values()])
        elif all("layer" in part.coords for part in of_stages.values()):
            found[name] = _along("module" if name == "optimizer" else "layer", of_stages, firsts)
    tree = xr.DataTree.from_dict({f"/{name}": part for name, part in found.items()})
    shares = [float(run.attrs["watching_share"]) for run in runs if "watching_share" in run.attrs]
    tree.attrs = {name: value for name, value in runs[0].attrs.items() if name != "stage"}
    tree.attrs |= {"state": state_of([str(run.attrs.get("state", "")) for run in runs])}
    tree.attrs |= {"watching_share": max(shares)} if shares else {}
    return tree


def _at_common_steps(of_stages: Mapping[int, xr.Dataset]) -> dict[int, xr.Dataset]:
    steps = reduce(np.intersect1d, (part["step"].values for part in of_stages.values()))
    return {i: part.sel(step=steps) for i, part in of_stages.items()}


def _along(dim: str, of_stages: Mapping[int, xr.Dataset], firsts: Sequence[int]) -> xr.Dataset:
    """Return a part of all stages along its layers or modules; a value without them is that of the last stage."""
    import xarray as xr

    moved, n_before = [], 0
    for i, part in of_stages.items():
        own = part["layer"].values
        part = part.assign_coords(layer=part["layer"].copy(data=np.where(own < 0, own, own + firsts[i])))
        if dim == "module":
            names = part["module_name"].values.tolist()
            names = [f"{name} of stage {i}" if at < 0 else name for name, at in zip(names, own, strict=True)]
            part = part.assign_coords(module=part["module"] + n_before, module_name=(dim, names))
            n_before += part.sizes[dim]
        moved.append(part)
    each = [part[[name for name in part.data_vars if dim in part[name].dims]] for part in moved]
    found = xr.concat(each, dim, join="outer", coords="minimal", compat="override")
    found = found.assign(_known([part.drop_dims(dim) for part in moved[::-1]]).data_vars)
    if dim == "module":  # stages without embedding and head have nothing outside of their blocks
        found = found.isel(module=(found["layer"] >= 0) | found["module_weight_norm"].notnull().any("step"))
        found = found.assign_coords(module=np.arange(found.sizes["module"]))
    return found


def _known(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Return the values of the first part that knows them."""
    return reduce(lambda one, other: one.combine_first(other), parts)


def _monitors(parts: Sequence[xr.Dataset]) -> xr.Dataset:
    """Return the metrics of all stages: losses of the last one, contents of the first one, norms of all together."""
    import xarray as xr

    found, first = _known(parts[::-1]), _known(parts)
    every = xr.concat(parts, "stage", coords="minimal", compat="override", join="exact")
    own, change, size = (every[name] for name in _OWN_NORMS)
    # Norms that the loop logs are those of all stages if they are equal, and else each of its own stage.
    logged = every["grad_norm"].where(own.isnull())
    are_own = logged.notnull().all("stage") & (logged.max("stage") > logged.min("stage") * (1 + 1e-6))

    def total(norms: xr.DataArray) -> xr.DataArray:
        return (norms**2).sum("stage", skipna=False) ** 0.5

    known = xr.where(are_own, total(logged), logged.max("stage"))
    new = {
        **{name: first[name] for name in _OF_INPUTS},
        "grad_norm": xr.where(logged.notnull().any("stage"), known, total(own)),
        "update_ratio": total(change) / total(size),
        "is_skipped": every["is_skipped"].max("stage"),
        "lookahead": found["lookahead"].where(False),  # it compares outputs of the model with its inputs
    }
    found = found.assign({name: value.assign_attrs(found[name].attrs) for name, value in new.items()})
    return found.drop_vars(_OWN_NORMS)


def _events(of_stages: Mapping[int, xr.Dataset], firsts: Sequence[int]) -> xr.Dataset:
    """Return the events of all stages by their steps: those of all stages once, others with the stage."""
    import xarray as xr

    keys = {
        i: list(zip(*(part[name].values.tolist() for name in ("step", "kind", "source", "message")), strict=True))
        for i, part in of_stages.items()
    }
    n_equal = Counter(key for of_stage in keys.values() for key in {*of_stage})
    found: list[xr.Dataset] = []
    for i, part in of_stages.items():
        own = part["layer"].values
        is_own = (own >= 0) | np.array([n_equal[key] < len(of_stages) for key in keys[i]], dtype=bool)
        texts = [f"Stage {i}: {key[-1]}" if one else key[-1] for key, one in zip(keys[i], is_own, strict=True)]
        part = part.assign(
            message=part["message"].copy(data=np.array(texts, dtype=np.str_)),
            layer=part["layer"].copy(data=np.where(own < 0, own, own + firsts[i])),
        )
        found.append(part.isel(event=is_own) if found else part)
    events = xr.concat(found, "event")
    return events.isel(event=np.argsort(events["step"].values, kind="stable"))
