"""Summarize information flow as the numbers that failure modes are judged by, over models that differ in seed only."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import xarray as xr


def _ratio(name: str, numerator: int, denominator: int) -> Callable[[xr.Dataset], float]:
    def ratio(flow: xr.Dataset) -> float:
        values = flow[name].values
        return float(values[numerator] / values[denominator]) if values[denominator] > 0 else math.nan

    return ratio


def _over(name: str, worst: Callable[[Any], Any]) -> Callable[[xr.Dataset], float]:
    def over(flow: xr.Dataset) -> float:
        values = flow[name].values.astype(float)
        return float(worst(values[np.isfinite(values)])) if np.isfinite(values).any() else math.nan

    return over


def _last(name: str) -> Callable[[xr.Dataset], float]:
    return lambda flow: float(flow[name].values[-1])


def _log_steepest(flow: xr.Dataset) -> float:
    gains = flow["gradient_gain"].values
    gains = gains[np.isfinite(gains) & (gains > 0)]
    return float(np.exp(np.abs(np.log(gains)).max())) if len(gains) else math.nan


#: Number -> the variable it reads, its unit, its title, and the function that computes it.
NUMBERS: dict[str, tuple[str, str, Callable[[xr.Dataset], float]]] = {
    "signal_gain_total": ("signal gain over all blocks", "1", _ratio("state_rms", -1, 0)),
    "gradient_gain_total": ("gradient gain over all blocks", "1", _ratio("gradient_norm", 0, -1)),
    "gradient_gain_steepest": ("steepest gradient gain of a block, either way", "1", _log_steepest),
    "branch_ratio_max": ("largest branch over its residual", "1", _over("branch_ratio", np.max)),
    "token_cosine_last": ("cosine of two tokens after the last block", "1", _last("token_cosine")),
    "effective_rank_last": ("effective rank of the tokens after the last block", "1", _last("effective_rank")),
    "attention_entropy_share_min": ("smallest attention entropy share", "1", _over("attention_entropy_share", np.min)),
    "attention_logit_std_max": ("largest spread of attention logits", "1", _over("attention_logit_std", np.max)),
    "sink_share_max": ("largest attention on the first token", "1", _over("sink_share", np.max)),
    "routing_entropy_share_min": ("smallest routing entropy share", "1", _over("routing_entropy_share", np.min)),
    "max_violation_max": ("largest MaxVio of the fresh router", "1", _over("max_violation", np.max)),
    "routing_margin_min": ("smallest routing margin", "1", _over("routing_margin", np.min)),
}
#: Numbers that are compared and averaged as logarithms.
LOGARITHMIC = frozenset(
    (
        "signal_gain_total",
        "gradient_gain_total",
        "gradient_gain_steepest",
        "branch_ratio_max",
        "attention_logit_std_max",
    )
)


#: Scale on which a number is compared with healthy ones; "linear" if it is not named.
SCALE_OF = dict.fromkeys(LOGARITHMIC, "log") | {
    "token_cosine_last": "share",
    "effective_rank_last": "share",
    "attention_entropy_share_min": "share",
    "sink_share_max": "share",
    "routing_entropy_share_min": "share",
}


def flow_numbers(flows: Sequence[xr.Dataset], *, log_error: float = 0.0) -> xr.Dataset:
    """Average each number over flows, with its standard error.

    Args:
        flows: Flows from `workbench.flow.measure`, one for each seed.
        log_error: Additional standard error of every logarithm, common to all seeds.

    Returns:
        Dataset of the numbers of ``NUMBERS``, 0-dim, geometric means of those in ``LOGARITHMIC``; NaN where the model
        has no such part. ``<name>_error``: standard error over the seeds, of the logarithm where the mean is
        geometric; of a single flow only the additional error. Attribute ``n_seeds``.
    """
    import xarray as xr

    data = {}
    for name, (long_name, units, find) in NUMBERS.items():
        values = np.array([find(flow) for flow in flows])
        is_log = name in LOGARITHMIC
        with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)  # means of no values
            scaled = np.log(values) if is_log else values
            mean = float(np.mean(scaled))
            error = float(np.std(scaled, ddof=1) / math.sqrt(len(scaled))) if len(scaled) > 1 else 0.0
        about = {"long_name": long_name, "units": units}
        if is_log:
            error = math.hypot(error, log_error)
        data[name] = ((), _exp(mean) if is_log else mean, about)
        data[f"{name}_error"] = ((), error, {"long_name": f"standard error of the {long_name}", "units": "1"})
    return xr.Dataset(data, attrs={"n_seeds": len(flows)})


def _exp(value: float) -> float:
    """The exponential; large but finite where that of a finite mean of logarithms would overflow."""
    return math.exp(min(value, 700.0)) if value != math.inf else math.inf
