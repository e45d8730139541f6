"""Read a Zarr store that may be removed or replaced while its run is open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zarr.storage import LocalStore

from workbench.errors import StoreError

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype


class WatchedStore(LocalStore):
    """Read-only folder store that raises an error after it was removed or replaced.

    Zarr reads a missing chunk as the fill value, so a run that was removed while it was open would be read as zeros,
    and one that was replaced as a mixture of both.

    Args:
        root: Path of the store.
    """

    def __init__(self, root: Path | str, *, read_only: bool = True) -> None:
        super().__init__(root, read_only=read_only)
        self._folder = self.root.stat().st_ino

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return the bytes at a key, as `zarr.storage.LocalStore` does; None if there are none.

        Raises:
            StoreError: If the store no longer exists, or was replaced by another one.
        """
        found = await super().get(key, prototype, byte_range)
        # Checked after reading, because bytes that were read before the store was removed are valid.
        if not self._is_there() or (found is None and self._is_array_gone(key)):
            raise StoreError(
                f"The run at {self.root} was removed or replaced after it had been opened; open it again, or load() a "
                "run before its store is removed.",
                name="path",
                value=self.root,
                expected="the store that was opened",
            )
        return found

    def _is_there(self) -> bool:
        try:
            return self.root.stat().st_ino == self._folder
        except FileNotFoundError:
            return False

    def _is_array_gone(self, key: str) -> bool:
        """Return whether the array of a missing chunk is missing too; chunks of fill values are never written."""
        *array, last = key.rstrip("/0123456789").split("/")
        return last == "c" and not self.root.joinpath(*array, "zarr.json").exists()
