"""Drivers of a predicted risk: the contribution of each feature to the log-odds of divergence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.formatting import percent
from workbench.plots import outcome_colors, style
from workbench.plots.primitives import Primitives, decades

if TYPE_CHECKING:
    import xarray as xr

_WIDTH, _ROW, _GAP = 300, 26, 40
_MOST_RUNS = 4


def drivers(drivers: xr.DataArray, *, n: int = 10, backend: str = "bokeh") -> Any:
    """Draw how features move the risk of a run from that of the mean training run: one bar each, largest first.

    Bars to the right, in the colour of divergence, raise the risk; bars to the left, in that of survival, lower it.
    The unit is the log-odds: +0.69 doubles the odds of divergence. Features beyond the first ``n`` are summed up
    in the last bar, so that the bars add up to the total.

    Args:
        drivers: Array of ``RiskModel.drivers()`` by ``feature``, perhaps by ``run`` (at most 4), each a panel with
            the same rows. Attribute ``mean``, where known: log-odds of the mean training run.
        n: Number of features with their own bar.
        backend: ``"bokeh"`` for the screen or ``"matplotlib"`` for print.

    Returns:
        A holoviews Layout with options for that backend only.

    Raises:
        SchemaError: If it is no such array, a value is not finite, or it has too many runs.
        OptionError: If ``n`` is not positive, or the backend does not exist.

    Example:
        >>> import workbench as wb
        >>> case = wb.samples.divergence_sweep("held out").isel(run=[0])
        >>> figure = wb.plots.drivers(wb.risk.shipped("forward").drivers(case))
        >>> len(figure)  # panels
        1
    """
    bars = Bars.of(drivers, n=n)
    n_rows, n_runs = len(bars.features), len(bars.runs)
    row = -np.arange(n_rows, dtype=float)
    reach = 1.35 * float(np.abs(bars.values).max()) or 1.0
    with style.drawing(backend) as hv:
        panels = []
        for index, (run, values) in enumerate(zip(bars.runs, bars.values, strict=True)):
            draw = Primitives(hv, backend, "log-odds", "feature")
            for is_it, color in ((values >= 0, outcome_colors.DIVERGED), (values < 0, outcome_colors.SURVIVED)):
                if is_it.any():
                    columns = {"name": np.array(bars.features)[is_it], "factor": np.exp(values[is_it])}
                    tips = [("", "@name"), ("odds of divergence", "× @factor{0.00}")]
                    ends = (np.zeros(is_it.sum()), row[is_it] - 0.33, values[is_it], row[is_it] + 0.33)
                    draw.boxes(*ends, colors=color, alpha=0.85, columns=columns, tips=tips)
            for place, value in zip(row, values, strict=True):
                side = 1 if value >= 0 else -1
                words = f"{value:+.2f}"
                draw.words(value + 0.02 * side * reach, place, words, align="left" if side > 0 else "right")
            draw.bars([0.0], [row[-1] - 0.5], [0.0], [0.5], color=draw.ink, width=1.2)
            names = bars.features if index == 0 else [""] * n_rows
            panel = draw.panel(
                title=run or "What drives the risk",
                note=bars.note(index),
                view=((-reach, reach), (row[-1] - 0.6, 0.6)),
                size=(_WIDTH if n_runs > 1 else 420, _ROW * n_rows + 16),
                names=("← lowers   log-odds of divergence   raises →", ""),
                ticks=(_ticks(reach), list(zip(row.tolist(), names, strict=True))),
                at=(index * (_WIDTH + _GAP), 0),
                grid=False,
            )
            panels.append(panel)
        return style.laid_out(hv, panels, backend, n_columns=n_runs)


@dataclass(frozen=True)
class Bars:
    """The values of the bars.

    Attributes:
        features: Names of the rows, from the top down; the last may be the sum of the rest.
        runs: Names of the panels; empty for a single one without a name.
        values: Contributions to the log-odds, shape (run, feature).
        mean: Log-odds of the mean training run; NaN: not known.
    """

    features: tuple[str, ...]
    runs: tuple[str, ...]
    values: np.ndarray
    mean: float

    @classmethod
    def of(cls, drivers: xr.DataArray, *, n: int = 10) -> Bars:
        """Choose and sort the features; see `drivers`."""
        import xarray as xr

        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
            raise OptionError(f"n is {n!r}, expected a whole number of at least 1.")
        if (
            not isinstance(drivers, xr.DataArray)
            or "feature" not in drivers.dims
            or set(drivers.dims) - {"run", "feature"}
        ):
            has = (
                f"dims {', '.join(map(str, drivers.dims))}"
                if isinstance(drivers, xr.DataArray)
                else type(drivers).__name__
            )
            raise SchemaError(
                f"The drivers are of {has}, expected an array by feature, as a risk model's drivers() gives."
            )
        if "run" not in drivers.dims:
            drivers = drivers.expand_dims("run")
        if not drivers.size or drivers.sizes["run"] > _MOST_RUNS:
            raise SchemaError(
                f"The drivers have {drivers.sizes['run']} runs and {drivers.sizes['feature']} features, expected 1 to "
                f"{_MOST_RUNS} runs; select some, for example drivers.isel(run=0)."
            )
        values = drivers.transpose("run", "feature").values.astype(float)
        if not np.isfinite(values).all():
            raise SchemaError(
                "A driver is not finite, for the risk model has seen no such case or a feature is not; choose another."
            )
        names = _feature_names(drivers)
        order = np.argsort(-np.abs(values).max(0), kind="stable")
        kept, rest = order[:n], order[n:]
        rows = [names[i] for i in kept]
        columns = values[:, kept]
        if len(rest):
            rows.append(f"{len(rest)} others together" if len(rest) > 1 else names[rest[0]])
            columns = np.concatenate([columns, values[:, rest].sum(1, keepdims=True)], axis=1)
        return cls(tuple(rows), _run_names(drivers), columns, float(drivers.attrs.get("mean", np.nan)))

    def note(self, run: int) -> list[str]:
        """A note on the sum of a run's bars."""
        total = float(self.values[run].sum())
        if np.isnan(self.mean):
            return [f"together {total:+.2f}"]
        risk = 1 / (1 + np.exp(-self.mean - total))
        return [f"mean run {self.mean:+.2f}, bars {total:+.2f}: risk {percent(risk)}"]


def _ticks(reach: float) -> list[tuple[float, str]]:
    """Ticks: zero, and one or two round numbers on each side."""
    step = decades(reach / 4, reach / 1.5)[0]
    places = [i * step for i in range(-4, 5) if abs(i * step) <= 0.95 * reach]
    return [(at, f"{at:+g}" if at else "0") for at in places]


def _feature_names(drivers: xr.DataArray) -> list[str]:
    from workbench.risk.features import FEATURES

    if "long_name" in drivers.coords and drivers["long_name"].dims == ("feature",):
        return [str(name) for name in drivers["long_name"].values]
    names = drivers["feature"].values if "feature" in drivers.coords else range(drivers.sizes["feature"])
    return [FEATURES[name].long_name if name in FEATURES else str(name).replace("_", " ") for name in map(str, names)]


def _run_names(drivers: xr.DataArray) -> tuple[str, ...]:
    for key in ("name", "run", "architecture"):
        if key in drivers.coords and drivers[key].dims == ("run",):
            return tuple(map(str, drivers[key].values))
    if drivers.sizes["run"] == 1:
        return ("",)
    return tuple(f"run {i}" for i in range(drivers.sizes["run"]))
