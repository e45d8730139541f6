"""Signals: every variable of a run as a line over steps, by one name, independent of its part and shape.

A signal is a variable of any part that has steps, and of a variable with terms one of its terms: ``"loss"``,
``"effective_rank D2"``, ``"routing_entropy"``. A variable with layers, heads, modules or experts is reduced to one
line, or one layer or head is selected; `heat` returns all of them at one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.formatting import listed
from workbench.schema.runs import MONITORS, PARTS, SPECTRA
from workbench.studies.comparison import SPECTRAL
from workbench.studies.lines import SignalBand, decimate, healthy_band

if TYPE_CHECKING:
    import xarray as xr

__all__ = [
    "REDUCTIONS",
    "Entry",
    "Signal",
    "SignalBand",
    "bad_direction",
    "catalogue",
    "decimate",
    "default_names",
    "healthy_band",
    "heat",
    "names",
    "read",
    "worst",
]


REDUCTIONS = ("min", "max", "mean")
#: Parts in the order that their signals are listed; parts with other names come before the spectra.
_PARTS = ("monitors", "attention", "router", "optimizer", "activations", "curvature")
#: Dimensions of a signal besides steps, and their names in titles.
_PLACES = {"layer": "layers", "module": "modules", "head": "heads", "expert": "experts"}
#: Signals for which low values are bad; for all others, high values are.
_LOW_IS_BAD = (
    "accuracy",
    "attention_entropy",
    "attention_entropy_share",
    "effective_rank",
    "gradient_rms",
    "gradient_rms_over_eps",
    "gradient_signal_share",
    "rank",
    "router_conditioning",
    "routing_entropy",
    "routing_entropy_share",
    "significant_digits",
    "spectral_entropy",
    "stable_rank",
)
#: Neither: a share of the modes, a setting.
_NEITHER = tuple(name for name in SPECTRA if name.endswith("_mass"))


@dataclass(frozen=True)
class Signal:
    """One line over steps.

    Attributes:
        name: Name, such as ``"effective_rank D2"``.
        part: Part of the run that holds it, such as ``"attention"``.
        step: Optimizer updates, int64, shape (step,); rising.
        value: float64, shape (step,); NaN where not measured; may be infinite.
        long_name: Title: the quantity, and how it was reduced.
        unit: ``"1"`` for dimensionless.
        reduce: ``"min"``, ``"max"`` or ``"mean"`` over its other dimensions; empty if it has only steps.
        variable: The variable's name, without its term.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("precision"))
        >>> signal = wb.signals.read(run, "effective_rank D2")
        >>> signal.reduce, signal.value.shape == signal.step.shape
        ('min', True)
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
        """Steps and values where the value is finite."""
        is_finite = np.isfinite(self.value)
        return (self.step, self.value) if is_finite.all() else (self.step[is_finite], self.value[is_finite])


@dataclass(frozen=True)
class Entry:
    """The description of a signal, without its values.

    Attributes:
        name: Name of the signal.
        part: Part of the run.
        variable: Variable in that part.
        term: Term of the variable; None: it has no terms.
        places: Its dimensions besides steps: some of ``layer``, ``head``, ``module``, ``expert``.
        long_name: Title of the quantity.
        unit: ``"1"`` for dimensionless.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("precision"))
        >>> entry = wb.signals.catalogue(run)["effective_rank D2"]
        >>> entry.part, entry.term, entry.places
        ('attention', 'D2', ('layer', 'head'))
    """

    name: str
    part: str
    variable: str
    term: str | None
    places: tuple[str, ...]
    long_name: str
    unit: str


def names(run: xr.DataTree) -> list[str]:
    """Every signal that a run offers, in the order of its parts.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("precision"))
        >>> wb.signals.names(run)[:3]
        ['accuracy', 'auxiliary_loss', 'batch_size']
    """
    return list(catalogue(run))


def catalogue(run: xr.DataTree) -> dict[str, Entry]:
    """Describe the signals of a run, by name; no values are read.

    Where two parts have a variable of one name, the later ones are called ``"part/name"``.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("precision"))
        >>> wb.signals.catalogue(run)["loss"].part
        'monitors'
    """
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
    """Which values are bad: ``"low"`` for ranks and entropies, ``"high"`` for norms, logits, loads and the rest.

    Args:
        name: Name of a signal or a variable.

    Example:
        >>> import workbench as wb
        >>> wb.signals.bad_direction("effective_rank D2"), wb.signals.bad_direction("grad_norm")
        ('low', 'high')
    """
    return "low" if _variable_of(name) in _LOW_IS_BAD else "high"


def worst(name: str) -> str:
    """The reduction to the worst value: ``"min"`` where low is bad, ``"max"`` where high is; the mean of shares.

    Args:
        name: Name of a signal or a variable.

    Example:
        >>> import workbench as wb
        >>> wb.signals.worst("effective_rank D2"), wb.signals.worst("attention_logit_max")
        ('min', 'max')
    """
    if _variable_of(name) in _NEITHER:
        return "mean"
    return "min" if bad_direction(name) == "low" else "max"


def read(
    run: xr.DataTree,
    name: str,
    *,
    reduce: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    first_row: int = 0,
) -> Signal:
    """Read one signal of a run as a line over steps.

    Args:
        run: A run with any parts that have steps.
        name: One of `names`.
        reduce: ``"min"``, ``"max"`` or ``"mean"`` over all dimensions besides steps; values that are NaN are ignored.
            None: `worst`.
        layer: Take this layer alone, by its number; None: all.
        head: Take this head alone; None: all.
        first_row: Leave out the rows before it, which a reader that follows a run already has.

    Returns:
        The signal; its value is NaN where every layer and head is. Spectral measures leave layers out whose update is
        too small to be informative.

    Raises:
        SchemaError: If the run has no such signal.
        OptionError: If there is no such reduction, layer or head.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("hyperparameter"))
        >>> loss = wb.signals.read(run, "loss")
        >>> loss.part, bool(loss.value[-1] > 50)  # it diverged
        ('monitors', True)
    """
    if reduce is not None and reduce not in REDUCTIONS:
        raise OptionError(f"The reduction is '{reduce}', expected one of {', '.join(REDUCTIONS)}.")
    entry = _entry(run, name)
    values = _values(run, entry, slice(first_row, None))
    step = values["step"].values.astype(np.int64)
    values, words = _taken(values, entry, layer=layer, head=head)
    places = [str(dim) for dim in values.dims if dim != "step"]
    reduce = (reduce or worst(entry.variable)) if places else ""
    if places:
        words.append(f"{reduce} over {listed([_PLACES[place] for place in places])}")
    plain = values.transpose("step", ...).values.astype(float)
    line = _reduced(plain.reshape(len(plain), -1), reduce) if places else plain
    if (np.diff(step) < 0).any():
        order = np.argsort(step, kind="stable")
        step, line = step[order], line[order]
    title = ", ".join([entry.long_name, *words])
    return Signal(name, entry.part, step, line, title, entry.unit, reduce, entry.variable)


def heat(run: xr.DataTree, name: str, step: int) -> xr.DataArray:
    """Read a signal at one step with all its dimensions: layers and heads, layers and experts, or modules.

    Args:
        run: A run with the signal.
        name: One of `names`.
        step: The nearest recorded step is taken; of two as near, the earlier.

    Returns:
        Dims ``layer`` and ``head``, or those of ``layer``, ``module``, ``expert`` that it has; the scalar coordinate
        ``step`` is the step that was taken. NaN where not measured.

    Raises:
        SchemaError: If the run has no such signal, no row of it, or it has no dimension besides steps.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("hyperparameter"))
        >>> wb.signals.heat(run, "effective_rank D2", step=50).dims
        ('layer', 'head')
    """
    entry = _entry(run, name)
    if not entry.places:
        raise SchemaError(f"'{name}' has no layers; choose one that has, such as an effective rank or an entropy.")
    recorded = run.children[entry.part].to_dataset()["step"].values
    if not len(recorded):
        raise SchemaError(f"'{name}' has no row yet; wait for the first.")
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
        choice = f"choose from {', '.join(known)}" if known else "it holds nothing that has steps"
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


def _taken(
    values: xr.DataArray, entry: Entry, *, layer: int | None, head: int | None
) -> tuple[xr.DataArray, list[str]]:
    """Select one layer, one head, or both, and describe the selection."""
    words = []
    for dim, chosen in (("layer", layer), ("head", head)):
        if chosen is None:
            continue
        # The modules of an optimizer are blocks, each with its layer.
        along = "module" if dim == "layer" and dim in values.coords and dim not in values.dims else dim
        if along not in values.dims:
            raise OptionError(f"'{entry.name}' has no {dim}s; leave {dim}= out.")
        labels = values[dim].values if dim in values.coords else np.arange(values.sizes[along])
        if chosen not in labels:
            choice = ", ".join(map(str, labels))
            raise OptionError(f"'{entry.name}' has no {dim} {chosen}; choose from {choice}.")
        values = values.isel({along: int(np.flatnonzero(labels == chosen)[0])})
        words.append(f"{dim} {chosen}")
    return values, words


def _reduced(values: np.ndarray, reduce: str) -> np.ndarray:
    """Reduce over the last axis, ignoring NaN; NaN where all are."""
    if values.shape[-1] == 0:
        return np.full(len(values), np.nan)
    if reduce != "mean":
        return (np.fmin if reduce == "min" else np.fmax).reduce(values, axis=-1)
    known = ~np.isnan(values)
    n_known = known.sum(-1)
    return np.divide(np.where(known, values, 0).sum(-1), n_known, out=np.full(len(values), np.nan), where=n_known > 0)


def _variable_of(name: str) -> str:
    return name.rpartition("/")[2].partition(" ")[0]


def default_names(runs: Mapping[str, xr.DataTree], alarmed: Sequence[str] = (), *, n: int = 6) -> list[str]:
    """The signals to show first: loss and gradient norm, those with alarms, and those that distinguish mechanisms.

    Args:
        runs: Runs by name.
        alarmed: Signals with alarms, the first alarm first.
        n: Largest number, if loss, gradient norm and the first three with alarms fit.

    Returns:
        Names of signals that at least one run offers.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("precision"))
        >>> wb.signals.default_names({"mine": run}, n=3)
        ['loss', 'grad_norm', 'effective_rank D2']
    """
    offered = dict.fromkeys(name for run in runs.values() for name in names(run))
    wanted = ["loss", "grad_norm", *list(dict.fromkeys(name for name in alarmed if name in offered))[:3], *_TELLING]
    return list(dict.fromkeys(name for name in wanted if name in offered))[:n]


#: Signals that distinguish faults: attention, router, rate, and precursors of spikes.
_TELLING = (
    "effective_rank D2",
    "routing_entropy_share",
    "routing_entropy",
    "update_ratio",
    "attention_logit_max",
    "adam_staleness",
    "router_similarity",
    "max_violation",
    "attention_entropy_share",
    "outlier_ratio",
    "spectral_radius",
    "near_unit_mass",
    "accuracy",
)


def __dir__() -> list[str]:
    return sorted(__all__)
