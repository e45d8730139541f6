"""Numbers that are known of a run before it starts, from which the risk may be predicted.

No feature depends on the name of an architecture, of a norm or of an initialization, so that an untrained new
architecture has the same features as any other. Positive quantities that spread over powers of ten are logarithms to
base 10.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.koopman.measures import STATISTICS
from workbench.schema.runs import SPECTRA

if TYPE_CHECKING:
    import xarray as xr

#: The learning rate is no feature: the features predict the rates at which outcomes change.
RATE = "learning_rate"
#: Layer measure -> smallest and largest value of its logarithm; None: it enters as it is. kappa and K may be infinite
#: (a defective operator; a spectral radius above 1), so K says little more than the share of layers at its bound.
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
#: Statistics of a measure over layers; the change is the last layer's value less the first one's.
LAYER_STATISTICS = (*STATISTICS, "change")
#: Largest loss (nat) and gradient norm without divergence (RKSP's label).
LIMITS = {"initial_loss": 50.0, "initial_grad_norm": 500.0}
#: Optimizers in which momentum adds updates up instead of averaging them.
_ACCUMULATING = ("sgd", "rmsprop")


@dataclass(frozen=True)
class Feature:
    """One number known before training.

    Attributes:
        name: Name in lists of features.
        long_name: Title shown to the user.
        needs: Variables and coordinates of a case that it is computed from.
        measures: Function of these variables, each of shape (run,), with values of shape (run,); None: a statistic
            over layers.
    """

    name: str
    long_name: str
    needs: tuple[str, ...]
    measures: Callable[..., np.ndarray] | None = None


def feature_table(cases: xr.Dataset, names: Sequence[str], *, allow_missing: bool = False) -> xr.DataArray:
    """Compute the features of cases.

    Args:
        cases: Runs of a sweep, or cases before training; dim ``run``, and ``layer`` for spectra.
        names: Names of `FEATURES`.
        allow_missing: Whether a run may lack a value; it is NaN then. Without it that is an error.

    Returns:
        Shape (run, feature). Infinite where a quantity is, such as the breaking rate of a model that no rate tried
        breaks.

    Raises:
        OptionError: If a learning rate is no positive number, or a name is no feature.
        SchemaError: If there is no case, a variable is missing, or a run lacks a value.

    Example:
        >>> import workbench as wb
        >>> cases = wb.samples.divergence_sweep("held out").isel(run=slice(0, 2))
        >>> wb.risk.feature_table(cases, ["near_unit_mass mean", "d_model"]).shape
        (2, 2)
    """
    import xarray as xr

    cases = as_cases(cases)
    values, lacks = _values(cases, names)
    if lacks.any() and not allow_missing:
        raise SchemaError(_lacking(cases, names, lacks))
    about = {"long_name": "feature", "units": "1"}
    return xr.DataArray(values, {"feature": list(names)}, ["run", "feature"], name="feature_value", attrs=about)


def as_cases(cases: xr.Dataset) -> xr.Dataset:
    """Cases with a dimension ``run`` and positive learning rates.

    Args:
        cases: Cases, or one without the dimension ``run``.

    Raises:
        OptionError: If a learning rate is no positive number.
        SchemaError: If there is none, or no case.
    """
    if RATE not in cases.variables:
        raise SchemaError("The cases have no learning_rate; assign the peak rate of each run.")
    if "run" not in cases.dims:
        cases = cases.expand_dims("run")
    rates = np.atleast_1d(np.asarray(cases[RATE].values, dtype=float))
    if not (np.isfinite(rates) & (rates > 0)).all():
        wrong = rates[~(np.isfinite(rates) & (rates > 0))][0]
        raise OptionError(f"The learning rate is {wrong:g}, expected a positive number.")
    if not cases.sizes["run"]:
        raise SchemaError("There is no case; select less narrowly.")
    return cases


def counts_as_diverged(cases: xr.Dataset) -> np.ndarray:
    """Which fresh models count as diverged before the first update, and so at any learning rate (RKSP's label).

    Args:
        cases: Cases with ``initial_loss`` and ``initial_grad_norm``, as far as they are known.

    Returns:
        Shape (run,): whether the loss is above 50 nat or the norm of all gradients above 500; NaN counts as below.
    """
    found = np.zeros(cases.sizes["run"], dtype=bool)
    for name, limit in LIMITS.items():
        if name in cases.variables:
            found |= column(cases, name).astype(float) > limit
    return found


def column(cases: xr.Dataset, name: str) -> np.ndarray:
    """One value for each run, of a variable or coordinate that may be common to all; shape (run,)."""
    return np.broadcast_to(cases[name].values, cases.sizes["run"])


def _values(cases: xr.Dataset, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Values of shape (run, feature), and where there is none."""
    for name in names:
        if name not in FEATURES:
            raise OptionError(f"'{name}' is no feature; choose from wb.risk.FEATURES.")
    needs = {need for name in names for need in FEATURES[name].needs}
    if missing := sorted(need for need in needs if need not in cases.variables):
        raise SchemaError(
            f"The cases lack {', '.join(missing)}; measure them as a sweep does, or fit a model without such features."
        )
    layered = _over_layers(cases, {name.split()[0] for name in names if FEATURES[name].measures is None})
    values = np.empty((cases.sizes["run"], len(names)))
    for i, name in enumerate(names):
        feature = FEATURES[name]
        if feature.measures is None:
            values[:, i] = layered[name]
        else:
            values[:, i] = feature.measures(*(column(cases, need) for need in feature.needs))
    return values, np.isnan(values)


def _lacking(cases: xr.Dataset, names: Sequence[str], lacks: np.ndarray) -> str:
    """The sentence about features that are NaN."""
    n_runs = int(lacks.any(axis=1).sum())
    which = [names[i] for i in np.flatnonzero(lacks.any(axis=0)).tolist()]
    who = f"{n_runs} of {len(lacks)} cases" if len(lacks) > 1 else "The case"
    verb = "have" if n_runs > 1 else "has"
    layered = [name for name in which if FEATURES[name].measures is None]
    spectra = {need for name in layered for need in FEATURES[name].needs}
    if (
        spectra
        and cases[sorted(spectra)].isel(run=np.flatnonzero(lacks.any(axis=1))[:1]).isnull().all().to_array().all()
    ):
        return f"{who} {verb} no spectra (every layer is NaN); measure the fresh model before asking for its risk."
    variables = sorted({need for name in which for need in FEATURES[name].needs})
    return (
        f"{who} {verb} no {' or '.join(which)} (NaN), which is made from {', '.join(variables)}; leave such cases out."
    )


def _over_layers(cases: xr.Dataset, measures: set[str]) -> dict[str, np.ndarray]:
    """Statistics over layers, as in `summarize`, of all cases at once; padded layers are NaN and ignored."""
    if not measures:
        return {}
    names = sorted(measures)
    values = np.stack([cases[name].transpose("run", "layer").values.astype(float) for name in names])
    for of_measure, name in zip(values, names, strict=True):
        if (bounds := _LAYER_MEASURES[name]) is not None:
            of_measure[:] = np.log10(np.clip(of_measure, *bounds))
    functions: dict[str, Callable[..., np.ndarray]] = {
        "mean": np.nanmean,
        "max": np.nanmax,
        "min": np.nanmin,
        "std": np.nanstd,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a case without any layer is NaN
        statistics = {name: functions[name](values, axis=2) for name in STATISTICS}
    statistics["change"] = np.stack([_change(of_measure) for of_measure in values])
    return {f"{name} {statistic}": found[i] for statistic, found in statistics.items() for i, name in enumerate(names)}


def _change(values: np.ndarray) -> np.ndarray:
    """Last value that is not NaN less the first one; NaN where there is none."""
    is_there = ~np.isnan(values)
    first = is_there.argmax(axis=1)
    last = values.shape[1] - 1 - is_there[:, ::-1].argmax(axis=1)
    rows = np.arange(len(values))
    return values[rows, last] - values[rows, first]


def _log(values: np.ndarray, *, shift: float = 0.0, low: float = 0.0) -> np.ndarray:
    """Logarithm to base 10 of the values, raised to at least ``low``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log10(np.maximum(np.asarray(values, dtype=float) + shift, low))


def _stream_growth(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    return _log(last) - _log(first)


def _momentum(momentum: np.ndarray) -> np.ndarray:
    return np.nan_to_num(np.asarray(momentum, dtype=float))


def _momentum_gain(momentum: np.ndarray, optimizer: np.ndarray) -> np.ndarray:
    """log10 of 1 / (1 - momentum) where updates add up."""
    adds_up = np.isin(np.char.lower(np.asarray(optimizer, dtype=str)), _ACCUMULATING)
    return np.where(adds_up, -_log(1 - _momentum(momentum)), 0.0)


def _clip(clip_norm: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(np.asarray(clip_norm, dtype=float)), 0.0, _log(clip_norm))


def _is_clipped(clip_norm: np.ndarray) -> np.ndarray:
    return (~np.isnan(np.asarray(clip_norm, dtype=float))).astype(float)


def _feature(name: str, long_name: str, *, shift: float = 0.0, low: float = 0.0) -> Feature:
    """The logarithm of one variable."""
    return Feature(name, long_name, (name,), lambda x: _log(x, shift=shift, low=low))


_SETTINGS = (
    _feature("d_model", "width"),
    _feature("n_layers", "number of layers"),
    _feature("n_weights", "number of weights"),
    _feature("n_tokens", "tokens of a batch"),
    _feature("batch_size", "rows of a batch"),
    _feature("n_steps", "number of updates"),
    _feature("warmup", "warm-up steps", shift=1.0),
    Feature("warmup_share", "warm-up over all steps", ("warmup", "n_steps"), measures=lambda a, b: a / b),
    Feature("mean_rate_share", "mean share of the peak rate", ("mean_rate_share",), measures=np.asarray),
    _feature("weight_decay", "weight decay", shift=0.01),
    Feature("momentum", "momentum", ("momentum",), measures=_momentum),
    Feature("momentum_gain", "steps that momentum adds up", ("momentum", "optimizer"), measures=_momentum_gain),
    Feature("is_clipped", "gradient clipping", ("clip_norm",), measures=_is_clipped),
    Feature("clip_norm", "largest gradient norm let through", ("clip_norm",), measures=_clip),
)
_FORWARD = (
    _feature("initial_loss", "initial loss", low=1e-6),
    _feature("logit_std", "standard deviation of the logits", low=1e-6),
    Feature("scale_response", "response of the logits to a doubled stream", ("scale_response",), measures=np.asarray),
    _feature("stream_rms_first", "rms of the stream entering the first block", low=1e-9),
    _feature("stream_rms_last", "rms of the stream leaving the last block", low=1e-9),
    Feature("stream_growth", "growth of the stream", ("stream_rms_first", "stream_rms_last"), measures=_stream_growth),
)
_GRADIENT = (
    _feature("initial_grad_norm", "initial gradient norm", low=1e-12),
    _feature("overshoot_rate", "rate at which the first update raises the loss"),
    _feature("breaking_rate", "rate at which the first update diverges"),
    _feature("unit_change_rate", "rate at which the first update changes the logits by 1"),
)
_PILOT = (_feature("rehearsed_rate", "rate at which ten trial updates diverge"),)
_SPECTRAL = tuple(
    Feature(
        f"{measure} {statistic}",
        f"{SPECTRA[measure].long_name}, {statistic} over layers",
        (measure,),
    )
    for measure in _LAYER_MEASURES
    for statistic in LAYER_STATISTICS
)
#: Every feature by name.
FEATURES: dict[str, Feature] = {f.name: f for f in (*_SPECTRAL, *_FORWARD, *_GRADIENT, *_PILOT, *_SETTINGS)}
