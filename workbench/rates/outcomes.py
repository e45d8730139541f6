"""Outcomes of each design of a sweep over learning rates: useful band, sensitivity, explosion, lasting spikes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.rates.useful_band import REFERENCE_SHARE, useful_band

if TYPE_CHECKING:
    import xarray as xr

#: A design learns if it beats the trivial predictor by this many standard deviations between seeds.
_DEVIATIONS = 3.0
#: A spike is lasting if the loss has not returned within so many windows of the training loss.
_LASTING_WINDOWS = 3
_WINDOWS_BEFORE = 5


def count_lasting_spikes(loss: np.ndarray) -> int:
    """Count the spikes of the training loss from which it did not return within 30 updates.

    A spike begins where the mean of a window of 10 updates exceeds the median of the five windows before by more than
    a tenth of a nat and five times their median absolute deviation; it lasts while the loss stays above that bound.

    Args:
        loss: Mean training loss of each window, shape (window,); nat; infinite: not finite; NaN: after the end.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> wb.rates.count_lasting_spikes(np.r_[np.full(10, 2.0), 2.5, 2.0, 2.0, np.full(4, 3.0), np.full(5, 2.0)])
        1
    """
    loss = loss[: int(np.flatnonzero(~np.isnan(loss))[-1]) + 1] if (~np.isnan(loss)).any() else loss[:0]
    count, at = 0, _WINDOWS_BEFORE
    while at < len(loss):
        before = loss[at - _WINDOWS_BEFORE : at]
        middle = float(np.median(before))
        bound = middle + max(0.1, 5 * float(np.median(np.abs(before - middle))))
        is_high = ~(loss[at:] <= bound)
        length = int(np.argmin(is_high)) if not is_high.all() else len(is_high)
        count += length >= _LASTING_WINDOWS
        at += max(length, 1)
    return count


def rate_outcomes(sweep: xr.Dataset, *, shorter: xr.Dataset | None = None, n_steps: int | None = None) -> xr.Dataset:
    """Outcomes of each design of a sweep over learning rates.

    Args:
        sweep: Sweep with the losses along the runs, recorded with ``n_evaluations``. The runs of a design, its
            ``cell``, share all settings but learning rate and seed.
        shorter: Runs of four fifths of the updates, of designs whose schedule falls to 0; matched by the settings. A
            design without gets its reference from the run itself, which is right for a constant rate alone.
        n_steps: Number of updates after which the losses are read; None: all.

    Returns:
        Dataset with dim ``cell``: ``best_rate``, ``best_loss``, ``slow_edge``, ``useful_edge`` as in `UsefulBand`;
        ``explosion_edge``, the geometric mean of the smallest rate at which most runs diverge and the one below, or
        the smallest rate tried where they diverge there already (NaN: none did); ``is_learned``, whether the best loss
        beats the trivial predictor by three standard deviations between seeds; ``n_rates``; and ``architecture``. Edges
        are NaN where it is not.

    Raises:
        SchemaError: If the sweep has no losses along its runs.

    Example:
        >>> import workbench as wb
        >>> task = {"name": "random_tokens", "length": 8, "vocab_size": 16, "batch_size": 4}
        >>> size = {"d_model": 16, "n_layers": 2, "n_heads": 2}
        >>> runs = wb.sweeps.grid(
        ...     {"tiny": size}, learning_rate=[1e-3, 1e-2], n_steps=5, task=task, n_snapshots=0, n_evaluations=5
        ... )
        >>> sweep = wb.sweeps.run(runs, "sweep.zarr")  # doctest: +SKIP
        >>> wb.rates.rate_outcomes(sweep)["useful_edge"]  # doctest: +SKIP
    """
    import xarray as xr

    _require_curves(sweep)
    rows = []
    cells = list(dict.fromkeys(sweep["cell"].values.tolist()))
    for cell in cells:
        runs = sweep.isel(run=sweep["cell"].values == cell)
        rows.append(_outcome(runs, None if shorter is None else shorter, n_steps))
    names = rows[0].keys()
    variables = {name: ("cell", np.array([row[name] for row in rows])) for name in names if name != "architecture"}
    coords = {"cell": cells, "architecture": ("cell", [row["architecture"] for row in rows])}
    return xr.Dataset(variables, coords)


def loss_over_rates(runs: xr.Dataset, *, shorter: xr.Dataset | None = None, n_steps: int | None = None) -> xr.Dataset:
    """Losses of one design by rate and seed, and the outcomes that follow from them; see `rate_outcomes`.

    Args:
        runs: Runs that share all settings but rate and seed.
        shorter: As in `rate_outcomes`.
        n_steps: As in `rate_outcomes`.

    Returns:
        Dataset with dims ``rate`` and ``seed``: ``loss``, infinite where it was not finite, NaN where a seed was not
        tried; and, without dims, ``trivial_loss`` and the outcomes.

    Raises:
        SchemaError: If the runs are of several designs, or have no losses along them.

    Example:
        >>> import workbench as wb
        >>> sweep = wb.open_sweep("sweep.zarr")  # doctest: +SKIP
        >>> figure = wb.plots.rate_curve(wb.rates.loss_over_rates(sweep))  # doctest: +SKIP
    """
    import xarray as xr

    _require_curves(runs)
    if (n_cells := len(set(runs["cell"].values.tolist()))) > 1:
        raise SchemaError(f"The runs are of {n_cells} designs; select one, as with runs.cell == runs.cell[0].")
    table = LossTable.of(runs, n_steps)
    found = _outcome(runs, shorter, n_steps)
    about = {"long_name": "held-out loss", "units": "nat"}
    variables = {"loss": (("rate", "seed"), table.loss, about), "trivial_loss": table.trivial_loss}
    coords = {"rate": ("rate", table.rate, {"long_name": "learning rate", "units": "1"}), "seed": table.seed}
    return xr.Dataset({**variables, **found}, coords)


def _outcome(runs: xr.Dataset, shorter: xr.Dataset | None, n_steps: int | None) -> dict[str, Any]:
    """Outcomes of one design."""
    table = LossTable.of(runs, n_steps)
    earlier = table.earlier if shorter is None else table.earlier_from(shorter)
    band = useful_band(table.rate, table.loss, earlier)
    tried = table.loss[table.rate == band.best_rate]
    tried = tried[np.isfinite(tried)]
    deviation = float(np.std(tried, ddof=1)) if len(tried) > 1 else 0.0
    is_learned = band.best_loss < table.trivial_loss - _DEVIATIONS * deviation
    exploded = np.flatnonzero(table.exploded > 0.5)
    first = exploded[0] if len(exploded) else None
    edge = math.nan if first is None else math.sqrt(table.rate[first] * table.rate[max(first - 1, 0)])
    return {
        "architecture": str(runs["architecture"].values[0]),
        "best_rate": band.best_rate,
        "best_loss": band.best_loss,
        "slow_edge": band.slow_edge if is_learned else math.nan,
        "useful_edge": band.useful_edge if is_learned else math.nan,
        "explosion_edge": edge,
        "is_learned": is_learned,
        "n_rates": len(table.rate),
    }


@dataclass(frozen=True)
class LossTable:
    """Losses of the runs of one design by rate and seed.

    Attributes:
        rate: Rates, rising, shape (rate,).
        seed: Seeds, shape (seed,).
        loss: Held-out loss after the updates, shape (rate, seed); infinite: not finite; NaN: not tried.
        earlier: The same after four fifths of them.
        exploded: Share of the runs of each rate that diverged.
        trivial_loss: Loss of the predictor that knows the frequencies of the targets alone; nat.
        settings: Settings of a run, to find shorter runs of the same design.
    """

    rate: np.ndarray
    seed: np.ndarray
    loss: np.ndarray
    earlier: np.ndarray
    exploded: np.ndarray
    trivial_loss: float
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, runs: xr.Dataset, n_steps: int | None = None) -> LossTable:
        """The table of runs that share all settings but rate and seed."""
        total = int(runs["n_steps"].values[0]) if n_steps is None else n_steps
        rate, i = np.unique(runs["learning_rate"].values, return_inverse=True)
        seed, j = np.unique(runs["seed"].values, return_inverse=True)
        loss, earlier = (np.full((len(rate), len(seed)), np.nan) for _ in range(2))
        loss[i, j], earlier[i, j] = held_out_at(runs, total), held_out_at(runs, REFERENCE_SHARE * total)
        exploded = np.bincount(i, weights=runs["has_diverged"].values.astype(float)) / np.bincount(i)
        settings = json.loads(str(runs["settings"].values[0]))
        return cls(rate, seed, loss, earlier, exploded, float(runs["trivial_loss"].values[0]), settings)

    def earlier_from(self, shorter: xr.Dataset) -> np.ndarray:
        """The losses of shorter runs of the same design, where there are any; shape (rate, seed)."""

        def key(settings: Mapping[str, Any]) -> str:
            training = {k: v for k, v in settings["training"].items() if k not in ("learning_rate", "n_steps")}
            return json.dumps([settings["model"], settings["task"], training], sort_keys=True)

        own = key(self.settings)
        is_same = np.array([key(json.loads(str(text))) == own for text in shorter["settings"].values])
        if not is_same.any():
            return self.earlier
        found = np.full_like(self.loss, np.nan)
        runs = shorter.isel(run=is_same)
        losses = held_out_at(runs, float(runs["n_steps"].values[0]))
        for rate, seed, loss in zip(runs["learning_rate"].values, runs["seed"].values, losses, strict=True):
            found[self.rate == rate, self.seed == seed] = loss
        return found


def held_out_at(runs: xr.Dataset, step: float) -> np.ndarray:
    """Held-out loss of each run after some updates, shape (run,); infinite: not finite, or the run ended before.

    Raises:
        SchemaError: If the loss was not measured then.
    """
    steps = runs["evaluation_step"].values
    is_at = np.isclose(steps, step, atol=0.5)
    if not is_at.any():
        raise SchemaError(f"No run has a held-out loss at update {step:g}; choose one at which it was measured.")
    losses = np.where(is_at, runs["held_out_loss"].values, np.nan)
    found = np.nanmin(np.where(np.isnan(losses), np.inf, losses), axis=1)
    return np.where(is_at.any(axis=1), found, np.inf)


def _require_curves(sweep: xr.Dataset) -> None:
    missing = [name for name in ("held_out_loss", "evaluation_step", "trivial_loss") if name not in sweep.variables]
    if missing or np.isnan(sweep["evaluation_step"].values).all():
        raise SchemaError("The sweep has no losses along its runs; record it with n_evaluations=.")
