"""Read one practice case from the file of all: a part of its record, or at the end the truth about it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import xarray as xr

from workbench import schema
from workbench.course.failure_runs import Case, Plant
from workbench.koopman.measures import MASSES
from workbench.schema.runs import SCHEMA_VERSION
from workbench.studies import samples

#: Variables of the file that describe the result of a run, and with the prefix "control_" that of its control.
RESULT = ("start_loss", "final_loss", "rise", "dead_share")


@dataclass(frozen=True)
class Truth:
    """What happened to a run, and why.

    ``causes`` is ("nothing",) for a healthy run; ``how`` is "diverged", "spike", "learned less", "experts died" or "".
    ``result`` has held-out losses ``start_loss`` and ``final_loss`` in nat (NaN if it diverged), ``rise`` and
    ``dead_share``; ``control`` is that of the run without faults.
    """

    case: Case
    causes: tuple[str, ...]
    how: str
    result: Mapping[str, float]
    control: Mapping[str, float]


@contextmanager
def opened() -> Iterator[xr.Dataset]:
    """Open the file of all cases without reading its records."""
    with xr.open_dataset(samples.recorded("patients.nc"), engine="netcdf4") as data:
        yield data


@contextmanager
def opened_case(level: int, place: int) -> Iterator[xr.Dataset]:
    """Open one case."""
    with opened() as data:
        yield data.isel(patient=_contents().rows[level][place])


def counts() -> dict[int, int]:
    """Return the number of cases of each level."""
    return {level: len(rows) for level, rows in _contents().rows.items()}


def costs() -> dict[str, int]:
    """Return the cost of each measurement, and of a replay as "cure", in percent of the compute of the training."""
    return dict(_contents().costs)


@dataclass(frozen=True)
class _Contents:
    """Rows of the cases of each level in the order of their places, and the cost of each measurement."""

    rows: Mapping[int, tuple[int, ...]]
    costs: Mapping[str, int]


@cache  # the file is part of the package and does not change
def _contents() -> _Contents:
    with opened() as data:
        levels, places = data["level"].values, data["place"].values
        rows = {
            int(level): tuple(int(i) for i in np.lexsort((places, levels)) if levels[i] == level)
            for level in np.unique(levels)
        }
        names, numbers = data["measurement"].values, data["cost"].values
    return _Contents(rows, {str(name): int(cost) for name, cost in zip(names, numbers, strict=True)})


def whole_run(case: xr.Dataset) -> xr.DataTree:
    """Return the complete record of a case, without the faults."""
    parts = {part: unpack(case, part) for part in VARIABLES}
    tree = xr.DataTree.from_dict({f"/{part}": data for part, data in parts.items() if data.data_vars})
    tree["events"] = xr.DataTree(events_of(parts["monitors"]))
    tree.attrs = {"schema_version": SCHEMA_VERSION, "subject": "patient", "configuration": configuration(case)}
    return tree


def configuration(case: xr.Dataset) -> str:
    """Return the settings of a case as JSON, without the faults."""
    return str(case["configuration"].item().decode())


def truth_of(case: xr.Dataset) -> Truth:
    """Return what happened to a case, and why."""
    given: Mapping[str, Any] = json.loads(case["case"].item().decode())
    known = Case(given["setup"], given["base"], tuple(Plant(**plant) for plant in given["plants"]))
    causes = case["ranked_cause"].values[case["is_cause"].values]
    result, control = ({name: float(case[prefix + name]) for name in RESULT} for prefix in ("", "control_"))
    return Truth(known, tuple(map(str, causes)), str(case["how"].values), result, control)


#: Part of a run -> its packed variables: those that `wb.diagnose` reads, those of the batches, and whole spectra.
VARIABLES: dict[str, tuple[str, ...]] = {
    "monitors": ("loss", "grad_norm", "learning_rate", "batch_size", "auxiliary_loss",
        "label_agreement", "label_entropy", "token_entropy", "repeated_examples", "largest_losses"),
    "optimizer": ("update_ratio", "module_weight_norm", "module_grad_norm", "adam_staleness", "gradient_rms",
        "gradient_rms_over_eps", "gradient_signal_share", "unchanged_share"),
    "activations": ("state_norm", "activation_max", "kurtosis"),
    "attention": ("attention_logit_max", "attention_entropy_share", "effective_rank", "frobenius_norm"),
    "router": (
        "dead_experts", "max_violation", "routing_entropy_share", "router_similarity", "routing_change", "expert_load"),
    "curvature": ("sharpness", "sharpness_rate", "preconditioned_sharpness", "preconditioned_sharpness_rate"),
    "spectra": tuple(schema.SPECTRA),
}  # fmt: skip
#: Terms of the update spectra of queries and keys that are packed.
TERMS = ("D2", "dWq", "W")


def unpack(packed: xr.Dataset, part: str, names: Sequence[str] | None = None) -> xr.Dataset:
    """Return a part of one patient of a packed dataset, of variables in ``names``; empty if it was not measured."""
    steps = packed[f"{part}_step"].values
    n_rows = int((steps >= 0).sum())
    rules = {**schema.MONITORS, **schema.SPECTRA} if part in ("monitors", "spectra") else schema.PARTS[part]
    variables: dict[str, Any] = {}
    for name in VARIABLES[part] if names is None else names:
        values = _values(packed, part, name, n_rows)
        if values is not None:
            rule = rules.get(name)
            variables[name] = (*values, rule.attrs if rule is not None else {})
    if "rank" in variables:  # a mass is a number of modes over the rank, so that rounding can be undone
        rank = np.maximum(variables["rank"][1], 1)
        for name in set(MASSES) & set(variables):
            dims, mass, about = variables[name]
            variables[name] = (dims, np.round(mass * rank) / rank, about)
    coords: dict[str, Any] = {"step": steps[:n_rows].astype(np.int64)}
    sizes = {dim: n for dims, values, _ in variables.values() for dim, n in zip(dims, values.shape, strict=True)}
    coords |= {dim: np.arange(sizes[dim]) for dim in sorted(sizes) if dim not in ("step", "term")}
    if "layer" in sizes:
        coords["layer_name"] = ("layer", [f"block {i}" for i in coords["layer"]])
    if "module" in sizes:  # the last one holds all parameters outside of the blocks
        n_blocks = len(coords["module"]) - 1
        coords["layer"] = ("module", np.array([*range(n_blocks), -1]))
        coords["module_name"] = ("module", [*(f"block {i}" for i in range(n_blocks)), "outside"])
    if "term" in sizes:
        coords["term"] = list(TERMS)
    attrs: dict[str, Any] = json.loads(packed.attrs["spectra"]) if part == "spectra" and variables else {}
    if "loss" in variables:
        attrs["diverged_at"] = int(packed["diverged_at"])
    return xr.Dataset(variables, coords, attrs)


def _values(packed: xr.Dataset, part: str, name: str, n_rows: int) -> tuple[tuple[str, ...], np.ndarray] | None:
    """Return dimensions and values of a variable; None if it was not measured."""
    is_complex = f"{part}_{name}_real" in packed
    name_of_column = f"{part}_{name}_real" if is_complex else f"{part}_{name}"
    if name_of_column not in packed:
        return None
    column = packed[name_of_column]
    dims = tuple(str(dim).removeprefix(f"{part}_") for dim in column.dims)
    counts = [n_rows, *(int(packed[f"{part}_n_{dim}"]) if dim != "term" else len(TERMS) for dim in dims[1:])]
    if not all(counts):
        return None
    at = tuple(slice(n) for n in counts)
    values: np.ndarray = column.values[at].astype(np.float64)
    if is_complex:
        values = values + 1j * packed[f"{part}_{name}_imag"].values[at]
    elif part == "spectra" and (kind := schema.SPECTRA[name].kind) in "bi":
        values = np.nan_to_num(values).astype(bool if kind == "b" else np.int64)
    return ("step", *dims[1:]), values


def events_of(loss: xr.Dataset) -> xr.Dataset:
    """Return the events of one run, which are its divergence or its end."""
    at, last = int(loss.attrs["diverged_at"]), int(loss["step"].values.max())
    kind, step = ("divergence", at) if at >= 0 else ("finished", last + 1)
    row = {"step": step, "kind": kind, "source": "", "score": np.nan, "message": "", "layer": -1, "head": -1}
    return xr.Dataset({name: ("event", [value]) for name, value in row.items()})
