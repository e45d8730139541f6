"""Read one practice case from data/patients.nc: a part of its record, or at the end the truth about it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.course import packed_runs
from workbench.course.failure_runs import Case, Plant
from workbench.schema.runs import SCHEMA_VERSION
from workbench.studies import samples

if TYPE_CHECKING:
    import xarray as xr

#: Variables of the file that describe the result of a run, and with the prefix "control_" that of its control.
RESULT = ("start_loss", "final_loss", "rise", "dead_share")


@dataclass(frozen=True)
class Truth:
    """What happened to a run, and why.

    Attributes:
        case: The run: setup, settings and injected faults.
        causes: Causes of the failure; ("nothing",) for a healthy run.
        how: "diverged", "spike", "learned less", "experts died", or "" for a healthy run.
        result: Held-out loss at the start and at the end (``start_loss``, ``final_loss``, in nat; NaN if it diverged),
            largest temporary rise of the loss (``rise``), and largest fraction of the experts of a block that receive
            no tokens at the end (``dead_share``).
        control: The same of the run without faults; for a healthy run, its own.
    """

    case: Case
    causes: tuple[str, ...]
    how: str
    result: Mapping[str, float]
    control: Mapping[str, float]


@contextmanager
def opened() -> Iterator[xr.Dataset]:
    """Open the file of all cases without reading its records."""
    import xarray as xr

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
    import xarray as xr

    parts = {part: packed_runs.unpack(case, part) for part in packed_runs.VARIABLES}
    tree = xr.DataTree.from_dict({f"/{part}": data for part, data in parts.items() if data.data_vars})
    tree["events"] = xr.DataTree(packed_runs.events_of(parts["monitors"]))
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
