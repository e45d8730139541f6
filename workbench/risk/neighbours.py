"""Find the recorded runs nearest to a case in the features of the risk model."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.risk.applicability import distances
from workbench.risk.features import is_complete
from workbench.schema.sweeps import require

if TYPE_CHECKING:
    import xarray as xr

    from workbench.risk.risk_model import RiskModel

_DISTANCE = {
    "long_name": "distance",
    "units": "1",
    "meaning": "from the case, in the features of the risk model; 1: as far as cells that are familiar to each other",
}


def nearest_runs(model: RiskModel, case: xr.Dataset, sweep: xr.Dataset, n: int = 8) -> xr.Dataset:
    """Find the recorded runs nearest to a case.

    The distance is that in the standardised features of the risk model. The learning rate is none of them, so the
    runs of one architecture, seed and plan have the same distance at any rate.

    Args:
        model: Risk model with the features, each in units of its spread over the model's training runs.
        case: One run, as `workbench.sweeps.measure_case` returns it.
        sweep: The recorded runs; those that lack a feature are ignored.
        n: Number of runs; fewer if the sweep has fewer.

    Returns:
        Rows of the sweep with ``distance`` (unit 1, in units of `Applicability.unit`), ascending; equally far ones in
        the order of the sweep.

    Raises:
        SchemaError: If the case is not one run, a dataset lacks a feature, or no run of the sweep has all of them.
        OptionError: If ``n`` is no whole number of at least 1.

    Example:
        >>> import workbench as wb
        >>> sweep = wb.samples.divergence_sweep("held out")
        >>> near = wb.risk.nearest_runs(wb.risk.shipped("forward"), sweep.isel(run=[0]), sweep, n=3)
        >>> near.sizes["run"], near["distance"].values[0].item()
        (3, 0.0)
    """
    _require_count(n)
    return Neighbours(model, sweep).runs(case, n)


class Neighbours:
    """The runs of a sweep, prepared for repeated searches of the nearest runs.

    Args:
        model: As in `nearest_runs`.
        sweep: As in `nearest_runs`.

    Raises:
        SchemaError: As `nearest_runs`.
    """

    def __init__(self, model: RiskModel, sweep: xr.Dataset) -> None:
        require(sweep, ("learning_rate", "has_diverged"))
        rows = np.flatnonzero(is_complete(sweep, model.features).values)
        if not len(rows):
            raise SchemaError("No run of the sweep has every feature of the risk model; take a sweep with spectra.")
        self.model, self.sweep = model, sweep.isel(run=rows)
        self._points = _columns(model, self.sweep)

    def runs(self, case: xr.Dataset, n: int = 8) -> xr.Dataset:
        """The nearest runs; see `nearest_runs`."""
        _require_count(n)
        distance = self._distances(case)
        return self._rows(np.argsort(distance, kind="stable")[:n], distance)

    def cells(self, case: xr.Dataset, n: int = 3) -> xr.Dataset:
        """All runs of the nearest cells: every learning rate and seed of them.

        Args:
            case: As in `nearest_runs`.
            n: Number of cells.

        Returns:
            As `nearest_runs`, but cell by cell, the nearest first, and by learning rate within a cell; ``distance`` is
            that of the cell's nearest run. A run of no cell is one by itself.

        Raises:
            SchemaError: If the case is not one run.
            OptionError: If ``n`` is no whole number of at least 1.
        """
        _require_count(n)
        distance = self._distances(case)
        cells = self.sweep["cell"].values.astype(str) if "cell" in self.sweep.variables else np.full(len(distance), "")
        cells = np.where(cells == "", [f"run {i}" for i in range(len(cells))], cells)
        _, index = np.unique(cells, return_inverse=True)
        of_cell = np.full(index.max() + 1, np.inf)
        np.minimum.at(of_cell, index, distance)
        first = np.full(len(of_cell), len(index))  # cells of equal distance keep the order of the sweep
        np.minimum.at(first, index, np.arange(len(index)))
        rank = np.empty(len(of_cell), int)
        rank[np.lexsort((first, of_cell))] = np.arange(len(of_cell))
        order = np.lexsort((self.sweep["learning_rate"].values, rank[index]))
        return self._rows(order[rank[index][order] < n], of_cell[index])

    def _distances(self, case: xr.Dataset) -> np.ndarray:
        """Distance of every run; shape (run,)."""
        if (n_cases := case.sizes.get("run", 1)) != 1:
            raise SchemaError(f"There are {n_cases} cases, expected one; choose it with case.isel(run=[0]).")
        point = _columns(self.model, case)
        return distances(self._points, point)[:, 0] / self.model.applicability.unit

    def _rows(self, rows: np.ndarray, distance: np.ndarray) -> xr.Dataset:
        return self.sweep.isel(run=rows).assign(distance=("run", distance[rows], _DISTANCE))


def _columns(model: RiskModel, cases: xr.Dataset) -> np.ndarray:
    """Standardised features without squares and products; shape (run, column)."""
    return model.feature_map.matrix(model.feature_map.read(cases))[:, : model.feature_map.n_base]


def _require_count(n: int) -> None:
    if not isinstance(n, Integral) or isinstance(n, bool) or n < 1:
        raise OptionError(f"n is {n!r}, expected a whole number of at least 1.")
