"""A sweep on disk: one Zarr store with one row for each run, in the order of the design.

The columns that the design decides are written at the beginning; the rest is written row by row, by one process. Zarr
replaces each of its files in one step, and a row counts only once it is marked as finished, so the store is
crash-consistent: after a kill at any moment it opens with every row that was finished before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from workbench.errors import SchemaError, StoreError
from workbench.io.atomic import check_free, replacing
from workbench.io.provenance import versions
from workbench.schema.sweeps import CURVES, MEASURES, OUTCOMES, SETTINGS, SWEEP_VERSION, dtype_of, require
from workbench.sweeps.run_settings import RunSettings

if TYPE_CHECKING:
    import xarray as xr

#: Rows in a chunk: it is read and written again with each of its rows, and empty chunks take no space.
_ROWS_PER_CHUNK = 256
_MARK = "is_done"
_KIND = "sweep"


class SweepStore:
    """The store of a sweep that is being executed.

    Args:
        path: Path of the store; an existing sweep of the same design is continued.
        runs: The design.
        overwrite: Start again, replacing an existing store at ``path``.

    Raises:
        StoreError: If the path holds something else, or a sweep of another design.

    Example:
        >>> import workbench as wb
        >>> task = {"name": "random_tokens", "length": 8, "vocab_size": 16, "batch_size": 4}
        >>> size = {"d_model": 16, "n_layers": 2, "n_heads": 2}
        >>> runs = wb.sweeps.grid({"tiny": size}, learning_rate=[0.001, 0.01], n_steps=2, task=task, n_snapshots=64)
        >>> store = wb.sweeps.SweepStore("sweep.zarr", runs)
        >>> store.missing()  # store.write(0, wb.sweeps.make_run(runs[0].as_dict())) makes the first
        [0, 1]
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
        # A store from before there were losses along the runs goes on without them.
        self._arrays = {name: cast(zarr.Array, self._group[name]) for name in names if name in self._group}
        self._mark = cast(zarr.Array, self._group[_MARK])

    def missing(self) -> list[int]:
        """Indices of the rows that are not finished."""
        return np.flatnonzero(~np.asarray(self._mark[:])).tolist()

    def write(self, index: int, row: Mapping[str, Any]) -> None:
        """Write a finished row.

        Raises:
            StoreError: If it cannot be written, as on a full disk; the row is not marked as finished then.
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
        Dataset with dim ``run``, in the order of the design; see `workbench.schema.sweeps`. ``n_missing`` in its
        attributes counts the runs that are not finished.

    Raises:
        StoreError: If there is no sweep at the path, or it is of a newer version.

    Example:
        >>> import workbench as wb
        >>> size, task = {"d_model": 16, "n_layers": 2}, {"name": "random_tokens"}
        >>> runs = wb.sweeps.grid({"tiny": size}, learning_rate=[1e-3, 1e-2], n_steps=2, task=task)
        >>> store = wb.sweeps.SweepStore("sweep.zarr", runs)  # what wb.sweeps.run() begins with
        >>> wb.open_sweep("sweep.zarr").attrs["n_missing"]
        2
    """
    import xarray as xr

    attrs = _attrs_of(Path(path))
    with xr.open_zarr(path, consolidated=False, chunks=None) as data:  # dask is slower at this size
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


def join(sweeps: Sequence[xr.Dataset]) -> xr.Dataset:
    """Join several sweeps into one, in the order given; layers and modes that a run lacks are NaN.

    Args:
        sweeps: Sweeps from `open_sweep`; attributes in which they differ are dropped.

    Raises:
        SchemaError: If none is given, or one is no sweep.

    Example:
        >>> import workbench as wb
        >>> norms, scales = wb.samples.divergence_sweep("norms"), wb.samples.divergence_sweep("scales")
        >>> wb.sweeps.join([norms, scales]).sizes["run"] == norms.sizes["run"] + scales.sizes["run"]
        True
    """
    import xarray as xr

    if not sweeps:
        raise SchemaError("There is no sweep to join; pass at least one.")
    for part in sweeps:
        require(part, [*SETTINGS, *OUTCOMES])
    dims = dict.fromkeys(dim for part in sweeps for dim in part.dims if dim != "run")
    extents = {dim: max(part.sizes.get(dim, 0) for part in sweeps) for dim in dims}
    padded = [part.pad({d: (0, n - part.sizes[d]) for d, n in extents.items() if d in part.dims}) for part in sweeps]
    return xr.concat(padded, "run", combine_attrs="drop_conflicts").set_coords(list(SETTINGS))


def _lay_out(path: Path, runs: Sequence[RunSettings]) -> None:
    """Create a store in which no row is finished: every array has its full length, with the design's columns filled."""
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
    """Attributes of a sweep's store.

    Raises:
        StoreError: If there is none.
    """
    import zarr
    from zarr.errors import GroupNotFoundError

    try:
        attrs: dict[str, Any] = dict(zarr.open_group(path, mode="r", use_consolidated=False).attrs)
    except (GroupNotFoundError, FileNotFoundError, NotADirectoryError) as error:
        raise StoreError(f"There is no sweep at {path}; make one with wb.sweeps.run(runs, path).") from error
    except ValueError as error:
        raise StoreError(f"The store at {path} is damaged ({error}); delete it and make the sweep again.") from error
    if attrs.get("kind") != _KIND:
        raise StoreError(f"{path} is no sweep but another store; choose another path.")
    if attrs["sweep_version"] > SWEEP_VERSION:
        raise StoreError(
            f"The sweep at {path} is of version {attrs['sweep_version']}; this workbench reads {SWEEP_VERSION}."
        )
    return attrs


def _check_design(path: Path, runs: Sequence[RunSettings]) -> None:
    """Refuse a store of another design.

    Raises:
        StoreError: If the path holds something else, or other runs.
    """
    recorded = _attrs_of(path)["design"]
    asked = [json.dumps(run.as_dict(), sort_keys=True) for run in runs]
    if recorded == asked:
        return
    advice = "go on with the same design, choose another path, or pass overwrite=True"
    if len(recorded) != len(asked):
        raise StoreError(
            f"The sweep at {path} has another design, {len(recorded)} runs instead of {len(asked)}; {advice}."
        )
    index = next(i for i, (old, new) in enumerate(zip(recorded, asked, strict=True)) if old != new)
    name, old, new = _difference(json.loads(recorded[index]), json.loads(asked[index]))
    raise StoreError(
        f"The sweep at {path} has another design: run {index} has {name} = {old} instead of {new}; {advice}."
    )


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, Any, Any]:
    from workbench.training.configuration import first_difference

    return first_difference(old, new) or ("settings", old, new)
