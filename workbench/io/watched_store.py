"""Read a Zarr store, here or far away, that may be removed, replaced or damaged while its run is open."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xarray.backends import BackendArray
from xarray.core import indexing
from zarr.abc.store import RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import LocalStore

from workbench.io.far_places import FarPlace
from workbench.io.files import FileKind
from workbench.io.memory import require_memory
from workbench.schema.runs import ALL_CHUNKS, IDENTITY

if TYPE_CHECKING:
    import xarray as xr
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

_METADATA = FileKind("the metadata of an undamaged run", "check the path, or write the run again with wb.save()")
_OPENED = FileKind("the run that was opened", "open it again, or load() a run before its store is removed")
#: Values in a part far away that is read at once.
_SMALL = 1 << 17
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


class FarStore(Store):
    """Read-only store on another machine or in a bucket, with the same errors as `WatchedStore`."""

    supports_writes = supports_deletes = supports_partial_writes = False
    supports_listing = True

    def __init__(self, place: FarPlace) -> None:
        super().__init__(read_only=True)
        self.place = place
        self.stamp = place.stamp("zarr.json")
        self.root = place.read("zarr.json")
        with _METADATA.reading(str(place)):
            if self.root is None:
                raise FileNotFoundError
            self.metadata: dict[str, Any] = _object(self.root)
        self.attrs = self.metadata.get("attributes") or {}
        self._one_at_a_time, self._confirmed_at = asyncio.Lock(), -float("inf")
        self._kept = dict[str, bytes | None]()
        self._seen = set[str]()

    def __reduce__(self) -> Any:
        return FarStore, (self.place,)

    def __eq__(self, other: object) -> bool:
        return self is other

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return the bytes at a key; None if there are none."""
        if key.rpartition("/")[2].startswith(".z"):  # of Zarr's format 2
            return None
        if not _is_chunk(key):
            found = self.root if key == "zarr.json" else await asyncio.to_thread(self.place.read, key)
        else:
            found = await self._chunk(key)
            if found is None and self.attrs.get(ALL_CHUNKS):
                raise _CHUNK.rejected(str(self.place), f"it lacks its file {key}, so values are lost")
        if found is None:
            return None
        if isinstance(byte_range, RangeByteRequest):
            found = found[byte_range.start : byte_range.end]
        elif byte_range is not None:
            at = -byte_range.suffix if isinstance(byte_range, SuffixByteRequest) else byte_range.offset
            found = found[at:]
        return (prototype or default_buffer_prototype()).buffer.from_bytes(found)

    async def _chunk(self, key: str) -> bytes | None:
        """Return a chunk; the first one of a small part is read with all others of it, at the same time."""
        part = key.partition("/")[0]
        async with self._one_at_a_time:
            keys = [] if part in self._seen else self._chunks_of(part)
            self._seen.add(part)
            found = await asyncio.gather(*(asyncio.to_thread(self.place.read, each) for each in keys))
            if keys:
                await asyncio.to_thread(self._look)
            self._kept |= zip(keys, found, strict=True)
        if key in self._kept:
            return self._kept[key]
        content = await asyncio.to_thread(self.place.read, key)
        await self._confirm()
        return content

    def _chunks_of(self, part: str) -> list[str]:
        """Return the keys of all chunks of a part, if they are consolidated and small; else none."""
        arrays = ((self.metadata.get("consolidated_metadata") or {}).get("metadata") or {}).items()
        keys: list[str] = []
        n_values = 0
        for name, each in arrays:
            if name.startswith(f"{part}/") and each.get("node_type") == "array":
                n_values += math.prod(each["shape"])
                of = zip(each["shape"], each["chunk_grid"]["configuration"]["chunk_shape"], strict=True)
                grid = itertools.product(*(range(-(-size // step)) for size, step in of))
                keys += ["/".join([name, "c", *map(str, at)]) for at in grid]
        return keys if n_values <= _SMALL else []

    async def _confirm(self) -> None:
        """Raise an error if the run is no longer the one that was opened; one look serves all reads before it."""
        read_at = time.monotonic()
        async with self._one_at_a_time:
            if self._confirmed_at < read_at:
                begun = time.monotonic()
                await asyncio.to_thread(self._look)
                self._confirmed_at = begun

    def _look(self) -> None:
        stamp = self.place.stamp("zarr.json")
        if stamp != self.stamp:
            root = self.place.read("zarr.json")
            new = {} if root is None else _object(root).get("attributes") or {}
            if root is None or not self.attrs.get(IDENTITY) or new.get(IDENTITY) != self.attrs[IDENTITY]:
                raise _OPENED.rejected(str(self.place), "it was removed or replaced since")
            self.stamp = stamp

    async def exists(self, key: str) -> bool:
        """Return whether there is a file at a key."""
        return await asyncio.to_thread(self.place.stamp, key) is not None

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names in a folder."""
        for name in await asyncio.to_thread(self.place.listed, prefix.strip("/")):
            yield name.rstrip("/")

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return the bytes at several keys."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    def list(self) -> AsyncIterator[str]:
        """Not needed: folders are listed one by one."""
        raise NotImplementedError

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Not needed: folders are listed one by one."""
        raise NotImplementedError

    async def set(self, key: str, value: Buffer) -> None:
        """Not possible."""
        raise NotImplementedError

    async def delete(self, key: str) -> None:
        """Not possible."""
        raise NotImplementedError


def opened_store(place: Path | FarPlace) -> WatchedStore | FarStore:
    """Return the store at a place."""
    return FarStore(place) if isinstance(place, FarPlace) else WatchedStore(place)


def _object(content: bytes) -> dict[str, Any]:
    found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError("it holds no object")
    return found


def _is_chunk(key: str) -> bool:
    return f"/{key}".rstrip("/0123456789").endswith("/c")


def guarded(run: xr.DataTree, kind: FileKind, path: Path | FarPlace) -> xr.DataTree:
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

    def __init__(self, inner: Any, kind: FileKind, path: Path | FarPlace) -> None:
        self.shape, self.dtype, self._inner, self._kind, self._path = inner.shape, inner.dtype, inner, kind, path

    def __getitem__(self, key: Any) -> Any:
        """Return the values at a key of xarray."""
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: tuple[Any, ...]) -> Any:
        with self._kind.reading(self._path):
            found = self._inner.oindex[indexing.OuterIndexer(key)]
            require_memory(found.size * self.dtype.itemsize)
            return found.get_duck_array()
