"""Features of a run that are known before it starts, from which the risk is predicted.

No feature depends on the name of an architecture, a norm or an initialization, so that a new architecture has the same
features as any other. Positive quantities that range over powers of ten are logarithms to base 10.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import OptionError, SchemaError, require_listed
from workbench.koopman.measures import STATISTICS
from workbench.schema.runs import SPECTRA

if TYPE_CHECKING:
    import xarray as xr

#: The learning rate is not a feature: the features predict the rates at which outcomes change.
RATE = "learning_rate"
#: Measure of layers -> bounds to which it is clipped before its logarithm is taken; None uses the measure unchanged.
#: kappa and K may be infinite (a defective operator; a spectral radius above 1), so K contains little more information
#: than the fraction of layers at its bound.
_LAYER_MEASURES: dict[str, tuple[float, float] | None] = {
    "near_unit_mass": None,
    "expansive_mass": None,
    "contractive_mass": None,
    "intermediate_mass": None,
    "spectral_radius": (1e-3, 1e6),
    "eigenvector_condition": (1.0, 1e6),
    "nonlinearity_ratio": None,
    "kreiss_constant": (1.0, 1e3),
    "energy_gain": (1e-6, 1e6),
    "update_norm": (1e-6, 1e6),
    "is_informative": None,
}
#: Statistics of a measure over layers; the change is the value of the last layer less that of the first one.
LAYER_STATISTICS = (*STATISTICS, "change")
#: Largest loss (nat) and gradient norm that do not count as divergence (RKSP).
LIMITS = {"initial_loss": 50.0, "initial_grad_norm": 500.0}
#: Optimizers whose momentum sums gradients instead of averaging them.
_ACCUMULATING = ("sgd", "rmsprop")


@dataclass(frozen=True)
class Feature:
    """A feature that is known before training.

    ``measures`` maps the variables that it ``needs``, each (run,), to values; None for a statistic over layers.
    """

    name: str
    long_name: str
    needs: tuple[str, ...]
    measures: Callable[..., np.ndarray] | None = None


def feature_table(cases: xr.Dataset, names: Sequence[str], *, allow_missing: bool = False) -> xr.DataArray:
    """Return features of cases, (run, feature), by their names in `FEATURES`; an error or NaN where one is missing.

    It is infinite where a quantity is, such as ``breaking_rate`` of a model that diverges at no rate.
    """
    import xarray as xr

    cases = as_cases(cases)
    values, is_missing = _values(cases, names)
    if is_missing.any() and not allow_missing:
        raise _missing_values(cases, names, is_missing)
    about = {"long_name": "feature", "units": "1"}
    return xr.DataArray(values, {"feature": list(names)}, ["run", "feature"], name="feature_value", attrs=about)


def as_cases(cases: xr.Dataset) -> xr.Dataset:
    """Return cases with a dimension ``run`` and positive learning rates."""
    if RATE not in cases.variables:
        raise SchemaError("The cases have no learning_rate; assign the peak learning rate of each run.")
    if "run" not in cases.dims:
        cases = cases.expand_dims("run")
    rates = np.atleast_1d(np.asarray(cases[RATE].values, dtype=float))
    if not (np.isfinite(rates) & (rates > 0)).all():
        wrong = float(rates[~(np.isfinite(rates) & (rates > 0))][0])
        raise OptionError.of(RATE, wrong, "positive and finite")
    if not cases.sizes["run"]:
        raise SchemaError("There is no case; select at least one run.")
    return cases


def counts_as_diverged(cases: xr.Dataset) -> np.ndarray:
    """Return which untrained models diverged at once: loss above 50 nat or gradient norm above 500 (RKSP)."""
    found = np.zeros(cases.sizes["run"], dtype=bool)
    for name, limit in LIMITS.items():
        if name in cases.variables:
            found |= column(cases, name).astype(float) > limit
    return found


def column(cases: xr.Dataset, name: str) -> np.ndarray:
    """Return a variable or coordinate with one value for each run, shape (run,); a scalar is repeated."""
    return np.broadcast_to(cases[name].values, cases.sizes["run"])


def _values(cases: xr.Dataset, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of features, shape (run, feature), and where they are missing."""
    require_listed("features", names, FEATURES)
    needs = {need for name in names for need in FEATURES[name].needs}
    if missing := sorted(need for need in needs if need not in cases.variables):
        raise SchemaError(f"The cases lack {', '.join(missing)}; measure them with wb.sweeps.measure_case().")
    layered = _over_layers(cases, {name.split()[0] for name in names if FEATURES[name].measures is None})
    values = np.empty((cases.sizes["run"], len(names)))
    for i, name in enumerate(names):
        feature = FEATURES[name]
        if feature.measures is None:
            values[:, i] = layered[name]
        else:
            values[:, i] = feature.measures(*(column(cases, need) for need in feature.needs))
    return values, np.isnan(values)


def _missing_values(cases: xr.Dataset, names: Sequence[str], is_missing: np.ndarray) -> SchemaError:
    """Create the exception for features that are NaN."""
    n_runs = int(is_missing.any(axis=1).sum())
    which = [names[i] for i in np.flatnonzero(is_missing.any(axis=0)).tolist()]
    subject = f"{n_runs} of {len(is_missing)} cases" if len(is_missing) > 1 else "The case"
    verb = "have" if n_runs > 1 else "has"
    layered = [name for name in which if FEATURES[name].measures is None]
    spectra = sorted({need for name in layered for need in FEATURES[name].needs})
    first = np.flatnonzero(is_missing.any(axis=1))[:1]
    if spectra and cases[spectra].isel(run=first).isnull().all().to_array().all():
        return SchemaError(
            f"{subject} {verb} no spectra (every layer is NaN); measure the untrained model with "
            "wb.sweeps.measure_case."
        )
    variables = sorted({need for name in which for need in FEATURES[name].needs})
    return SchemaError(
        f"{subject} {verb} no {' or '.join(which)} (NaN), which is computed from {', '.join(variables)}; omit such "
        "cases."
    )


def _over_layers(cases: xr.Dataset, measures: set[str]) -> dict[str, np.ndarray]:
    """Return statistics over layers of all cases, as in `summarize`; padded layers are NaN and ignored."""
    if not measures:
        return {}
    names = sorted(measures)
    values = np.stack([cases[name].transpose("run", "layer").values.astype(float) for name in names])
    for layers, name in zip(values, names, strict=True):
        if (bounds := _LAYER_MEASURES[name]) is not None:
            layers[:] = np.log10(np.clip(layers, *bounds))
    functions: dict[str, Callable[..., np.ndarray]] = {
        "mean": np.nanmean,
        "max": np.nanmax,
        "min": np.nanmin,
        "std": np.nanstd,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # All layers of a case may be NaN.
        statistics = {name: functions[name](values, axis=2) for name in STATISTICS}
    statistics["change"] = np.stack([_change(layers) for layers in values])
    return {f"{name} {statistic}": found[i] for statistic, found in statistics.items() for i, name in enumerate(names)}


def _change(values: np.ndarray) -> np.ndarray:
    """Return the last value that is not NaN less the first one; NaN if there is none."""
    is_there = ~np.isnan(values)
    first = is_there.argmax(axis=1)
    last = values.shape[1] - 1 - is_there[:, ::-1].argmax(axis=1)
    rows = np.arange(len(values))
    return values[rows, last] - values[rows, first]


def _log(values: np.ndarray, *, shift: float = 0.0, low: float = 0.0) -> np.ndarray:
    """Return the logarithm to base 10 of the values plus ``shift``, limited to at least ``low``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log10(np.maximum(np.asarray(values, dtype=float) + shift, low))


def _momentum(momentum: np.ndarray) -> np.ndarray:
    return np.nan_to_num(np.asarray(momentum, dtype=float))


def _momentum_gain(momentum: np.ndarray, optimizer: np.ndarray) -> np.ndarray:
    """Return log10 of 1 / (1 - momentum) for optimizers whose momentum sums gradients; 0 for others."""
    is_summed = np.isin(np.char.lower(np.asarray(optimizer, dtype=str)), _ACCUMULATING)
    return np.where(is_summed, -_log(1 - _momentum(momentum)), 0.0)


def _clip(clip_norm: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(np.asarray(clip_norm, dtype=float)), 0.0, _log(clip_norm))


def _feature(name: str, long_name: str, *, shift: float = 0.0, low: float = 0.0) -> Feature:
    """Create the feature that is the logarithm of one variable."""
    return Feature(name, long_name, (name,), lambda x: _log(x, shift=shift, low=low))


_SETTINGS = (
    _feature("d_model", "width"),
    _feature("n_layers", "number of layers"),
    _feature("n_weights", "number of parameters"),
    _feature("n_tokens", "tokens of a batch"),
    _feature("batch_size", "batch size"),
    _feature("n_steps", "number of updates"),
    _feature("warmup", "warm-up steps", shift=1.0),
    Feature("warmup_share", "fraction of warm-up steps", ("warmup", "n_steps"), measures=lambda a, b: a / b),
    Feature("mean_rate_share", "mean over peak learning rate", ("mean_rate_share",), measures=np.asarray),
    _feature("weight_decay", "weight decay", shift=0.01),
    Feature("momentum", "momentum", ("momentum",), measures=_momentum),
    Feature("momentum_gain", "gain of momentum", ("momentum", "optimizer"), measures=_momentum_gain),
    Feature(
        "is_clipped", "gradient clipping", ("clip_norm",), measures=lambda x: (~np.isnan(x.astype(float))).astype(float)
    ),
    Feature("clip_norm", "limit of the gradient norm", ("clip_norm",), measures=_clip),
)
_FORWARD = (
    _feature("initial_loss", "initial loss", low=1e-6),
    _feature("logit_std", "standard deviation of the logits", low=1e-6),
    Feature("scale_response", "response to a doubled residual stream", ("scale_response",), measures=np.asarray),
    _feature("stream_rms_first", "RMS of the residual stream before the first block", low=1e-9),
    _feature("stream_rms_last", "RMS of the residual stream after the last block", low=1e-9),
    Feature(
        "stream_growth",
        "growth of the residual stream",
        ("stream_rms_first", "stream_rms_last"),
        measures=lambda first, last: _log(last) - _log(first),
    ),
)
_GRADIENT = (
    _feature("initial_grad_norm", "initial gradient norm", low=1e-12),
    _feature("overshoot_rate", "learning rate at which the first update increases the loss"),
    _feature("breaking_rate", "learning rate at which the first update diverges"),
    _feature("unit_change_rate", "learning rate at which the first update changes the logits by 1"),
)
_PILOT = (_feature("rehearsed_rate", "learning rate at which ten trial updates diverge"),)
_SPECTRAL = tuple(
    Feature(f"{measure} {statistic}", f"{SPECTRA[measure].long_name}, {statistic} over layers", (measure,))
    for measure in _LAYER_MEASURES
    for statistic in LAYER_STATISTICS
)
#: All features by name.
FEATURES: dict[str, Feature] = {f.name: f for f in (*_SPECTRAL, *_FORWARD, *_GRADIENT, *_PILOT, *_SETTINGS)}
