"""A sweep on disk: one Zarr store with one row for each run, in the order of the planned runs.

The columns that the settings determine are written first; the other columns are written row by row, by one process.
Zarr replaces each of its files atomically, and a row counts only when it is marked as finished, so the store is
crash-consistent: after a kill at any moment it opens with every row that was finished before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from workbench.errors import StoreError
from workbench.io.atomic import check_free, replacing
from workbench.io.files import FileKind, as_path
from workbench.io.provenance import versions
from workbench.schema.sweeps import CURVES, MEASURES, OUTCOMES, SETTINGS, SWEEP_VERSION, dtype_of
from workbench.sweeps.run_settings import RunSettings

if TYPE_CHECKING:
    import xarray as xr

#: Rows in a chunk. A chunk is rewritten with each of its rows; empty chunks take no space.
_ROWS_PER_CHUNK = 256
_MARK = "is_done"
_KIND = "sweep"
_STORE = FileKind("an undamaged sweep", "choose another path, or create one with wb.sweeps.run(runs, path)")


class SweepStore:
    """The store of a sweep that is being executed.

    Args:
        path: Path of the store; an existing sweep of the same runs is continued.
        runs: The planned runs.
        overwrite: Replace an existing store at ``path``.

    Raises:
        StoreError: If the path holds something else, or a sweep of other runs.

    Example:
        >>> import workbench as wb
        >>> task = {"name": "random_tokens", "length": 8, "vocab_size": 16, "batch_size": 4}
        >>> size = {"d_model": 16, "n_layers": 2, "n_heads": 2}
        >>> runs = wb.sweeps.grid({"tiny": size}, learning_rate=[0.001, 0.01], n_steps=2, task=task, n_snapshots=64)
        >>> store = wb.sweeps.SweepStore("sweep.zarr", runs)
        >>> store.missing()
        [0, 1]

    See Also:
        `workbench.sweeps.run`: Executes the runs and fills the store.
        `workbench.open_sweep`: Opens the store.
    """

    def __init__(self, path: str | os.PathLike[str], runs: Sequence[RunSettings], *, overwrite: bool = False) -> None:
        import zarr

        self.path = Path(path)
        if overwrite or not self.path.exists():
            check_free(self.path, overwrite=overwrite)
            with replacing(self.path) as partial:
                _lay_out(partial, runs)
        else:
            _check_design(self.path, runs)
        self._group = zarr.open_group(self.path, mode="r+", use_consolidated=False)
        designed = runs[0].describe()
        names = [name for name in {**SETTINGS, **MEASURES, **OUTCOMES, **CURVES} if name not in designed]
        # An older store has no losses along the runs, and is continued without them.
        self._arrays = {name: cast(zarr.Array, self._group[name]) for name in names if name in self._group}
        self._mark = cast(zarr.Array, self._group[_MARK])

    def missing(self) -> list[int]:
        """Return the indices of the unfinished rows."""
        return np.flatnonzero(~np.asarray(self._mark[:])).tolist()

    def write(self, index: int, row: Mapping[str, Any]) -> None:
        """Write the row of a finished run.

        Args:
            index: Index of the run among the planned runs.
            row: Values of the row, as returned by `make_run`.

        Raises:
            StoreError: If the row cannot be written, for example on a full disk; it is then not marked as finished.
        """
        try:
            for name, array in self._arrays.items():
                with np.errstate(over="ignore"):  # values too large for single precision become infinite
                    value = np.asarray(row[name], dtype=array.dtype)
                if value.ndim and any(n > m for n, m in zip(value.shape, array.shape[1:], strict=True)):
                    array.resize((array.shape[0], *np.maximum(value.shape, array.shape[1:]).tolist()))
                place: tuple[int | slice, ...] = (index, *(slice(n) for n in value.shape))
                array[place] = value
            self._mark[index] = True
        except OSError as error:
            raise StoreError(
                f"The sweep at {self.path} cannot be written ({error.strerror or error}); its finished runs are kept: "
                "free some space and start it again."
            ) from error


def open_sweep(path: str | os.PathLike[str]) -> xr.Dataset:
    """Open the finished runs of a sweep, also while it is being executed.

    Args:
        path: Path of the store.

    Returns:
        Dataset with dimension ``run``, in the order of the planned runs; see `workbench.schema.sweeps`. Its attribute
        ``n_missing`` is the number of unfinished runs.

    Raises:
        StoreError: If there is no sweep at the path, or its version is newer than that of this workbench.

    Example:
        >>> import workbench as wb
        >>> size, task = {"d_model": 16, "n_layers": 2}, {"name": "random_tokens"}
        >>> runs = wb.sweeps.grid({"tiny": size}, learning_rate=[1e-3, 1e-2], n_steps=2, task=task)
        >>> store = wb.sweeps.SweepStore("sweep.zarr", runs)  # wb.sweeps.run() creates it
        >>> wb.open_sweep("sweep.zarr").attrs["n_missing"]
        2

    See Also:
        `workbench.sweeps.run`: Executes a sweep.
        `workbench.rates.rate_outcomes`: Computes the outcomes of a sweep over learning rates.
    """
    import xarray as xr

    attrs = _attrs_of(as_path(path))
    # At this size dask would be slower.
    with _STORE.reading(path), xr.open_zarr(path, consolidated=False, chunks=None) as data:
        is_done = data[_MARK].values
        data = data.drop_vars(_MARK).isel(run=is_done).load()
    data = data.set_coords(list(SETTINGS))
    kept = {name: value for name, value in attrs.items() if name not in ("kind", "design")}
    for name, variable in data.variables.items():
        if variable.dtype.kind not in "fcib":
            data[name] = (variable.dims, np.array(variable.values.tolist(), dtype=str), variable.attrs)
    data = data.drop_encoding()
    data.attrs = kept | {"n_missing": int((~is_done).sum())}
    return data


def _lay_out(path: Path, runs: Sequence[RunSettings]) -> None:
    """Create a store in which no row is finished: arrays have their full length, and the settings are filled in."""
    import zarr

    designed = [run.describe() for run in runs]
    group = zarr.create_group(path)
    extents = dict.fromkeys(("layer", "mode", "window", "evaluation"), 1)
    for name, rule in {**SETTINGS, **MEASURES, **OUTCOMES, **CURVES}.items():
        shape = tuple(len(runs) if dim == "run" else extents[dim] for dim in rule.dims)
        chunks = tuple(min(_ROWS_PER_CHUNK, len(runs)) if dim == "run" else 64 for dim in rule.dims)
        dtype = dtype_of(name, rule.kind)
        array = group.create_array(
            name,
            shape=shape,
            chunks=chunks,
            dtype="string" if dtype is np.str_ else dtype,
            fill_value={"f": np.nan, "c": np.nan, "i": 0, "b": False, "U": ""}[rule.kind],
            attributes=dict(rule.attrs),
            dimension_names=rule.dims,
        )
        if name in designed[0]:
            array[:] = np.array([row[name] for row in designed], dtype=array.dtype)
    group.create_array(
        _MARK, shape=(len(runs),), chunks=(len(runs),), dtype=bool, fill_value=False, dimension_names=("run",)
    )
    group.attrs.update(
        {
            "kind": _KIND,
            "sweep_version": SWEEP_VERSION,
            "design": [json.dumps(run.as_dict(), sort_keys=True) for run in runs],
            "versions": versions(),
        }
    )


def _attrs_of(path: Path) -> dict[str, Any]:
    """Return the attributes of the store of a sweep."""
    with _STORE.reading(path):
        attrs: dict[str, Any] = dict(_STORE.json(path / "zarr.json")["attributes"])
        if attrs["kind"] != _KIND:
            raise ValueError(f"its kind is {attrs['kind']!r}")
    if attrs["sweep_version"] > SWEEP_VERSION:
        raise StoreError(
            f"The sweep at {path} has version {attrs['sweep_version']}, but this workbench reads versions up to "
            f"{SWEEP_VERSION}; update the workbench."
        )
    return attrs


def _check_design(path: Path, runs: Sequence[RunSettings]) -> None:
    """Raise StoreError if the path holds something else, or a sweep of other runs."""
    recorded = _attrs_of(path)["design"]
    planned = [json.dumps(run.as_dict(), sort_keys=True) for run in runs]
    if recorded == planned:
        return
    advice = "pass the same runs, choose another path, or pass overwrite=True"
    if len(recorded) != len(planned):
        raise StoreError(f"The sweep at {path} has {len(recorded)} runs instead of {len(planned)}; {advice}.")
    index = next(i for i, (old, new) in enumerate(zip(recorded, planned, strict=True)) if old != new)
    name, old, new = _difference(json.loads(recorded[index]), json.loads(planned[index]))
    raise StoreError(f"The sweep at {path} has other runs: in run {index}, {name} is {old} instead of {new}; {advice}.")


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """Return name, old and new value of the first setting that differs."""
    from workbench.training.recording import first_difference

    return first_difference(old, new) or ("settings", old, new)
