"""Extrapolation of a scaling study to sizes that were not measured."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import SchemaError
from workbench.option_checks import Level, PositiveFloat
from workbench.scaling.quantities import EXTRAPOLATED, rule_of
from workbench.scaling.trend import Trend, along_trend, fit_trend

if TYPE_CHECKING:
    import xarray as xr

_N_CURVE = 13
_ENDS = ("", "_low", "_high")
#: Variables of the dataset that describe the trend of each quantity.
_COLUMNS = (
    "scale", *(f"{name}{end}" for name in ("slope", "depth_slope", "at_target") for end in _ENDS), "is_supported",
    "reason",
)  # fmt: skip


def extrapolated(
    study: xr.Dataset, target: tuple[int, int], *, largest_reach: PositiveFloat = 4.0, level: Level = 0.95
) -> xr.Dataset:
    """Extrapolate the trends of a study to another size without new measurements.

    Beyond the ladder only the explosion edge is predicted. Spectra and flow of untrained models may saturate or change
    direction in ways that a ladder does not show: in the recorded study their values at the target lay within the
    intervals too rarely. They need no training, so they should be measured on an untrained model of the target size.

    Args:
        study: Study from `scaling_study`.
        target: Target width and depth.
        largest_reach: Largest factor of extrapolation for the explosion edge; see `fit_trend`.
        level: Level of the intervals.

    Returns:
        Dataset with dimension ``quantity``, as in `scaling_study`, and the trend from the smallest rung to the target,
        ``curve`` with ``_low`` and ``_high`` (quantity, curve_point) at ``curve_width`` and ``curve_depth``. Points
        with ``curve_along`` "width" lead to the target width at the smallest depth, those with "depth" to the target
        depth at the largest width.

    Example:
        >>> import workbench as wb
        >>> study = wb.samples.scaling().isel(architecture=0)
        >>> further = wb.scaling.extrapolated(study, (256, 4))
        >>> further["quantity"].values[:2].tolist(), "at_target" in further
        (['explosion_edge', 'near_unit_mass'], True)

    See Also:
        `workbench.scaling_study`: Measures a ladder.
        `workbench.plots.scaling_trend`: Draws the trends.
    """
    import xarray as xr

    if missing := [name for name in ("width", "depth", "quantity") if name not in study.variables]:
        raise SchemaError.of("study", missing[0], "from wb.scaling_study()")
    goals, along = _path(study["width"].values, study["depth"].values, target)
    widths, depths = study["width"].values, study["depth"].values
    columns, curves = [], []
    for name in study["quantity"].values.tolist():
        scale, bounds = rule_of(name)
        values = study["measured"].sel(quantity=name).values
        reach = largest_reach if name in EXTRAPOLATED else 1.0
        trend = fit_trend(values, widths, depths, target, largest_reach=reach, scale=scale, bounds=bounds, level=level)
        columns.append(_columns(trend))
        curves.append(along_trend(values, widths, depths, goals, scale=scale, bounds=bounds, level=level))
    found: dict[str, Any] = {key: ("quantity", [column[key] for column in columns]) for key in _COLUMNS}
    for i, end in enumerate(_ENDS):
        found[f"curve{end}"] = (("quantity", "curve_point"), np.array([curve[i] for curve in curves], dtype=np.float32))
    coords = {
        "quantity": study["quantity"].values,
        "curve_width": ("curve_point", goals[:, 0]),
        "curve_depth": ("curve_point", goals[:, 1]),
        "curve_along": ("curve_point", along),
    }
    return xr.Dataset(found, coords=coords)


def _path(widths: np.ndarray, depths: np.ndarray, target: tuple[int, int]) -> tuple[np.ndarray, list[str]]:
    """Return sizes along the width at the smallest depth, then along the depth at the largest width.

    A part is omitted if the ladder has only one width, or only one depth.
    """
    shallow, wide = depths.min(), widths.max()
    goals, along = [], []
    if len(np.unique(widths)) > 1:
        steps = np.geomspace(widths.min(), max(target[0], wide), _N_CURVE)
        goals += [(width, shallow) for width in steps]
        along += ["width"] * _N_CURVE
    if len(np.unique(depths)) > 1:
        steps = np.geomspace(shallow, max(target[1], depths.max()), _N_CURVE)
        goals += [(wide, depth) for depth in steps]
        along += ["depth"] * _N_CURVE
    return np.array(goals, float).reshape(-1, 2), along


def _columns(trend: Trend) -> dict[str, Any]:
    """Return the variables that describe a trend, by name."""
    found: dict[str, Any] = {"scale": trend.scale}
    for name, line in (("slope", trend.width), ("depth_slope", trend.depth)):
        found |= {f"{name}{end}": value for end, value in zip(_ENDS, asdict(line).values(), strict=True)}
    found |= {key: getattr(trend, key) for key in ("at_target", "at_target_low", "at_target_high")}
    return found | {"is_supported": trend.is_supported, "reason": trend.reason}
