"""Summary of a flow in a few numbers: totals, extremes, and trends over depth."""

from __future__ import annotations

import numpy as np
import xarray as xr

from workbench.errors import SchemaError
from workbench.schema.runs import FLOW, variables

#: Variables of `summarize`, all without dimensions and of unit 1.
SUMMARY = variables("""
total_signal_gain | | f | total signal gain | 1 | RMS of the states that leave the last block over that at the first \
input
total_gradient_gain | | f | total gradient gain | 1 | gradient norm at the first input over that at the last output
log_signal_gain | | f | log signal gain per block | 1 | mean of the natural logarithms
log_signal_gain_error | | f | standard error of the log signal gain | 1 | over blocks; NaN with one block
log_signal_gain_trend | | f | trend of the log signal gain | 1 | slope over the block number
log_signal_gain_trend_error | | f | standard error of the trend of the log signal gain | 1 | NaN with fewer than \
three blocks
log_gradient_gain | | f | log gradient gain per block | 1 | mean of the natural logarithms
log_gradient_gain_error | | f | standard error of the log gradient gain | 1 | over blocks; NaN with one block
log_gradient_gain_trend | | f | trend of the log gradient gain | 1 | slope over the block number
log_gradient_gain_trend_error | | f | standard error of the trend of the log gradient gain | 1 | NaN with fewer than \
three blocks
largest_signal_gain | | f | largest signal gain | 1 | of all blocks
largest_signal_gain_layer | | i | block of the largest signal gain | 1 | number of the block; -1 if there is none
smallest_signal_gain | | f | smallest signal gain | 1 | of all blocks
smallest_signal_gain_layer | | i | block of the smallest signal gain | 1 | number of the block; -1 if there is none
largest_gradient_gain | | f | largest gradient gain | 1 | of all blocks
largest_gradient_gain_layer | | i | block of the largest gradient gain | 1 | number of the block; -1 if there is none
smallest_gradient_gain | | f | smallest gradient gain | 1 | of all blocks
smallest_gradient_gain_layer | | i | block of the smallest gradient gain | 1 | number of the block; -1 if there is none
state_growth | | f | growth exponent of the states | 1 | p of state RMS ~ l^p at the outputs of blocks l = 1, 2, ...
state_growth_error | | f | standard error of the growth exponent of the states | 1 | NaN with fewer than three blocks
branch_ratio_mean | | f | mean branch ratio | 1 | over all sublayers; NaN if not observed
branch_ratio_growth | | f | growth exponent of the branch ratio | 1 | p of branch ratio ~ l^p, mean over each block; \
NaN if not observed
branch_ratio_growth_error | | f | standard error of the growth exponent of the branch ratio | 1 | NaN with fewer than \
three blocks
token_cosine_end | | f | final token cosine | 1 | of the states that leave the last block
token_cosine_rise | | f | increase of the token cosine | 1 | from the first boundary to the last
effective_rank_end | | f | final relative effective rank | 1 | of the states that leave the last block
effective_rank_smallest | | f | smallest relative effective rank | 1 | of all boundaries
attention_entropy_share_smallest | | f | smallest normalized attention entropy | 1 | of all heads; NaN if not observed
attention_logit_std_largest | | f | largest attention logit scale | 1 | of all heads; NaN if not observed
attention_logit_largest | | f | largest attention logit | 1 | of all heads; NaN if not observed
sink_share_largest | | f | largest attention sink fraction | 1 | of all heads; NaN if not observed
routing_entropy_share_smallest | | f | smallest normalized routing entropy | 1 | of all routers; NaN if not observed
max_violation_largest | | f | largest MaxVio | 1 | of all routers; NaN if not observed
routing_margin_smallest | | f | smallest routing margin | 1 | of all routers; NaN if not observed
block_singular_value_largest | | f | largest singular value of a block | 1 | of all blocks; NaN if not observed
block_singular_mean_largest | | f | largest RMS singular value of a block | 1 | of all blocks; NaN if not observed
end_to_end_singular_value_largest | | f | largest end-to-end singular value | 1 | NaN if not observed
end_to_end_singular_mean | | f | RMS end-to-end singular value | 1 | NaN if not observed
""")


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
            raise SchemaError(f"'{name}' of the flow has dims {flow[name].dims}, expected {rule.dims}; transpose it.")


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
    """Return final values of the token measures, and the extreme of each variable whose name one of `SUMMARY` has."""
    cosine = flow["token_cosine"].values
    found = {
        "token_cosine_end": cosine[-1],
        "token_cosine_rise": cosine[-1] - cosine[0],
        "effective_rank_end": flow["effective_rank"].values[-1],
        "end_to_end_singular_mean": float(flow["end_to_end_singular_mean"]),
    }
    for name in SUMMARY:
        variable, _, which = name.rpartition("_")
        if which in ("largest", "smallest"):
            values = flow["attention_logit_max" if variable == "attention_logit" else variable].values
            known = values[np.isfinite(values)]
            found[name] = (known.max() if which == "largest" else known.min()) if known.size else np.nan
    return found


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
