"""Write files and folders atomically, and replace on request what the workbench wrote, and nothing else."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import re
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.errors import StoreError
from workbench.io.files import FileKind, as_path
from workbench.io.run_lock import RunLock, has_writer
from workbench.option_checks import checked

#: What identifies files of the workbench: a mark in pictures and pages, and attributes of its data.
_MARK, _ATTRIBUTES = b"Stability Workbench", (b"schema_version", b"sweep_version")
#: Names of the pictures of a report.
_PICTURE = re.compile(r"\d\d+-[a-z0-9-]*\.(png|svg)")
_JSON = FileKind("a file that write_json wrote", "choose another path")


@checked
def check_free(path: str | os.PathLike[str], *, overwrite: bool, keys: Any = None) -> None:
    """Raise if a path exists and must not be overwritten."""
    path = as_path(path)
    parent = next((each for each in path.absolute().parents if os.path.exists(each)), Path("/"))
    if not os.access(parent, os.W_OK):
        raise _not_writable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    if not os.path.lexists(path):
        return
    try:
        is_own = overwrite and (_is_own(path) if keys is None else _JSON.json(path).keys() == set(keys))
    except (OSError, StoreError):
        is_own = False
    if not is_own:
        advice = (
            "was not written by the workbench alone, so overwrite=True does not replace it; choose another path"
            if overwrite
            else "exists already; pass overwrite=True to replace it, or choose another path"
        )
        raise StoreError(f"{path} {advice}.")
    if path.is_dir() and has_writer(path):
        RunLock(path).release()  # raises the error, unless the writer has just ended


def write_json(content: Any, path: Path | str, *, overwrite: bool = False) -> Path:
    """Write a JSON file and return its path."""
    check_free(path, overwrite=overwrite, keys=content)
    with replacing(Path(path)) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n")
    return Path(path)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``path``, to which a file or folder is written.

    It is moved to ``path`` if the block ends without an error, and removed otherwise; an existing file or folder at
    ``path`` is kept until then, and replaced in one step. Its permissions are kept, and a link is followed.
    """
    place = as_path(path)
    try:
        place = Path(os.path.realpath(place))
        place.parent.mkdir(parents=True, exist_ok=True)
        workplace = Path(tempfile.mkdtemp(prefix=f".{place.name[:50]}.", dir=place.parent))
    except OSError as error:
        raise _not_writable(path, error) from error
    new, is_written = workplace / place.name, False
    try:
        yield new
        if new.is_file():
            _mark(new)
        has_folder = place.exists() and (place.is_dir() or new.is_dir())  # which a rename does not replace
        if place.exists() and place.is_dir() == new.is_dir():
            new.chmod(stat.S_IMODE(place.stat().st_mode))
        if not has_folder or not _exchange(new, place):
            if has_folder:
                place.rename(workplace / "replaced")
            try:
                new.replace(place)
            except OSError:
                if (workplace / "replaced").exists():
                    (workplace / "replaced").rename(place)
                raise
        is_written = True
    except (OSError, StoreError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__  # of a file within the temporary folder
        if not isinstance(cause, OSError):
            raise
        raise _not_writable(path, cause) from error
    finally:
        # After an error, threads of the writer may still create files and folders.
        for wait in (0.0,) if is_written else (0.0, 0.05, 0.2):
            time.sleep(wait)
            shutil.rmtree(workplace, ignore_errors=True)


def _exchange(new: Path, old: Path) -> bool:
    """Exchange two paths in one step, safe against kills; return False where the file system cannot."""
    names, libc = (os.fsencode(new), os.fsencode(old)), ctypes.CDLL(None)
    if hasattr(libc, "renameat2"):  # of Linux; the numbers are AT_FDCWD and RENAME_EXCHANGE
        return libc.renameat2(-100, names[0], -100, names[1], 2) == 0
    return hasattr(libc, "renamex_np") and libc.renamex_np(*names, 2) == 0  # of macOS


def _mark(file: Path) -> None:
    """Mark a picture or page as written by the workbench, where no reader sees it."""
    kind, mark = file.suffix.lower(), _MARK.decode()
    if kind in (".html", ".md", ".svg", ".pdf"):
        with file.open("a", encoding="utf-8") as end:
            end.write(f"\n%{mark}\n" if kind == ".pdf" else f"\n<!-- {mark} -->\n")
    elif kind == ".png":
        content = file.read_bytes()
        chunk = b"tEXtSoftware\0" + _MARK  # before the last chunk, which has 12 bytes
        parts = content[:-12], (len(chunk) - 4).to_bytes(4, "big"), chunk, zlib.crc32(chunk).to_bytes(4, "big")
        file.write_bytes(b"".join([*parts, content[-12:]]))


def _is_own(path: Path) -> bool:
    """Return whether the workbench wrote a file or all entries of a folder."""
    if not path.is_dir():
        if not path.is_file() or not path.stat().st_size:
            return path.is_file()
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return any(content.find(mark) >= 0 for mark in (_MARK, *_ATTRIBUTES))
    inner = [each for each in path.iterdir() if each.name != "zarr.json"]
    if not (path / "zarr.json").is_file():
        return all(_PICTURE.fullmatch(each.name) for each in inner)
    metadata = (path / "zarr.json").read_bytes()
    are_parts = all((each / "zarr.json").is_file() or not any(each.iterdir()) for each in inner)
    return are_parts and any(name in metadata for name in _ATTRIBUTES)


def _not_writable(path: Path, error: OSError) -> StoreError:
    """Create the error for a path that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(
            f"The disk is full, so {path} was not written and its previous content is unchanged; free some space."
        )
    return StoreError(f"{path} cannot be written ({error.strerror or error}); check its folder.")
