"""The risk of divergence under a plan: what the risk model says, and what trying the plan out adds to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.assessment.failure_modes.reference import rehearsal_weights
from workbench.assessment.model_file import shipped

if TYPE_CHECKING:
    import xarray as xr

#: Risk below which a rate counts as stable (RKSP).
STABLE_BELOW = 0.20
_TINY = 1e-6


def plan_risk(case: xr.Dataset, rehearsal: xr.Dataset) -> xr.Dataset:
    """The risk of one planned run.

    Args:
        case: From `workbench.sweeps.measure_case`, with gradients and a rehearsal.
        rehearsal: From `dress_rehearsal`, of the same plan.

    Returns:
        Dataset with dim ``run`` (one): ``probability``, ``low``, ``high`` of the risk model alone; ``share_broken`` of
        the trials, and ``tried_probability``, ``tried_low``, ``tried_high``, the probability when they are known;
        ``largest_stable_rate`` (cautious, risk below .20), ``stable_rate_low``, ``stable_rate_high``,
        ``expected_stable_rate``; ``distance``, ``is_familiar``, ``farthest_feature``. Where the model has seen nothing
        like the case it extrapolates, and says so in the attribute ``warning``.
    """
    model = shipped("rehearsal")
    found = model.predict(case, extrapolate=True)
    known = model.predict(case)
    rates = model.largest_stable_rate(case, below=STABLE_BELOW, extrapolate=True)
    share = float(rehearsal["has_diverged"].mean())
    risk = found[["probability", "low", "high", "distance", "is_familiar", "farthest_feature"]]
    risk = risk.assign(
        share_broken=("run", [share], {"long_name": "share of trials that broke", "units": "1"}),
        largest_stable_rate=rates["largest_stable_rate"],
        stable_rate_low=rates["low"],
        stable_rate_high=rates["high"],
        expected_stable_rate=rates["expected_stable_rate"],
    )
    for name, source in (("probability", "probability"), ("low", "low"), ("high", "high")):
        values = after_trial(found[source].values, share)
        about = {"long_name": f"{found[source].attrs.get('long_name', source)} after the trial", "units": "1"}
        risk[f"tried_{name}"] = ("run", values, about)
    return risk.assign_attrs(warning=known.attrs["warning"], note=found.attrs.get("note", ""), level=model.level)


def after_trial(probability: Any, share_broken: float) -> np.ndarray:
    """The probability of divergence once trials are known.

    log-odds' = a + b log-odds + c share, fitted to recorded runs (see the shipped reference).

    Args:
        probability: Of the risk model; any shape.
        share_broken: Of the trials.
    """
    from scipy.special import expit, logit

    intercept, of_model, of_trials = rehearsal_weights()
    odds = logit(np.clip(np.asarray(probability, dtype=float), _TINY, 1 - _TINY))
    return expit(intercept + of_model * odds + of_trials * share_broken)
