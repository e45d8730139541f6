"""The risk model: distributions of the three learning rates at which the outcome of a training changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import OptionError, SchemaError, StoreError
from workbench.formatting import listed
from workbench.io.atomic import write_json
from workbench.io.files import FileKind
from workbench.option_kinds import NonNegativeInt
from workbench.risk.features import LIMITS, RATE, as_cases, column, counts_as_diverged, feature_table
from workbench.risk.scores import resamples

if TYPE_CHECKING:
    import xarray as xr


Floats = NDArray[np.float64]

#: Candidates for the penalty of the coefficients of standardized features.
PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
#: Bounds of the standard deviation of the logarithm of an edge: 5 %, and a factor of e^20.
_MIN_DEVIATION, _MAX_DEVIATION = 0.05, 20.0


@dataclass(frozen=True)
class Edges:
    """Edges of designs, each known to lie between two natural logarithms of learning rates.

    Attributes:
        low: Lower ends, shape (design,); minus infinity if unknown.
        high: Upper ends, shape (design,), no smaller than ``low``; infinity if unknown. If both ends are equal, the
            edge is known exactly.

    Raises:
        OptionError: If an end is NaN, a lower end is above the upper one, or an edge is infinite.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> edges = wb.risk.Edges(np.log([0.01, 0.1]), np.array([np.log(0.01), np.inf]))  # at 0.01; above 0.1
        >>> len(edges.low)
        2

    See Also:
        `workbench.risk.fit`: Fits a risk model to edges.
    """

    low: Floats
    high: Floats

    def __post_init__(self) -> None:
        if np.shape(self.low) != np.shape(self.high) or np.ndim(self.low) != 1:
            raise OptionError(
                f"high and low must have one shape, (design,), got {np.shape(self.high)} and {np.shape(self.low)}."
            )
        is_valid = (self.low <= self.high) & (self.low < np.inf) & (self.high > -np.inf)
        if not is_valid.all():
            i = int(np.argmin(is_valid))
            raise OptionError(
                f"low[{i}] must not exceed high[{i}], and an edge must not be infinite, got {self.low[i]:g} and "
                f"{self.high[i]:g}."
            )

    def __getitem__(self, index: np.ndarray) -> Edges:
        """Return the edges of selected designs."""
        return Edges(self.low[index], self.high[index])


@dataclass(frozen=True)
class EdgeFit:
    """A fitted regression of the log of an edge on standardized features, whose deviations are ``scale``."""

    center: Floats
    scale: Floats
    intercept: float
    coefficients: Floats

    def mean(self, features: np.ndarray) -> Floats:
        """Return the mean of the logarithm of the edge of designs, shape (design,)."""
        found: Floats = self.intercept + ((features - self.center) / self.scale) @ self.coefficients
        return found


def fit_edges(features: np.ndarray, edges: Edges, *, penalty: float, weight: np.ndarray | None = None) -> EdgeFit:
    """Fit the regression by penalized maximum likelihood."""
    from scipy.optimize import minimize

    weight = np.ones(len(features)) if weight is None else np.asarray(weight, dtype=float)
    center = np.average(features, axis=0, weights=weight)
    scale = np.sqrt(np.average((features - center) ** 2, axis=0, weights=weight))
    scale = np.where(scale > 1e-9 * np.maximum(np.abs(center), 1), scale, 1.0)
    inputs = (features - center) / scale
    # The middle of each interval, its only finite end, or 0 if it has none.
    ends = np.where(np.isfinite(edges.low), edges.low, edges.high)
    with np.errstate(invalid="ignore"):
        middle = np.where(np.isinf(edges.low) | np.isinf(edges.high), ends, (edges.low + edges.high) / 2)
    middle = np.where(np.isfinite(middle), middle, 0.0)
    start = np.concatenate([[np.average(middle, weights=weight)], np.zeros(inputs.shape[1]), [0.0]])

    def loss(values: np.ndarray) -> tuple[float, Floats]:
        mean, spread = values[0] + inputs @ values[1:-1], np.exp(values[-1])
        terms, by_mean, by_deviation = _with_derivatives(mean, _MIN_DEVIATION + spread, edges)
        by_mean, by_deviation = weight * by_mean, weight * by_deviation
        total = -(weight * terms).sum() + 0.5 * penalty * (values[1:-1] ** 2).sum()
        gradient = [-by_mean.sum(), *(penalty * values[1:-1] - by_mean @ inputs), -by_deviation.sum() * spread]
        return float(total), np.array(gradient)

    found = minimize(loss, start, jac=True, method="L-BFGS-B").x
    return EdgeFit(center, scale, float(found[0]), found[1:-1])


def log_likelihood(mean: np.ndarray, deviation: float, edges: Edges) -> Floats:
    """Return the log-likelihood of each edge: of its interval, or of its value if it is known exactly."""
    return _with_derivatives(mean, deviation, edges)[0]


def _with_derivatives(mean: np.ndarray, deviation: float, edges: Edges) -> tuple[Floats, Floats, Floats]:
    """Return the log-likelihood of each edge, and its derivatives with respect to the mean and the deviation."""
    from scipy.special import log_ndtr

    low, high = (edges.low - mean) / deviation, (edges.high - mean) / deviation
    is_exact = edges.low == edges.high
    # The mirrored interval has the same probability, and is computed precisely if both ends lie far above the mean.
    is_above = low > 0
    lower, upper = np.where(is_above, -high, low), np.where(is_above, -low, high)
    with np.errstate(divide="ignore", invalid="ignore"):
        between = log_ndtr(upper) + np.log1p(-np.exp(log_ndtr(lower) - log_ndtr(upper)))
        terms = np.where(is_exact, _log_density(high) - np.log(deviation), between)
        at_low, at_high = (np.exp(_log_density(end) - between) for end in (low, high))
        by_mean = np.where(is_exact, high, at_low - at_high) / deviation
        low, high = (np.where(np.isfinite(end), end, 0.0) for end in (low, high))  # The density there is 0.
        by_deviation = np.where(is_exact, high**2 - 1, low * at_low - high * at_high) / deviation
    return terms, by_mean, by_deviation


def _log_density(values: np.ndarray) -> Floats:
    """Return the logarithm of the density of the standard normal distribution."""
    return np.asarray(-0.5 * values**2 - 0.5 * np.log(2 * np.pi))


def out_of_group(features: np.ndarray, edges: Edges, groups: np.ndarray, *, penalty: float) -> tuple[Floats, float]:
    """Predict the logs of each group's edges from other groups; also return the standard deviation around them."""
    from scipy.optimize import minimize_scalar

    mean = np.full(len(features), np.nan)
    for group in np.unique(groups):
        is_out = groups == group
        mean[is_out] = fit_edges(features[~is_out], edges[~is_out], penalty=penalty).mean(features[is_out])

    def loss(log_deviation: float) -> float:
        return float(-log_likelihood(mean, np.exp(log_deviation), edges).sum())

    found = minimize_scalar(loss, bounds=(np.log(_MIN_DEVIATION), np.log(_MAX_DEVIATION)), method="bounded")
    return mean, float(np.exp(found.x))


def best_penalty(features: np.ndarray, edges: Edges, groups: np.ndarray) -> tuple[float, float]:
    """Return the penalty with the largest likelihood for held-out groups, and the deviation of their edges."""
    found = {}
    for penalty in PENALTIES:
        mean, deviation = out_of_group(features, edges, groups, penalty=penalty)
        found[penalty] = log_likelihood(mean, deviation, edges).sum(), deviation
    best = max(found, key=lambda penalty: found[penalty][0])
    return best, found[best][1]


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
    (`workbench.rates.useful_band`); from the explosion edge on, a run diverges by RKSP's limits. The probability that a
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

        def rounded(value: Any) -> Any:
            """Round numbers to six digits, far more than are significant."""
            return [rounded(one) for one in value] if isinstance(value, list) else float(f"{value:.6g}")

        def row(one: EdgeFit) -> list[Any]:
            return rounded([one.center.tolist(), one.scale.tolist(), one.intercept, one.coefficients.tolist()])

        content = {
            "kind": _KIND, "version": _VERSION, "about": dict(self.about), "features": self.features,
            "groups": self.groups, "ranges": dict(self.ranges), "measured": dict(self.measured),
            "deviations": {edge: rounded(value) for edge, value in self.deviations.items()},
            "fits": {edge: [row(one) for one in fits] for edge, fits in self.fits.items()},
        }  # fmt: skip
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
        raise OptionError(f"edges must contain {listed(missing)}; pass -inf and inf for an unknown edge.")
    for name, size in {"families": len(families), **{name: len(edges[name].low) for name in EDGES}}.items():
        if size != n_designs:
            raise OptionError(f"{name} must have one entry for each of the {n_designs} designs, got {size}.")
    groups, family = groups_of(cases), np.asarray(families, dtype=str)
    _numbers(cases, "scale_response")  # Raises an error if the group of a case is unknown.
    is_used = in_enough_families(groups, family)
    if not is_used.any():
        counts = {group: len(set(family[groups == group])) for group in np.unique(groups).tolist()}
        found = listed([f"{n} for {group}" for group, n in counts.items()])
        raise SchemaError(f"Designs must belong to at least {_MIN_FAMILIES} families for an optimizer, got {found}.")
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
    """Return whether the group of each design occurs in enough families for a fit, shape (design,)."""
    counts = {group: len(set(families[groups == group].tolist())) for group in set(groups.tolist())}
    return np.array([counts[group] >= _MIN_FAMILIES for group in groups.tolist()])


def groups_of(cases: xr.Dataset) -> np.ndarray:
    """Return strings such as "AdamW with norm" (run,), empty where ``scale_response`` is NaN.

    A norm is measured: doubling the stream doubles the logits of a model without one.
    """
    responses = _numbers(cases, "scale_response", allow_missing=True)
    names = [_OPTIMIZER_NAMES.get(name, name) for name in _known_column(cases, "optimizer").astype(str)]
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
        ranges, measured = (
            {name: (float(low), float(high)) for name, (low, high) in content[part].items()}
            for part in ("ranges", "measured")
        )
        fits = {
            edge: tuple(
                EdgeFit(np.array(a), np.array(b), float(c), np.array(d)) for a, b, c, d in content["fits"][edge]
            )
            for edge in EDGES
        }
        deviations = {edge: float(content["deviations"][edge]) for edge in EDGES}
        names = tuple(content["features"]), tuple(content["groups"])
        return EdgeModel(*names, ranges, measured, fits, deviations, content["about"])


def _table(cases: xr.Dataset, features: Sequence[str], *, needed: np.ndarray) -> Floats:
    """Return features of cases, shape (run, feature)."""
    if not features:
        return np.empty((cases.sizes["run"], 0))
    found: Floats = feature_table(cases, features, allow_missing=True).values.astype(float)
    if np.isnan(found[needed]).any():
        feature_table(cases.isel(run=needed), features)  # Raises an error that names the missing features.
    return found


def _numbers(cases: xr.Dataset, name: str, *, allow_missing: bool = False) -> Floats:
    """Return the numbers of a variable of cases, shape (run,)."""
    values: Floats = _known_column(cases, name).astype(float)
    if np.isnan(values).any() and not allow_missing:
        raise SchemaError(f"A case has no {name} (NaN); omit such cases.")
    return values


def _known_column(cases: xr.Dataset, name: str) -> np.ndarray:
    if name not in cases.variables:
        raise SchemaError(f"The cases lack {name}; measure them with wb.sweeps.measure_case.")
    return column(cases, name)


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
