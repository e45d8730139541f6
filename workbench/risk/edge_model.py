"""The risk model: distributions of the three learning rates at which the outcome of a training changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError, SchemaError, StoreError
from workbench.formatting import listed
from workbench.io.atomic import write_json
from workbench.io.files import FileKind
from workbench.option_checks import NonNegativeInt
from workbench.risk.edge_regression import EdgeFit, Edges, Floats, best_penalty, fit_edges
from workbench.risk.features import LIMITS, RATE, as_cases, column, counts_as_diverged, feature_table
from workbench.risk.scores import resamples

if TYPE_CHECKING:
    import xarray as xr


_FILE = FileKind("a risk model", "pass a file from EdgeModel.save()")
#: Edge -> outcome of the rates beyond it, and whether these are the larger rates.
EDGES = {"slow_edge": ("too_small", False), "useful_edge": ("too_large", True), "explosion_edge": ("explosion", True)}
#: Name of a prediction -> its title.
TITLES = {
    "failure": "probability of not learning well",
    "too_small": "probability that the learning rate is too small",
    "too_large": "probability that the learning rate is too large",
    "explosion": "probability of an explosion",
    "slow_edge": "smallest useful rate",
    "useful_edge": "largest useful rate",
    "explosion_edge": "learning rate from which the run diverges",
}
_ENDS = {"": "", "_low": ", lower end", "_high": ", upper end"}
#: Upper limit of the sum of two probabilities: both are estimates, and no outcome is certain.
MAX_PROBABILITY = 1 - 1e-6
_STARTS_DIVERGED = (
    "The untrained model counts as diverged by RKSP's limits (a loss above "
    f"{LIMITS['initial_loss']:g} or a gradient norm above {LIMITS['initial_grad_norm']:g}), and the risk model was not "
    "fitted for such models."
)
#: Setting of a design -> phrase for a value outside of the fitted range.
_FITTED = {"d_model": "a width of {}", "n_layers": "a depth of {}", "n_steps": "training over {} updates"}
#: Level of the intervals: fraction of new families (of a rate) or of resamples of the families (of a probability) that
#: they contain.
LEVEL = 0.8
_KIND, _VERSION = "stability-workbench edge model", 1
#: Minimum number of families, in total and for each optimizer with or without a norm.
_MIN_FAMILIES = 3
#: Class of an optimizer -> its usual name.
_OPTIMIZER_NAMES = {"MuonWithAdamW": "Muon", "": "an unnamed optimizer"}


@dataclass(frozen=True)
class EdgeModel:
    """Normal distributions of the logarithms of three edges, whose means are linear in features of a design.

    Slow and useful edge are the ends of the band of learning rates at which a design learns well
    (`workbench.rates.outcomes`); from the explosion edge on, a run diverges by RKSP's limits. The probability that a
    rate is too large is the probability that the useful edge lies below it, and likewise for the other outcomes. The
    standard deviation of each edge is that of families held out from the fit, so it includes what the features do not
    explain in a new family. Designs that learned at no rate have no edges, so the probabilities hold for designs that
    learn at some rate.

    Attributes:
        features: Names of numeric features (`workbench.risk.FEATURES`).
        groups: Optimizers, each with or without a norm, of the fitted designs; there are no predictions for others.
        ranges: Smallest and largest value of each feature in these designs; values outside are clipped.
        measured: Smallest and largest width, number of layers and number of updates of these designs; there are no
            predictions outside.
        fits: Regressions of each edge, by its name; the first is the model, the others are bootstrap resamples over
            families.
        deviations: Standard deviation of the natural logarithm of each edge for held-out families, by its name.
        about: Data and options of the fit.

    Example:
        >>> import workbench as wb
        >>> model = wb.risk.shipped()
        >>> sorted(model.deviations)
        ['explosion_edge', 'slow_edge', 'useful_edge']

    See Also:
        `workbench.risk.fit`: Fits a model.
        `workbench.risk.shipped`: Returns the model that ships with the workbench.
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
            cases: Settings and measurements of untrained models, dimension ``run``; see
                `workbench.sweeps.measure_case`.

        Returns:
            Dataset with dimension ``run``: the probabilities ``too_small``, ``too_large``, ``failure`` (either of them)
            and ``explosion``, and the learning rates ``slow_edge``, ``useful_edge`` and ``explosion_edge``. Each has
            ``_low`` and ``_high``, the ends of an 80 % interval: over new families for rates, over resamples of the
            families for probabilities. Values are NaN where there is no prediction, for the reason given in ``reason``.
            For an untrained model that counts as diverged the probability of an explosion is 1 at every rate, and the
            other values are NaN.

        Raises:
            OptionError: If a learning rate is not positive.
            SchemaError: If a case lacks a value.
        """
        import xarray as xr
        from scipy.stats import norm

        cases = as_cases(cases)
        starts_diverged = counts_as_diverged(cases)
        reasons = self._reasons(cases)
        reasons = np.where(starts_diverged & (reasons == ""), _STARTS_DIVERGED, reasons)
        is_known = reasons == ""
        inputs, log_rate = self._inputs(cases, is_known=is_known), np.log(column(cases, RATE).astype(float))
        quantile = norm.ppf((1 + LEVEL) / 2)
        found: dict[str, np.ndarray] = {}
        probabilities: dict[str, Floats] = {}
        for edge, (outcome, is_above) in EDGES.items():
            means, deviation = np.array([one.mean(inputs) for one in self.fits[edge]]), self.deviations[edge]
            distance = (log_rate - means) / deviation
            probabilities[outcome] = norm.cdf(distance if is_above else -distance)
            found[edge] = np.where(
                is_known, np.exp(means[0] + np.array([[0.0], [-quantile], [quantile]]) * deviation), np.nan
            )
        # A run that diverges does not learn well, and the useful edge is known better than the explosion edge.
        probabilities["explosion"] = np.minimum(probabilities["explosion"], probabilities["too_large"])
        found["explosion_edge"] = np.maximum(found["explosion_edge"], found["useful_edge"])
        # A rate cannot be both too small and too large.
        probabilities["failure"] = np.minimum(probabilities["too_small"] + probabilities["too_large"], MAX_PROBABILITY)
        for outcome, values in probabilities.items():
            low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
            three = np.stack([values[0], np.minimum(low, values[0]), np.maximum(high, values[0])])
            found[outcome] = np.where(is_known, three, np.nan)
        found["explosion"] = np.where(starts_diverged, 1.0, found["explosion"])
        variables: dict[str, Any] = {"reason": ("run", reasons.astype(str))}
        for name, three in found.items():
            for (end, phrase), one in zip(_ENDS.items(), three, strict=True):
                variables[f"{name}{end}"] = ("run", one, {"long_name": f"{TITLES[name]}{phrase}", "units": "1"})
        return xr.Dataset(variables)

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the model as a JSON file for `load`, with coefficients and deviations rounded to six digits.

        Args:
            path: File to write.
            overwrite: Whether to replace an existing file.

        Returns:
            The path.

        Raises:
            StoreError: If the path exists, or cannot be written.
        """
        content = {
            "kind": _KIND,
            "version": _VERSION,
            "about": dict(self.about),
            "features": self.features,
            "groups": self.groups,
            "ranges": dict(self.ranges),
            "measured": dict(self.measured),
            "deviations": {edge: _rounded(value) for edge, value in self.deviations.items()},
            "fits": {edge: [_row(one) for one in fits] for edge, fits in self.fits.items()},
        }
        return write_json(content, path, overwrite=overwrite)

    def _inputs(self, cases: xr.Dataset, *, is_known: np.ndarray) -> Floats:
        """Return features of cases, clipped to the range of the fitted designs, and a one-hot column for each group."""
        table = _table(cases, self.features, needed=is_known)
        bounds = np.array([self.ranges[name] for name in self.features]).reshape(-1, 2)
        table = np.clip(np.where(np.isnan(table), bounds[:, 0], table), bounds[:, 0], bounds[:, 1])
        is_one = groups_of(cases)[:, None] == np.array(self.groups)
        return np.concatenate([table, is_one.astype(float)], axis=1)

    def _reasons(self, cases: xr.Dataset) -> np.ndarray:
        """Return why there is no prediction for each case, shape (run,); empty if there is one."""
        settings = {name: _numbers(cases, name) for name in self.measured}
        reasons = []
        for i, group in enumerate(groups_of(cases).tolist()):
            outside = []
            for name, (low, high) in self.measured.items():
                if not low <= (value := settings[name][i]) <= high:
                    only = f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
                    outside.append(f"{_FITTED[name].format(f'{value:,.0f}')} (only {only})")
            if group and group not in self.groups:
                kind = " with norm" if group.endswith(" with norm") else " without norm"
                known = [one.removesuffix(kind) for one in self.groups if one.endswith(kind)]
                outside.append(f"{group} (only {listed(known or self.groups)})")
            reason = f"The risk model was not fitted for {listed(outside)}." if outside else ""
            if not group:
                reason = "Whether the model has a norm is unknown: its logits are zero or not finite."
            reasons.append(reason)
        return np.array(reasons)


def fit(
    cases: xr.Dataset,
    edges: Mapping[str, Edges],
    families: Sequence[str],
    *,
    features: Sequence[str] = (),
    n_bootstrap: NonNegativeInt = 200,
    seed: NonNegativeInt = 0,
) -> EdgeModel:
    """Fit the risk model to designs whose edges were measured.

    For each edge, the penalty of the coefficients is the one with the largest likelihood on held-out families. Designs
    whose optimizer, with or without a norm, occurs in fewer than three families are not used.

    Args:
        cases: Settings and measurements of the designs, dimension ``run``.
        edges: Logarithms between which the edges of each design lie: ``slow_edge``, ``useful_edge`` and
            ``explosion_edge``.
        families: Family of each design. Families are resampled and held out as units.
        features: Names of numeric features.
        n_bootstrap: Number of resamples of the families.
        seed: Seed of the resamples.

    Returns:
        The model.

    Raises:
        OptionError: If a feature does not exist or has no finite value, an edge is missing, or the numbers of designs,
            edges and families differ.
        SchemaError: If a case lacks a value, or no optimizer, with or without a norm, occurs in three families.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> cases = wb.samples.open("divergence_sweep", "norms").isel(run=slice(0, 180, 10))
        >>> edge = np.log(cases["learning_rate"].values)
        >>> edges = {name: wb.risk.Edges(edge, edge) for name in ("slow_edge", "useful_edge", "explosion_edge")}
        >>> model = wb.risk.fit(cases, edges, cases["architecture"].values, n_bootstrap=2)
        >>> model.predict(cases)["useful_edge"].dims
        ('run',)

    See Also:
        `workbench.risk.EdgeModel`: Describes the model.
        `workbench.risk.Edges`: Holds measured edges.
    """
    cases = as_cases(cases)
    n_designs = cases.sizes["run"]
    if missing := [name for name in EDGES if name not in edges]:
        raise OptionError(
            f"edges must contain {listed(missing)}; pass minus infinity and infinity for an unknown edge."
        )
    for name, size in {"families": len(families), **{name: len(edges[name].low) for name in EDGES}}.items():
        if size != n_designs:
            raise OptionError(f"{name} must have one entry for each of the {n_designs} designs, got {size}.")
    groups, family = groups_of(cases), np.asarray(families, dtype=str)
    if "" in groups:
        raise _missing_value("scale_response")
    is_used = in_enough_families(groups, family)
    if not is_used.any():
        counts = {group: len(set(family[groups == group])) for group in np.unique(groups).tolist()}
        found = listed([f"{n} for {group}" for group, n in counts.items()])
        raise SchemaError(
            f"The designs must belong to at least {_MIN_FAMILIES} families for some optimizer, got {found}."
        )
    cases, edges = cases.isel(run=is_used), {name: edges[name][is_used] for name in EDGES}
    n_designs, codes = cases.sizes["run"], np.unique(family[is_used], return_inverse=True)[1]
    table = _table(cases, features, needed=np.ones(n_designs, bool))
    ranges = {}
    for name, values in zip(features, table.T, strict=True):
        if not np.isfinite(values).any():
            raise OptionError(f"The feature '{name}' is infinite for every design; fit a model without it.")
        ranges[name] = _range(values[np.isfinite(values)])
    measured = {name: _range(_numbers(cases, name)) for name in _FITTED}
    unfitted = EdgeModel(tuple(features), tuple(sorted(set(groups[is_used].tolist()))), ranges, measured, {}, {})
    inputs = unfitted._inputs(cases, is_known=np.ones(n_designs, bool))
    draws = np.concatenate([np.empty((0, n_designs)), *resamples(codes, n_designs, n_bootstrap, seed)])
    fits, deviations, penalties = {}, {}, {}
    for edge in EDGES:
        known = edges[edge]
        penalty, deviations[edge] = best_penalty(inputs, known, codes)
        resampled = [fit_edges(inputs, known, penalty=penalty, weight=row) for row in draws]
        fits[edge], penalties[edge] = (fit_edges(inputs, known, penalty=penalty), *resampled), penalty
    about = {"n_rows": n_designs, "n_families": int(codes.max()) + 1, "penalties": penalties, "seed": seed}
    return replace(unfitted, fits=fits, deviations=deviations, about=about)


def in_enough_families(groups: np.ndarray, families: np.ndarray) -> np.ndarray:
    """Return whether the group of each design occurs in enough families for a fit, shape (design,).

    Args:
        groups: Group of each design, from `groups_of`.
        families: Family of each design, shape (design,).
    """
    counts = {group: len(set(families[groups == group].tolist())) for group in set(groups.tolist())}
    return np.array([counts[group] >= _MIN_FAMILIES for group in groups.tolist()])


def groups_of(cases: xr.Dataset) -> np.ndarray:
    """Return the optimizer of each case and whether its model has a norm, as text.

    The presence of a norm is measured, so that it does not depend on names: doubling the residual stream doubles the
    logits of a model without normalization, and hardly changes those of others (``scale_response``).

    Returns:
        Strings such as "AdamW with norm", shape (run,); empty where ``scale_response`` is NaN.
    """
    responses = _numbers(cases, "scale_response", allow_missing=True)
    if "optimizer" not in cases.variables:
        raise _missing_variable("optimizer")
    names = [_OPTIMIZER_NAMES.get(name, name) for name in column(cases, "optimizer").astype(str)]
    return np.array(
        [
            "" if np.isnan(response) else f"{name} {'with' if response < 0.5 else 'without'} norm"
            for name, response in zip(names, responses, strict=True)
        ]
    )


def load(path: str | Path) -> EdgeModel:
    """Load a model that `EdgeModel.save` wrote.

    Args:
        path: File of the model.

    Returns:
        The model.

    Raises:
        StoreError: If the file is missing, damaged, not a risk model, or written by a newer version.

    Example:
        >>> import workbench as wb
        >>> path = wb.risk.shipped().save("risk.json")
        >>> wb.risk.load(path).features == wb.risk.shipped().features
        True

    See Also:
        `workbench.risk.EdgeModel`: Describes the model.
    """
    content = _FILE.json(path)
    with _FILE.reading(path):
        if content["kind"] != _KIND:
            raise ValueError(f"its kind is {content['kind']!r}")
        if content["version"] > _VERSION:
            raise StoreError(
                f"{path} was written by a newer version of the workbench; update the workbench, or fit the model again."
            )
        return EdgeModel(
            tuple(content["features"]),
            tuple(content["groups"]),
            _ranges(content["ranges"]),
            _ranges(content["measured"]),
            {
                edge: tuple(
                    EdgeFit(np.array(a), np.array(b), float(c), np.array(d)) for a, b, c, d in content["fits"][edge]
                )
                for edge in EDGES
            },
            {edge: float(content["deviations"][edge]) for edge in EDGES},
            content["about"],
        )


def _table(cases: xr.Dataset, features: Sequence[str], *, needed: np.ndarray) -> Floats:
    """Return features of cases, shape (run, feature)."""
    if not features:
        return np.empty((cases.sizes["run"], 0))
    found: Floats = feature_table(cases, features, allow_missing=True).values.astype(float)
    if np.isnan(found[needed]).any():
        feature_table(cases.isel(run=needed), features)  # Raises an error that names the missing features.
    return found


def _numbers(cases: xr.Dataset, name: str, *, allow_missing: bool = False) -> Floats:
    """Return the values of a variable of cases, shape (run,)."""
    if name not in cases.variables:
        raise _missing_variable(name)
    values: Floats = column(cases, name).astype(float)
    if np.isnan(values).any() and not allow_missing:
        raise _missing_value(name)
    return values


def _missing_variable(name: str) -> SchemaError:
    """Create the exception for cases without a variable."""
    return SchemaError(f"The cases lack {name}; measure them with wb.sweeps.measure_case.")


def _missing_value(name: str) -> SchemaError:
    """Create the exception for a case in which a variable is NaN."""
    return SchemaError(f"A case has no {name} (NaN); omit such cases.")


def _row(fit: EdgeFit) -> list[Any]:
    """Return a fit as JSON values."""
    parts = (fit.center.tolist(), fit.scale.tolist(), fit.intercept, fit.coefficients.tolist())
    return [[_rounded(one) for one in part] if isinstance(part, list) else _rounded(part) for part in parts]


def _rounded(value: float) -> float:
    """Round a number to six digits, far more than are significant."""
    return float(f"{value:.6g}")


def _ranges(found: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    return {name: (float(low), float(high)) for name, (low, high) in found.items()}


def _range(values: np.ndarray) -> tuple[float, float]:
    return float(values.min()), float(values.max())


_SHIPPED = Path(__file__).parent / "shipped" / "edges.json"


@cache
def shipped() -> EdgeModel:
    """Return the risk model that ships with the workbench.

    Raises:
        StoreError: If its file is missing.

    Example:
        >>> import workbench as wb
        >>> wb.risk.shipped().about["n_families"] > 10
        True

    See Also:
        `workbench.risk.predict`: Uses it by default.
        `workbench.risk.fit`: Fits another model.
    """
    return load(_SHIPPED)
