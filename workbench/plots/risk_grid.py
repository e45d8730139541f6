"""Predicted risk over learning rates, and outcomes of runs, as the figures of risk draw them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import SchemaError
from workbench.plots.dataset_columns import columns_of

if TYPE_CHECKING:
    import xarray as xr

_EXPECTED = "expected a dataset with dims architecture and learning_rate, such as predictions of wb.risk on a grid"
_EDGE = "largest_stable_rate"
#: Share of diverging runs up to which a rate counts as stable, if the data do not state another; the paper's value.
_BELOW = 0.20


@dataclass(frozen=True)
class RiskGrid:
    """Predictions for each architecture at each learning rate.

    Attributes:
        architectures: Names of the rows; one empty name if the data have none.
        rates: Learning rates, ascending, shape (rate,).
        probability: Probability of divergence, shape (architecture, rate); NaN: not predicted.
        low: Lower bound of its interval; NaN: not known.
        high: Upper bound of its interval; NaN: not known.
        is_familiar: Whether the case is like those that the model has seen.
        edges: Largest stable rate, its lower and its upper bound, shape (3, architecture); NaN: not known.
        below: Share of diverging runs that defines the largest stable rate.
        level: Confidence level of the intervals.
    """

    architectures: tuple[str, ...]
    rates: np.ndarray
    probability: np.ndarray
    low: np.ndarray
    high: np.ndarray
    is_familiar: np.ndarray
    edges: np.ndarray
    below: float
    level: float | None

    @classmethod
    def of(cls, risk: xr.Dataset) -> RiskGrid:
        """Read a dataset; see `workbench.plots.risk_map`.

        Raises:
            SchemaError: If it lacks a variable or a dimension, or a rate or probability is invalid.
        """
        import xarray as xr

        if not isinstance(risk, xr.Dataset):
            raise SchemaError(f"The risk is of type {type(risk).__name__}, {_EXPECTED}.")
        if "probability" not in risk or "learning_rate" not in risk.dims or "learning_rate" not in risk.coords:
            lacks = "probability" if "probability" not in risk else "the dimension learning_rate with its values"
            raise SchemaError(f"The risk lacks {lacks}; {_EXPECTED}.")
        if "architecture" not in risk.dims:
            if "architecture" not in risk.coords:
                risk = risk.assign_coords(architecture="")
            risk = risk.expand_dims("architecture")
        extra = set(risk["probability"].dims) - {"architecture", "learning_rate"}
        if extra or not risk["probability"].size:
            wrong = f"runs over {', '.join(map(str, sorted(map(str, extra))))} too" if extra else "is empty"
            raise SchemaError(f"The risk {wrong}; select first, for example risk.isel(run=0).")
        risk = risk.sortby("learning_rate")
        rates = risk["learning_rate"].values.astype(float)
        if not (np.isfinite(rates) & (rates > 0)).all() or len(set(rates)) < len(rates):
            raise SchemaError("The learning rates of the risk must be positive, finite and each there once.")
        grid = {name: _matrix(risk, name) for name in ("probability", "low", "high")}
        probability = grid["probability"]
        if (probability[np.isfinite(probability)] > 1).any() or (probability[np.isfinite(probability)] < 0).any():
            raise SchemaError("The risk has a probability outside 0 to 1; predict it with wb.risk.")
        is_familiar = np.isfinite(probability)
        if "is_familiar" in risk:
            is_familiar = _matrix(risk, "is_familiar").astype(bool)
        names = [_EDGE, f"{_EDGE}_low", f"{_EDGE}_high"]
        unknown = np.full(risk.sizes["architecture"], np.nan)
        for name in names:
            if name in risk and set(risk[name].dims) - {"architecture"}:
                raise SchemaError(f"In the risk, {name} runs over more than architecture; it is one value a row.")
        edges = np.array([risk[name].values.astype(float) if name in risk else unknown for name in names])
        return cls(
            tuple(map(str, risk["architecture"].values)),
            rates,
            **grid,
            is_familiar=is_familiar,
            edges=edges,
            below=float(risk.attrs.get("below", _BELOW)),
            level=float(risk.attrs["level"]) if "level" in risk.attrs else None,
        )

    @property
    def bounds(self) -> np.ndarray:
        """Edges of the cells of the rates, halfway between them on a logarithmic axis, shape (rate + 1,)."""
        place = np.log(self.rates)
        if len(place) == 1:
            return self.rates[0] * np.array([0.8, 1.25])
        middle = (place[1:] + place[:-1]) / 2
        return np.exp([2 * place[0] - middle[0], *middle, 2 * place[-1] - middle[-1]])

    def edge_in_words(self, row: int) -> str:
        """The edge and its interval as text, such as "0.0031 [0.0018, 0.005]"."""
        edge, low, high = self.edges[:, row]
        if np.isnan(edge):
            return "not predicted"
        interval = "" if np.isnan([low, high]).any() else f" [{low:.2g}, {high:.2g}]"
        return f"{edge:.2g}{interval}"

    @property
    def edge_meaning(self) -> str:
        """Definition of the edge as text, such as "largest rate with less than 20 % risk, 90 % interval"."""
        interval = ""
        if not np.isnan(self.edges[1:]).all():
            interval = ", with its interval" if self.level is None else f", {100 * self.level:g} % interval"
        return f"largest rate with less than {100 * self.below:g} % risk{interval}"


@dataclass(frozen=True)
class Runs:
    """The outcomes of runs whose architecture has a row.

    Attributes:
        row: Row of the architecture, shape (run,).
        rate: Learning rate, shape (run,).
        has_diverged: Whether the run diverged, shape (run,).
        n_elsewhere: Number of runs without a row or outside the view, which are not drawn.
    """

    row: np.ndarray
    rate: np.ndarray
    has_diverged: np.ndarray
    n_elsewhere: int

    @classmethod
    def of(cls, runs: xr.Dataset | None, grid: RiskGrid) -> Runs:
        """Select the runs that a grid can show.

        Raises:
            SchemaError: If the dataset lacks a variable.
        """
        if runs is None:
            return cls(np.zeros(0, int), np.zeros(0), np.zeros(0, bool), 0)
        is_named = grid.architectures != ("",)
        needed = ["learning_rate", "has_diverged", *(["architecture"] if is_named else [])]
        columns = columns_of(runs, needed, what="table of runs", source="wb.sweeps.run()", dim="run")
        known = {name: row for row, name in enumerate(grid.architectures)}
        names = columns["architecture"] if is_named else [""] * len(columns["learning_rate"])
        row = np.array([known.get(str(name), -1) for name in names])
        rate = columns["learning_rate"].astype(float)
        is_shown = (row >= 0) & (rate >= grid.bounds[0]) & (rate <= grid.bounds[-1])
        has_diverged = columns["has_diverged"].astype(bool)
        return cls(row[is_shown], rate[is_shown], has_diverged[is_shown], int((~is_shown).sum()))

    @property
    def spots(self) -> np.ndarray:
        """Heights within a row, between -1 and 1: runs of one rate and row next to each other, diverged ones above."""
        heights = np.zeros(len(self.row))
        for key in {*zip(self.row.tolist(), self.rate.tolist(), strict=True)}:
            here = np.flatnonzero((self.row == key[0]) & (self.rate == key[1]))
            here = here[np.argsort(self.has_diverged[here], kind="stable")]
            heights[here] = np.linspace(-1, 1, len(here)) if len(here) > 1 else 0.0
        return heights

    @property
    def remarks(self) -> list[str]:
        """A note on runs that are not drawn."""
        if not self.n_elsewhere:
            return []
        return [f"{self.n_elsewhere} run{'s' if self.n_elsewhere > 1 else ''} elsewhere not shown"]


def _matrix(risk: xr.Dataset, name: str) -> np.ndarray:
    """Values of a variable, shape (architecture, rate); NaN if it does not exist."""
    import xarray as xr

    shape = risk["probability"]
    if name not in risk:
        return np.full((risk.sizes["architecture"], risk.sizes["learning_rate"]), np.nan)
    spread = xr.broadcast(risk[name], shape)[0].transpose("architecture", "learning_rate")
    return spread.values if spread.dtype.kind == "b" else spread.values.astype(float)
