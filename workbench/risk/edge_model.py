"""The risk of a planned training: distributions of the ends of its useful rates, and what follows at a rate."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, SchemaError, StoreError
from workbench.formatting import counted, listed
from workbench.io.atomic import check_free, replacing
from workbench.risk.edge_regression import PENALTIES, EdgeFit, Edges, Floats, fit_edges, log_likelihood, out_of_group
from workbench.risk.features import FEATURES, OPTIMIZER, RATE, as_cases, column, counts_as_diverged, feature_table
from workbench.risk.scores import resamples

if TYPE_CHECKING:
    import xarray as xr

#: Edge -> outcome of a rate on its wrong side, and whether that is the larger one.
EDGES = {"slow_edge": ("too_small", False), "useful_edge": ("too_large", True), "explosion_edge": ("explosion", True)}
#: Outcome -> title of its probability.
_TITLES = {
    "too_small": "probability that the rate is too small",
    "too_large": "probability that the rate is too large",
    "explosion": "probability that the run explodes",
    "failure": "probability that it does not learn well",
}
#: The largest probability of a sum of two.
MOST_CERTAIN = 1 - 1e-6
#: Variables that have to lie within the range of the fitted designs, whether they are features or not.
CHECKED = ("d_model", "n_layers", "n_steps")
#: Intervals of rates contain the edges of this share of new families; those of probabilities of resampled ones.
LEVEL = 0.8
_KIND, _VERSION = "stability-workbench edge model", 1


@dataclass(frozen=True)
class EdgeModel:
    """Normal distributions of the logarithms of three edges, whose means are linear in features of a design.

    Slow and useful edge are the ends of the rates with which a design learns well (`workbench.rates.useful_band`); from
    the explosion edge on it diverges by RKSP's limits. A rate is too large with the probability that the useful edge
    lies below it. The deviation of an edge is that of families that were left out of the fit.

    Attributes:
        features: Names of numeric features (`workbench.risk.FEATURES`).
        groups: Values of the optimizer, with or without a norm, that the fitted designs had; empty: no feature.
        ranges: Smallest and largest value of each feature, and of width, depth and number of updates, in these designs.
        fits: Regression of each edge, by its name; the first is the model, the others its bootstrap over families.
        deviations: Standard deviation of the logarithm of each edge for families left out, by its name.
        about: Data and options that it was fitted with.

    Example:
        >>> import workbench as wb
        >>> model = wb.risk.shipped()
        >>> sorted(model.deviations)
        ['explosion_edge', 'slow_edge', 'useful_edge']
    """

    features: tuple[str, ...]
    groups: tuple[str, ...]
    ranges: Mapping[str, tuple[float, float]]
    fits: Mapping[str, tuple[EdgeFit, ...]]
    deviations: Mapping[str, float]
    about: Mapping[str, Any] = field(default_factory=dict)

    def predict(self, cases: xr.Dataset) -> xr.Dataset:
        """Predict the edges, and the probabilities at the learning rates of cases.

        Args:
            cases: Settings and measurements of fresh models, dim ``run``; see `workbench.sweeps.measure_case`.

        Returns:
            Dataset with dim ``run``: the probabilities ``too_small``, ``too_large``, ``failure`` (either of them) and
            ``explosion``, and the rates ``slow_edge``, ``useful_edge`` and ``explosion_edge``, each with ``_low`` and
            ``_high``; ``reason`` why they are NaN, empty where they are known. A fresh model that counts as diverged
            explodes at any rate.

        Raises:
            OptionError: If a learning rate is no positive number.
            SchemaError: If a case lacks a value.
        """
        import xarray as xr
        from scipy.stats import norm

        cases = as_cases(cases)
        starts_diverged = counts_as_diverged(cases)
        reasons = np.where(starts_diverged, "", self._reasons(cases))
        is_known = (reasons == "") & ~starts_diverged
        inputs, log_rate = self._inputs(cases), np.log(column(cases, RATE).astype(float))
        reach = norm.ppf((1 + LEVEL) / 2)
        found: dict[str, tuple[Floats, Floats, Floats]] = {}
        chances: dict[str, Floats] = {}
        for edge, (outcome, is_above) in EDGES.items():
            means, deviation = np.array([one.mean(inputs) for one in self.fits[edge]]), self.deviations[edge]
            distance = (log_rate - means) / deviation
            chances[outcome] = norm.cdf(distance if is_above else -distance)
            ends = (np.exp(means[0] + by * deviation) for by in (0.0, -reach, reach))
            value, low, high = (np.where(is_known, one, np.nan) for one in ends)
            found[edge] = value, low, high
        # What explodes does not learn well. Too small and too large exclude each other.
        chances["too_large"] = np.maximum(chances["too_large"], chances["explosion"])
        chances["failure"] = np.minimum(chances["too_small"] + chances["too_large"], MOST_CERTAIN)
        for outcome, chance in chances.items():
            certain = float(outcome != "too_small")
            value, low, high = (
                np.where(starts_diverged, certain, np.where(is_known, one, np.nan))
                for one in (chance[0], *_interval(chance))
            )
            found[outcome] = value, low, high
        variables: dict[str, Any] = {"reason": ("run", reasons.astype(str))}
        for name, values in found.items():
            title = _TITLES.get(name, name.replace("_", " "))
            for end, one in zip(("", "_low", "_high"), values, strict=True):
                variables[f"{name}{end}"] = ("run", one, {"long_name": title, "units": "1"})
        return xr.Dataset(variables)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the model as JSON, which `load` reads.

        Raises:
            StoreError: If there is something at the path, or it cannot be written.
        """
        path = Path(path)
        check_free(path, overwrite=overwrite)
        content = {
            "kind": _KIND,
            "version": _VERSION,
            "about": dict(self.about),
            "features": self.features,
            "groups": self.groups,
            "ranges": self.ranges,
            "deviations": self.deviations,
            "fits": {edge: [_row(one) for one in fits] for edge, fits in self.fits.items()},
        }
        with replacing(path) as partial:
            partial.write_text(json.dumps(content, indent=None) + "\n")
        return path

    def _inputs(self, cases: xr.Dataset) -> Floats:
        """Features of cases within the range of the fitted designs, then one column for each group."""
        table = feature_table(cases, self.features).values if self.features else np.empty((cases.sizes["run"], 0))
        bounds = np.array([self.ranges[name] for name in self.features]).reshape(-1, 2)
        table = np.clip(table, bounds[:, 0], bounds[:, 1])
        if not self.groups:
            return np.asarray(table, dtype=float)
        is_one = groups_of(cases)[:, None] == np.array(self.groups)
        return np.concatenate([table, is_one.astype(float)], axis=1)

    def _reasons(self, cases: xr.Dataset) -> np.ndarray:
        """Why there is no answer for a case, shape (run,); empty: there is one."""
        found = np.full(cases.sizes["run"], "", dtype=object)
        for name, (low, high) in self.ranges.items():
            if name not in CHECKED:
                continue
            values = column(cases, name).astype(float)
            for i in np.flatnonzero(~((values >= low) & (values <= high))).tolist():
                title = FEATURES[name].long_name
                found[i] = f"Nothing was measured at a {title} of {values[i]:g}, only from {low:g} to {high:g}."
        if self.groups:
            groups = groups_of(cases)
            for i in np.flatnonzero(~np.isin(groups, self.groups)).tolist():
                found[i] = f"Nothing was measured for {groups[i]}, only for {listed(self.groups)}."
        return found.astype(str)


def fit(
    cases: xr.Dataset,
    edges: Mapping[str, Edges],
    families: Sequence[str],
    *,
    features: Sequence[str] = (),
    by_group: bool = True,
    n_bootstrap: int = 200,
    seed: int = 0,
) -> EdgeModel:
    """Fit the model to designs whose edges were measured.

    The penalty of each edge's weights is the one with the largest likelihood for families left out.

    Args:
        cases: Settings and measurements of the designs, dim ``run``.
        edges: Logarithms between which the edges of each design lie, by the edge's name.
        families: Family of each design; families are resampled and left out as a whole.
        features: Names of numeric features.
        by_group: Whether the optimizer, with or without a norm, is a feature.
        n_bootstrap: Resamples of the families.
        seed: Seed of the resamples.

    Raises:
        OptionError: If a feature does not exist.
        SchemaError: If a case lacks a value, or there are fewer than three families.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> cases = wb.samples.divergence_sweep("norms").isel(run=slice(0, 180, 10))
        >>> edge = np.log(cases["learning_rate"].values)
        >>> edges = {name: wb.risk.Edges(edge, edge) for name in ("slow_edge", "useful_edge", "explosion_edge")}
        >>> model = wb.risk.fit(cases, edges, cases["architecture"].values, n_bootstrap=2)
        >>> model.predict(cases)["useful_edge"].dims
        ('run',)
    """
    cases = as_cases(cases)
    codes = np.unique(np.asarray(families, dtype=str), return_inverse=True)[1]
    if codes.max() < 2:
        raise SchemaError(f"The designs are of {counted(int(codes.max()) + 1, 'family')}, expected at least 3.")
    unknown = [name for name in features if name not in FEATURES or name == OPTIMIZER]
    if unknown:
        raise OptionError(f"'{unknown[0]}' is no numeric feature; choose from wb.risk.FEATURES.")
    table = feature_table(cases, features).values if features else np.empty((cases.sizes["run"], 0))
    table = np.where(np.isinf(table), np.nan, table)
    ranges = {name: _range(table[:, i]) for i, name in enumerate(features)}
    ranges |= {name: _range(column(cases, name).astype(float)) for name in CHECKED if name in cases.variables}
    groups = tuple(sorted(set(groups_of(cases).tolist()))) if by_group else ()
    blank = EdgeModel(tuple(features), groups, ranges, {}, {})
    inputs = blank._inputs(cases)
    fits, deviations, penalties = {}, {}, {}
    for edge, known in edges.items():
        left_out = {penalty: out_of_group(inputs, known, codes, penalty=penalty) for penalty in PENALTIES}
        losses = {
            penalty: -log_likelihood(mean, deviation, known).sum() for penalty, (mean, deviation) in left_out.items()
        }
        penalty = min(losses, key=lambda one: losses[one])
        draws = (row for block in resamples(codes, len(codes), n_bootstrap, seed) for row in block)
        resampled = [fit_edges(inputs, known, penalty=penalty, weight=row) for row in draws]
        fits[edge] = (fit_edges(inputs, known, penalty=penalty), *resampled)
        deviations[edge], penalties[edge] = left_out[penalty][1], penalty
    about = {"n_designs": len(codes), "n_families": int(codes.max()) + 1, "penalties": penalties, "seed": seed}
    return EdgeModel(blank.features, groups, ranges, fits, deviations, about)


def groups_of(cases: xr.Dataset) -> np.ndarray:
    """The optimizer of each case, and whether it has a norm, as text, shape (run,).

    A doubled stream doubles the logits of a model without normalization and hardly changes those of others
    (``scale_response``), whatever their norm is called.
    """
    missing = [name for name in (OPTIMIZER, "scale_response") if name not in cases.variables]
    if missing:
        raise SchemaError(f"The cases lack {' and '.join(missing)}; measure them with wb.sweeps.measure_case.")
    has_norm = column(cases, "scale_response").astype(float) < 0.5
    names = column(cases, OPTIMIZER).astype(str)
    return np.array([f"{name} {'with' if of else 'without'} norm" for name, of in zip(names, has_norm, strict=True)])


def load(path: str | Path) -> EdgeModel:
    """Read a model that `EdgeModel.save` wrote, which keeps six digits of its numbers.

    Raises:
        StoreError: If the file is missing, no such model, damaged, or written by a newer version.

    Example:
        >>> import workbench as wb
        >>> path = wb.risk.shipped().save("risk.json")
        >>> wb.risk.load(path).features == wb.risk.shipped().features
        True
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["kind"] != _KIND or content["version"] > _VERSION:
            raise StoreError(f"{path} is no risk model that this workbench reads; pass a file from EdgeModel.save().")
        return EdgeModel(
            tuple(content["features"]),
            tuple(content["groups"]),
            {name: (float(low), float(high)) for name, (low, high) in content["ranges"].items()},
            {edge: tuple(_fit(row) for row in rows) for edge, rows in content["fits"].items()},
            {edge: float(value) for edge, value in content["deviations"].items()},
            content["about"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is no risk model ({error!r}); pass a file from EdgeModel.save().") from error


def _row(fit: EdgeFit) -> list[Any]:
    """A fit as plain values."""
    parts = (fit.center.tolist(), fit.scale.tolist(), fit.intercept, fit.weights.tolist(), fit.deviation)
    return [[_short(one) for one in part] if isinstance(part, list) else _short(part) for part in parts]


def _short(value: float) -> float:
    """A number in six digits, which the uncertainty of a fit does not need."""
    return float(f"{value:.6g}")


def _fit(row: Sequence[Any]) -> EdgeFit:
    center, scale, intercept, weights, deviation = row
    return EdgeFit(np.array(center), np.array(scale), float(intercept), np.array(weights), float(deviation))


def _range(values: np.ndarray) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (math.nan, math.nan)


def _interval(values: np.ndarray) -> tuple[Floats, Floats]:
    """Percentiles of the bootstrap, extended to the model's own value."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return np.minimum(low, values[0]), np.maximum(high, values[0])
