"""Read a Zarr store that may be removed, replaced or damaged while its run is open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xarray.backends import BackendArray
from xarray.core import indexing
from zarr.storage import LocalStore

from workbench.io.files import FileKind
from workbench.io.memory import require_memory
from workbench.schema.runs import ALL_CHUNKS

if TYPE_CHECKING:
    import xarray as xr
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

_METADATA = FileKind("the metadata of an undamaged run", "check the path, or write the run again with wb.save()")
_OPENED = FileKind("the run that was opened", "open it again, or load() a run before its store is removed")
_CHUNK = FileKind("an undamaged run", "copy the run again", most_bytes=1 << 36)


class WatchedStore(LocalStore):
    """Read-only folder store that raises an error after it was removed or replaced, or lost a chunk.

    Zarr reads a missing chunk as the fill value, so a run that was removed while it was open would be read as zeros,
    and one that was replaced as a mixture of both.
    """

    def __init__(self, root: Path | str, *, read_only: bool = True) -> None:
        super().__init__(root, read_only=read_only)
        self._folder = self.root.stat().st_ino
        self.metadata = _METADATA.json(self.root / "zarr.json")
        self._has_all_chunks = bool((self.metadata.get("attributes") or {}).get(ALL_CHUNKS))

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return the bytes at a key, as `zarr.storage.LocalStore` does; None if there are none."""
        if (file := self.root / key).exists():
            _CHUNK.check(file)  # a pipe would never end
        found = await super().get(key, prototype, byte_range)
        # Checked after reading, because bytes that were read before the store was removed are valid.
        if not self._is_there() or (found is None and self._is_array_gone(key)):
            raise _OPENED.rejected(self.root, "it was removed or replaced since")
        if found is None and self._has_all_chunks and _is_chunk(key):
            raise _CHUNK.rejected(self.root, f"it lacks its file {key}, so values are lost")
        return found

    def _is_there(self) -> bool:
        try:
            return self.root.stat().st_ino == self._folder
        except FileNotFoundError:
            return False

    def _is_array_gone(self, key: str) -> bool:
        """Return whether the array of a missing chunk is missing too; older stores lack chunks of fill values."""
        return _is_chunk(key) and not self.root.joinpath(*key.split("/c")[:1], "zarr.json").exists()


def _is_chunk(key: str) -> bool:
    return f"/{key}".rstrip("/0123456789").endswith("/c")


def guarded(run: xr.DataTree, kind: FileKind, path: Path) -> xr.DataTree:
    """Return a run whose values, which are read later, raise errors of one kind if they are damaged."""
    import xarray as xr

    def guard(part: xr.Dataset) -> xr.Dataset:
        lazy: dict[Any, Any] = {name: v for name, v in part.variables.items() if not v._in_memory}
        return part.assign(
            {name: v.copy(data=indexing.LazilyIndexedArray(_Values(v._data, kind, path))) for name, v in lazy.items()}
        )

    return xr.map_over_datasets(guard, run)


class _Values(BackendArray):
    """Values of a variable that are read later."""

    def __init__(self, inner: Any, kind: FileKind, path: Path) -> None:
        self.shape, self.dtype, self._inner, self._kind, self._path = inner.shape, inner.dtype, inner, kind, path

    def __getitem__(self, key: Any) -> Any:
        """Return the values at a key of xarray."""
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> Any:
        with self._kind.reading(self._path):
            found = self._inner.oindex[indexing.OuterIndexer(key)]
            require_memory(found.size * self.dtype.itemsize)
            return found.get_duck_array()
