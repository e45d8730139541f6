"""The risk of divergence under a plan: the risk model's probability, updated by trials of the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.assessment.failure_modes.reference import trial_weights
from workbench.risk.model_file import shipped

if TYPE_CHECKING:
    import xarray as xr

#: Risk below which a rate counts as stable (RKSP).
STABLE_BELOW = 0.20
_TINY = 1e-6
_RATES = {
    "largest_stable_rate": "largest_stable_rate",
    "stable_rate_low": "low",
    "stable_rate_high": "high",
    "expected_stable_rate": "expected_stable_rate",
}


def plan_risk(case: xr.Dataset, share_broken: float, *, stand_in: str = "") -> xr.Dataset:
    """Compute the risk of one planned run, within the applicability of the risk model.

    Args:
        case: Case from `workbench.sweeps.measure_case`, with gradients and a pilot run.
        share_broken: Share of diverged trials of the same plan, from `pilot_run`.
        stand_in: A sentence why the case does not apply to the planned run, where a stand-in was measured;
            empty: it is the planned run's own.

    Returns:
        Dataset with dim ``run`` (one): ``probability``, ``low``, ``high`` of the risk model alone;
        ``tried_probability``, ``tried_low``, ``tried_high``, the probability given the trials;
        ``largest_stable_rate`` (cautious, risk below .20), ``stable_rate_low``, ``stable_rate_high``,
        ``expected_stable_rate``; ``distance``, ``is_familiar``, ``farthest_feature``. All numbers but the distance are
        NaN where the case is not familiar to the risk model, and all of them for a stand-in; the attribute ``warning``
        then gives the reason in one sentence.
    """
    model = shipped("pilot")
    found = model.predict(case)
    rates = model.largest_stable_rate(case, below=STABLE_BELOW)
    names = ("probability", "low", "high")
    # Where a fresh model that counts as diverged is not familiar, the trials decide, as they diverge at once.
    is_known = found["is_familiar"] & (not stand_in)
    risk = found[["distance", "is_familiar", "farthest_feature"]].copy(deep=True)
    for name in names:
        risk[name] = found[name].where(is_known)
    for name, source in _RATES.items():
        risk[name] = rates[source].where(is_known)
    for name in names:
        about = {"long_name": f"{found[name].attrs.get('long_name', name)} after the trial", "units": "1"}
        risk[f"tried_{name}"] = ("run", after_trial(risk[name].values, share_broken), about)
    if stand_in:
        risk["distance"][:], risk["is_familiar"][:], risk["farthest_feature"][:] = np.nan, False, ""
    warning = stand_in or found.attrs["warning"]
    return risk.assign_attrs(warning=warning, note="" if warning else found.attrs["note"], level=model.level)


def after_trial(probability: Any, share_broken: float) -> np.ndarray:
    """The probability of divergence given the trials.

    log-odds' = a + b log-odds + c share, fitted to recorded runs (see the shipped reference).

    Args:
        probability: Probability of the risk model; any shape; where it is NaN the result is NaN as well.
        share_broken: Share of diverged trials.
    """
    from scipy.special import expit, logit

    intercept, of_model, of_trials = trial_weights()
    odds = logit(np.clip(np.asarray(probability, dtype=float), _TINY, 1 - _TINY))
    return expit(intercept + of_model * odds + of_trials * share_broken)
