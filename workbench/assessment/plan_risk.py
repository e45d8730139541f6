"""The risk of divergence under a plan: what the risk model says, and what trying the plan out adds to it."""

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
    """The risk of one planned run, where it is known.

    Args:
        case: From `workbench.sweeps.measure_case`, with gradients and a pilot run.
        share_broken: Of the trials of the same plan, from `pilot_run`.
        stand_in: Why the case says nothing about the planned run, a sentence, where another model stood in for it;
            empty: it is the planned run's own.

    Returns:
        Dataset with dim ``run`` (one): ``probability``, ``low``, ``high`` of the risk model alone;
        ``tried_probability``, ``tried_low``, ``tried_high``, the probability once the trials are known;
        ``largest_stable_rate`` (cautious, risk below .20), ``stable_rate_low``, ``stable_rate_high``,
        ``expected_stable_rate``; ``distance``, ``is_familiar``, ``farthest_feature``. All numbers but the distance are
        NaN where the case is not familiar to the risk model, and all of them for a stand-in; the attribute ``warning``
        then says why in one sentence.
    """
    model = shipped("pilot")
    found = model.predict(case)
    rates = model.largest_stable_rate(case, below=STABLE_BELOW)
    names = ("probability", "low", "high")
    # A fresh model that counts as diverged is a matter of the trials, which break at once, where it is not familiar.
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
    """The probability of divergence once trials are known.

    log-odds' = a + b log-odds + c share, fitted to recorded runs (see the shipped reference).

    Args:
        probability: Of the risk model; any shape; NaN where it is not known, which trials do not make known.
        share_broken: Of the trials.
    """
    from scipy.special import expit, logit

    intercept, of_model, of_trials = trial_weights()
    odds = logit(np.clip(np.asarray(probability, dtype=float), _TINY, 1 - _TINY))
    return expit(intercept + of_model * odds + of_trials * share_broken)
