"""How far a case is from everything that the training runs show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.assessment.design import Design, Known, in_words, rounded
from workbench.assessment.features import OPTIMIZER

#: Share of the training runs that are familiar to the others, their own configuration left out.
_QUANTILE = 0.99


@dataclass(frozen=True)
class Familiarity:
    """Distance to the nearest cell of the training runs, and to the ranges that they cover.

    Attributes:
        points: Mean of each training cell over its runs, standardised; shape (cell, column without terms).
        unit: The 99 % quantile, over the training runs, of the distance to the nearest cell of another configuration.
    """

    points: np.ndarray
    unit: float

    @classmethod
    def of(cls, base: np.ndarray, cells: np.ndarray, configurations: np.ndarray) -> Familiarity:
        """From training runs.

        Args:
            base: Standardised columns without squares and products; shape (run, column).
            cells: Of each run.
            configurations: Of each run; at least two.
        """
        _, first, index = np.unique(cells, return_index=True, return_inverse=True)
        points = np.stack([np.bincount(index, column) for column in base.T], axis=1) if base.shape[1] else base[first]
        points = rounded(points / np.bincount(index)[:, None]) if base.shape[1] else points
        distance = _distances(base, points)
        distance[configurations[:, None] == configurations[first][None]] = np.inf
        unit = float(np.quantile(distance.min(axis=1), _QUANTILE))
        return cls(points, float(f"{unit:.8g}") if unit > 0 else 1.0)

    def look(self, design: Design, known: Known) -> Look:
        """How far cases are.

        Args:
            design: Of the model.
            known: Of the cases.
        """
        base = design.matrix(known)[:, : design.n_base]
        to_points = _distances(base, self.points)
        nearest = self.points[to_points.argmin(axis=1)]
        return Look(design, known, base, nearest, to_points.min(axis=1) / self.unit, design.excess(known))


@dataclass(frozen=True)
class Look:
    """How far cases are from the training runs.

    Attributes:
        design: Of the model.
        known: Of the cases.
        base: Standardised columns without squares and products; shape (run, column).
        nearest: Those of the nearest training cell.
        far: Distance to it, in units of the model's; shape (run,).
        outside: How far each feature is beyond the ranges seen; see `Design.excess`.
    """

    design: Design
    known: Known
    base: np.ndarray
    nearest: np.ndarray
    far: np.ndarray
    outside: np.ndarray

    @property
    def distance(self) -> np.ndarray:
        """The larger of the two, shape (run,); 1 is the edge of what the training runs show."""
        return np.maximum(self.far, self.outside.max(axis=1, initial=0.0))

    @property
    def farthest(self) -> np.ndarray:
        """Names of the features in which cases are farthest, shape (run,); empty where there is no feature."""
        if not self.design.n_base:
            return np.full(len(self.base), "")
        sources = np.array(self.design.sources[: self.design.n_base])
        from_nearest = sources[((self.base - self.nearest) ** 2).argmax(axis=1)]
        from_range = np.array(self.design.features)[self.outside.argmax(axis=1)]
        return np.where(self.outside.max(axis=1) >= self.far, from_range, from_nearest)

    def farthest_in_words(self) -> str:
        """What the farthest case has of its farthest feature, against what was seen."""
        worst = int(self.distance.argmax())
        name = str(self.farthest[worst])
        if name == OPTIMIZER:
            return f"{name}, which is {self.known.optimizer[worst]} where they had {self.design.range_of(name)}"
        place = self.design.numeric.index(name)
        own = in_words(name, self.known.table[worst, place])
        if self.outside[worst].max() >= self.far[worst]:
            return f"{name}, which is {own} where they had {self.design.range_of(name)}"
        value = self.nearest[worst, place] * self.design.scale[place] + self.design.center[place]
        return f"{name}, which is {own} where the nearest of them had {in_words(name, value)}"


def _distances(rows: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Euclidean, shape (row, point)."""
    squared = (rows**2).sum(axis=1)[:, None] + (points**2).sum(axis=1)[None] - 2 * rows @ points.T
    return np.sqrt(np.maximum(squared, 0))
