"""Evaluate a recorded study of alarms: shares of runs, lead times, and the confusion matrix of the attribution.

Every function takes the table of `workbench.samples.early_warning`, or one made like it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import OptionError, SchemaError

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "SIGNS",
    "attributed_rightly",
    "confusion",
    "false_alarms",
    "harmful",
    "lead_times",
    "saved",
    "shown_at",
    "warned_first",
]


#: The usual signals, each with its alarm, and divergence.
SIGNS = ("loss", "grad_norm", "spike_score", "divergence")
_OUTCOMES = ("loss_step", "grad_norm_step", "spike_score_step")


def harmful(runs: xr.Dataset, *, margin: float = 0.05) -> xr.DataArray:
    """Which faulted runs diverged, or ended less accurate than the same run without the fault; bool, dim ``run``.

    Args:
        runs: The table.
        margin: Accuracy that a run may lose; of 1,024 questions, two standard errors of a difference are .044.

    Raises:
        SchemaError: If the table lacks a column.
        OptionError: If the margin is negative.

    Example:
        >>> import workbench as wb
        >>> runs = wb.samples.early_warning()
        >>> harmful = wb.early_warning.harmful(runs)
        >>> bool((runs["fault"][harmful] != "").all())
        True
    """
    if margin < 0:
        raise OptionError(f"margin is {margin}, expected a share of at least 0.")
    _need(runs, "fault", "has_diverged", "accuracy", "healthy_accuracy")
    has_fault = runs["fault"] != ""
    return has_fault & (runs["has_diverged"] | (runs["accuracy"] < runs["healthy_accuracy"] - margin))


def shown_at(runs: xr.Dataset, *, signs: Sequence[str] = SIGNS) -> xr.DataArray:
    """The step of the first alarm of loss, gradient norm or spike score, or of divergence; dim ``run``.

    Args:
        runs: The table.
        signs: Which of these four to use.

    Returns:
        Steps; NaN where there was none.

    Raises:
        SchemaError: If the table lacks a column.
        OptionError: If a sign is unknown.

    Example:
        >>> import workbench as wb
        >>> runs = wb.samples.early_warning()
        >>> by_loss = wb.early_warning.shown_at(runs, signs=["loss"])
        >>> bool((by_loss < wb.early_warning.shown_at(runs)).any())  # more signs never show it later
        False
    """
    for sign in signs:
        if sign not in SIGNS:
            raise OptionError(f"There is no sign '{sign}', expected some of {', '.join(SIGNS)}.")
    _need(runs, *_OUTCOMES, "has_diverged", "step")
    steps = {name.removesuffix("_step"): runs[name] for name in _OUTCOMES}
    steps["divergence"] = runs["step"].where(runs["has_diverged"])
    ends = [steps[sign] for sign in signs]
    first = np.fmin.reduce([np.asarray(end, dtype=float) for end in ends])
    return runs["step"].astype(float).copy(data=first)


def lead_times(runs: xr.Dataset, *, signs: Sequence[str] = SIGNS) -> xr.DataArray:
    """Steps from the first alarm of a mechanism monitor to the first of the other signals; dim ``run``.

    Args:
        runs: The table.
        signs: As in `shown_at`.

    Returns:
        Steps; negative where the mechanism came later, infinite where no other signal alarmed, NaN where the mechanism
        raised no alarm.

    Raises:
        SchemaError: If the table lacks a column.

    Example:
        >>> import workbench as wb
        >>> runs = wb.samples.early_warning()
        >>> steps = wb.early_warning.lead_times(runs)
        >>> bool((steps[wb.early_warning.warned_first(runs)] > 0).all())
        True
    """
    _need(runs, "mechanism_step")
    shown = shown_at(runs, signs=signs)
    return shown.fillna(np.inf) - runs["mechanism_step"]


def warned_first(runs: xr.Dataset, *, signs: Sequence[str] = SIGNS) -> xr.DataArray:
    """Whether a mechanism monitor raised its alarm strictly before any of the other signals; bool, dim ``run``.

    Args:
        runs: The table.
        signs: As in `shown_at`.

    Example:
        >>> import workbench as wb
        >>> runs = wb.samples.early_warning()
        >>> first = wb.early_warning.warned_first(runs)
        >>> first.dims, bool((wb.early_warning.lead_times(runs)[first] > 0).all())
        (('run',), True)
    """
    return lead_times(runs, signs=signs) > 0


def false_alarms(runs: xr.Dataset) -> xr.Dataset:
    """Count the healthy runs that raised an alarm.

    Args:
        runs: The table.

    Returns:
        Dataset of numbers: ``n_runs``; ``any`` (runs with an alarm of either group), ``mechanism``, ``outcome``.

    Raises:
        SchemaError: If the table lacks a column or has no healthy run.

    Example:
        >>> import workbench as wb
        >>> alarms = wb.early_warning.false_alarms(wb.samples.early_warning())
        >>> int(alarms["mechanism"]) <= int(alarms["any"]) <= int(alarms["n_runs"])
        True
    """
    import xarray as xr

    _need(runs, "fault", "mechanism_step", *_OUTCOMES)
    healthy = runs.isel(run=np.flatnonzero(runs["fault"].values == ""))
    if not healthy.sizes["run"]:
        raise SchemaError("The table has no healthy run; add runs whose fault is empty.")
    mechanism = healthy["mechanism_step"].notnull().values
    outcome = np.any([healthy[name].notnull().values for name in _OUTCOMES], axis=0)
    counts = {"any": mechanism | outcome, "mechanism": mechanism, "outcome": outcome}
    return xr.Dataset({"n_runs": healthy.sizes["run"], **{name: int(found.sum()) for name, found in counts.items()}})


def confusion(runs: xr.Dataset, *, cause: str = "cause_later") -> xr.DataArray:
    """The confusion matrix of the alarmed runs with one fault: the fault and its attribution.

    Args:
        runs: The table.
        cause: Column of the attribution: ``"cause_at_once"``, ``"cause_later"`` or ``"cause_later_without_settings"``.

    Returns:
        Runs, int, dims ``fault`` and ``attributed``.

    Raises:
        SchemaError: If the table lacks a column.

    Example:
        >>> import workbench as wb
        >>> table = wb.early_warning.confusion(wb.samples.early_warning())
        >>> table.dims, int(table.sel(fault="large_rate", attributed="large_rate")) > 0
        (('fault', 'attributed'), True)
    """
    import xarray as xr

    _need(runs, "fault", cause)
    pairs = [
        (fault, found)
        for fault, found in zip(runs["fault"].values.tolist(), runs[cause].values.tolist(), strict=True)
        if fault and found and " + " not in fault
    ]
    faults = sorted({fault for fault, _ in pairs})
    attributed = sorted({found for _, found in pairs} | set(faults))
    counts = np.zeros((len(faults), len(attributed)), dtype=int)
    for fault, found in pairs:
        counts[faults.index(fault), attributed.index(found)] += 1
    return xr.DataArray(counts, coords={"fault": faults, "attributed": attributed}, name="runs")


def attributed_rightly(runs: xr.Dataset, *, cause: str = "cause_later") -> tuple[int, int]:
    """Count the alarmed runs that were attributed to their fault, or to one of several, and all alarmed runs.

    Args:
        runs: The table.
        cause: See `confusion`.

    Raises:
        SchemaError: If the table lacks a column.

    Example:
        >>> import workbench as wb
        >>> right, alarmed = wb.early_warning.attributed_rightly(wb.samples.early_warning())
        >>> 0 < right <= alarmed
        True
    """
    _need(runs, "fault", cause)
    pairs = zip(runs["fault"].values.tolist(), runs[cause].values.tolist(), strict=True)
    right = [found in fault.split(" + ") for fault, found in pairs if fault and found]
    return sum(right), len(right)


def saved(runs: xr.Dataset, *, margin: float = 0.05) -> xr.DataArray:
    """Which harmful runs automatic actions saved: converged, as accurate as the paired healthy run; bool, dim ``run``.

    Args:
        runs: The table.
        margin: As in `harmful`.

    Raises:
        SchemaError: If the table lacks a column.
        OptionError: If the margin is negative.

    Example:
        >>> import workbench as wb
        >>> runs = wb.samples.early_warning()
        >>> saved = wb.early_warning.saved(runs)
        >>> bool(wb.early_warning.harmful(runs)[saved].all())
        True
    """
    _need(runs, "acted_has_diverged", "acted_accuracy")
    is_well = ~runs["acted_has_diverged"] & (runs["acted_accuracy"] >= runs["healthy_accuracy"] - margin)
    return harmful(runs, margin=margin) & is_well


def _need(runs: xr.Dataset, *names: str) -> None:
    missing = [name for name in names if name not in runs.variables]
    if missing:
        raise SchemaError(
            f"This table of runs lacks {', '.join(missing)}; take samples.early_warning(), or one made like it."
        )


def __dir__() -> list[str]:
    return sorted(__all__)
