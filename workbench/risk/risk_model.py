"""The model of the risk of divergence: its predictions, its refusals, and the drivers of a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import OptionError
from workbench.risk.applicability import Applicability, CaseDistances
from workbench.risk.feature_map import FeatureMap
from workbench.risk.features import LIMITS, RATE, as_cases, counts_as_diverged
from workbench.risk.model_card import model_card
from workbench.risk.model_json import write

if TYPE_CHECKING:
    import xarray as xr

_PROBABILITY = {"long_name": "probability of divergence", "units": "1", "meaning": "NaN: not familiar"}


@dataclass(frozen=True)
class RiskModel:
    """log-odds of divergence = slope (log10 rate - log10 edge), the edge linear in features known before training.

    Attributes:
        feature_map: Maps cases to standardised columns.
        applicability: Distance of a case from the training runs.
        weights: Slope, log10 of the edge at the mean of the training runs, and the edge's weight of each column; the
            first row is the model, the others its bootstrap; shape (1 + resample, 2 + column).
        seen: Smallest and largest log10 (rate / edge) of the training runs.
        log_rate: Mean and standard deviation of log10 rate over the training runs.
        spread: Slope of the log-odds within one cell, and standard deviation of log10 of the edges of cells around
            their predictions; see `edge_spread`.
        about: Data and options that it was fitted with.
        validation: Figures of `validate`, if there are any.

    Example:
        >>> import workbench as wb
        >>> model = wb.risk.shipped("forward")
        >>> case = wb.samples.divergence_sweep("held out").isel(run=[0])
        >>> risk = model.predict(wb.sweeps.replan(case, learning_rate=1e-5))
        >>> risk["probability"].values < 0.5
        array([ True])
    """

    feature_map: FeatureMap
    applicability: Applicability
    weights: np.ndarray
    seen: tuple[float, float]
    log_rate: tuple[float, float]
    spread: tuple[float, float]
    about: Mapping[str, Any]
    validation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def features(self) -> tuple[str, ...]:
        """The features that it needs in addition to the learning rate."""
        return self.feature_map.features

    @property
    def level(self) -> float:
        """Level of its intervals."""
        return float(self.about["options"]["level"])

    def predict(self, cases: xr.Dataset) -> xr.Dataset:
        """Predict the probability of divergence.

        Args:
            cases: Settings and measurements of fresh models, dim ``run``.

        Returns:
            Dataset with dim ``run``: ``probability``; ``low`` and ``high``, percentile interval of the bootstrap over
            groups (the uncertainty of the model; attribute ``level``); ``distance`` (1: the limit of its
            applicability), ``is_familiar``, ``farthest_feature`` (in which a case is farthest), ``is_rate_seen`` and
            ``starts_diverged``. The first three are NaN where a case is not familiar, which one of another size than
            the training runs never is; the attribute ``warning`` then states this in a sentence, else it is empty.

            A rate further below or above the edge than any in the training runs gets the risk of the last one, since
            the risk can only fall or rise beyond it; a fresh model whose loss or gradient norm counts as diverged
            has the probability 1 at any rate. For a run longer than all training runs the probability is that of
            divergence within their number of updates. The attribute ``note`` states this, and is empty otherwise.

        Raises:
            OptionError: If a learning rate is no positive number.
            SchemaError: If a case lacks a value.
        """
        return self._risk(cases, withholds=True)

    def _extrapolated(self, cases: xr.Dataset) -> xr.Dataset:
        """`predict` with a number for every case, familiar or not; only for validation, on runs of known outcome."""
        return self._risk(cases, withholds=False)

    def _risk(self, cases: xr.Dataset, *, withholds: bool) -> xr.Dataset:
        """See `predict`; without withholding see `_extrapolated`."""
        import xarray as xr
        from scipy.special import expit

        measured, columns = self._measure(cases)
        edge = self._edges(columns)
        offset = measured.known.log_rate - edge[0]
        is_seen = (offset >= self.seen[0] - 1e-6) & (offset <= self.seen[1] + 1e-6)
        rate = edge[0] + np.clip(offset, *self.seen) if withholds else measured.known.log_rate
        probability = expit(self.weights[:, :1] * (rate - edge))
        starts = counts_as_diverged(as_cases(cases))
        probability[:, starts] = 1.0
        low, high = self._interval(probability)
        shown = (measured.distance <= 1) | starts | (not withholds)
        variables = {
            "probability": ("run", np.where(shown, probability[0], np.nan), _PROBABILITY),
            "low": ("run", np.where(shown, low, np.nan), _bound("lower bound", "probability")),
            "high": ("run", np.where(shown, high, np.nan), _bound("upper bound", "probability")),
            **_distance_columns(measured),
            "is_rate_seen": ("run", is_seen, {"long_name": "rate seen", "units": "1"}),
            "starts_diverged": ("run", starts, {"long_name": "diverged at the start", "units": "1"}),
        }
        notes = (
            _about_starts(starts),
            self._about_rates(offset[shown & ~is_seen & ~starts], withholds=withholds),
            _about_length(cases, self.about.get("n_steps")),
        )
        about = {
            "level": self.level,
            "warning": _warning(measured, withholds=withholds),
            "note": " ".join(filter(None, notes)),
        }
        return xr.Dataset(variables, _coords(cases), about)

    def largest_stable_rate(self, cases: xr.Dataset, *, below: float = 0.20) -> xr.Dataset:
        """Predict the learning rates at which the risk reaches a given one; the rates of the cases are ignored.

        Args:
            cases: As in `predict`.
            below: The risk; 0.20 is the paper's.

        Returns:
            Dataset with dim ``run``: ``largest_stable_rate``, at which `predict` gives the probability ``below``. It is
            cautious: the uncertainty of the edge is part of that risk. ``low`` and ``high``, its percentile interval
            of the bootstrap (attribute ``level``). ``expected_stable_rate``, at which the share ``below`` of the
            case's own seeds is expected to diverge, which is what a sweep over rates measures: half of such cases have
            a lower one; ``expected_low`` and ``expected_high`` hold it for a share ``level`` of them. ``edge``, the
            rate of probability .5. ``distance``, ``is_familiar``, ``farthest_feature`` and ``starts_diverged`` as in
            `predict`.

            Rates are NaN where a case is not familiar, where the training runs have no rate of so low or high a risk,
            and where the fresh model counts as diverged at any rate. The attribute ``warning`` states which, and is
            empty otherwise.

        Raises:
            OptionError: If ``below`` is no probability between 0 and 1, or a learning rate no positive number.
            SchemaError: If a case lacks a value.
        """
        return self._rates(cases, below=below, withholds=True)

    def _extrapolated_rates(self, cases: xr.Dataset, *, below: float = 0.20) -> xr.Dataset:
        """`largest_stable_rate` with a number for every case; only for validation, like `_extrapolated`."""
        return self._rates(cases, below=below, withholds=False)

    def _rates(self, cases: xr.Dataset, *, below: float, withholds: bool) -> xr.Dataset:
        """See `largest_stable_rate`; without withholding see `_extrapolated_rates`."""
        import xarray as xr
        from scipy.special import logit
        from scipy.stats import norm

        if not 0 < below < 1:
            raise OptionError(f"below is {below}, expected a probability between 0 and 1.")
        measured, columns = self._measure(cases)
        edge = self._edges(columns)
        cautious = edge + logit(below) / self.weights[:, :1]
        expected = edge[0] + logit(below) / self.spread[0]
        error = norm.ppf((1 + self.level) / 2) * self.spread[1]
        starts = counts_as_diverged(as_cases(cases))
        shown = ((measured.distance <= 1) | (not withholds)) & ~starts
        is_seen = bool(self.seen[0] <= logit(below) / self.weights[0, 0] <= self.seen[1])
        is_given = shown & (is_seen or not withholds)
        low, high = self._interval(cautious)
        logs = {
            "largest_stable_rate": (cautious[0], is_given, "largest stable learning rate"),
            "low": (low, is_given, "lower bound"),
            "high": (high, is_given, "upper bound"),
            "expected_stable_rate": (expected, shown, "expected stable learning rate"),
            "expected_low": (expected - error, shown, "lower bound of the expected rate"),
            "expected_high": (expected + error, shown, "upper bound of the expected rate"),
            "edge": (edge[0], shown, "edge of stability"),
        }
        variables = {
            name: ("run", np.where(of, 10.0**log, np.nan), {"long_name": long_name, "units": "1"})
            for name, (log, of, long_name) in logs.items()
        } | _distance_columns(measured)
        variables["starts_diverged"] = ("run", starts, {"long_name": "diverged at the start", "units": "1"})
        warnings = [_warning(measured, withholds=withholds), _about_starts(starts)]
        if not is_seen:
            tail = "no rate is given" if withholds else "the rates given go by the formula alone"
            warnings.append(f"No run was seen where the risk is {below:g}; {tail}.")
        about = {"level": self.level, "below": below, "warning": " ".join(filter(None, warnings))}
        return xr.Dataset(variables, _coords(cases), about)

    def drivers(self, cases: xr.Dataset) -> xr.DataArray:
        """Compute the contribution of each feature to the log-odds of a case, relative to the training runs' mean.

        Args:
            cases: As in `predict`.

        Returns:
            Shape (run, feature), the learning rate first; squares are counted with their feature, optimizers together.
            A row and the attribute ``mean`` add up to the log-odds of the formula, which `predict` follows within the
            range of recorded rates. Rows of cases that are not familiar are NaN; see the coordinate ``is_familiar``.

        Raises:
            OptionError: As `predict`.
            SchemaError: As `predict`.
        """
        import xarray as xr

        measured, columns = self._measure(cases)
        slope, edge = self.weights[0, :2]
        sources = np.array(self.feature_map.sources, dtype=str)
        names = list(dict.fromkeys(sources.tolist()))
        parts = -slope * self.weights[0, 2:] * columns
        values = [slope * (measured.known.log_rate - self.log_rate[0])]
        values += [parts[:, sources == name].sum(axis=1) for name in names]
        about = {"long_name": "log-odds", "units": "1", "mean": float(slope * (self.log_rate[0] - edge))}
        coords = {"feature": [RATE, *names], "is_familiar": ("run", measured.distance <= 1), **_coords(cases)}
        table = np.where((measured.distance <= 1)[:, None], np.stack(values, axis=1), np.nan)
        return xr.DataArray(table, coords, ["run", "feature"], name="driver", attrs=about)

    def coefficients(self) -> xr.DataArray:
        """Change of the log-odds by one standard deviation of each column over the training runs.

        Returns:
            By ``feature`` (the learning rate, then every column), with coordinates ``low`` and ``high`` of the
            bootstrap; 0 where a feature never varied. The attribute ``slope`` is that of the log-odds per factor of
            ten in the rate.
        """
        import xarray as xr

        slope = self.weights[:, :1]
        values = np.concatenate([slope * self.log_rate[1], -slope * self.weights[:, 2:]], axis=1)
        low, high = self._interval(values)
        about = {"long_name": "log-odds per standard deviation", "units": "1", "slope": float(slope[0, 0])}
        coords = {"feature": [RATE, *self.feature_map.columns], "low": ("feature", low), "high": ("feature", high)}
        return xr.DataArray(values[0], coords, ["feature"], name="coefficient", attrs=about | {"level": self.level})

    def with_validation(self, figures: Mapping[str, Any]) -> RiskModel:
        """The same model with the figures of `validate`, for its file and its card."""
        return replace(self, validation=dict(figures))

    def card(self) -> str:
        """Data, figures and limits, as Markdown."""
        return model_card(
            self.feature_map,
            self.coefficients(),
            about=self.about,
            validation=self.validation,
            spread=self.spread,
            sizes=self.applicability.sizes,
        )

    def content(self) -> dict[str, Any]:
        """All fields by name, as in its file."""
        return {
            "about": self.about,
            "validation": self.validation,
            "design": {item.name: getattr(self.feature_map, item.name) for item in fields(self.feature_map)},
            "seen": self.seen,
            "log_rate": self.log_rate,
            "spread": self.spread,
            "weights": self.weights,
            "familiarity": {
                "unit": self.applicability.unit,
                "sizes": self.applicability.sizes,
                "points": self.applicability.points,
            },
        }

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the model as JSON, which `wb.risk.load` reads.

        Raises:
            StoreError: If there is something at the path, or it cannot be written.
        """
        return write(self.content(), Path(path), overwrite=overwrite)

    def _measure(self, cases: xr.Dataset) -> tuple[CaseDistances, np.ndarray]:
        """Distances of cases, and their columns."""
        known = self.feature_map.read(cases)
        return self.applicability.measure(self.feature_map, known, cases), self.feature_map.matrix(known)

    def _edges(self, columns: np.ndarray) -> np.ndarray:
        """log10 of the edges; shape (1 + resample, run)."""
        return self.weights[:, 1:2] + self.weights[:, 2:] @ columns.T

    def _interval(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Percentiles of the bootstrap, extended to the model's own value; NaN without a bootstrap."""
        if len(values) == 1:
            return np.full_like(values[0], np.nan), np.full_like(values[0], np.nan)
        low, high = np.quantile(values[1:], [(1 - self.level) / 2, (1 + self.level) / 2], axis=0)
        return np.minimum(low, values[0]), np.maximum(high, values[0])

    def _about_rates(self, offset: np.ndarray, *, withholds: bool) -> str:
        """One sentence about rates that lie further from the edge than any seen; empty where none does."""
        if not len(offset):
            return ""
        tail = "is that of the last rate seen, and can only lie beyond it" if withholds else "goes by the formula alone"
        return (
            f"{len(offset)} learning rate{'s lie' if len(offset) > 1 else ' lies'} further from the predicted edge "
            f"than any that was trained with ({10.0 ** self.seen[0]:.2g} to {10.0 ** self.seen[1]:.2g} times it); the "
            f"risk {tail}."
        )


def _distance_columns(measured: CaseDistances) -> dict[str, Any]:
    about = {"long_name": "distance", "units": "1", "meaning": "1: the edge of what the training runs show"}
    return {
        "distance": ("run", measured.distance, about),
        "is_familiar": ("run", measured.distance <= 1, {"long_name": "familiar", "units": "1"}),
        "farthest_feature": ("run", measured.farthest.astype(str), {"long_name": "farthest feature"}),
    }


def _warning(measured: CaseDistances, *, withholds: bool) -> str:
    """One sentence about the cases that are not familiar; empty where all are."""
    distance = measured.distance
    n_cases, n_unknown = len(distance), int((distance > 1).sum())
    if not n_unknown:
        return ""
    who = f"{n_unknown} of {n_cases} cases {'is' if n_unknown == 1 else 'are'}" if n_cases > 1 else "The case is"
    tail = "no number is given" if withholds else "the numbers given are extrapolated"
    return (
        f"{who} unlike the runs that the risk model has seen, at a distance of {'up to ' if n_unknown > 1 else ''}"
        f"{distance.max():.2g} where 1 is the edge, farthest in {measured.farthest_in_words()}; {tail}."
    )


def _about_starts(starts: np.ndarray) -> str:
    """One sentence about models that count as diverged before they are trained; empty where none does."""
    if not starts.any():
        return ""
    who = "The fresh model counts" if len(starts) == 1 else f"{int(starts.sum())} of {len(starts)} fresh models count"
    loss, norm = LIMITS.values()
    return f"{who} as diverged before any update, with a loss above {loss:g} or a gradient norm above {norm:g}."


def _about_length(cases: xr.Dataset, longest: int | None) -> str:
    """One sentence about runs longer than any seen; empty where none is."""
    if longest is None or "n_steps" not in cases.variables or not (np.asarray(cases["n_steps"].values) > longest).any():
        return ""
    return f"The runs seen ended after {longest} updates, so the risk is that of divergence within the first {longest}."


def _bound(long_name: str, of: str) -> dict[str, str]:
    return {"long_name": long_name, "units": "1", "meaning": f"of the {of}, from the bootstrap; NaN: none"}


def _coords(cases: xr.Dataset) -> dict[str, Any]:
    """The coordinates to keep: the learning rate, and those that name a case."""
    names = (RATE, "study", "architecture", "configuration", "cell", "seed", "run")
    found = {name: cases[name] for name in names if name in cases.variables}
    return {
        name: ("run", np.atleast_1d(np.broadcast_to(v.values, cases.sizes.get("run", 1)))) for name, v in found.items()
    }
