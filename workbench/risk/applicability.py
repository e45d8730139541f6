"""Applicability of a risk model: the distance of a case from the training runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from workbench.risk.feature_map import FeatureMap, Known, in_words, rounded
from workbench.risk.features import FEATURES, OPTIMIZER, SIZES, as_cases, sizes_of

if TYPE_CHECKING:
    import xarray as xr

#: Share of the training runs within the applicability of the others, their own configuration left out.
_QUANTILE = 0.99


@dataclass(frozen=True)
class Applicability:
    """Distance to the nearest cell of the training runs, and to the ranges that they cover.

    Attributes:
        points: Mean of each training cell over its runs, standardised; shape (cell, column without terms).
        unit: The 99 % quantile, over the training runs, of the distance to the nearest cell of another configuration.
        sizes: Size -> its smallest and largest value in the training runs, beyond which no case is familiar; empty:
            not known, as in files of an older workbench.
    """

    points: np.ndarray
    unit: float
    sizes: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        base: np.ndarray,
        cells: np.ndarray,
        configurations: np.ndarray,
        sizes: Mapping[str, tuple[float, float]] | None = None,
    ) -> Applicability:
        """Compute the applicability from training runs.

        Args:
            base: Standardised columns without squares and products; shape (run, column).
            cells: Cell of each run.
            configurations: Configuration of each run; at least two different ones.
            sizes: Ranges from `ranges_of`; None: not known.
        """
        _, first, index = np.unique(cells, return_index=True, return_inverse=True)
        points = np.stack([np.bincount(index, column) for column in base.T], axis=1) if base.shape[1] else base[first]
        points = rounded(points / np.bincount(index)[:, None]) if base.shape[1] else points
        distance = distances(base, points)
        distance[configurations[:, None] == configurations[first][None]] = np.inf
        unit = float(np.quantile(distance.min(axis=1), _QUANTILE))
        return cls(points, float(f"{unit:.8g}") if unit > 0 else 1.0, dict(sizes or {}))

    def measure(self, feature_map: FeatureMap, known: Known, cases: xr.Dataset) -> CaseDistances:
        """Measure the distances of cases.

        Args:
            feature_map: Feature map of the risk model.
            known: Features of the cases.
            cases: The cases themselves, for their sizes.

        Raises:
            SchemaError: If the cases lack the sizes of their models.
        """
        base = feature_map.matrix(known)[:, : feature_map.n_base]
        to_points = distances(base, self.points)
        nearest = self.points[to_points.argmin(axis=1)]
        sizes = sizes_of(as_cases(cases), list(self.sizes))
        far = to_points.min(axis=1) / self.unit
        return CaseDistances(feature_map, known, base, nearest, far, feature_map.excess(known), sizes, self.sizes)


@dataclass(frozen=True)
class CaseDistances:
    """Distances of cases from the training runs.

    Attributes:
        feature_map: Feature map of the risk model.
        known: Features of the cases.
        base: Standardised columns without squares and products; shape (run, column).
        nearest: Those of the nearest training cell.
        far: Distance to it, in units of `Applicability.unit`; shape (run,).
        outside: How far each feature is beyond its range in the training runs; see `FeatureMap.excess`.
        sizes: Size -> that of each case, shape (run,).
        size_ranges: Size -> the smallest and largest one in the training runs.
    """

    feature_map: FeatureMap
    known: Known
    base: np.ndarray
    nearest: np.ndarray
    far: np.ndarray
    outside: np.ndarray
    sizes: Mapping[str, np.ndarray]
    size_ranges: Mapping[str, tuple[float, float]]

    @property
    def beyond(self) -> np.ndarray:
        """Factor by which each size exceeds its range, shape (run, size); 0 inside, infinite if it is not known.

        Unlike features, which may lie a little beyond their ranges, a size is inside or it is not.
        """
        columns = [np.empty((len(self.far), 0))]
        for name, (low, high) in self.size_ranges.items():
            size = self.sizes[name]
            with np.errstate(divide="ignore", invalid="ignore"):
                factor = np.maximum(low / size, size / high)
            is_inside = (size >= low) & (size <= high)
            columns.append(np.where(is_inside, 0.0, np.where(np.isfinite(factor), factor, np.inf))[:, None])
        return np.concatenate(columns, axis=1)

    @property
    def distance(self) -> np.ndarray:
        """The largest of the three, shape (run,); 1 is the limit of the applicability."""
        outside, beyond = (values.max(axis=1, initial=0.0) for values in (self.outside, self.beyond))
        return np.maximum(np.maximum(self.far, outside), beyond)

    @property
    def farthest(self) -> np.ndarray:
        """Names of the features or sizes in which cases are farthest, shape (run,); empty where there is no feature."""
        outside, beyond = (values.max(axis=1, initial=0.0) for values in (self.outside, self.beyond))
        if self.feature_map.n_base:
            sources = np.array(self.feature_map.sources[: self.feature_map.n_base])
            from_nearest = sources[((self.base - self.nearest) ** 2).argmax(axis=1)]
            from_range = np.array(self.feature_map.features)[self.outside.argmax(axis=1)]
            found = np.where(outside >= self.far, from_range, from_nearest)
        else:
            found = np.full(len(self.far), "")
        if not self.size_ranges:
            return found
        by_size = np.array(list(self.size_ranges))[self.beyond.argmax(axis=1)]
        return np.where((beyond > 0) & (beyond >= np.maximum(outside, self.far)), by_size, found)

    def farthest_in_words(self) -> str:
        """The value of the farthest feature or size of the farthest case, compared with the training runs."""
        worst = int(self.distance.argmax())
        name = str(self.farthest[worst])
        title = title_of(name)
        if self.size_ranges and self.beyond[worst].max() == self.distance[worst]:
            low, high = self.size_ranges[name]
            seen = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            return f"{title}, which is {self.sizes[name][worst]:g} where they had {seen}"
        if name == OPTIMIZER:
            return f"{title}, which is {self.known.optimizer[worst]} where they had {self.feature_map.range_of(name)}"
        place = self.feature_map.numeric.index(name)
        own = in_words(name, self.known.table[worst, place])
        if self.outside[worst].max() >= self.far[worst]:
            return f"{title}, which is {own} where they had {self.feature_map.range_of(name)}"
        value = self.nearest[worst, place] * self.feature_map.scale[place] + self.feature_map.center[place]
        return f"{title}, which is {own} where the nearest of them had {in_words(name, value)}"


def ranges_of(sweep: xr.Dataset) -> dict[str, tuple[float, float]]:
    """The smallest and the largest of each size in training runs, for the sizes that the sweep records."""
    sizes = sizes_of(sweep, [name for name in SIZES if name in sweep.variables])
    return {name: (float(values.min()), float(values.max())) for name, values in sizes.items()}


def title_of(name: str) -> str:
    """The title of a feature, and its name in data."""
    long_name = FEATURES[name].long_name
    return long_name if long_name == name else f"{long_name} ({name})"


def distances(rows: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Euclidean distances, shape (row, point); 0 where there are no columns."""
    from scipy.spatial.distance import cdist

    return cdist(rows, points) if rows.shape[1] else np.zeros((len(rows), len(points)))
