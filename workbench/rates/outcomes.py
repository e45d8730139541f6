"""Outcomes of each cell of a sweep over learning rates: useful band, sensitivity, explosion, lasting spikes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.option_kinds import n_dims
from workbench.schema.sweeps import LOSS_WINDOW

if TYPE_CHECKING:
    import xarray as xr


#: Fraction of the updates after which the best rate has the loss that a useful rate must reach after all updates.
REFERENCE_SHARE = 0.8
#: Difference of held-out losses below which two runs count as equal; nat.
RESOLUTION = 0.01


@dataclass(frozen=True)
class UsefulBand:
    """The learning rates at which a design learns about as well as at the best one.

    Attributes:
        best_rate: Learning rate of the lowest mean loss.
        best_loss: The lowest mean loss; nat.
        slow_edge: Lower end of the band; smaller rates are too slow for the number of updates. NaN if it lies outside
            the rates tried.
        useful_edge: Upper end of the band; NaN if it lies outside the rates tried.
        excess: Mean loss less the largest useful loss for each rate, shape (rate,); nat; infinite if not finite.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> loss = np.array([[2.6], [2.0], [2.1]])
        >>> wb.rates.useful_band(np.array([1e-3, 2e-3, 4e-3]), loss, loss + 0.2).best_loss
        2.0

    See Also:
        `workbench.rates.useful_band`: Returns it.
    """

    best_rate: float
    best_loss: float
    slow_edge: float
    useful_edge: float
    excess: np.ndarray


def useful_band(
    rate: np.ndarray,
    loss: Annotated[np.ndarray, n_dims(2)],
    earlier: np.ndarray,
    *,
    reference: np.ndarray | None = None,
) -> UsefulBand:
    """Find the band of useful learning rates of one design.

    A rate is useful if its held-out loss after all updates is no larger than that of the best rate after four fifths of
    them, so that it costs less than a quarter more updates. A loss within 0.01 nat of the best is useful too. Losses
    are compared for each seed separately, with the best rate determined from the other seeds, and the differences are
    averaged. Only rates tried with the largest number of seeds can be the best. The band is the contiguous one around
    the best rate; its ends are interpolated linearly in the logarithm of the rate.

    Args:
        rate: Learning rates, increasing, shape (rate,).
        loss: Held-out loss after all updates, shape (rate, seed); nat; infinite if not finite, NaN if not tried.
        earlier: The same after four fifths of the updates. With a schedule that decays to 0 these are separate runs
            with this number of updates.
        reference: Largest useful loss of each seed, shape (seed,), for example that of another design; None computes it
            from ``loss`` and ``earlier``. The edges are NaN if not even the best rate reaches it.

    Returns:
        The band.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> rate = np.array([0.001, 0.002, 0.004, 0.008])
        >>> loss = np.array([[2.6], [2.0], [2.1], [3.0]])
        >>> band = wb.rates.useful_band(rate, loss, loss + 0.2)
        >>> band.best_rate, round(band.slow_edge, 5), round(band.useful_edge, 5)
        (0.002, 0.00159, 0.00432)

    See Also:
        `workbench.rates.rate_outcomes`: Finds the bands of a sweep.
        `workbench.find_rate`: Estimates the band of a planned training.
    """
    for name, values, axes in (
        ("rate", rate, loss.shape[:1]),
        ("earlier", earlier, loss.shape),
        ("reference", reference, loss.shape[1:]),
    ):
        _require_shape(name, values, axes)
    n_tried = (~np.isnan(loss)).sum(axis=1)
    mean = mean_over_seeds(loss)
    compared = np.where(np.isfinite(mean) & (n_tried == n_tried.max()), mean, math.inf)
    is_own = reference is None
    reference = largest_useful_loss(loss, earlier) if reference is None else reference
    if not (np.isfinite(compared).any() and np.isfinite(reference).any()):
        return UsefulBand(math.nan, math.nan, math.nan, math.nan, mean)
    best = int(np.argmin(compared))
    excess = mean_over_seeds((loss - reference)[:, np.isfinite(reference)])
    is_useful = is_own or not excess[best] > 0
    ends = [_end(np.log(rate), excess, best, step) if is_useful else math.nan for step in (-1, 1)]
    return UsefulBand(float(rate[best]), float(mean[best]), math.exp(ends[0]), math.exp(ends[1]), excess)


def _require_shape(name: str, values: np.ndarray | None, shape: tuple[int, ...]) -> None:
    if values is not None and values.shape != shape:
        raise OptionError.of(name, values.shape, f"of shape {shape}, like loss")


def largest_useful_loss(loss: np.ndarray, earlier: np.ndarray) -> np.ndarray:
    """Return the largest useful loss of each seed, shape (seed,); NaN if unknown. Arguments as in `useful_band`."""
    return np.array([_reference(loss, earlier, seed) for seed in range(loss.shape[1])])


def _reference(loss: np.ndarray, earlier: np.ndarray, seed: int) -> float:
    """Return the largest useful loss of a seed, at the rate that is best for the other seeds; NaN if unknown."""
    others = np.delete(loss, seed, axis=1) if loss.shape[1] > 1 else loss
    known = np.isfinite(loss[:, seed]) & np.isfinite(earlier[:, seed])
    if not known.any():
        return math.nan
    by_others = np.where(known, np.nan_to_num(mean_over_seeds(others), nan=math.inf), math.inf)
    if not np.isfinite(by_others).any():  # No other seed was tried at these rates.
        by_others = np.where(known, loss[:, seed], math.inf)
    best = int(np.argmin(by_others))
    return max(float(earlier[best, seed]), float(loss[best, seed]) + RESOLUTION)


def mean_over_seeds(loss: np.ndarray) -> np.ndarray:
    """Return the mean over the seeds that were tried; NaN if there is none, infinite if one was not finite."""
    n_tried = (~np.isnan(loss)).sum(axis=1)
    total = np.where(np.isnan(loss), 0.0, loss).sum(axis=1)
    return np.where(n_tried > 0, total / np.maximum(n_tried, 1), np.nan)


def _end(log_rate: np.ndarray, excess: np.ndarray, best: int, step: int) -> float:
    """Return the logarithm of the rate where the excess becomes positive on one side of the best; NaN if nowhere."""
    at = best
    while 0 <= at + step < len(excess):
        here, there = excess[at], excess[at + step]
        if np.isnan(there):
            return math.nan
        if there > 0:
            fraction = 0.5 if math.isinf(there) else max(0.0, -here) / (there - min(0.0, here))
            return float(log_rate[at] + fraction * (log_rate[at + step] - log_rate[at]))
        at += step
    return math.nan


def rate_sensitivity(
    rate: np.ndarray, loss: Annotated[np.ndarray, n_dims(1)], *, start_loss: float, over: tuple[float, float]
) -> float:
    """Compute the learning-rate sensitivity: the mean excess of the loss over the best one, over a range of rates.

    It is the mean of min(loss, start_loss) - best loss over the logarithm of the rate (Wortsman et al. 2023,
    arXiv:2309.14322, Section 2.2), with the loss interpolated linearly.

    Args:
        rate: Learning rates, increasing, shape (rate,).
        loss: Mean loss at each rate, shape (rate,); nat; infinite if not finite.
        start_loss: Upper limit of the loss; nat. At most the loss of a uniform guess.
        over: First and last rate of the range.

    Returns:
        The sensitivity; nat; NaN if the rates tried do not cover the range.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> rate, loss = np.array([1e-3, 1e-2, 1e-1]), np.array([2.0, 1.0, 9.0])
        >>> round(wb.rates.rate_sensitivity(rate, loss, start_loss=3.0, over=(1e-3, 1e-1)), 3)
        0.75

    See Also:
        `workbench.rates.rate_outcomes`: Computes the sensitivity of each cell of a sweep.
    """
    _require_shape("rate", rate, loss.shape)
    is_known = ~np.isnan(loss)
    rate, loss = rate[is_known], loss[is_known]
    if not len(rate):
        return math.nan
    log_rate, ends = np.log(rate), np.log(over)
    if log_rate[0] > ends[0] + 1e-6 or log_rate[-1] < ends[1] - 1e-6:
        return math.nan
    inner = log_rate[(log_rate > ends[0]) & (log_rate < ends[1])]
    grid = np.array([ends[0], *inner, ends[1]])
    limited = np.interp(grid, log_rate, np.minimum(loss, start_loss))
    return float(np.trapezoid(limited - limited.min(), grid) / (ends[1] - ends[0]))


#: The runs of a cell learn if they beat the trivial predictor by this many standard deviations between seeds.
_DEVIATIONS = 3.0
#: The sensitivity is averaged over rates from the best one divided by this factor to the best one times this factor.
_DECADE = 10.0
#: A spike is lasting if the loss stays high for this many windows of the training loss.
_LASTING_WINDOWS = 3
_WINDOWS_BEFORE = 5


def count_lasting_spikes(loss: np.ndarray) -> int:
    """Count the spikes of the training loss that last at least 30 updates.

    A spike begins where the mean of a window of 10 updates exceeds the median of the previous five windows by more than
    0.1 nat and five times their median absolute deviation; it lasts while the loss stays above that bound.

    Args:
        loss: Mean training loss of each window, shape (window,); nat; infinite where the loss was not finite, NaN after
            the end of the run.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> wb.rates.count_lasting_spikes(np.r_[np.full(10, 2.0), 2.5, 2.0, 2.0, np.full(4, 3.0), np.full(5, 2.0)])
        1

    See Also:
        `workbench.rates.rate_outcomes`: Summarizes the runs of a study.
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
    """Compute the outcomes of each cell of a sweep over learning rates.

    The runs of a ``cell`` share all settings except learning rate and seed.

    Args:
        sweep: Sweep with the losses along the runs, recorded with ``n_evaluations``.
        shorter: Runs with four fifths of the updates, matched by their settings, for cells whose schedule decays to 0.
            The reference loss of a cell without such runs is read from its own runs after four fifths of the updates,
            which is valid only for a constant learning rate.
        n_steps: Number of updates after which the losses are read; None reads them after all updates.
        against: Name of a study with which the other studies are compared. A rate is then useful if its loss is no
            larger than that of the best rate after four fifths of the updates in the cell of the same architecture in
            that study; a cell without such a rate has no edges. If None, each cell is compared with its own best rate.

    Returns:
        Dataset with dimension ``cell``, and ``architecture`` and ``study`` as coordinates:

        - ``best_rate``, ``best_loss``, ``slow_edge``, ``useful_edge`` as in `UsefulBand`; the edges are NaN if the runs
          did not learn;
        - ``explosion_edge``: geometric mean of the smallest rate at which most runs diverge and the next smaller rate,
          or the smallest rate tried if most runs diverge there; NaN if there is no such rate;
        - ``is_learned``: whether the best loss beats the trivial predictor by three standard deviations between seeds;
        - ``sensitivity``: `rate_sensitivity` over a decade on either side of the best rate, with losses limited to that
          of the trivial predictor; nat; NaN if the rates tried do not cover this range;
        - ``lasting_spike_share``: fraction of the runs at useful rates with a lasting spike (`count_lasting_spikes`);
        - ``smallest_rate`` and ``largest_rate`` that were tried.

    Raises:
        SchemaError: If the sweep has no losses along its runs or none after this number of updates, or if the study to
            compare with does not have exactly one cell of the same architecture and seeds.

    Example:
        >>> import workbench as wb
        >>> study = wb.samples.open("rate_study", "fit")
        >>> runs = study.isel(run=(study.architecture == "Llama").values & (study.stage == "coarse").values)
        >>> wb.rates.rate_outcomes(runs)["useful_edge"].dims
        ('cell',)

    See Also:
        `workbench.rates.loss_over_rates`: Returns the losses of one cell.
        `workbench.plots.rate_bands`: Draws the bands.
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
    """Return the losses of one cell by learning rate and seed, and its outcomes; see `rate_outcomes`.

    Args:
        runs: Runs that share all settings except learning rate and seed.
        shorter: As in `rate_outcomes`.
        n_steps: As in `rate_outcomes`.

    Returns:
        Dataset with dimensions ``rate`` and ``seed``: ``loss``, infinite where it was not finite, NaN where a seed was
        not tried; ``mean_loss`` over the seeds that were tried; and the scalars ``trivial_loss`` and the outcomes.

    Raises:
        SchemaError: If the runs belong to several cells, or have no losses along them.

    Example:
        >>> import workbench as wb
        >>> study = wb.samples.open("rate_study", "fit")
        >>> losses = wb.rates.loss_over_rates(study.isel(run=(study.cell == study.cell[0]).values))
        >>> losses.sizes["seed"], bool(losses.is_learned)
        (3, True)

    See Also:
        `workbench.rates.rate_outcomes`: Computes the outcomes of all cells.
        `workbench.plots.rate_curve`: Draws the losses over the rates.
    """
    import xarray as xr

    _require_curves(runs)
    if (n_cells := len(set(runs["cell"].values.tolist()))) > 1:
        raise SchemaError(f"The runs belong to {n_cells} cells; select one, such as runs.cell == runs.cell[0].")
    table = LossTable.of(runs, n_steps)
    variables = {
        "loss": (("rate", "seed"), table.loss, {"long_name": "held-out loss", "units": "nat"}),
        "mean_loss": ("rate", mean_over_seeds(table.loss), {"long_name": "mean held-out loss", "units": "nat"}),
        "trivial_loss": table.trivial_loss,
    }
    coords = {"rate": ("rate", table.rate, {"long_name": "learning rate", "units": "1"}), "seed": table.seed}
    return xr.Dataset({**variables, **_outcome(table, shorter)}, coords)


def _compared(sweep: xr.Dataset, study: str, architecture: str, table: LossTable) -> LossTable:
    """Return the losses of the cell of an architecture in a study, with the same seeds as another table."""
    is_match = (sweep["study"].values == study) & (sweep["architecture"].values == architecture)
    runs = sweep.isel(run=is_match)
    n_cells = len(set(runs["cell"].values.tolist()))
    found = LossTable.of(runs, table.n_steps) if n_cells == 1 else None
    if found is None or found.seed.tolist() != table.seed.tolist():
        raise SchemaError(
            f"The study '{study}' must have one cell of {architecture} with seeds {table.seed.tolist()} to compare "
            f"with, but it has {n_cells if found is None else f'seeds {found.seed.tolist()}'}."
        )
    return found


def _earlier(table: LossTable, shorter: xr.Dataset | None) -> np.ndarray:
    """Return the losses after four fifths of the updates, from shorter runs if there are any."""
    found = None if shorter is None else table.earlier_from(shorter)
    return table.earlier() if found is None else found


def _outcome(table: LossTable, shorter: xr.Dataset | None, compared: LossTable | None = None) -> dict[str, Any]:
    """Return the outcomes of one cell; useful rates are relative to another cell, if one is given."""
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
    """Losses of the runs of one cell after ``n_steps`` updates, shape (rate, seed); NaN where not tried.

    They are infinite if not finite. ``exploded`` is the fraction that diverged at each rate, and ``trivial_loss``, in
    nat, that of the predictor that knows only the frequencies of the targets.
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
        """Create the table of runs that share all settings except learning rate and seed."""
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
        """Return the losses of the same runs after four fifths of the updates, shape (rate, seed)."""
        found = np.full_like(self.loss, np.nan)
        i = np.searchsorted(self.rate, self.runs["learning_rate"].values)
        j = np.searchsorted(self.seed, self.runs["seed"].values)
        found[i, j] = held_out_at(self.runs, REFERENCE_SHARE * self.n_steps)
        return found

    def earlier_from(self, shorter: xr.Dataset) -> np.ndarray | None:
        """Return the losses of runs with the same settings and four fifths of the updates; None if there are none."""
        if "settings" not in shorter.variables:
            raise SchemaError.of("shorter", tuple(shorter.variables), "a sweep")
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
    """Return a key of the settings that determine the results of a run, except learning rate, seed and length."""
    training = {name: value for name, value in settings["training"].items() if name not in ("learning_rate", "n_steps")}
    return json.dumps([settings["model"], settings["task"], training, settings.get("kss")], sort_keys=True)


def held_out_at(runs: xr.Dataset, step: float) -> np.ndarray:
    """Return the held-out loss of each run after a number of updates, infinite if not finite or ended before."""
    settings = json.loads(str(runs["settings"].values[0]))
    every = settings["training"]["n_steps"] // settings["n_evaluations"]
    nearest = every * round(step / every)
    if abs(nearest - step) > 0.5 or not 0 < nearest <= settings["training"]["n_steps"]:
        raise SchemaError(
            f"No held-out loss was measured at update {step:g}; it was measured every {every} updates up to "
            f"{settings['training']['n_steps']}."
        )
    is_at = np.isclose(runs["evaluation_step"].values, nearest)
    return np.where(is_at, np.nan_to_num(runs["held_out_loss"].values, nan=math.inf), math.inf).min(axis=1)


def _require_curves(sweep: xr.Dataset) -> None:
    """Raise SchemaError if a sweep has no losses along its runs."""
    missing = [name for name in ("held_out_loss", "training_loss", "trivial_loss") if name not in sweep.variables]
    if missing or np.isnan(sweep["trivial_loss"].values).all():
        raise SchemaError("The sweep has no losses along its runs; use wb.sweeps.RunSettings(..., n_evaluations=).")
