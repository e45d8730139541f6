"""Save, open and read runs: trees of datasets in a Zarr store, or exported to netCDF. Writing is atomic."""

from __future__ import annotations

import errno
import numbers
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from workbench.errors import OptionError, SchemaError
from workbench.io.atomic import check_free, replacing
from workbench.io.far_places import FarPlace, place_of
from workbench.io.files import FileKind
from workbench.io.memory import require_memory
from workbench.io.run_lock import has_writer
from workbench.io.run_parts import events_part
from workbench.io.stages import joined, stages_at
from workbench.io.training_logs import is_log, read_log
from workbench.schema.runs import (
    ALL_CHUNKS,
    CONCAT_DIMS,
    IDENTITY,
    PARTS,
    SCHEMA_VERSION,
    check_version,
    validate_events,
    validate_monitors,
    validate_part,
    validate_spectra,
    validate_weights,
)
from workbench.schema.statuses import RunState

if TYPE_CHECKING:
    import xarray as xr


#: Approximate size of the description of a variable in a netCDF file.
_BYTES_PER_VARIABLE = 2048
_NETCDF = FileKind("a file that can hold the run", "save it with wb.save()")
_RUN = FileKind("an undamaged run", "check the path, or write it again with wb.save()", most_bytes=1 << 40)
#: Parts of a run that follow the schema; others are stored unchanged.
_VALIDATORS: dict[str, Callable[[xr.Dataset], xr.Dataset]] = {
    "spectra": validate_spectra,
    "monitors": validate_monitors,
    "events": validate_events,
    "weights": validate_weights,
    **{part: partial(validate_part, part) for part in PARTS},
}


def as_run(data: xr.DataTree | xr.Dataset | Mapping[str, xr.Dataset]) -> xr.DataTree:
    """Create a run from a tree, a dataset or a mapping of parts."""
    import xarray as xr

    if isinstance(data, xr.Dataset) and "loss" in data and "eigenvalue" not in data:
        data = _run_of_log(data)
    elif isinstance(data, xr.Dataset):
        data = {"weights" if "singular_value" in data else "spectra": data}
    if isinstance(data, xr.DataTree):
        run = data.copy()
    elif isinstance(data, Mapping) and all(isinstance(part, xr.Dataset) for part in data.values()):
        run = xr.DataTree.from_dict({f"/{str(name).strip('/')}": part for name, part in data.items()})
    else:
        raise SchemaError.of("run", data, "a DataTree, a Dataset or a mapping of datasets")
    for node in run.subtree:
        check_version(node)
        _check_attrs(node)
    for name, validate in _VALIDATORS.items():
        # A diagnosis has a part "evidence" too, along the dimension cause.
        if name in run.children and not (name == "evidence" and "cause" in run.children[name]):
            validate(run.children[name].to_dataset())
    run.attrs.setdefault("schema_version", SCHEMA_VERSION)
    return run


def save(
    run: xr.DataTree | xr.Dataset | Mapping[str, xr.Dataset], path: str | os.PathLike[str], *, overwrite: bool = False
) -> Path:
    """Save a run to a Zarr store.

    Writing is crash-consistent: the store is written next to its path and moved there at the end.

    Args:
        run: A run; a dataset of spectra or of weight spectra; or parts by name, such as
            ``{"spectra": ..., "monitors": ...}``.
        path: Path of the store, by convention ending in ``.zarr``.
        overwrite: Replace an existing store, which is kept until the new one is complete.

    Returns:
        The path.

    Raises:
        SchemaError: If the run does not follow the schema; no file is touched then.
        StoreError: If the path exists and ``overwrite`` is False, or the disk is full; an existing store is then
            unchanged.

    Example:
        >>> import numpy as np
        >>> import workbench as wb
        >>> states = np.random.default_rng(0).normal(size=(64, 4))
        >>> spectra = wb.koopman.whitened_dmd(states, 0.9 * states)
        >>> wb.save(spectra, "mine.zarr").name
        'mine.zarr'

    See Also:
        `workbench.open_run`: Opens the run.
        `workbench.export_netcdf`: Writes a netCDF file.
    """
    run = as_run(run)
    check_free(path, overwrite=overwrite)
    path = Path(path)
    with replacing(path) as partial:
        # Zarr 3 specifies strings of variable length, but not those of fixed length.
        stored = with_text(run, of_variable_length=True)
        stored.attrs = run.attrs | {ALL_CHUNKS: 1}
        stored.to_zarr(partial, zarr_format=3, consolidated=False, mode="w-", write_empty_chunks=True)
    return path


def export_netcdf(
    run: xr.DataTree | xr.Dataset | Mapping[str, xr.Dataset], path: str | os.PathLike[str], *, overwrite: bool = False
) -> Path:
    """Write a run to a netCDF-4 file with a group for each part; complex numbers become compound types.

    Args:
        run: As in `save`.
        path: Path of the file, by convention ending in ``.nc``.
        overwrite: Replace an existing file.

    Returns:
        The path.

    Raises:
        SchemaError: If the run does not follow the schema; no file is touched then.
        StoreError: If the path exists and ``overwrite`` is False, or the disk is full.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("architecture"))
        >>> wb.export_netcdf(run, "copy.nc").name
        'copy.nc'

    See Also:
        `workbench.save`: Saves a run to a Zarr store.
        `workbench.open_run`: Opens either form.
    """
    run = as_run(run)
    check_free(path, overwrite=overwrite)
    path = Path(path)
    with replacing(path) as partial:
        # On a disk that becomes full, HDF5 raises other errors and keeps the file open.
        n_bytes = sum(node.nbytes + _BYTES_PER_VARIABLE * (1 + len(node.variables)) for node in run.subtree)
        if n_bytes > shutil.disk_usage(partial.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with _NETCDF.reading(path):
            run.to_netcdf(partial, engine="netcdf4", auto_complex=True)
    return path


def open_run(path: str | os.PathLike[str]) -> xr.DataTree:
    """Open a run written by `save`, `train` or `export_netcdf`; values of a Zarr store are loaded lazily.

    Its attribute ``state`` tells whether the run is still being written: ``"ended without being closed"`` if no process
    does, although none has closed it. Loading raises a `StoreError` if the store was removed or replaced since;
    ``run.load()`` loads all values at once.

    A run of a pipeline has a store for each stage, ``NAME.stage0.zarr`` and so on, which are opened by the path
    ``NAME.zarr`` as one run, with all values loaded.

    The store may be on another machine or in a bucket, whose writer cannot be seen: there the state "running" says only
    that nobody has closed the run. Errors of the link are retried for some seconds.

    Args:
        path: Path of a Zarr store or a netCDF file; or URL of a Zarr store for fsspec, such as
            ``"ssh://host/path/run.zarr"`` or ``"s3://bucket/run.zarr"``.

    Returns:
        The run.

    Raises:
        StoreError: If there is no run at the path, it is damaged, or it is a log, which `read_log` reads.
        SchemaError: If the run follows the schema of a newer version.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("architecture"))
        >>> sorted(run.children)
        ['activations', 'attention', 'events', 'monitors', 'spectra']
        >>> run["events"]["kind"].values.tolist()
        ['divergence']

    See Also:
        `workbench.save`: Saves a run.
        `workbench.read_log`: Reads the log of another tool.
        `workbench.diagnose`: Finds the causes of a failed run.
    """
    import xarray as xr

    place = place_of(path)
    if stages := stages_at(place):
        return joined([open_run(getattr(each, "url", each)) for each in stages])
    with _RUN.reading(place):
        if (
            isinstance(place, Path)
            and place.exists()
            and (is_log(place) or (place.is_file() and not _may_be_run(place)))
        ):
            raise _RUN.rejected(place, "if it is a log of another tool, read it with wb.read_log()")
        if isinstance(place, FarPlace) or place.is_dir():
            from workbench.io.watched_store import guarded, opened_store

            store: Any = opened_store(place)  # xarray accepts Zarr's stores, which its annotation does not list
            # While a store is being written, only its consolidated metadata are consistent.
            is_consolidated = bool(store.metadata.get("consolidated_metadata"))
            run = guarded(xr.open_datatree(store, engine="zarr", consolidated=is_consolidated), _RUN, place)
        else:
            # Closed immediately, because HDF5 crashes if one thread closes a file while another opens one.
            with xr.open_datatree(_RUN.check(place), engine="netcdf4", auto_complex=True) as file:
                require_memory(sum(node.nbytes for node in file.subtree))
                run = file.load()
        run.attrs.pop(ALL_CHUNKS, None)
        run.attrs.pop(IDENTITY, None)
        if "schema_version" not in run.attrs:
            raise _RUN.rejected(place, "the workbench did not write it; open it with xarray")
        for node in run.subtree:
            check_version(node)
        is_running = run.attrs.get("state") == RunState.RUNNING and "writer" in run.attrs
        if is_running and isinstance(place, Path) and has_writer(place) is False:
            run.attrs["state"] = str(RunState.UNCLOSED)
        return with_text(run, of_variable_length=False)


def open_run_or_log(path: str | os.PathLike[str]) -> xr.DataTree:
    """Open a run, or read the log of another tool as a run; see `open_run` and `workbench.read_log`."""
    place = place_of(path)
    is_run = isinstance(place, FarPlace) or not place.exists() or _may_be_run(place)
    return open_run(path) if is_run else as_run(read_log(path))


def _may_be_run(path: Path) -> bool:
    """Return whether a path looks like a store, or like a netCDF file, from its name or its first bytes."""
    if path.suffix in (".nc", ".zarr") or not path.is_file():
        return path.suffix in (".nc", ".zarr") or (path / "zarr.json").exists()
    with _RUN.check(path).open("rb") as file:
        return file.read(4).startswith((b"\x89HDF", b"CDF"))


def _run_of_log(log: xr.Dataset) -> xr.DataTree:
    """Return a run with the monitors of a log, and an event for each resumption."""
    import xarray as xr

    run = xr.DataTree.from_dict({"/monitors": log})
    run.attrs = {"subject": str(log.attrs.get("subject", ""))}
    if resumed := np.atleast_1d(log.attrs.get("resumed_at", [])).tolist():
        row = {"kind": "resumed", "source": "", "score": np.nan, "message": "", "layer": -1, "head": -1}
        part = events_part()
        columns = {name: np.full(len(resumed), value) for name, value in row.items()}
        run["events"] = xr.DataTree(part.dataset(resumed, columns))
    return run


def _check_attrs(node: xr.DataTree) -> None:
    for name, value in node.attrs.items():
        items = value if isinstance(value, list | tuple | np.ndarray) else [value]
        if not all(isinstance(item, str | numbers.Real) and not isinstance(item, bool | np.bool_) for item in items):
            raise SchemaError(f"Attribute '{name}' is {value!r}, which netCDF cannot store; use numbers, text or JSON.")


@overload
def with_text(data: xr.Dataset, *, of_variable_length: bool) -> xr.Dataset: ...


@overload
def with_text(data: xr.DataTree, *, of_variable_length: bool) -> xr.DataTree: ...


def with_text(data: xr.DataTree | xr.Dataset, *, of_variable_length: bool) -> xr.DataTree | xr.Dataset:
    """Convert text to variable-length strings, as Zarr stores it, or to NumPy's fixed-length strings."""
    import xarray as xr

    dtype = np.dtypes.StringDType() if of_variable_length else np.str_

    def convert(part: xr.Dataset) -> xr.Dataset:
        texts = {name: v for name, v in part.variables.items() if v.dtype.kind in "UTO"}
        new = {name: (v.dims, np.array(np.asarray(v).tolist(), dtype=dtype), v.attrs) for name, v in texts.items()}
        return part.assign(new).set_coords([name for name in new if name in part.coords])

    return convert(data) if isinstance(data, xr.Dataset) else xr.map_over_datasets(convert, data)


def named_runs(
    runs: xr.DataTree | xr.Dataset | Mapping[str, xr.DataTree | xr.Dataset] | Iterable[xr.DataTree | xr.Dataset],
    *,
    needs_spectra: bool = True,
) -> dict[str, xr.DataTree]:
    """Return runs by name; runs without names are named after their subjects."""
    import xarray as xr

    if isinstance(runs, xr.DataTree | xr.Dataset):
        single = _as_run(runs, "The run", needs_spectra=needs_spectra)
        return {str(spectra_of(single).attrs["subject"]) if "spectra" in single.children else "run": single}
    if isinstance(runs, list | tuple):
        runs = by_subject(runs)
    if not isinstance(runs, Mapping) or not runs:
        raise SchemaError.of("runs", runs, "a run, or a non-empty dict of names and runs")
    found = {}
    for name, run in runs.items():
        if not isinstance(run, xr.DataTree | xr.Dataset):
            raise SchemaError(f"'{name}' is of type {type(run).__name__}, expected a run or a dataset of wb.profile().")
        found[str(name)] = _as_run(run, f"'{name}'", needs_spectra=needs_spectra)
    return found


def by_subject(things: Iterable[Any]) -> dict[str, Any]:
    """Return runs, spectra or models, each under the name of its subject; equal names are numbered from the second."""
    found: dict[str, Any] = {}
    for thing in things:
        data = thing["spectra"] if hasattr(thing, "subtree") and "spectra" in thing.children else thing
        name = getattr(data, "attrs", {}).get("subject") or getattr(thing, "name", None) or type(thing).__name__
        number = 1 + sum(each.partition(" (")[0] == name for each in found)
        found[name if number == 1 else f"{name} ({number})"] = thing
    return found


def spectra_of(run: xr.DataTree) -> xr.Dataset:
    """Return the spectra of a run, sorted along ``step`` if they have this dimension."""
    spectra = run["spectra"].to_dataset()
    return spectra.sortby("step") if "step" in spectra.dims else spectra


def at_step(spectra: xr.Dataset, at: int | str, *, name: str) -> xr.Dataset:
    """Return the spectra at one step."""
    others = [dim for dim in spectra["eigenvalue"].dims if dim in CONCAT_DIMS and dim != "step"]
    if others:
        raise SchemaError(
            f"'{name}' has the dimension {', '.join(map(str, others))}; select one entry, for example "
            f"spectra.isel({others[0]}=0)."
        )
    if at in ("first", "last"):
        return spectra.isel(step=0 if at == "first" else -1) if "step" in spectra.dims else spectra
    if isinstance(at, str | bool) or not isinstance(at, int | np.integer):
        raise OptionError.of("step", at, "'first', 'last' or an integer")
    steps = recorded_steps(spectra)
    if not len(steps):
        raise OptionError(f"'{name}' has no steps, so step {at} cannot be found; use 'first' or 'last'.")
    if at < steps[0]:
        raise OptionError(f"'{name}' has no spectra at or before step {at}; its first are at step {steps[0]}.")
    return spectra.isel(step=np.searchsorted(steps, at, side="right") - 1) if "step" in spectra.dims else spectra


def recorded_steps(spectra: xr.Dataset) -> np.ndarray:
    """Return the steps at which spectra were recorded, in the order of the data; empty if unknown."""
    return np.atleast_1d(spectra["step"].values) if "step" in spectra.coords else np.zeros(0, int)


def divergence_step(run: xr.DataTree) -> int | None:
    """Return the step of the first event of kind ``divergence``; None if there is none."""
    if "events" not in run.children:
        return None
    events = run["events"].to_dataset()
    steps = events["step"].values[events["kind"].values == "divergence"]
    return int(steps.min()) if len(steps) else None


def last_step(run: xr.DataTree) -> int | None:
    """Return the last step of spectra, monitors and events; None if the run has no steps."""
    parts = [run[part].to_dataset() for part in ("spectra", "monitors", "events") if part in run.children]
    return max(
        (int(part["step"].max()) for part in parts if "step" in part.variables and part["step"].size), default=None
    )


def _as_run(data: xr.DataTree | xr.Dataset, name: str, *, needs_spectra: bool) -> xr.DataTree:
    try:
        run = as_run(data)
    except SchemaError as error:
        raise error.within(f"{name} is not a run") from error
    if needs_spectra and "spectra" not in run.children:
        parts = ", ".join(run.children) or "nothing"
        raise SchemaError(f"{name} has no spectra, only {parts}; record spectra in training, or wb.profile() a model.")
    return run
