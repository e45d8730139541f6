"""Signals: the variables of a run as lines over steps, each by a single name that does not depend on its part or shape.

A signal is a variable of any part with steps, or one term of a variable with terms: ``"loss"``,
``"effective_rank D2"``, ``"routing_entropy"``. A variable with layers, heads, modules or experts is reduced to one
line, or one layer or head is selected; `heat` returns all of them at one step.

Example:
    >>> import workbench as wb
    >>> run = wb.open_run(wb.samples.failed_run("hyperparameter"))
    >>> wb.signals.read(run, "grad_norm").long_name
    'gradient norm'

See Also:
    `workbench.open_run`: Opens a run.
    `workbench.plots.timeline`: Draws signals over steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import numpy as np

from workbench.callbacks.alarms.probe_alarms import SIGNALS, Check, ProbeAlarms
from workbench.callbacks.observation import Observation
from workbench.errors import OptionError, SchemaError
from workbench.formatting import listed
from workbench.option_checks import checked, publish
from workbench.option_kinds import NonNegativeInt, PositiveInt, Range, at_least, one_of
from workbench.schema.runs import MONITORS, PARTS, SPECTRA
from workbench.studies.comparison import SPECTRAL

if TYPE_CHECKING:
    import xarray as xr


__all__ = ["Signal", "names", "read", "worst"]


REDUCTIONS = ("min", "max", "mean")
#: Parts in the order in which their signals are listed; other parts come before the spectra.
_PARTS = ("monitors", "attention", "router", "optimizer", "activations", "curvature")
#: Dimensions of a signal besides steps -> their names in titles.
_PLACES = {"layer": "layers", "module": "modules", "head": "heads", "expert": "experts"}
#: Signals for which low values are bad; for all others, high values are bad.
_LOW_IS_BAD = (
    "accuracy", "attention_entropy", "attention_entropy_share", "effective_rank", "gradient_rms",
    "gradient_rms_over_eps", "gradient_signal_share", "rank", "router_conditioning", "routing_entropy",
    "routing_entropy_share", "significant_digits", "spectral_entropy", "stable_rank",
)  # fmt: skip
#: Signals for which neither low nor high values are bad: fractions of the modes.
_NEITHER = tuple(name for name in SPECTRA if name.endswith("_mass"))


@dataclass(frozen=True)
class Signal:
    """A quantity of a run as a line over steps.

    Attributes:
        name: Name, such as ``"effective_rank D2"``.
        part: Part of the run that holds it, such as ``"attention"``.
        step: Optimizer updates in increasing order, int64, shape (step,).
        value: Values, float64, shape (step,); NaN where not measured; may be infinite.
        long_name: Title: the quantity, and how it was reduced.
        unit: Unit; ``"1"`` for dimensionless quantities.
        reduce: ``"min"``, ``"max"`` or ``"mean"`` over its other dimensions; empty if it has only steps.
        variable: Name of the variable without its term.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("precision"))
        >>> signal = wb.signals.read(run, "effective_rank D2")
        >>> signal.reduce, signal.value.shape == signal.step.shape
        ('min', True)

    See Also:
        `workbench.signals.read`: Reads a signal.
    """

    name: str
    part: str
    step: np.ndarray
    value: np.ndarray
    long_name: str
    unit: str
    reduce: str
    variable: str

    @property
    def finite(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values at which the value is finite."""
        is_finite = np.isfinite(self.value)
        return (self.step, self.value) if is_finite.all() else (self.step[is_finite], self.value[is_finite])


@dataclass(frozen=True)
class Entry:
    """A signal without its values: part, variable, term (None without) and unit (``"1"`` without dimension).

    ``places`` are dimensions besides steps, some of ``layer``, ``head``, ``module``, ``expert``.
    """

    name: str
    part: str
    variable: str
    term: str | None
    places: tuple[str, ...]
    long_name: str
    unit: str


def names(run: xr.DataTree) -> list[str]:
    """Return the names of all signals of a run, in the order of its parts.

    Args:
        run: A run, from `workbench.open_run`.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("precision"))
        >>> wb.signals.names(run)[:3]
        ['accuracy', 'auxiliary_loss', 'batch_size']

    See Also:
        `workbench.signals.read`: Reads a signal by its name.
    """
    return list(catalogue(run))


def catalogue(run: xr.DataTree) -> dict[str, Entry]:
    """Return descriptions of a run's signals by name, ``"part/name"`` for a later one of equal name."""
    found: dict[str, Entry] = {}
    others = [part for part in run.children if part not in (*_PARTS, "spectra", "events")]
    for part in (*_PARTS, *others, "spectra"):
        if part not in run.children:
            continue
        for entry in _entries(part, run.children[part].to_dataset(inherit=False)):
            name = entry.name if entry.name not in found else f"{part}/{entry.name}"
            found[name] = replace(entry, name=name)
    return found


def bad_direction(name: str) -> str:
    """Return which values are bad: ``"low"`` for ranks and entropies, ``"high"`` for norms, logits, loads, others."""
    return "low" if _variable_of(name) in _LOW_IS_BAD else "high"


def worst(name: str) -> str:
    """Return the reduction to the worst value: ``"min"`` if low values are bad, ``"max"`` if high values are.

    For masses, which are fractions of the modes, it is ``"mean"``.

    Args:
        name: Name of a signal or a variable.

    Example:
        >>> import workbench as wb
        >>> wb.signals.worst("effective_rank D2"), wb.signals.worst("attention_logit_max")
        ('min', 'max')

    See Also:
        `workbench.signals.read`: Reduces by it, unless another reduction is given.
    """
    if _variable_of(name) in _NEITHER:
        return "mean"
    return "min" if bad_direction(name) == "low" else "max"


@checked
def read(
    run: xr.DataTree,
    name: str,
    *,
    reduce: Annotated[str, one_of(REDUCTIONS)] | None = None,
    layer: Annotated[int, at_least(-1)] | None = None,
    head: NonNegativeInt | None = None,
    first_row: NonNegativeInt = 0,
) -> Signal:
    """Read one signal of a run as a line over steps.

    Args:
        run: A run with any parts that have steps.
        name: One of `workbench.signals.names`.
        reduce: ``"min"``, ``"max"`` or ``"mean"`` over all dimensions besides steps, ignoring NaN; None for
            `workbench.signals.worst`.
        layer: Number of the layer to select, -1 for modules outside of all layers; None for all.
        head: Number of the head to select; None for all heads.
        first_row: First row to read; a reader that follows a run skips the rows that it already has.

    Returns:
        The signal; its value is NaN where all layers and heads are NaN. Spectral measures omit layers whose update is
        too small to be informative.

    Raises:
        SchemaError: If the run has no such signal.
        OptionError: If there is no such reduction, layer or head.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("hyperparameter"))
        >>> loss = wb.signals.read(run, "loss")
        >>> loss.part, bool(loss.value[-1] > 50)  # the run diverged
        ('monitors', True)

    See Also:
        `workbench.signals.names`: The signals of a run.
    """
    entry = _entry(run, name)
    values = _values(run, entry, slice(first_row, None))
    step = values["step"].values.astype(np.int64)
    values, words = _selected(values, entry, layer=layer, head=head)
    places = [str(dim) for dim in values.dims if dim != "step"]
    reduce = (reduce or worst(entry.variable)) if places else ""
    if places:
        words.append(f"{reduce} over {listed([_PLACES[place] for place in places])}")
    table = values.transpose("step", ...).values.astype(float, copy=False)
    line = _reduced(table.reshape(len(table), -1), reduce) if places else table
    if (np.diff(step) < 0).any():
        order = np.argsort(step, kind="stable")
        step, line = step[order], line[order]
    title = ", ".join([entry.long_name, *words])
    return Signal(name, entry.part, step, line, title, entry.unit, reduce, entry.variable)


def heat(run: xr.DataTree, name: str, step: int) -> xr.DataArray:
    """Return a signal at one step with all its dimensions, such as layers and heads; ``step`` is the one used."""
    entry = _entry(run, name)
    if not entry.places:
        raise SchemaError(f"'{name}' has no layers; choose a signal that has, such as an effective rank or an entropy.")
    recorded = run.children[entry.part].to_dataset()["step"].values
    if not len(recorded):
        raise SchemaError(f"'{name}' has no row yet; wait for the first one.")
    row = int(np.abs(recorded - step).argmin())
    found = _values(run, entry, slice(row, row + 1)).isel(step=0).transpose(*sorted(entry.places, key=[*_PLACES].index))
    return found.load().assign_attrs(long_name=entry.long_name, units=entry.unit).rename(name)


def _entries(part: str, data: xr.Dataset) -> list[Entry]:
    if "step" not in data.dims:
        return []
    found = []
    for name, values in data.data_vars.items():
        variable = str(name)
        dims = [str(dim) for dim in values.dims if dim not in ("step", "term")]
        is_line = "step" in values.dims and values.dtype.kind in "fiu" and all(dim in _PLACES for dim in dims)
        if not is_line or variable == "step":
            continue
        rule = PARTS.get(part, {}).get(variable) or MONITORS.get(variable) or SPECTRA.get(variable)
        long_name = values.attrs.get("long_name", rule.long_name if rule else str(variable).replace("_", " "))
        unit = values.attrs.get("units", rule.units if rule else "1")
        terms = [str(term) for term in values["term"].values] if "term" in values.dims else [None]
        for term in terms:
            ending = "" if term is None else f" {term}"
            found.append(
                Entry(f"{variable}{ending}", part, str(variable), term, tuple(dims), f"{long_name}{ending}", str(unit))
            )
    return found


def _entry(run: xr.DataTree, name: str) -> Entry:
    known = catalogue(run)
    if name not in known:
        choice = f"choose from {', '.join(known)}" if known else "none of its parts has steps"
        raise SchemaError(f"The run has no signal '{name}'; {choice}.")
    return known[name]


def _values(run: xr.DataTree, entry: Entry, rows: slice) -> xr.DataArray:
    data = run.children[entry.part].to_dataset(inherit=False)
    values = data[entry.variable].isel(step=rows)
    if entry.part == "spectra" and entry.variable in SPECTRAL:
        values = values.astype(float).where(data["is_informative"].isel(step=rows))
    return (
        values if entry.term is None else values.isel(term=data["term"].values.astype(str).tolist().index(entry.term))
    )


def _selected(
    values: xr.DataArray, entry: Entry, *, layer: int | None, head: int | None
) -> tuple[xr.DataArray, list[str]]:
    """Return the values of one layer, one head, or both, and a description of the selection."""
    words = []
    for dim, chosen in (("layer", layer), ("head", head)):
        if chosen is None:
            continue
        # The modules of an optimizer are blocks, each with its layer.
        along = "module" if dim == "layer" and dim in values.coords and dim not in values.dims else dim
        if along not in values.dims:
            raise OptionError(f"'{entry.name}' has no {dim}s; omit {dim}=.")
        labels = values[dim].values if dim in values.coords else np.arange(values.sizes[along])
        if chosen not in labels:
            raise OptionError.of(dim, chosen, tuple(labels.tolist()))
        values = values.isel({along: int(np.flatnonzero(labels == chosen)[0])})
        words.append(f"{dim} {chosen}")
    return values, words


def _reduced(values: np.ndarray, reduce: str) -> np.ndarray:
    """Reduce over the last axis, ignoring NaN; NaN where all values are NaN."""
    if values.shape[-1] == 0:
        return np.full(len(values), np.nan)
    if reduce != "mean":
        return (np.fmin if reduce == "min" else np.fmax).reduce(values, axis=-1)
    known = ~np.isnan(values)
    n_known = known.sum(-1)
    return np.divide(np.where(known, values, 0).sum(-1), n_known, out=np.full(len(values), np.nan), where=n_known > 0)


def _variable_of(name: str) -> str:
    return name.rpartition("/")[2].partition(" ")[0]


def default_names(runs: Mapping[str, xr.DataTree], alarmed: Sequence[str] = (), *, n: PositiveInt = 6) -> list[str]:
    """Return ``n`` signals to show first: loss, gradient norm, alarmed ones, those that tell mechanisms apart."""
    known = dict.fromkeys(name for run in runs.values() for name in names(run))
    order = ["loss", "grad_norm", *list(dict.fromkeys(name for name in alarmed if name in known))[:3], *_INFORMATIVE]
    return list(dict.fromkeys(name for name in order if name in known))[:n]


#: Signals that distinguish faults: attention, router, rate, and precursors of spikes.
_INFORMATIVE = (
    "effective_rank D2", "routing_entropy_share", "routing_entropy", "update_ratio", "attention_logit_max",
    "adam_staleness", "router_similarity", "max_violation", "attention_entropy_share", "outlier_ratio",
    "spectral_radius", "near_unit_mass", "accuracy",
)  # fmt: skip


def checks_of(run: xr.DataTree) -> list[Check]:
    """Return every measurement of the probes of arithmetic and gradients in a run, as evaluated by the alarms."""
    probes, found = ProbeAlarms(), []
    for part in ("precision", "reduction"):
        if part not in run.children:
            continue
        data = run.children[part].to_dataset(inherit=False).load()
        columns = {str(name): values.values for name, values in data.data_vars.items()}
        for row, step in enumerate(data["step"].values.tolist()):
            probes.observe(Observation(step, part, {name: np.asarray(column[row]) for name, column in columns.items()}))
            check = probes.checks.get(SIGNALS[part])
            if check is not None and check.step == step:
                found.append(check)
    return sorted(found, key=lambda check: check.step)


#: Two quantiles of a band.
Quantiles = Annotated[tuple[float, float], Range("that increase from 0 to 1", lambda pair: 0 <= pair[0] < pair[1] <= 1)]

#: A number larger than every step.
_FAR = 2**31 - 1


@checked
def decimate(
    step: np.ndarray, value: np.ndarray, n: PositiveInt, start: float | None = None, stop: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Reduce the points of a line without visible change: keep both ends and the extremes of each bucket of rows.

    Every spike is kept, however short. Buckets have the same number of rows, a power of two, counted from the first
    row, so they do not change while the view moves, and the line does not flicker. There are .7 to 1.4 ``n`` of them;
    at most ``2 * n`` rows in view are all kept. The rows next to the view, from ``start`` to ``stop``, are kept, those
    that are not finite omitted.
    """
    is_finite = np.isfinite(value)
    if not is_finite.all():
        step, value = step[is_finite], value[is_finite]
    first, last = _rows_in_view(step, start, stop)
    if last - first <= 2 * n:
        return step[first:last], value[first:last]
    size = 1 << int(np.round(np.log2((last - first) / n)))
    begin = min(-(-first // size) * size, last)
    end = max(last - last % size, begin)
    buckets = value[begin:end].reshape(-1, size)
    offset = np.arange(begin, end, size)
    extremes = np.sort([buckets.argmin(1) + offset, buckets.argmax(1) + offset], axis=0).T.ravel()
    # The visible parts of the buckets at the ends of the view are separate buckets.
    kept = np.concatenate([[first], _extremes(value, first, begin), extremes, _extremes(value, end, last), [last - 1]])
    kept = kept[np.append(True, kept[1:] > kept[:-1])].astype(np.intp)
    return step[kept], value[kept]


@dataclass(frozen=True)
class SignalBand:
    """Lower and upper quantile of a signal in healthy runs by center of each interval of steps."""

    step: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


@checked
def healthy_band(
    lines: Sequence[tuple[np.ndarray, np.ndarray]], *, quantiles: Quantiles = (0.05, 0.95), n: PositiveInt = 100
) -> SignalBand:
    """Compute running quantiles over healthy runs from finite values in each of ``n`` intervals and its neighbors."""
    finite = [np.isfinite(value) for _, value in lines]
    step = np.concatenate([np.zeros(0), *(line[0][is_there] for line, is_there in zip(lines, finite, strict=True))])
    value = np.concatenate([np.zeros(0), *(line[1][is_there] for line, is_there in zip(lines, finite, strict=True))])
    if not len(step):
        return SignalBand(np.zeros(0), np.zeros(0), np.zeros(0))
    order = np.argsort(step, kind="stable")
    step, value = step[order], value[order]
    n = int(np.clip(len(step) // 5, 1, n))
    edges = np.linspace(step[0], step[-1], n + 1)
    bounds = np.append(np.searchsorted(step, edges[:-1]), len(step))
    centers, found = [], []
    for i in range(n):
        nearby = value[bounds[max(i - 1, 0)] : bounds[min(i + 2, n)]]
        if len(nearby):
            centers.append((edges[i] + edges[i + 1]) / 2)
            found.append(np.quantile(nearby, quantiles))
    lower, upper = np.array(found).T
    centers[0], centers[-1] = edges[0], edges[-1]
    return SignalBand(np.array(centers), lower, upper)


def _extremes(value: np.ndarray, first: int, last: int) -> list[int]:
    part = value[first:last]
    return sorted([first + int(part.argmin()), first + int(part.argmax())]) if len(part) else []


def _rows_in_view(step: np.ndarray, start: float | None, stop: float | None) -> tuple[int, int]:
    """Return the first row and the row after the last one, with one row beyond the view on either side."""
    if step.dtype.kind == "i":  # for bounds of another type NumPy would convert all steps first
        start, stop = (None if end is None else np.clip(end, -_FAR, _FAR) for end in (start, stop))
        start = None if start is None else step.dtype.type(np.ceil(start))
        stop = None if stop is None else step.dtype.type(np.floor(stop))
    first = 0 if start is None else max(int(np.searchsorted(step, start)) - 1, 0)
    last = len(step) if stop is None else min(int(np.searchsorted(step, stop, side="right")) + 1, len(step))
    return first, max(first, last)


__dir__ = publish(__name__)
