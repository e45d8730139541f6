"""Measure the largest stable learning rate of a cell on the cell's own grid, and the accuracy of predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import OptionError, SchemaError

if TYPE_CHECKING:
    import xarray as xr


def stable_rates(sweep: xr.Dataset, *, below: float = 0.20) -> xr.Dataset:
    """Find the two learning rates of its grid between which a cell stops being stable.

    A rate is stable where less than the given share of the runs diverge at it and at all smaller rates of the cell
    (0.20 is the paper's). The runs of a cell share every setting except learning rate and seed.

    Args:
        sweep: Sweep with ``cell``, ``learning_rate``, ``has_diverged``; ``architecture`` and ``configuration`` are
            kept.
        below: Share of runs.

    Returns:
        Dataset with dim ``cell``: ``largest_stable_rate``, the geometric mean of ``last_stable`` (the largest stable
        rate of the grid) and ``first_unstable`` (the next one); ``n_runs``, ``n_diverged``. Where the grid ends before
        the cell diverges, ``is_lower_bound`` is true and the rates are the last of the grid, NaN and NaN; where it is
        unstable even at the smallest rate, ``is_upper_bound`` is true, ``last_stable`` NaN.

    Raises:
        OptionError: If ``below`` is no share above 0.
        SchemaError: If the sweep lacks a variable, or has no run.

    Example:
        >>> import workbench as wb
        >>> rates = wb.risk.stable_rates(wb.samples.divergence_sweep("held out"))
        >>> within = rates.isel(cell=~rates["is_lower_bound"] & ~rates["is_upper_bound"])
        >>> bool((within["last_stable"] < within["first_unstable"]).all())
        True
    """
    import xarray as xr

    if not 0 < below <= 1:
        raise OptionError(f"below is {below}, expected a share above 0, at most 1.")
    missing = [name for name in ("cell", "learning_rate", "has_diverged") if name not in sweep.variables]
    if missing or not sweep.sizes.get("run"):
        raise SchemaError(f"The sweep has no {', '.join(missing) or 'run'}; take one from wb.open_sweep().")
    keep = [name for name in ("architecture", "configuration") if name in sweep.variables]
    cells, first, index = np.unique(sweep["cell"].values, return_index=True, return_inverse=True)
    order = np.argsort(first)  # in the order of the sweep
    rates, diverged = sweep["learning_rate"].values, sweep["has_diverged"].values.astype(bool)
    rows = []
    for i in order:
        of = index == i
        grid, at = np.unique(rates[of], return_inverse=True)
        share = np.bincount(at, weights=diverged[of]) / np.bincount(at)
        n_stable = int((share < below).cumprod().sum())
        last = grid[n_stable - 1] if n_stable else np.nan
        unstable = grid[n_stable] if n_stable < len(grid) else np.nan
        rows.append((last, unstable, of.sum(), diverged[of].sum()))
    last, unstable, n_runs, n_diverged = map(np.array, zip(*rows, strict=True))
    about = {"units": "1"}
    variables = {
        "largest_stable_rate": (
            "cell",
            np.sqrt(last * unstable),
            {"long_name": "largest stable learning rate"} | about,
        ),
        "last_stable": ("cell", last, {"long_name": "last stable rate of the grid"} | about),
        "first_unstable": ("cell", unstable, {"long_name": "first unstable rate of the grid"} | about),
        "is_lower_bound": ("cell", np.isnan(unstable)),
        "is_upper_bound": ("cell", np.isnan(last)),
        "n_runs": ("cell", n_runs.astype(int)),
        "n_diverged": ("cell", n_diverged.astype(int)),
    }
    coords = {"cell": cells[order]} | {name: ("cell", sweep[name].values[first[order]]) for name in keep}
    return xr.Dataset(variables, coords, {"below": below})


def stable_rate_accuracy(sweep: xr.Dataset, predicted: xr.DataArray, *, below: float = 0.20) -> xr.Dataset:
    """Compare predicted and measured largest stable rates, cell by cell.

    Args:
        sweep: As in `stable_rates`.
        predicted: Largest stable rate that a model gives each run, dim ``run``; NaN (refused) is ignored. A cell's
            prediction is the geometric mean over its runs, whose seeds differ.
        below: Share of runs, the same that the prediction was made for.

    Returns:
        The dataset of `stable_rates`, with ``predicted`` and ``ratio`` (predicted over measured; NaN where the grid or
        the model gives none), and ``is_consistent``: for cells with only a bound, whether the prediction satisfies it;
        for others whether it lies between the two rates.

    Raises:
        OptionError: As `stable_rates`.
        SchemaError: As `stable_rates`.

    Example:
        >>> import workbench as wb
        >>> import xarray as xr
        >>> sweep = wb.samples.divergence_sweep("norms")
        >>> predicted = xr.full_like(sweep["learning_rate"], 0.01)
        >>> wb.risk.stable_rate_accuracy(sweep, predicted)["ratio"].dims
        ('cell',)
    """
    found = stable_rates(sweep, below=below)
    logs = np.log10(np.asarray(predicted.values, dtype=float))
    own = np.full(found.sizes["cell"], np.nan)
    for i, cell in enumerate(found["cell"].values):
        of = logs[sweep["cell"].values == cell]
        if (~np.isnan(of)).any():
            own[i] = 10 ** np.nanmean(of)
    low = np.where(found["is_upper_bound"], 0, found["last_stable"])
    high = np.where(found["is_lower_bound"], np.inf, found["first_unstable"])
    return found.assign(
        predicted=("cell", own, {"long_name": "predicted largest stable rate", "units": "1"}),
        ratio=(
            "cell",
            own / found["largest_stable_rate"].values,
            {"long_name": "predicted over measured", "units": "1"},
        ),
        is_consistent=("cell", (own >= low) & (own <= high)),
    )


def share_within(ratio: xr.DataArray, factor: float = 1.5) -> float:
    """Share of cells whose predicted and measured stable rates differ by at most a factor; NaN cells are left out.

    Raises:
        OptionError: If the factor is below 1.

    Example:
        >>> import workbench as wb
        >>> import xarray as xr
        >>> ratio = xr.DataArray([1.2, 0.9, 4.0, 0.1, float("nan")], dims="cell")
        >>> wb.risk.share_within(ratio, factor=1.5)
        0.5
    """
    if not factor >= 1:
        raise OptionError(f"factor is {factor}, expected a number of at least 1.")
    values = np.abs(np.log(ratio.values[~np.isnan(ratio.values)]))
    return float(np.mean(values <= np.log(factor) + 1e-12)) if len(values) else np.nan
