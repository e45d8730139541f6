"""Read access to runs: by name, at a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.io.store import as_run
from workbench.schema.runs import CONCAT_DIMS

if TYPE_CHECKING:
    import xarray as xr


def named_runs(
    runs: xr.DataTree | xr.Dataset | Mapping[str, xr.DataTree | xr.Dataset], *, needs_spectra: bool = True
) -> dict[str, xr.DataTree]:
    """Runs by name; one alone is named after its subject.

    Args:
        runs: One run, or several by name.
        needs_spectra: Refuse runs without spectra.

    Raises:
        SchemaError: If there is no run, or one is not a run.
    """
    import xarray as xr

    if isinstance(runs, xr.DataTree | xr.Dataset):
        alone = _as_run(runs, "The run", needs_spectra=needs_spectra)
        return {str(spectra_of(alone).attrs["subject"]) if "spectra" in alone.children else "run": alone}
    if not isinstance(runs, Mapping) or not runs:
        kind = "an empty dict" if isinstance(runs, Mapping) else f"of type {type(runs).__name__}"
        raise SchemaError(f"The runs are {kind}, expected a non-empty dict of name: run.")
    found = {}
    for name, run in runs.items():
        if not isinstance(run, xr.DataTree | xr.Dataset):
            raise SchemaError(f"'{name}' is of type {type(run).__name__}, expected a run or a dataset of wb.profile().")
        found[str(name)] = _as_run(run, f"'{name}'", needs_spectra=needs_spectra)
    return found


def spectra_of(run: xr.DataTree) -> xr.Dataset:
    """The spectra of a run, its dimension ``step`` (if any) in rising order."""
    spectra = run["spectra"].to_dataset()
    return spectra.sortby("step") if "step" in spectra.dims else spectra


def at_step(spectra: xr.Dataset, at: int | str, *, name: str) -> xr.Dataset:
    """The spectra at one step.

    Args:
        spectra: With or without the dimension ``step``.
        at: ``"first"``, ``"last"``, or a number: the latest recorded step up to it.
        name: Name of the run, for error messages.

    Returns:
        The spectra without the dimension; the scalar coordinate ``step`` says which step it is, if the data do.

    Raises:
        SchemaError: If the spectra run over anything else, such as ``run``.
        OptionError: If there is no such step.
    """
    others = [dim for dim in spectra["eigenvalue"].dims if dim in CONCAT_DIMS and dim != "step"]
    if others:
        raise SchemaError(
            f"'{name}' runs over {', '.join(others)}; select one, for example spectra.isel({others[0]}=0)."
        )
    if at in ("first", "last"):
        return spectra.isel(step=0 if at == "first" else -1) if "step" in spectra.dims else spectra
    if isinstance(at, str | bool) or not isinstance(at, int | np.integer):
        raise OptionError(f"The step is {at!r}, expected 'first', 'last' or a whole number.")
    steps = recorded_steps(spectra)
    if not len(steps):
        raise OptionError(f"'{name}' names no steps, so step {at} is not to be found; use 'first' or 'last'.")
    if at < steps[0]:
        raise OptionError(f"'{name}' has no spectra at or before step {at}; its first are at step {steps[0]}.")
    return spectra.isel(step=np.searchsorted(steps, at, side="right") - 1) if "step" in spectra.dims else spectra


def recorded_steps(spectra: xr.Dataset) -> np.ndarray:
    """The steps that spectra were recorded at, in the order of the data; empty if the data name none."""
    return np.atleast_1d(spectra["step"].values) if "step" in spectra.coords else np.zeros(0, int)


def divergence_step(run: xr.DataTree) -> int | None:
    """The first step that an event calls a divergence; None if there is none."""
    if "events" not in run.children:
        return None
    events = run["events"].to_dataset()
    steps = events["step"].values[events["kind"].values == "divergence"]
    return int(steps.min()) if len(steps) else None


def last_step(run: xr.DataTree) -> int | None:
    """The last step that anything was recorded at; None if the run names no steps."""
    parts = [run[part].to_dataset() for part in ("spectra", "monitors", "events") if part in run.children]
    return max(
        (int(part["step"].max()) for part in parts if "step" in part.variables and part["step"].size), default=None
    )


def _as_run(data: xr.DataTree | xr.Dataset, name: str, *, needs_spectra: bool) -> xr.DataTree:
    try:
        run = as_run(data)
    except SchemaError as error:
        raise SchemaError(f"{name} is no run: {error}") from error
    if needs_spectra and "spectra" not in run.children:
        parts = ", ".join(run.children) or "nothing"
        raise SchemaError(
            f"{name} has no spectra, it holds {parts}; record some while training, or wb.profile() the model."
        )
    return run
