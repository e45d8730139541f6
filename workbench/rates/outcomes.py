"""Outcomes of each design of a sweep over learning rates: useful band, sensitivity, explosion, lasting spikes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.rates.useful_band import (
    REFERENCE_SHARE,
    largest_useful_loss,
    mean_over_seeds,
    rate_sensitivity,
    useful_band,
)
from workbench.schema.sweeps import LOSS_WINDOW

if TYPE_CHECKING:
    import xarray as xr

#: A design learns if it beats the trivial predictor by this many standard deviations between seeds.
_DEVIATIONS = 3.0
#: The sensitivity is taken over rates from the best one divided by this to the best one times this.
_DECADE = 10.0
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


def rate_outcomes(
    sweep: xr.Dataset, *, shorter: xr.Dataset | None = None, n_steps: int | None = None, against: str | None = None
) -> xr.Dataset:
    """Outcomes of each design of a sweep over learning rates.

    Args:
        sweep: Sweep with the losses along the runs, recorded with ``n_evaluations``. The runs of a design, its
            ``cell``, share all settings but learning rate and seed.
        shorter: Runs of four fifths of the updates, of designs whose schedule falls to 0; matched by the settings. A
            design without gets its reference from the run itself, which is right for a constant rate alone.
        n_steps: Number of updates after which the losses are read; None: all.
        against: Name of a study, to compare others with: a rate is useful if it reaches what the best rate of that
            study's design of the same architecture has after four fifths of the updates, and a design without such a
            rate has no edges. None: each design is compared with its own best rate.

    Returns:
        Dataset with dim ``cell``, ``architecture`` and ``study`` as coordinates:

        - ``best_rate``, ``best_loss``, ``slow_edge``, ``useful_edge`` as in `UsefulBand`; edges are NaN where the
          design did not learn;
        - ``explosion_edge``: the geometric mean of the smallest rate at which most runs diverge and the one below, or
          the smallest rate tried where they diverge there already; NaN: none did;
        - ``is_learned``: whether the best loss beats the trivial predictor by three standard deviations between seeds;
        - ``sensitivity``: `rate_sensitivity` over a decade on either side of the best rate, nat, no run being charged
          more than the trivial predictor's loss; NaN where so many rates were not tried;
        - ``lasting_spike_share``: share of the runs at useful rates with a lasting spike (`count_lasting_spikes`);
        - ``smallest_rate`` and ``largest_rate`` that were tried.

    Raises:
        SchemaError: If the sweep has no losses along its runs, or none after so many updates; or not one design of the
            study to compare with, of the same architecture and seeds.

    Example:
        >>> import workbench as wb
        >>> study = wb.samples.rate_study("fit")
        >>> runs = study.isel(run=(study.architecture == "Llama").values & (study.stage == "coarse").values)
        >>> wb.rates.rate_outcomes(runs)["useful_edge"].dims  # a rate for each setup of this architecture
        ('cell',)
    """
    import xarray as xr

    _require_curves(sweep)
    rows: list[dict[str, Any]] = []
    names: dict[str, list[str]] = {"architecture": [], "study": []}
    cells = list(dict.fromkeys(sweep["cell"].values.tolist()))
    for cell in cells:
        runs = sweep.isel(run=sweep["cell"].values == cell)
        table = LossTable.of(runs, n_steps)
        for name in names:
            names[name].append(str(runs[name][0].item()))
        compared = None if against is None else _compared(sweep, against, names["architecture"][-1], table)
        rows.append(_outcome(table, shorter, compared))
    variables = {name: ("cell", np.array([row[name] for row in rows])) for name in rows[0]}
    return xr.Dataset(variables, {"cell": cells, **{name: ("cell", values) for name, values in names.items()}})


def loss_over_rates(runs: xr.Dataset, *, shorter: xr.Dataset | None = None, n_steps: int | None = None) -> xr.Dataset:
    """Losses of one design by rate and seed, and the outcomes that follow from them; see `rate_outcomes`.

    Args:
        runs: Runs that share all settings but rate and seed.
        shorter: As in `rate_outcomes`.
        n_steps: As in `rate_outcomes`.

    Returns:
        Dataset with dims ``rate`` and ``seed``: ``loss``, infinite where it was not finite, NaN where a seed was not
        tried; ``mean_loss`` over the seeds that were; and, without dims, ``trivial_loss`` and the outcomes.

    Raises:
        SchemaError: If the runs are of several designs, or have no losses along them.

    Example:
        >>> import workbench as wb
        >>> study = wb.samples.rate_study("fit")
        >>> losses = wb.rates.loss_over_rates(study.isel(run=(study.cell == study.cell[0]).values))
        >>> losses.sizes["seed"], bool(losses.is_learned)
        (3, True)
    """
    import xarray as xr

    _require_curves(runs)
    if (n_cells := len(set(runs["cell"].values.tolist()))) > 1:
        raise SchemaError(f"The runs are of {n_cells} designs; select one, as with runs.cell == runs.cell[0].")
    table = LossTable.of(runs, n_steps)
    variables = {
        "loss": (("rate", "seed"), table.loss, {"long_name": "held-out loss", "units": "nat"}),
        "mean_loss": ("rate", mean_over_seeds(table.loss), {"long_name": "mean held-out loss", "units": "nat"}),
        "trivial_loss": table.trivial_loss,
    }
    coords = {"rate": ("rate", table.rate, {"long_name": "learning rate", "units": "1"}), "seed": table.seed}
    return xr.Dataset({**variables, **_outcome(table, shorter)}, coords)


def _compared(sweep: xr.Dataset, study: str, architecture: str, table: LossTable) -> LossTable:
    """The losses of a study's design of an architecture, of the seeds of another table."""
    is_it = (sweep["study"].values == study) & (sweep["architecture"].values == architecture)
    runs = sweep.isel(run=is_it)
    found = LossTable.of(runs, table.n_steps) if len(set(runs["cell"].values.tolist())) == 1 else None
    if found is None or found.seed.tolist() != table.seed.tolist():
        raise SchemaError(
            f"The study '{study}' has not one design of {architecture} with seeds {table.seed.tolist()}, expected "
            "one to compare with."
        )
    return found


def _earlier(table: LossTable, shorter: xr.Dataset | None) -> np.ndarray:
    """The losses after four fifths of the updates, of runs of their own where there are such."""
    found = None if shorter is None else table.earlier_from(shorter)
    return table.earlier() if found is None else found


def _outcome(table: LossTable, shorter: xr.Dataset | None, compared: LossTable | None = None) -> dict[str, Any]:
    """Outcomes of one design, its rates compared with those of another one or with its own."""
    reference = None if compared is None else largest_useful_loss(compared.loss, _earlier(compared, shorter))
    band = useful_band(table.rate, table.loss, _earlier(table, shorter), reference=reference)
    tried = table.loss[table.rate == band.best_rate]
    tried = tried[np.isfinite(tried)]
    deviation = float(np.std(tried, ddof=1)) if len(tried) > 1 else 0.0
    is_learned = band.best_loss < table.trivial_loss - _DEVIATIONS * deviation
    exploded = np.flatnonzero(table.exploded > 0.5)
    first = exploded[0] if len(exploded) else None
    edge = math.nan if first is None else math.sqrt(table.rate[first] * table.rate[max(first - 1, 0)])
    spikes = table.has_lasting_spike[(band.excess <= 0) & is_learned]
    return {
        "best_rate": band.best_rate,
        "best_loss": band.best_loss,
        "slow_edge": band.slow_edge if is_learned else math.nan,
        "useful_edge": band.useful_edge if is_learned else math.nan,
        "explosion_edge": edge,
        "is_learned": is_learned,
        "sensitivity": rate_sensitivity(
            table.rate,
            mean_over_seeds(table.loss),
            start_loss=table.trivial_loss,
            over=(band.best_rate / _DECADE, band.best_rate * _DECADE),
        ),
        "lasting_spike_share": float(np.nanmean(spikes)) if np.isfinite(spikes).any() else math.nan,
        "smallest_rate": float(table.rate[0]),
        "largest_rate": float(table.rate[-1]),
    }


@dataclass(frozen=True)
class LossTable:
    """Losses of the runs of one design by rate and seed.

    Attributes:
        runs: The runs.
        n_steps: Number of updates after which the losses are read.
        rate: Rates, rising, shape (rate,).
        seed: Seeds, shape (seed,).
        loss: Held-out loss after the updates, shape (rate, seed); infinite: not finite; NaN: not tried.
        exploded: Share of the runs of each rate that diverged within these updates.
        has_lasting_spike: Whether a run has a lasting spike, 0 or 1, shape (rate, seed); NaN: not tried.
        trivial_loss: Loss of the predictor that knows the frequencies of the targets alone; nat.
    """

    runs: xr.Dataset
    n_steps: int
    rate: np.ndarray
    seed: np.ndarray
    loss: np.ndarray
    exploded: np.ndarray
    has_lasting_spike: np.ndarray
    trivial_loss: float

    @classmethod
    def of(cls, runs: xr.Dataset, n_steps: int | None = None) -> LossTable:
        """The table of runs that share all settings but rate and seed."""
        total = int(runs["n_steps"].values[0]) if n_steps is None else n_steps
        rate, i = np.unique(runs["learning_rate"].values, return_inverse=True)
        seed, j = np.unique(runs["seed"].values, return_inverse=True)
        loss, spikes = (np.full((len(rate), len(seed)), np.nan) for _ in range(2))
        loss[i, j] = held_out_at(runs, total)
        n_windows = -(-total // LOSS_WINDOW)
        spikes[i, j] = [count_lasting_spikes(one[:n_windows]) > 0 for one in runs["training_loss"].values]
        has_exploded = runs["has_diverged"].values & (runs["divergence_step"].values < total)
        exploded = np.bincount(i, weights=has_exploded.astype(float)) / np.bincount(i)
        return cls(runs, total, rate, seed, loss, exploded, spikes, float(runs["trivial_loss"].values.mean()))

    def earlier(self) -> np.ndarray:
        """The losses of the same runs after four fifths of the updates; shape (rate, seed)."""
        found = np.full_like(self.loss, np.nan)
        i = np.searchsorted(self.rate, self.runs["learning_rate"].values)
        j = np.searchsorted(self.seed, self.runs["seed"].values)
        found[i, j] = held_out_at(self.runs, REFERENCE_SHARE * self.n_steps)
        return found

    def earlier_from(self, shorter: xr.Dataset) -> np.ndarray | None:
        """The losses of runs of the same design with four fifths of the updates; None: there are none."""
        own = design_key(json.loads(str(self.runs["settings"].values[0])))
        n_steps = REFERENCE_SHARE * self.n_steps
        is_same = [design_key(json.loads(str(text))) == own for text in shorter["settings"].values]
        runs = shorter.isel(
            run=np.array(is_same, dtype=bool) & np.isclose(shorter["n_steps"].values, n_steps, atol=0.5)
        )
        if not runs.sizes["run"]:
            return None
        found = np.full_like(self.loss, np.nan)
        losses = held_out_at(runs, n_steps)
        for rate, seed, loss in zip(runs["learning_rate"].values, runs["seed"].values, losses, strict=True):
            found[self.rate == rate, self.seed == seed] = loss
        return found


def design_key(settings: Mapping[str, Any]) -> str:
    """The design of a run, from its settings: all that decides its numbers but rate, seed and length."""
    training = {name: value for name, value in settings["training"].items() if name not in ("learning_rate", "n_steps")}
    return json.dumps([settings["model"], settings["task"], training, settings.get("kss")], sort_keys=True)


def held_out_at(runs: xr.Dataset, step: float) -> np.ndarray:
    """Held-out loss of each run after some updates, shape (run,); infinite: not finite, or the run ended before.

    Raises:
        SchemaError: If the loss was not to be measured then.
    """
    settings = json.loads(str(runs["settings"].values[0]))
    every = settings["training"]["n_steps"] // settings["n_evaluations"]
    nearest = every * round(step / every)
    if abs(nearest - step) > 0.5 or not 0 < nearest <= settings["training"]["n_steps"]:
        raise SchemaError(f"No held-out loss was measured at update {step:g}, only every {every} updates; choose one.")
    is_at = np.isclose(runs["evaluation_step"].values, nearest)
    return np.where(is_at, np.nan_to_num(runs["held_out_loss"].values, nan=math.inf), math.inf).min(axis=1)


def _require_curves(sweep: xr.Dataset) -> None:
    missing = [name for name in ("held_out_loss", "training_loss", "trivial_loss") if name not in sweep.variables]
    if missing or np.isnan(sweep["trivial_loss"].values).all():
        raise SchemaError("The sweep has no losses along its runs; record it with n_evaluations=.")
