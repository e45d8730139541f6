"""Write files and folders atomically, and never replace an existing one unless asked to."""

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
    """Refuse a path that is taken.

    Raises:
        StoreError: If there is something at the path and ``overwrite`` is False.
    """
    if path.exists() and not overwrite:
        raise StoreError(f"{path} exists already; pass overwrite=True to replace it, or choose another path.")


def write_json(content: Any, path: Path | str, *, overwrite: bool = False) -> Path:
    """Write a file of JSON.

    Raises:
        StoreError: If there is something at the path and ``overwrite`` is False, or it cannot be written.
    """
    path = Path(path)
    check_free(path, overwrite=overwrite)
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n")
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``path`` to write a file or folder to.

    It is moved to ``path`` when the block ends without an error, and removed otherwise; a file already at ``path``
    stays until then.

    Raises:
        StoreError: If the disk is full, or the place cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        workplace = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({error.strerror or error}); check its folder.") from error
    is_written = False
    try:
        yield workplace / path.name
        old = workplace / "replaced"
        if path.is_dir():  # a file is replaced in one step, a folder cannot be
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
                f"The disk is full, so {path} was not written and what was there is unchanged; free some space."
            ) from error
        raise StoreError(f"{path} cannot be written ({error.strerror or error}); check its folder.") from error
    finally:
        # After an error, threads of the writer may still finish what they began, folders included.
        for wait in (0.0,) if is_written else (0.0, 0.05, 0.2):
            time.sleep(wait)
            shutil.rmtree(workplace, ignore_errors=True)
