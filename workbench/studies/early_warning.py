"""Evaluation of a recorded study of alarms: delays from the onset of a fault, named causes, and false alarms.

Every function takes the table of ``wb.samples.open("early_warning")``, or one with the same columns, dim ``run``:

- Run: ``set`` (``"locked"`` is the test set, used neither for detectors nor for thresholds), ``setup``, ``family``,
  ``plan``, ``kind`` of fault (empty if there is none; ``"late"`` for runs that may fail without one), ``dose``,
  ``remedy``, ``expected_cause``, ``settings_show_it`` (whether the logged settings reveal the fault), ``start`` of the
  fault (NaN if there is none) and ``n_steps``.
- Outcome: ``is_harmful``, ``harm_step`` (step at which the loss is visibly worse or the run diverged; NaN if neither),
  ``divergence`` (cause of the divergence; empty if it converged).
- Alarms from the onset on: ``first_step``, ``first_signal``, ``mechanism_step``, ``mechanism_signal`` (neither loss nor
  gradient norm), ``loss_step`` and ``grad_norm_step`` (each alone, with the same total rate of false alarms), NaN if
  there is no alarm; ``first_cause`` and ``cause`` (named by the first alarm, and within 50 steps); ``n_alarms``. Alarms
  of a healthy run (``n_alarms``, ``n_loss_alarms``, ``n_grad_norm_alarms``) are false alarms.
- Alarms before the onset: ``n_alarms_before``, ``alarms_before``.

Example:
    >>> import workbench as wb
    >>> runs = wb.early_warning.of_set(wb.samples.open("early_warning"), "locked")
    >>> wb.early_warning.goals(runs)["goal"].values[0].item()
    'alarm within 50 steps of the onset'

See Also:
    `workbench.samples.open`: The recorded study.
    `workbench.Alarms`: The alarms that the study evaluates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import SchemaError, require_listed
from workbench.option_checks import publish
from workbench.option_kinds import NonNegativeInt
from workbench.risk.scores import resamples

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["by_kind", "false_alarms", "goals", "of_set"]

#: Compared detectors -> column with the step of their first alarm from the onset on.
DETECTORS = {"all alarms": "first_step", "loss alone": "loss_step", "gradient norm alone": "grad_norm_step"}
#: A fault is subtle if it harms the run only more than this many steps after its onset.
SUBTLE = 500
#: Number of steps from the onset within which a fault should be found.
SOON = 50
_PER_STEPS = 100_000
_N_BOOTSTRAP = 1000


def of_set(runs: xr.Dataset, *names: str) -> xr.Dataset:
    """Return the runs of the given sets.

    Args:
        runs: The table.
        *names: Names of sets, such as the test set (``"locked"``), which was used neither for detectors nor for
            thresholds.

    Raises:
        OptionError: If there is no such set.

    Example:
        >>> import workbench as wb
        >>> locked = wb.early_warning.of_set(wb.samples.open("early_warning"), "locked")
        >>> set(locked["set"].values.tolist())
        {'locked'}

    See Also:
        `workbench.early_warning.goals`: Evaluates the runs of a set.
    """
    _need(runs, "set")
    require_listed("set", names, sorted(set(runs["set"].values.tolist())))
    return runs.isel(run=np.flatnonzero(np.isin(runs["set"].values, names)))


def harmful(runs: xr.Dataset) -> xr.DataArray:
    """Return which runs a fault harmed that the settings do not reveal, bool with dim ``run``.

    A harmed run diverged, or ended above its control by three standard deviations of a mean over 50 steps.
    """
    _need(runs, "start", "is_harmful", "settings_show_it")
    return runs["start"].notnull() & runs["is_harmful"] & ~runs["settings_show_it"]


def delays(runs: xr.Dataset, *, detector: str = "all alarms") -> xr.DataArray:
    """Return the number of steps from the onset of the fault to the first alarm, dim ``run``; NaN if there is none."""
    _need(runs, "start", DETECTORS[detector])
    return runs[DETECTORS[detector]] - runs["start"]


def false_alarms(runs: xr.Dataset) -> xr.Dataset:
    """Count the alarms of healthy runs.

    Args:
        runs: The table.

    Returns:
        Dataset with dim ``detector``: ``n_alarms``, ``n_steps``, ``rate`` per 100,000 steps, and ``low`` and ``high``,
        its 95 % interval if false alarms are independent (Poisson).

    Raises:
        SchemaError: If the table lacks a column or has no healthy run.

    Example:
        >>> import workbench as wb
        >>> counts = wb.early_warning.false_alarms(wb.samples.open("early_warning"))
        >>> bool((counts["low"] <= counts["rate"]).all())
        True

    See Also:
        `workbench.early_warning.goals`: Evaluates the alarms of runs with faults.
    """
    import xarray as xr
    from scipy.stats import chi2

    _need(runs, "kind", "n_steps", "n_alarms", "n_loss_alarms", "n_grad_norm_alarms")
    healthy = runs.isel(run=np.flatnonzero(runs["kind"].values == ""))
    if not healthy.sizes["run"]:
        raise SchemaError("The table has no healthy run; add runs whose kind of fault is empty.")
    n_steps = int(healthy["n_steps"].sum())
    columns = ("n_alarms", "n_loss_alarms", "n_grad_norm_alarms")
    counts = np.array([int(healthy[name].sum()) for name in columns])
    low = np.where(counts > 0, chi2.ppf(0.025, 2 * np.maximum(counts, 1)) / 2, 0.0)
    high = chi2.ppf(0.975, 2 * counts + 2) / 2
    scale = _PER_STEPS / n_steps
    found = {"n_alarms": counts, "rate": counts * scale, "low": low * scale, "high": high * scale}
    return xr.Dataset(
        {name: ("detector", values) for name, values in found.items()} | {"n_steps": n_steps},
        coords={"detector": list(DETECTORS)},
    )


def goals(runs: xr.Dataset, *, seed: NonNegativeInt = 0) -> xr.Dataset:
    """Compare the alarms with their goals and with two baselines, for harmful faults that the settings do not reveal.

    Args:
        runs: The table; see `workbench.early_warning.of_set`.
        seed: Seed of the resamples of the families.

    Returns:
        Dataset with dims ``goal`` and ``detector``: ``asked`` (the target fraction), ``n`` (runs that count),
        ``n_reached``, ``share`` (the fraction reached), and ``low`` and ``high``, the wider of Wilson's 95 % interval
        over runs and of that over resamples of the families. NaN if there is no such run, or a goal does not apply to a
        detector.

    Raises:
        SchemaError: If the table lacks a column.

    Example:
        >>> import workbench as wb
        >>> runs = wb.early_warning.of_set(wb.samples.open("early_warning"), "locked")
        >>> found = wb.early_warning.goals(runs)
        >>> bool((found["share"].sel(detector="all alarms") <= 1).all())
        True

    See Also:
        `workbench.early_warning.false_alarms`: The alarms of healthy runs.
        `workbench.early_warning.by_kind`: The same runs by kind of fault.
    """
    import xarray as xr

    _need(runs, "first_cause", "cause", "expected_cause", "family", "harm_step", "kind")
    harm = harmful(runs).values
    is_late = (runs["harm_step"] - runs["start"] > SUBTLE).values
    late = harm & is_late | ((runs["kind"] == "late") & runs["is_harmful"]).values
    harm_step, expected = runs["harm_step"].values, runs["expected_cause"].values
    at_once, later = runs["first_cause"].values == expected, runs["cause"].values == expected
    loss = np.fmin(runs["loss_step"].values, harm_step)
    nobody = np.zeros(len(harm), dtype=bool)
    rows: list[tuple[str, float, np.ndarray, dict[str, np.ndarray]]] = []
    soon, before, warned = {}, {}, {}
    for detector, column in DETECTORS.items():
        step = runs[column].values
        soon[detector] = delays(runs, detector=detector).values <= SOON
        before[detector] = step <= harm_step
        warned[detector] = (step < loss) & (at_once if detector == "all alarms" else True)
    rows.append((f"alarm within {SOON} steps of the onset", 0.95, harm, soon))
    rows.append(("alarm at the latest when the loss is visibly worse", 0.95, harm, before))
    rows.append((f"harm after more than {SUBTLE} steps: warned before the loss, cause named", 0.95, late, warned))
    rows.append(("cause named by the first alarm", 0.90, harm, {"all alarms": at_once}))
    rows.append((f"cause named within {SOON} steps of the onset", 0.95, harm, {"all alarms": later}))
    shape = len(rows), len(DETECTORS)
    n_reached, low, high = (np.full(shape, np.nan) for _ in range(3))
    for i, (_, _, counts, reached) in enumerate(rows):
        for j, detector in enumerate(DETECTORS):
            if detector in reached and counts.any():
                hit = np.where(counts, reached[detector], nobody)
                n_reached[i, j] = hit.sum()
                low[i, j], high[i, j] = _interval(hit[counts], runs["family"].values[counts], seed)
    n = np.array([counts.sum() for _, _, counts, _ in rows])
    both = ("goal", "detector")
    return xr.Dataset(
        {
            "asked": ("goal", [asked for _, asked, _, _ in rows]),
            "n": ("goal", n),
            "n_reached": (both, n_reached),
            "share": (both, n_reached / np.maximum(n, 1)[:, None]),
            "low": (both, low),
            "high": (both, high),
        },
        coords={"goal": [words for words, *_ in rows], "detector": list(DETECTORS)},
    )


def by_kind(runs: xr.Dataset) -> xr.Dataset:
    """Summarize the harmful runs by kind of fault: their number, the delays of the detectors and the first signal.

    Args:
        runs: The table.

    Returns:
        Dataset with dim ``kind``: ``n_runs``, ``n_harmful``, ``n_soon`` (alarm within 50 steps), ``n_named`` (cause
        named by the first alarm), ``delay`` (median in steps over the runs with an alarm; NaN if there is none),
        ``delay_of_loss``, ``delay_of_grad_norm``, and ``first_signal``, the most frequent first signal.

    Raises:
        SchemaError: If the table lacks a column.

    Example:
        >>> import workbench as wb
        >>> kinds = wb.early_warning.by_kind(wb.samples.open("early_warning"))
        >>> bool((kinds["n_soon"] <= kinds["n_harmful"]).all())
        True

    See Also:
        `workbench.early_warning.goals`: Compares the alarms with their goals.
    """
    import xarray as xr

    harm = harmful(runs).values
    delay = {detector: delays(runs, detector=detector).values for detector in DETECTORS}
    is_named = runs["first_cause"].values == runs["expected_cause"].values
    is_hidden = runs["start"].notnull().values & ~runs["settings_show_it"].values
    kinds = sorted(set(runs["kind"].values[is_hidden].tolist()))
    columns: dict[str, list[object]] = {}
    for kind in kinds:
        of_kind = runs["kind"].values == kind
        here = of_kind & harm
        signals = [signal for signal in runs["first_signal"].values[here].tolist() if signal]
        row = {
            "n_runs": int((of_kind & is_hidden).sum()),
            "n_harmful": int(here.sum()),
            "n_soon": int((delay["all alarms"][here] <= SOON).sum()),
            "n_named": int(is_named[here].sum()),
            "delay": _median(delay["all alarms"][here]),
            "delay_of_loss": _median(delay["loss alone"][here]),
            "delay_of_grad_norm": _median(delay["gradient norm alone"][here]),
            "first_signal": max(sorted(set(signals)), key=signals.count, default=""),
        }
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return xr.Dataset({name: ("kind", values) for name, values in columns.items()}, coords={"kind": kinds})


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


def _interval(reached: np.ndarray, family: np.ndarray, seed: int) -> tuple[float, float]:
    """Return the wider of Wilson's interval over runs and of the interval over resamples of families."""
    from scipy.stats import binomtest

    wilson = binomtest(int(reached.sum()), len(reached)).proportion_ci(method="wilson")
    _, codes = np.unique(family, return_inverse=True)
    fractions = [
        weight @ reached / np.maximum(weight.sum(axis=1), 1e-12)
        for weight in resamples(codes, len(reached), _N_BOOTSTRAP, seed)
    ]
    low, high = np.quantile(np.concatenate(fractions), [0.025, 0.975])
    return min(wilson.low, float(low)), max(wilson.high, float(high))


def _need(runs: xr.Dataset, *names: str) -> None:
    missing = [name for name in names if name not in runs.variables]
    if missing:
        raise SchemaError(f"The table lacks {', '.join(missing)}; pass one like wb.samples.open('early_warning').")


def __dir__() -> Sequence[str]:
    return sorted(__all__)


publish(__name__)
