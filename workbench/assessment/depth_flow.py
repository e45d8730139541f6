"""Signal and gradient gains at the target depth: by building it, and by extrapolation from half of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.assessment.flow_numbers import flow_numbers
from workbench.errors import OptionError
from workbench.flow.flow_measurement import measure

if TYPE_CHECKING:
    import xarray as xr
    from torch import nn

#: Numbers that depend on depth, as logarithms, and are extrapolated.
EXTRAPOLATED = ("signal_gain_total", "gradient_gain_total")


def depths_below(target: int) -> list[int]:
    """Depths to extrapolate from: up to half of the target, at least two blocks, at most three of them."""
    return sorted({depth for depth in (target // 8, target // 4, target // 2) if depth >= 2})


def depth_flow(
    make: Callable[[int, int], nn.Module],
    target: int,
    inputs: Any,
    targets: Any,
    *,
    seeds: Sequence[int] = (0, 1),
    log_error: float = 0.0,
) -> tuple[xr.Dataset, xr.Dataset]:
    """Measure signal and gradient gains of one architecture at growing depth.

    Args:
        make: Function of depth and seed that returns a fresh model.
        target: Target depth.
        inputs: Inputs of all models.
        targets: Targets of the loss whose gradients are measured; None: see `workbench.flow.measure`.
        seeds: Seeds of the models.
        log_error: As in `flow_numbers`.

    Returns:
        Dataset with dim ``depth``: the numbers of `flow_numbers` at each depth, the target last; and, 0-dim,
        ``<name>_extrapolated`` for the gains, at the target from the smaller depths alone (log gain linear in depth,
        least squares), with ``<name>_extrapolated_error``, the standard error of that prediction as a logarithm; NaN
        where fewer than two smaller depths exist. And the flow of the target's first seed, as `measure` gives it.

    Raises:
        OptionError: If the target is below one block.
    """
    import xarray as xr

    if target < 1:
        raise OptionError(f"The target depth is {target}, expected at least 1 block.")
    depths = [*depths_below(target), target]
    rows, seen = [], {}
    for depth in depths:
        flows = [measure(make(depth, seed), inputs, targets=targets, jacobian=False) for seed in seeds]
        rows.append(flow_numbers(flows, log_error=log_error))
        seen[depth] = flows[0]
    data = xr.concat(rows, "depth", combine_attrs="drop_conflicts").assign_coords(depth=depths)
    for name in EXTRAPOLATED:
        with np.errstate(divide="ignore", invalid="ignore"):
            value, error = _extrapolated(np.array(depths[:-1]), np.log(data[name].values[:-1]), target)
        error = math.hypot(error, log_error)
        about = data[name].attrs
        data[f"{name}_extrapolated"] = (
            (),
            math.exp(min(value, 700.0)) if math.isfinite(value) else math.nan,
            {"long_name": f"{about['long_name']}, extrapolated", "units": about["units"]},
        )
        data[f"{name}_extrapolated_error"] = ((), error, {"long_name": "standard error of its logarithm", "units": "1"})
    return data, seen[target]


def _extrapolated(depth: np.ndarray, log_gain: np.ndarray, target: int) -> tuple[float, float]:
    """A line's value at the target, and the standard error of a new value there, which two points do not determine."""
    if len(depth) < 2 or not np.isfinite(log_gain).all():
        return math.nan, math.nan
    slope, intercept = np.polyfit(depth, log_gain, 1)
    value = float(slope * target + intercept)
    n_free = len(depth) - 2
    if not n_free:
        return value, 0.0
    residual = float(np.sum((log_gain - slope * depth - intercept) ** 2)) / n_free
    spread = float(np.sum((depth - depth.mean()) ** 2))
    return value, math.sqrt(residual * (1 + 1 / len(depth) + (target - depth.mean()) ** 2 / spread))
