"""Summary of a flow in a few numbers: totals, extremes, and trends over depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import SchemaError
from workbench.schema.flows import FLOW
from workbench.schema.runs import Variable

if TYPE_CHECKING:
    import xarray as xr

_NONE = "; NaN if not observed"
_FEW = "NaN with fewer than three blocks"
_LAYER = "number of the block; -1 if there is none"

#: Variables of `summarize`, all without dimensions.
SUMMARY: dict[str, Variable] = {
    "total_signal_gain": Variable(
        (), "f", "total signal gain", "1", "RMS of the states that leave the last block over that at the first input"
    ),
    "total_gradient_gain": Variable(
        (), "f", "total gradient gain", "1", "gradient norm at the first input over that at the last output"
    ),
    "log_signal_gain": Variable((), "f", "log signal gain per block", "1", "mean of the natural logarithms"),
    "log_signal_gain_error": Variable(
        (), "f", "standard error of the log signal gain", "1", "over blocks; NaN with one block"
    ),
    "log_signal_gain_trend": Variable((), "f", "trend of the log signal gain", "1", "slope over the block number"),
    "log_signal_gain_trend_error": Variable((), "f", "standard error of the trend of the log signal gain", "1", _FEW),
    "log_gradient_gain": Variable((), "f", "log gradient gain per block", "1", "mean of the natural logarithms"),
    "log_gradient_gain_error": Variable(
        (), "f", "standard error of the log gradient gain", "1", "over blocks; NaN with one block"
    ),
    "log_gradient_gain_trend": Variable((), "f", "trend of the log gradient gain", "1", "slope over the block number"),
    "log_gradient_gain_trend_error": Variable(
        (), "f", "standard error of the trend of the log gradient gain", "1", _FEW
    ),
    "largest_signal_gain": Variable((), "f", "largest signal gain", "1", "of all blocks"),
    "largest_signal_gain_layer": Variable((), "i", "block of the largest signal gain", "1", _LAYER),
    "smallest_signal_gain": Variable((), "f", "smallest signal gain", "1", "of all blocks"),
    "smallest_signal_gain_layer": Variable((), "i", "block of the smallest signal gain", "1", _LAYER),
    "largest_gradient_gain": Variable((), "f", "largest gradient gain", "1", "of all blocks"),
    "largest_gradient_gain_layer": Variable((), "i", "block of the largest gradient gain", "1", _LAYER),
    "smallest_gradient_gain": Variable((), "f", "smallest gradient gain", "1", "of all blocks"),
    "smallest_gradient_gain_layer": Variable((), "i", "block of the smallest gradient gain", "1", _LAYER),
    "state_growth": Variable(
        (), "f", "growth exponent of the states", "1", "p of state RMS ~ l^p at the outputs of blocks l = 1, 2, ..."
    ),
    "state_growth_error": Variable((), "f", "standard error of the growth exponent of the states", "1", _FEW),
    "branch_ratio_mean": Variable((), "f", "mean branch ratio", "1", f"over all sublayers{_NONE}"),
    "branch_ratio_growth": Variable(
        (), "f", "growth exponent of the branch ratio", "1", f"p of branch ratio ~ l^p, mean over each block{_NONE}"
    ),
    "branch_ratio_growth_error": Variable(
        (), "f", "standard error of the growth exponent of the branch ratio", "1", _FEW
    ),
    "token_cosine_end": Variable((), "f", "final token cosine", "1", "of the states that leave the last block"),
    "token_cosine_rise": Variable((), "f", "increase of the token cosine", "1", "from the first boundary to the last"),
    "effective_rank_end": Variable(
        (), "f", "final relative effective rank", "1", "of the states that leave the last block"
    ),
    "effective_rank_smallest": Variable((), "f", "smallest relative effective rank", "1", "of all boundaries"),
    "attention_entropy_share_smallest": Variable(
        (), "f", "smallest normalized attention entropy", "1", f"of all heads{_NONE}"
    ),
    "attention_logit_std_largest": Variable((), "f", "largest attention logit scale", "1", f"of all heads{_NONE}"),
    "attention_logit_largest": Variable((), "f", "largest attention logit", "1", f"of all heads{_NONE}"),
    "sink_share_largest": Variable((), "f", "largest attention sink fraction", "1", f"of all heads{_NONE}"),
    "routing_entropy_share_smallest": Variable(
        (), "f", "smallest normalized routing entropy", "1", f"of all routers{_NONE}"
    ),
    "max_violation_largest": Variable((), "f", "largest MaxVio", "1", f"of all routers{_NONE}"),
    "routing_margin_smallest": Variable((), "f", "smallest routing margin", "1", f"of all routers{_NONE}"),
    "block_singular_value_largest": Variable(
        (), "f", "largest singular value of a block", "1", f"of all blocks{_NONE}"
    ),
    "block_singular_mean_largest": Variable(
        (), "f", "largest RMS singular value of a block", "1", f"of all blocks{_NONE}"
    ),
    "end_to_end_singular_value_largest": Variable((), "f", "largest end-to-end singular value", "1", _NONE[2:]),
    "end_to_end_singular_mean": Variable((), "f", "RMS end-to-end singular value", "1", _NONE[2:]),
}


def summarize(flow: xr.Dataset) -> xr.Dataset:
    """Summarize a flow in scalar variables, per step if it has steps.

    Args:
        flow: Flow from `measure`.

    Returns:
        Dataset of `SUMMARY` with the attributes of the flow, and with the dim ``step`` if the flow has it. Gains are
        averaged as logarithms, so that ``exp(L * log_signal_gain)`` is the gain of L blocks. Values are NaN where those
        of the flow are, and where a gain is zero or not finite.

    Raises:
        SchemaError: If the dataset is no flow.

    Example:
        >>> import workbench as wb
        >>> model = wb.zoo.transformer(d_model=16, n_layers=2, n_heads=2)
        >>> flow = wb.flow.measure(model, wb.tasks.associative_recall(length=16), jacobian=False)
        >>> summary = wb.flow.summarize(flow)
        >>> "log_signal_gain" in summary, summary["log_signal_gain"].dims
        (True, ())

    See Also:
        `workbench.flow.measure`: Measures a flow.
    """
    import xarray as xr

    check_flow(flow)
    if "step" in flow.dims:
        rows = [summarize(flow.isel(step=i, drop=True)) for i in range(flow.sizes["step"])]
        return xr.concat(rows, dim=flow["step"], data_vars="all", combine_attrs="override")
    values = _of_gains(flow) | _of_growth(flow) | _of_extremes(flow)
    variables = {name: ((), values[name], rule.attrs) for name, rule in SUMMARY.items()}
    return xr.Dataset(variables, attrs=flow.attrs)


def check_flow(flow: xr.Dataset) -> None:
    """Check whether a dataset is a flow."""
    if missing := [name for name in FLOW if name not in flow]:
        raise SchemaError(f"The dataset is no flow: it lacks {', '.join(missing)}; create one with wb.flow.measure().")
    for name, rule in FLOW.items():
        dims = tuple(dim for dim in flow[name].dims if dim != "step")
        if dims != rule.dims:
            raise SchemaError(
                f"Variable '{name}' of the flow has dims {flow[name].dims}, expected {rule.dims} (after step, if any); "
                "select or transpose it."
            )


def _of_gains(flow: xr.Dataset) -> dict[str, float]:
    """Return totals, averages, trends and extremes of the gains."""
    rms, norm = flow["state_rms"].values, flow["gradient_norm"].values
    with np.errstate(divide="ignore", invalid="ignore"):
        values: dict[str, float] = {"total_signal_gain": rms[-1] / rms[0], "total_gradient_gain": norm[0] / norm[-1]}
    for kind in ("signal", "gradient"):
        gain = flow[f"{kind}_gain"].values
        log = _log(gain)
        known = log[np.isfinite(log)]
        values[f"log_{kind}_gain"] = known.mean() if len(known) == len(log) else np.nan
        error = known.std(ddof=1) / np.sqrt(len(known)) if len(known) == len(log) > 1 else np.nan
        values[f"log_{kind}_gain_error"] = error
        trend = _slope(np.arange(len(log)), log)
        values[f"log_{kind}_gain_trend"], values[f"log_{kind}_gain_trend_error"] = trend
        for word, pick in (("largest", np.nanargmax), ("smallest", np.nanargmin)):
            where = int(pick(gain)) if np.isfinite(gain).any() else -1
            values[f"{word}_{kind}_gain"] = gain[where] if where >= 0 else np.nan
            values[f"{word}_{kind}_gain_layer"] = where
    return values


def _of_growth(flow: xr.Dataset) -> dict[str, float]:
    """Return growth exponents of states and branch ratios."""
    ratio = flow["branch_ratio"].values
    depth = np.log(np.arange(1, len(ratio) + 1))
    is_seen = np.isfinite(ratio)
    total = np.where(is_seen, ratio, 0).sum(1)
    per_block = np.divide(total, is_seen.sum(1), out=np.full(len(ratio), np.nan), where=is_seen.any(1))
    state, branch = _slope(depth, _log(flow["state_rms"].values[1:])), _slope(depth, _log(per_block))
    return {
        "state_growth": state[0],
        "state_growth_error": state[1],
        "branch_ratio_mean": ratio[is_seen].mean() if is_seen.any() else np.nan,
        "branch_ratio_growth": branch[0],
        "branch_ratio_growth_error": branch[1],
    }


def _of_extremes(flow: xr.Dataset) -> dict[str, float]:
    """Return final values and extremes of the other variables."""

    def extreme(name: str, pick: Callable[[np.ndarray], float]) -> float:
        values = flow[name].values
        return pick(values[np.isfinite(values)]) if np.isfinite(values).any() else np.nan

    cosine = flow["token_cosine"].values
    return {
        "token_cosine_end": cosine[-1],
        "token_cosine_rise": cosine[-1] - cosine[0],
        "effective_rank_end": flow["effective_rank"].values[-1],
        "effective_rank_smallest": extreme("effective_rank", np.min),
        "attention_entropy_share_smallest": extreme("attention_entropy_share", np.min),
        "attention_logit_std_largest": extreme("attention_logit_std", np.max),
        "attention_logit_largest": extreme("attention_logit_max", np.max),
        "sink_share_largest": extreme("sink_share", np.max),
        "routing_entropy_share_smallest": extreme("routing_entropy_share", np.min),
        "max_violation_largest": extreme("max_violation", np.max),
        "routing_margin_smallest": extreme("routing_margin", np.min),
        "block_singular_value_largest": extreme("block_singular_value", np.max),
        "block_singular_mean_largest": extreme("block_singular_mean", np.max),
        "end_to_end_singular_value_largest": extreme("end_to_end_singular_value", np.max),
        "end_to_end_singular_mean": float(flow["end_to_end_singular_mean"]),
    }


def _log(values: np.ndarray) -> np.ndarray:
    """Return natural logarithms; NaN where they are not defined."""
    return np.log(values, out=np.full(len(values), np.nan), where=np.isfinite(values) & (values > 0))


def _slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the slope of a least-squares line through the finite points, and its standard error."""
    is_known = np.isfinite(y)
    x, y = x[is_known] - x[is_known].mean() if is_known.any() else x[:0], y[is_known]
    if len(y) < 2:
        return np.nan, np.nan
    slope = x @ y / (x @ x)
    rest = y - y.mean() - slope * x
    return slope, np.sqrt(rest @ rest / (len(y) - 2) / (x @ x)) if len(y) > 2 else np.nan
