"""The model behind the risk of a planned training: distributions of three learning rates at which outcomes change."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, SchemaError, StoreError
from workbench.formatting import listed
from workbench.io.atomic import check_free, replacing
from workbench.risk.edge_regression import EdgeFit, Edges, Floats, best_penalty, fit_edges
from workbench.risk.features import LIMITS, RATE, as_cases, column, counts_as_diverged, feature_table
from workbench.risk.scores import resamples

if TYPE_CHECKING:
    import xarray as xr

#: Edge -> outcome of a rate on its wrong side, and whether that side is the larger rates.
EDGES = {"slow_edge": ("too_small", False), "useful_edge": ("too_large", True), "explosion_edge": ("explosion", True)}
#: Name of a prediction -> its title.
TITLES = {
    "failure": "probability of not learning well",
    "too_small": "probability that the rate is too small",
    "too_large": "probability that the rate is too large",
    "explosion": "probability of an explosion",
    "slow_edge": "smallest useful rate",
    "useful_edge": "largest useful rate",
    "explosion_edge": "rate from which the run explodes",
}
_ENDS = {"": "", "_low": ", lower end", "_high": ", upper end"}
#: The largest sum of two probabilities: both are estimates, and nothing is certain.
MOST_CERTAIN = 1 - 1e-6
_STARTS_DIVERGED = (
    f"The fresh model counts as diverged by RKSP's limits (a loss of {LIMITS['initial_loss']:g} or a gradient norm of "
    f"{LIMITS['initial_grad_norm']:g}), and no such model was measured."
)
#: Setting of a design -> words for one outside of what was measured.
_MEASURED = {"d_model": "at a width of {}", "n_layers": "at a depth of {}", "n_steps": "over {} updates"}
#: Share of new families whose edge an interval of a rate contains, and of resamples of the families whose probability
#: an interval of a probability contains.
LEVEL = 0.8
_KIND, _VERSION = "stability-workbench edge model", 1
#: Families of which designs are needed, in all and of each optimizer with or without a norm.
_FEWEST_FAMILIES = 3
#: Class of an optimizer -> what users call it.
_CALLED = {"MuonWithAdamW": "Muon", "": "a nameless optimizer"}


@dataclass(frozen=True)
class EdgeModel:
    """Normal distributions of the logarithms of three edges, whose means are linear in features of a design.

    Slow and useful edge are the ends of the rates with which a design learns well (`workbench.rates.useful_band`); from
    the explosion edge on it diverges by RKSP's limits. A rate is too large with the probability that the useful edge
    lies below it, and likewise for the others. The standard deviation of each edge is that of families that were left
    out of the fit, so that it includes what the features do not say about a new family. Designs that learned at no rate
    have no edges: probabilities hold for designs that learn at some rate.

    Attributes:
        features: Names of numeric features (`workbench.risk.FEATURES`).
        groups: Optimizers, each with or without a norm, of the designs of the fit; there is no answer for others.
        ranges: Smallest and largest value of each feature in these designs; others are moved to the nearer end.
        measured: Smallest and largest width, number of layers and number of updates of these designs; there is no
            answer for others.
        fits: Regression of each edge, by its name; the first is the model, the others its bootstrap over families.
        deviations: Standard deviation of the natural logarithm of each edge for families left out, by its name.
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
    measured: Mapping[str, tuple[float, float]]
    fits: Mapping[str, tuple[EdgeFit, ...]]
    deviations: Mapping[str, float]
    about: Mapping[str, Any] = field(default_factory=dict)

    def predict(self, cases: xr.Dataset) -> xr.Dataset:
        """Predict the edges of cases, and the probabilities of the outcomes at their learning rates.

        Args:
            cases: Settings and measurements of fresh models, dim ``run``; see `workbench.sweeps.measure_case`.

        Returns:
            Dataset with dim ``run``: the probabilities ``too_small``, ``too_large``, ``failure`` (either of them) and
            ``explosion``, and the rates ``slow_edge``, ``useful_edge`` and ``explosion_edge``, each with ``_low`` and
            ``_high``, the ends of an 80 % interval: over new families for rates, over resamples of the families for
            probabilities. NaN where there is no answer, and ``reason`` says why. A fresh model that counts as diverged
            explodes at any rate; whether it learns is not known.

        Raises:
            OptionError: If a learning rate is no positive number.
            SchemaError: If a case lacks a value.
        """
        import xarray as xr
        from scipy.stats import norm

        cases = as_cases(cases)
        starts_diverged = counts_as_diverged(cases)
        reasons = self._reasons(cases)
        reasons = np.where(starts_diverged & (reasons == ""), _STARTS_DIVERGED, reasons)
        is_known = reasons == ""
        inputs, log_rate = self._inputs(cases, has_answer=is_known), np.log(column(cases, RATE).astype(float))
        reach = norm.ppf((1 + LEVEL) / 2)
        found: dict[str, np.ndarray] = {}
        chances: dict[str, Floats] = {}
        for edge, (outcome, is_above) in EDGES.items():
            means, deviation = np.array([one.mean(inputs) for one in self.fits[edge]]), self.deviations[edge]
            distance = (log_rate - means) / deviation
            chances[outcome] = norm.cdf(distance if is_above else -distance)
            found[edge] = np.where(
                is_known, np.exp(means[0] + np.array([[0.0], [-reach], [reach]]) * deviation), np.nan
            )
        # What explodes does not learn well; of the two edges the useful one is known better.
        chances["explosion"] = np.minimum(chances["explosion"], chances["too_large"])
        found["explosion_edge"] = np.maximum(found["explosion_edge"], found["useful_edge"])
        # A rate cannot be both too small and too large.
        chances["failure"] = np.minimum(chances["too_small"] + chances["too_large"], MOST_CERTAIN)
        for outcome, chance in chances.items():
            low, high = np.quantile(chance, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
            three = np.stack([chance[0], np.minimum(low, chance[0]), np.maximum(high, chance[0])])
            found[outcome] = np.where(is_known, three, np.nan)
        found["explosion"] = np.where(starts_diverged, 1.0, found["explosion"])
        variables: dict[str, Any] = {"reason": ("run", reasons.astype(str))}
        for name, values in found.items():
            for (end, words), one in zip(_ENDS.items(), values, strict=True):
                variables[f"{name}{end}"] = ("run", one, {"long_name": f"{TITLES[name]}{words}", "units": "1"})
        return xr.Dataset(variables)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the model as JSON, which `load` reads, with six digits of its weights and deviations.

        Args:
            path: File to write.
            overwrite: Whether to replace what is at the path.

        Returns:
            The path.

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
            "ranges": dict(self.ranges),
            "measured": dict(self.measured),
            "deviations": {edge: _short(value) for edge, value in self.deviations.items()},
            "fits": {edge: [_row(one) for one in fits] for edge, fits in self.fits.items()},
        }
        with replacing(path) as partial:
            partial.write_text(json.dumps(content) + "\n", encoding="utf-8")
        return path

    def _inputs(self, cases: xr.Dataset, *, has_answer: np.ndarray) -> Floats:
        """Features of cases within the range of the fitted designs, then one column for each group.

        Raises:
            SchemaError: If a case that has an answer lacks a feature; for others it is the lower end of the range.
        """
        table = _table(cases, self.features, needed=has_answer)
        bounds = np.array([self.ranges[name] for name in self.features]).reshape(-1, 2)
        table = np.clip(np.where(np.isnan(table), bounds[:, 0], table), bounds[:, 0], bounds[:, 1])
        is_one = groups_of(cases)[:, None] == np.array(self.groups)
        return np.concatenate([table, is_one.astype(float)], axis=1)

    def _reasons(self, cases: xr.Dataset) -> np.ndarray:
        """Why there is no answer for a case, shape (run,); empty: there is one."""
        settings = {name: _numbers(cases, name) for name in self.measured}
        reasons = []
        for i, group in enumerate(groups_of(cases).tolist()):
            outside = []
            for name, (low, high) in self.measured.items():
                if not low <= (value := settings[name][i]) <= high:
                    only = f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
                    outside.append(f"{_MEASURED[name].format(f'{value:,.0f}')} (only {only})")
            if group and group not in self.groups:
                kind = " with norm" if group.endswith(" with norm") else " without norm"
                known = [one.removesuffix(kind) for one in self.groups if one.endswith(kind)]
                outside.append(f"for {group} (only for {listed(known or self.groups)})")
            reason = f"Too little was measured {listed(outside)}." if outside else ""
            if not group:
                reason = "Whether the model has a norm is not known: its logits are zero or not finite."
            reasons.append(reason)
        return np.array(reasons)


def fit(
    cases: xr.Dataset,
    edges: Mapping[str, Edges],
    families: Sequence[str],
    *,
    features: Sequence[str] = (),
    n_bootstrap: int = 200,
    seed: int = 0,
) -> EdgeModel:
    """Fit the model to designs whose edges were measured.

    The penalty of each edge's weights is the one with the largest likelihood for families left out. Designs whose
    optimizer, with or without a norm, occurs in fewer than three families are not used.

    Args:
        cases: Settings and measurements of the designs, dim ``run``.
        edges: Logarithms between which the edges of each design lie: ``slow_edge``, ``useful_edge`` and
            ``explosion_edge``.
        families: Family of each design; families are resampled and left out as a whole.
        features: Names of numeric features.
        n_bootstrap: Resamples of the families.
        seed: Seed of the resamples.

    Returns:
        The model.

    Raises:
        OptionError: If a feature does not exist or has no finite value, an edge is missing, or there is not one edge
            and one family for each design.
        SchemaError: If a case lacks a value, or no optimizer, with or without a norm, occurs in three families.

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
    n_designs = cases.sizes["run"]
    if missing := [name for name in EDGES if name not in edges]:
        raise OptionError(f"The edges lack {listed(missing)}; an edge that is not known lies between infinities.")
    sizes = {len(families), *(len(edges[name].low) for name in EDGES)}
    if sizes != {n_designs}:
        raise OptionError(
            f"There are {listed(map(str, sorted(sizes)))} edges or families for {n_designs} designs, expected one each."
        )
    groups, family = groups_of(cases), np.asarray(families, dtype=str)
    if "" in groups:
        raise SchemaError("A design has no scale_response (NaN); leave it out.")
    is_used = in_enough_families(groups, family)
    if not is_used.any():
        counts = {group: len(set(family[groups == group])) for group in np.unique(groups).tolist()}
        shown = listed([f"{n} for {group}" for group, n in counts.items()])
        raise SchemaError(f"The designs are of too few families: {shown}, expected at least {_FEWEST_FAMILIES}.")
    cases, edges = cases.isel(run=is_used), {name: edges[name][is_used] for name in EDGES}
    n_designs, codes = cases.sizes["run"], np.unique(family[is_used], return_inverse=True)[1]
    table = _table(cases, features, needed=np.ones(n_designs, bool))
    ranges = {}
    for name, values in zip(features, table.T, strict=True):
        if not np.isfinite(values).any():
            raise OptionError(f"'{name}' is infinite for every design; fit a model without it.")
        ranges[name] = _range(values[np.isfinite(values)])
    measured = {name: _range(_numbers(cases, name)) for name in _MEASURED}
    blank = EdgeModel(tuple(features), tuple(sorted(set(groups[is_used].tolist()))), ranges, measured, {}, {})
    inputs = blank._inputs(cases, has_answer=np.ones(n_designs, bool))
    draws = np.concatenate([np.empty((0, n_designs)), *resamples(codes, n_designs, n_bootstrap, seed)])
    fits, deviations, penalties = {}, {}, {}
    for edge in EDGES:
        known = edges[edge]
        penalty, deviations[edge] = best_penalty(inputs, known, codes)
        resampled = [fit_edges(inputs, known, penalty=penalty, weight=row) for row in draws]
        fits[edge], penalties[edge] = (fit_edges(inputs, known, penalty=penalty), *resampled), penalty
    about = {"n_rows": n_designs, "n_families": int(codes.max()) + 1, "penalties": penalties, "seed": seed}
    return replace(blank, fits=fits, deviations=deviations, about=about)


def in_enough_families(groups: np.ndarray, families: np.ndarray) -> np.ndarray:
    """Whether the group of each design occurs in enough families for a fit, shape (design,).

    Args:
        groups: From `groups_of`.
        families: Family of each design, shape (design,).
    """
    counts = {group: len(set(families[groups == group].tolist())) for group in set(groups.tolist())}
    return np.array([counts[group] >= _FEWEST_FAMILIES for group in groups.tolist()])


def groups_of(cases: xr.Dataset) -> np.ndarray:
    """The optimizer of each case, and whether its model has a norm, as text.

    Whether it has one is measured: a doubled residual stream doubles the logits of a model without normalization and
    hardly changes those of others (``scale_response``), whatever their norm is called.

    Args:
        cases: Cases with ``optimizer`` and ``scale_response``, dim ``run``.

    Returns:
        Texts such as "AdamW with norm", shape (run,); empty where ``scale_response`` is NaN.

    Raises:
        SchemaError: If one of the two is missing.
    """
    responses = _numbers(cases, "scale_response", allow_missing=True)
    if "optimizer" not in cases.variables:
        raise SchemaError("The cases lack optimizer; measure them with wb.sweeps.measure_case.")
    names = [_CALLED.get(name, name) for name in column(cases, "optimizer").astype(str)]
    return np.array(
        [
            "" if np.isnan(response) else f"{name} {'with' if response < 0.5 else 'without'} norm"
            for name, response in zip(names, responses, strict=True)
        ]
    )


def load(path: str | Path) -> EdgeModel:
    """Read a model that `EdgeModel.save` wrote.

    Args:
        path: Its file.

    Returns:
        The model.

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
        if content["kind"] != _KIND:
            raise StoreError(f"{path} is no risk model; pass a file from EdgeModel.save().")
        if content["version"] > _VERSION:
            raise StoreError(f"{path} was written by a newer version of the workbench; update it, or fit again.")
        return EdgeModel(
            tuple(content["features"]),
            tuple(content["groups"]),
            _ranges(content["ranges"]),
            _ranges(content["measured"]),
            {edge: tuple(_fit(row) for row in content["fits"][edge]) for edge in EDGES},
            {edge: float(content["deviations"][edge]) for edge in EDGES},
            content["about"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is no risk model ({error!r}); pass a file from EdgeModel.save().") from error


def _table(cases: xr.Dataset, features: Sequence[str], *, needed: np.ndarray) -> Floats:
    """Features of cases, shape (run, feature).

    Raises:
        OptionError: If there is no such feature.
        SchemaError: If a case that is needed lacks one.
    """
    if not features:
        return np.empty((cases.sizes["run"], 0))
    found: Floats = feature_table(cases, features, allow_missing=True).values.astype(float)
    if np.isnan(found[needed]).any():
        feature_table(cases.isel(run=needed), features)  # says which
    return found


def _numbers(cases: xr.Dataset, name: str, *, allow_missing: bool = False) -> Floats:
    """Values of a variable of cases, shape (run,).

    Raises:
        SchemaError: If there is none, or a case lacks it.
    """
    if name not in cases.variables:
        raise SchemaError(f"The cases lack {name}; measure them with wb.sweeps.measure_case.")
    values: Floats = column(cases, name).astype(float)
    if np.isnan(values).any() and not allow_missing:
        raise SchemaError(f"A case has no {name} (NaN); leave it out.")
    return values


def _row(fit: EdgeFit) -> list[Any]:
    """A fit as plain values."""
    parts = (fit.center.tolist(), fit.scale.tolist(), fit.intercept, fit.weights.tolist())
    return [[_short(one) for one in part] if isinstance(part, list) else _short(part) for part in parts]


def _short(value: float) -> float:
    """A number in six digits, far more than are certain."""
    return float(f"{value:.6g}")


def _fit(row: Sequence[Any]) -> EdgeFit:
    center, scale, intercept, weights = row
    return EdgeFit(np.array(center), np.array(scale), float(intercept), np.array(weights))


def _ranges(found: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    return {name: (float(low), float(high)) for name, (low, high) in found.items()}


def _range(values: np.ndarray) -> tuple[float, float]:
    return float(values.min()), float(values.max())
