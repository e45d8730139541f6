"""Write files and folders atomically, and replace existing ones only on request."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.errors import StoreError


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raise if a path exists and must not be overwritten.

    Raises:
        StoreError: If the path exists and ``overwrite`` is False.
    """
    if path.exists() and not overwrite:
        raise StoreError(
            f"{path} exists already; pass overwrite=True to replace it, or choose another path.",
            name="path",
            value=path,
            expected="a path that does not exist",
        )


def write_json(content: Any, path: Path | str, *, overwrite: bool = False) -> Path:
    """Write a JSON file and return its path.

    Raises:
        StoreError: If the path exists and ``overwrite`` is False, or cannot be written.
    """
    path = Path(path)
    check_free(path, overwrite=overwrite)
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n")
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``path``, to which a file or folder is written.

    It is moved to ``path`` if the block ends without an error, and removed otherwise; an existing file at ``path``
    is kept until then.

    Raises:
        StoreError: If the disk is full, or the path cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        workplace = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise _not_writable(path, error) from error
    is_written = False
    try:
        yield workplace / path.name
        old = workplace / "replaced"
        if path.is_dir():  # unlike a file, a folder cannot be replaced in one step
            path.rename(old)
        try:
            (workplace / path.name).replace(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        is_written = True
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"The disk is full, so {path} was not written and its previous content is unchanged; free some space.",
                name="path",
                value=path,
                expected="on a disk with enough space",
            ) from error
        raise _not_writable(path, error) from error
    finally:
        # After an error, threads of the writer may still create files and folders.
        for wait in (0.0,) if is_written else (0.0, 0.05, 0.2):
            time.sleep(wait)
            shutil.rmtree(workplace, ignore_errors=True)


def _not_writable(path: Path, error: OSError) -> StoreError:
    """Create the error for a path that cannot be written."""
    return StoreError(
        f"{path} cannot be written ({error.strerror or error}); check its folder.",
        name="path",
        value=path,
        expected="a path that can be written",
    )
