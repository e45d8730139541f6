"""Append rows to the store of a run during training, while any process may read it.

Zarr keeps the length of each array in a separate file, so an interrupted append would leave arrays of different
lengths, which cannot be opened. Here readers use only one file, the consolidated metadata in the root. Rows are written
first, and that file is replaced last, in one step. The store is crash-consistent: if the process is killed at any time,
the store opens with all rows of the last commit.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import StoreError
from workbench.io.atomic import check_free, replacing
from workbench.io.run_copy import CopiedPath, RunCopy
from workbench.io.run_lock import RunLock, owner
from workbench.schema.runs import ALL_CHUNKS, IDENTITY, SCHEMA_VERSION

if TYPE_CHECKING:
    import xarray as xr
    import zarr

#: Approximate size of a chunk, which is rewritten with each append until it is full. Wide rows, as of many heads, have
#: larger ones of some rows, since a run of many small files is read slowly.
_BYTES_PER_CHUNK, _ROWS_OF_WIDE, _BYTES_OF_WIDE = 1 << 17, 64, 1 << 20


class RunWriter:
    """Appends rows to the parts of a run in a Zarr store; readers see them with the next `commit`."""

    def __init__(self, path: str | os.PathLike[str], attrs: Mapping[str, Any], *, overwrite: bool = False) -> None:
        import zarr

        self.path = Path(path)
        self._parts: dict[str, _Extent] = {}
        self._arrays: dict[str, list[zarr.Array]] = {}
        self.root = b""
        self._attrs = {"schema_version": SCHEMA_VERSION, **attrs, "writer": owner()}
        self._attrs |= {ALL_CHUNKS: 1, IDENTITY: uuid.uuid4().hex}
        check_free(self.path, overwrite=overwrite)
        self.copy = RunCopy(path, overwrite=overwrite, resume=False) if isinstance(path, CopiedPath) else None
        with replacing(self.path) as partial:
            zarr.create_group(partial)
            self._write_root(partial)
        self._lock = RunLock(self.path)
        self._folder = self.path.stat().st_ino

    @classmethod
    def reopen(cls, path: str | os.PathLike[str], *, before_step: int) -> RunWriter:
        """Continue a store; rows from step ``before_step`` on are dropped, because they will be recomputed."""
        from workbench.io.store import open_run
        from workbench.io.watched_store import WatchedStore

        open_run(path)
        writer = cls.__new__(cls)
        writer.path, writer._arrays, writer._lock = Path(path), {}, RunLock(Path(path))
        writer.root = b""
        committed = open_run(path)
        writer._attrs = dict(WatchedStore(os.fspath(path)).metadata["attributes"]) | {"writer": owner()}
        writer.copy = RunCopy(path, overwrite=False, resume=True) if isinstance(path, CopiedPath) else None
        writer._folder = writer.path.stat().st_ino
        writer._parts = {
            part: _Extent(str(steps.dims[0]), int(np.count_nonzero(steps.values < before_step)))
            for part, steps in ((part, node.to_dataset()["step"]) for part, node in committed.children.items())
        }
        # The metadata are written first: once readers see the shorter arrays, the other rows may be deleted.
        writer.commit()
        # Remove the parts and rows that a killed process wrote but did not commit.
        for folder in writer.path.iterdir():
            if folder.is_dir() and folder.name not in writer._parts:
                shutil.rmtree(folder)
        for part, extent in writer._parts.items():
            for array in writer._growing(part):
                array.resize((extent.n_rows, *array.shape[1:]))
        return writer

    def append(self, part: str, rows: xr.Dataset) -> None:
        """Add rows to a part of the run along its steps; the first create it, always with the same variables."""
        from workbench.io.store import with_text

        (dim,) = map(str, rows["step"].dims)
        rows = with_text(rows, of_variable_length=True)
        with _naming_the_error(self.path):
            self._check_is_there()
            if part not in self._parts:
                if (self.path / part).exists():  # left by a failed attempt
                    shutil.rmtree(self.path / part)
                encoding = {name: {"chunks": _chunks(variable)} for name, variable in rows.variables.items()}
                # The dimension of rows is the first one of each array, so that arrays grow by complete rows.
                rows = rows.transpose(dim, ...)
                options: dict[str, Any] = {"consolidated": False, "zarr_format": 3, "write_empty_chunks": True}
                rows.to_zarr(self.path, group=part, mode="a", encoding=encoding, **options)
                self._parts[part] = _Extent(dim, rows.sizes[dim])
                return
            start = self._parts[part].n_rows
            stop = start + rows.sizes[dim]
            for array in self._growing(part):
                array.resize((stop, *array.shape[1:]))
                array[start:stop] = rows[array.basename].transpose(dim, ...).values
            self._parts[part] = _Extent(dim, stop)

    def commit(self, **attrs: Any) -> None:
        """Make all rows appended so far visible to readers, in one step."""
        self._attrs |= attrs
        with _naming_the_error(self.path):
            self._check_is_there()
            self._write_root(self.path)

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Attributes of the run."""
        return self._attrs

    def release(self) -> None:
        """Let others write the store; called after the last commit."""
        self._lock.release()

    def is_there(self) -> bool:
        """Return whether the store still exists at its path and was not replaced by another one."""
        try:
            return (self.path / "zarr.json").exists() and self.path.stat().st_ino == self._folder
        except FileNotFoundError:
            return False

    def layout(self, part: str) -> xr.Dataset | None:
        """Return all variables of a part without its rows; None if there is no such part."""
        import xarray as xr
        import zarr

        if part not in self._parts:
            return None
        variables = {}
        for array in zarr.open_group(self.path / part, mode="r", use_consolidated=False).array_values():
            dims = _dims(array)
            stored: Any = array.attrs.get("dtype", array.dtype)  # xarray writes booleans as integers
            dtype = np.dtype(stored)
            is_growing = dims[:1] == (self._parts[part].dim,)
            values = np.empty((0, *array.shape[1:]), dtype) if is_growing else array[...]
            variables[array.basename] = (dims, values)
        return xr.Dataset(variables)

    @property
    def gone_message(self) -> str:
        """Message for a store that no longer exists."""
        return f"The run at {self.path} was removed, moved or replaced while it was being written."

    def _check_is_there(self) -> None:
        # Otherwise Zarr would create the folders again, without their rows.
        if not self.is_there():
            raise StoreError(self.gone_message)

    def _growing(self, part: str) -> list[zarr.Array]:
        """Return the arrays of a part that have the dimension of its steps, and so grow."""
        import zarr

        if part not in self._arrays:
            dim = self._parts[part].dim
            with zarr.config.set({"array.write_empty_chunks": True}):
                arrays = list(zarr.open_group(self.path / part, mode="r+", use_consolidated=False).array_values())
            self._arrays[part] = [array for array in arrays if _dims(array)[:1] == (dim,)]
        return self._arrays[part]

    def _write_root(self, folder: Path) -> None:
        """Replace the metadata of the root: its attributes, and the metadata of all arrays with committed lengths."""
        members = {}
        for part, extent in self._parts.items():
            for file in sorted([folder / part / "zarr.json", *(folder / part).glob("*/zarr.json")]):
                metadata = json.loads(file.read_text())
                if metadata.get("dimension_names", [])[:1] == [extent.dim]:
                    metadata["shape"][0] = extent.n_rows
                members[file.parent.relative_to(folder).as_posix()] = metadata
        root = {
            "zarr_format": 3,
            "node_type": "group",
            "attributes": self._attrs,
            "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": members},
        }
        self.root = json.dumps(root).encode()
        with replacing(folder / "zarr.json") as partial:
            partial.write_bytes(self.root)


@dataclass(frozen=True)
class _Extent:
    """Dimension along which a part grows, and the number of its rows."""

    dim: str
    n_rows: int


def _chunks(variable: xr.Variable) -> tuple[int, ...]:
    """Return the shape of a chunk, which holds complete rows."""
    row = variable.shape[1:]
    n_bytes = max(1, int(np.prod(row)) * variable.dtype.itemsize)
    n_rows = max(1, _BYTES_PER_CHUNK // n_bytes, min(_ROWS_OF_WIDE, _BYTES_OF_WIDE // n_bytes))
    return (n_rows, *(max(1, size) for size in row)) if variable.ndim else ()


@contextmanager
def _naming_the_error(path: Path) -> Iterator[None]:
    """Convert an error of the operating system to a `StoreError` that names the run."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"The run at {path} cannot be written ({error.strerror or error}); rows committed earlier are safe."
        ) from error


def _dims(array: zarr.Array) -> tuple[str | None, ...]:
    """Return the dimension names of an array; empty if it has none, as in Zarr's format 2."""
    return getattr(array.metadata, "dimension_names", None) or ()
