"""Transform features for the linear model: clip, standardise, square, multiply; all determined by the training runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.risk.features import FEATURES, OPTIMIZER, RATE, as_cases, column, feature_table

if TYPE_CHECKING:
    import xarray as xr


class Known(NamedTuple):
    """The features of cases.

    Attributes:
        log_rate: log10 of the learning rate; shape (run,).
        table: The numeric features; shape (run, feature).
        optimizer: Names of optimizers; shape (run,); empty where no feature needs them.
    """

    log_rate: np.ndarray
    table: np.ndarray
    optimizer: np.ndarray


@dataclass(frozen=True)
class FeatureMap:
    """Maps cases to columns of mean 0 and standard deviation 1 over the training runs.

    The columns are the numeric features, one for each optimizer in the training runs, squares and products. A feature
    that never varied in the training runs is 0 in every column, and its coefficient has no meaning.

    Attributes:
        features: Names, the optimizer last if it is among them.
        optimizers: Those of the training runs, by name; empty where the optimizer is no feature.
        lowest: Smallest finite value of each numeric feature in the training runs; shape (feature,).
        highest: The largest one. Infinite values, such as a breaking rate that no rate tried reaches, are taken
            as these.
        has_infinite: Whether the training runs had infinite values of a feature.
        squares: Names of columns whose squares are columns too.
        interactions: Pairs of columns whose products are columns too.
        center: Mean of each column before it is standardised; shape (column,).
        scale: Its standard deviation; 1 where it never varied.
    """

    features: tuple[str, ...]
    optimizers: tuple[str, ...]
    lowest: np.ndarray
    highest: np.ndarray
    has_infinite: np.ndarray
    squares: tuple[str, ...]
    interactions: tuple[tuple[str, str], ...]
    center: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(
        cls, cases: xr.Dataset, features: Sequence[str], *, squares: Sequence[str] = (),
        interactions: Sequence[tuple[str, str]] = (),
    ) -> FeatureMap:  # fmt: skip
        """The feature map that training runs determine.

        Raises:
            OptionError: If a name is no feature, or a square or product names no column.
            SchemaError: If a run lacks a value.
        """
        numeric = tuple(name for name in features if name != OPTIMIZER)
        known = read(cases, features)
        optimizers = _distinct(known.optimizer) if OPTIMIZER in features else ()
        is_finite = np.isfinite(known.table)
        for name, has_some in zip(numeric, is_finite.any(axis=0), strict=True):
            if not has_some:
                raise OptionError(f"'{name}' is infinite in every run; fit a model without it.")
        lowest = np.where(is_finite, known.table, np.inf).min(axis=0)
        highest = np.where(is_finite, known.table, -np.inf).max(axis=0)
        n_base = len(numeric) + len(optimizers)
        blank = cls(
            (*numeric, *([OPTIMIZER] if optimizers else [])), optimizers, rounded(lowest), rounded(highest),
            (~is_finite).any(axis=0), tuple(squares), tuple((a, b) for a, b in interactions), np.zeros(n_base),
            np.ones(n_base),
        )  # fmt: skip
        names = blank.columns[:n_base]
        for name in (*squares, *(name for pair in interactions for name in pair)):
            if name not in names:
                raise OptionError(f"There is no column '{name}' to square or multiply; there are {', '.join(names)}.")
        base = blank._base(known)
        center, scale = _moments(base)
        term_center, term_scale = _moments(blank._terms((base - center) / scale))
        return replace(
            blank,
            center=rounded(np.concatenate([center, term_center])),
            scale=rounded(np.concatenate([scale, term_scale])),
        )

    @property
    def numeric(self) -> tuple[str, ...]:
        """The features that are numbers."""
        return tuple(name for name in self.features if name != OPTIMIZER)

    @property
    def n_base(self) -> int:
        """Columns that are no squares or products."""
        return len(self.numeric) + len(self.optimizers)

    @property
    def columns(self) -> tuple[str, ...]:
        """A name for each column."""
        return (
            *self.numeric,
            *(f"{OPTIMIZER} {name}" for name in self.optimizers),
            *(f"{name} squared" for name in self.squares),
            *(f"{a} x {b}" for a, b in self.interactions),
        )

    @property
    def sources(self) -> tuple[str, ...]:
        """The feature that each column belongs to: squares belong to their feature, all optimizers to one."""
        return (
            *self.numeric, *(OPTIMIZER for _ in self.optimizers),
            *(OPTIMIZER if name.startswith(f"{OPTIMIZER} ") else name for name in self.squares),
            *(f"{a} x {b}" for a, b in self.interactions),
        )  # fmt: skip

    def read(self, cases: xr.Dataset) -> Known:
        """The features that the model needs of cases; see `read`."""
        return read(cases, self.features)

    def matrix(self, known: Known) -> np.ndarray:
        """Columns of cases; shape (run, column). An optimizer that the training runs lack counts as their mean."""
        n = self.n_base
        base = (self._base(known) - self.center[:n]) / self.scale[:n]
        return np.concatenate([base, (self._terms(base) - self.center[n:]) / self.scale[n:]], axis=1)

    def _base(self, known: Known) -> np.ndarray:
        table = known.table
        table = np.where(np.isposinf(table), self.highest, np.where(np.isneginf(table), self.lowest, table))
        if not self.optimizers:
            return table
        is_one = _is_one(known.optimizer, self.optimizers)
        n_numeric = len(self.numeric)
        mean = self.center[n_numeric : self.n_base]
        return np.concatenate([table, np.where(is_one.any(axis=1, keepdims=True), is_one, mean)], axis=1)

    def _terms(self, base: np.ndarray) -> np.ndarray:
        place = {name: i for i, name in enumerate(self.columns[: self.n_base])}
        squares = [base[:, place[name]] ** 2 for name in self.squares]
        products = [base[:, place[a]] * base[:, place[b]] for a, b in self.interactions]
        return np.stack([*squares, *products], axis=1) if squares or products else np.empty((len(base), 0))

    def excess(self, known: Known) -> np.ndarray:
        """Distance of each numeric feature, and of the optimizer if it is a feature, from the training runs.

        Returns:
            Shape (run, feature): 0 at the middle of the range, 1 at an eighth of the range beyond its ends; infinite
            where a feature differs that never varied, where it is infinite but never was so in the training runs, and
            where the optimizer is another.
        """
        table = known.table
        width = self.highest - self.lowest
        never_varied = width <= 1e-6 * np.maximum(np.abs(self.highest), 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.abs(table - (self.lowest + self.highest) / 2) / (0.625 * width)
        same = np.isclose(table, self.lowest, rtol=1e-4, atol=1e-4)
        found = np.where(never_varied, np.where(same, 0.0, np.inf), found)
        found = np.where(np.isinf(table), np.where(self.has_infinite, 0.8, np.inf), found)
        if not self.optimizers:
            return found
        is_known = _is_one(known.optimizer, self.optimizers).any(axis=1)
        return np.concatenate([found, np.where(is_known, 0.0, np.inf)[:, None]], axis=1)

    def range_of(self, name: str) -> str:
        """The range of a feature in the training runs, as text."""
        if name == OPTIMIZER:
            return " or ".join(self.optimizers)
        place = self.numeric.index(name)
        low, high = (in_words(name, end[place]) for end in (self.lowest, self.highest))
        return low if low == high else f"{low} to {high}"


def read(cases: xr.Dataset, features: Sequence[str]) -> Known:
    """Read the features of cases.

    Raises:
        OptionError: If a learning rate is no positive number.
        SchemaError: If a case lacks a value.
    """
    cases = as_cases(cases)
    table = feature_table(cases, [name for name in features if name != OPTIMIZER]).values
    optimizer = np.full(len(table), "")
    if OPTIMIZER in features:
        if OPTIMIZER not in cases.variables:
            raise SchemaError("The cases lack optimizer, the name of the class; assign it.")
        optimizer = column(cases, OPTIMIZER).astype(str)
    return Known(np.log10(column(cases, RATE).astype(float)), table, optimizer)


def in_words(name: str, value: float) -> str:
    """A value of a numeric feature as text, on the scale of the original quantity."""
    return f"{FEATURES[name].original(value):.4g}"


def _distinct(names: np.ndarray) -> tuple[str, ...]:
    """Each name once, sorted, ignoring case: "adamw" is "AdamW" to a training plan."""
    return tuple(sorted({name.lower(): name for name in sorted(names.tolist())}.values()))


def _is_one(names: np.ndarray, known: tuple[str, ...]) -> np.ndarray:
    """Which of the known names each is; shape (run, name)."""
    return np.char.lower(names)[:, None] == np.char.lower(np.array(known))


def _moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation, 1 where nothing varies."""
    scale = values.std(axis=0)
    center = values.mean(axis=0)
    return center, np.where(scale > 1e-9 * np.maximum(np.abs(center), 1), scale, 1.0)


def rounded(values: np.ndarray) -> np.ndarray:
    """Round to eight digits, so that a model in memory equals the one in its file."""
    return np.array([float(f"{value:.8g}") for value in np.ravel(values)]).reshape(np.shape(values))
