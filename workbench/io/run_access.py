"""Read runs by name and at a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.io.store import as_run
from workbench.schema.runs import CONCAT_DIMS

if TYPE_CHECKING:
    import xarray as xr


def named_runs(
    runs: xr.DataTree | xr.Dataset | Mapping[str, xr.DataTree | xr.Dataset] | Iterable[xr.DataTree | xr.Dataset],
    *,
    needs_spectra: bool = True,
) -> dict[str, xr.DataTree]:
    """Return runs by name; runs without names are named after their subjects."""
    import xarray as xr

    if isinstance(runs, xr.DataTree | xr.Dataset):
        single = _as_run(runs, "The run", needs_spectra=needs_spectra)
        return {str(spectra_of(single).attrs["subject"]) if "spectra" in single.children else "run": single}
    if isinstance(runs, list | tuple):
        runs = by_subject(runs)
    if not isinstance(runs, Mapping) or not runs:
        raise SchemaError.of("runs", runs, "a run, or a non-empty dict of names and runs")
    found = {}
    for name, run in runs.items():
        if not isinstance(run, xr.DataTree | xr.Dataset):
            raise SchemaError(f"'{name}' is of type {type(run).__name__}, expected a run or a dataset of wb.profile().")
        found[str(name)] = _as_run(run, f"'{name}'", needs_spectra=needs_spectra)
    return found


def by_subject(things: Iterable[Any]) -> dict[str, Any]:
    """Return runs, spectra or models, each under the name of its subject; equal names are numbered from the second."""
    found: dict[str, Any] = {}
    for thing in things:
        data = thing["spectra"] if hasattr(thing, "subtree") and "spectra" in thing.children else thing
        name = getattr(data, "attrs", {}).get("subject") or getattr(thing, "name", None) or type(thing).__name__
        number = 1 + sum(each.partition(" (")[0] == name for each in found)
        found[name if number == 1 else f"{name} ({number})"] = thing
    return found


def spectra_of(run: xr.DataTree) -> xr.Dataset:
    """Return the spectra of a run, sorted along ``step`` if they have this dimension."""
    spectra = run["spectra"].to_dataset()
    return spectra.sortby("step") if "step" in spectra.dims else spectra


def at_step(spectra: xr.Dataset, at: int | str, *, name: str) -> xr.Dataset:
    """Return the spectra at one step."""
    others = [dim for dim in spectra["eigenvalue"].dims if dim in CONCAT_DIMS and dim != "step"]
    if others:
        raise SchemaError(
            f"'{name}' has the dimension {', '.join(map(str, others))}; select one entry, for example "
            f"spectra.isel({others[0]}=0)."
        )
    if at in ("first", "last"):
        return spectra.isel(step=0 if at == "first" else -1) if "step" in spectra.dims else spectra
    if isinstance(at, str | bool) or not isinstance(at, int | np.integer):
        raise OptionError.of("step", at, "'first', 'last' or an integer")
    steps = recorded_steps(spectra)
    if not len(steps):
        raise OptionError(f"'{name}' has no steps, so step {at} cannot be found; use 'first' or 'last'.")
    if at < steps[0]:
        raise OptionError(f"'{name}' has no spectra at or before step {at}; its first are at step {steps[0]}.")
    return spectra.isel(step=np.searchsorted(steps, at, side="right") - 1) if "step" in spectra.dims else spectra


def recorded_steps(spectra: xr.Dataset) -> np.ndarray:
    """Return the steps at which spectra were recorded, in the order of the data; empty if unknown."""
    return np.atleast_1d(spectra["step"].values) if "step" in spectra.coords else np.zeros(0, int)


def divergence_step(run: xr.DataTree) -> int | None:
    """Return the step of the first event of kind ``divergence``; None if there is none."""
    if "events" not in run.children:
        return None
    events = run["events"].to_dataset()
    steps = events["step"].values[events["kind"].values == "divergence"]
    return int(steps.min()) if len(steps) else None


def last_step(run: xr.DataTree) -> int | None:
    """Return the last step of spectra, monitors and events; None if the run has no steps."""
    parts = [run[part].to_dataset() for part in ("spectra", "monitors", "events") if part in run.children]
    return max(
        (int(part["step"].max()) for part in parts if "step" in part.variables and part["step"].size), default=None
    )


def _as_run(data: xr.DataTree | xr.Dataset, name: str, *, needs_spectra: bool) -> xr.DataTree:
    try:
        run = as_run(data)
    except SchemaError as error:
        raise error.within(f"{name} is not a run") from error
    if needs_spectra and "spectra" not in run.children:
        parts = ", ".join(run.children) or "nothing"
        raise SchemaError(
            f"{name} has no spectra, only {parts}; record spectra in training, or wb.profile() the model."
        )
    return run
