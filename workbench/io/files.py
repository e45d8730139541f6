"""Files that users give: reading them with one kind of error, and the folder of downloaded ones."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from workbench.errors import OptionError, StoreError, WorkbenchError

#: Most levels of nested lists and objects; deeper content ends the code that walks through it.
_MOST_LEVELS = 100
#: Errors of code that takes apart damaged content.
_OF_CONTENT = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, EOFError, MemoryError,
    UnpicklingError,
)  # fmt: skip


@dataclass(frozen=True)
class FileKind:
    """What a file is expected to be, and how to read it without waiting, without end, and without another error.

    ``what`` completes "is not", ``remedy`` says what to do, and ``name`` is the argument in the exception, by default
    the file.
    """

    what: str
    remedy: str
    error: type[WorkbenchError] = StoreError
    name: str = "path"
    most_bytes: int = 1 << 28

    def check(self, path: str | os.PathLike[str]) -> Path:
        """Return the path of a regular file that this user may read; a pipe or device is never opened."""
        path = as_path(path, self.name or "path")
        with self.reading(path):
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                what = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
                raise ValueError(f"it is {what}, not a file")
            if status.st_size > self.most_bytes:
                raise ValueError(f"it has {status.st_size} bytes, and such files have at most {self.most_bytes}")
            path.open("rb").close()
        return path

    def text(self, path: str | os.PathLike[str]) -> str:
        """Return the text of a file in UTF-8."""
        path = self.check(path)
        with self.reading(path):
            return path.read_bytes().decode("utf-8-sig")

    def json(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the object in a JSON file."""
        return self._mapping(path, "JSON", json.loads)

    def toml(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Return the tables of a TOML file."""
        return self._mapping(path, "TOML", tomllib.loads)

    def _mapping(self, path: str | os.PathLike[str], syntax: str, parse: Any) -> dict[str, Any]:
        text = self.text(path)
        with self.reading(path):
            try:
                content = parse(text)
            except ValueError as error:
                raise ValueError(f"it is not valid {syntax}: {error}") from error
            if not isinstance(content, dict):
                raise ValueError(f"it holds {_WORDS.get(type(content), 'a number')} instead of an object")
            level: list[Any] = [content]
            for _ in range(_MOST_LEVELS):
                inner = [each.values() if isinstance(each, dict) else each for each in level]
                level = [value for values in inner for value in values if isinstance(value, dict | list)]
                if not level:
                    return content
            raise RecursionError

    @contextmanager
    def reading(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Convert the errors of code that reads a file, or takes its content apart, to the one of this kind."""
        try:
            yield
        except WorkbenchError:
            raise
        except _OF_CONTENT as error:
            raise self.rejected(path, reason_of(error)) from error

    def rejected(self, path: str | os.PathLike[str], reason: str) -> WorkbenchError:
        """Return the exception for a file."""
        message = f"{os.fspath(path)} is not {self.what} ({reason}); {self.remedy}."
        return self.error(message, name=self.name or Path(path).name, value=path, expected=self.what)


_WORDS = {list: "a list", str: "a text", type(None): "nothing", bool: "true or false"}


def reason_of(error: BaseException) -> str:
    """Return the reason of an error as a short clause."""
    if isinstance(error, RecursionError):
        return f"it is nested more than {_MOST_LEVELS} levels deep"
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, PermissionError):
        return "this user may not read it"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = (f"it lacks {text}" if isinstance(error, KeyError) else text).strip().partition("\n")[0].rstrip(".")
    return text[:200] or type(error).__name__


def as_path(path: Any, name: str = "path") -> Path:
    """Return an argument as a path."""
    if not isinstance(path, str | os.PathLike) or not isinstance(text := os.fspath(path), str) or "\0" in text:
        raise OptionError.of(name, path, "a path")
    return Path(path)


def cache_folder() -> Path:
    """Return the folder of downloaded checkpoints: $WORKBENCH_CACHE, or a folder in the cache of the user."""
    if "WORKBENCH_CACHE" in os.environ:
        return Path(os.environ["WORKBENCH_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "stability-workbench"
