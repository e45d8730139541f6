"""Files on other machines and in buckets, by the URLs of fsspec; a slow or broken link ends in one kind of error."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from workbench.errors import StoreError
from workbench.io.files import FileKind, as_path, reason_of

#: Waits before the attempts of one operation, and the limit of each attempt; in seconds.
_WAITS, _LIMIT = (0.0, 0.3, 1.0, 3.0), 15.0
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
#: File systems over ssh, and those where a reader never sees a part of a file.
_SSH, _AT_ONCE = ("ssh", "sftp"), ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory")


class UnreachableError(StoreError):
    """A place on another machine cannot be reached, which says nothing about what is there."""


_FAR = FileKind("a place that can be reached", "check the URL, and the access of this machine to it", UnreachableError)


def is_url(path: Any) -> bool:
    """Return whether an argument is a URL rather than a path of this machine."""
    return isinstance(path, str) and _URL.match(path) is not None and not path.lower().startswith("file://")


def place_of(path: Any, name: str = "path") -> Path | FarPlace:
    """Return the place of a path or URL; ``file://`` URLs are paths."""
    if is_url(path):
        return FarPlace(path)
    if isinstance(path, str) and path.lower().startswith("file://"):
        path = path[len("file://") :]
    return as_path(path, name)


class Stamp(NamedTuple):
    """What changes whenever a file is written, and when it was by the clock of its machine; None if unknown."""

    text: str
    seconds: float | None


class FarPlace:
    """File or folder that fsspec reaches. Its settings are those of fsspec and of the file system's own library.

    Errors of the link are retried a few times, with waits between; the last is raised as a `StoreError`.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.name = self.url.rpartition("/")[2]
        self._link = _Link(url)

    def __str__(self) -> str:
        return re.sub(r"//([^/@:]*):[^/@]*@", r"//\1@", self.url)  # without a password

    __fspath__ = __str__  # for messages

    def __reduce__(self) -> Any:
        return FarPlace, (self.url,)

    def beside(self, *names: str) -> FarPlace:
        """Return a place in the same folder."""
        return self._at("/".join([self.url.rpartition("/")[0], *names]))

    def within(self, *names: str) -> FarPlace:
        """Return a place in this folder."""
        return self._at("/".join([self.url, *names]))

    def _at(self, url: str) -> FarPlace:
        found = FarPlace(url)
        found._link = self._link  # the same connections
        return found

    def read(self, key: str = "") -> bytes | None:
        """Return the content of a file; None if there is none."""
        return self._try(lambda fs, path: _content(fs, path), key)

    def stamp(self, key: str = "") -> Stamp | None:
        """Return what changes whenever a file is written; None if there is no file."""
        found = self._try(lambda fs, path: _call(fs, "info", path, limit=_LIMIT), key)
        return None if found is None else _stamp(found)

    def listed(self, key: str = "") -> dict[str, Stamp]:
        """Return name -> stamp of the entries of a folder, empty if there is none; names of folders end in a slash."""

        def found(fs: Any, path: str) -> list[tuple[str, dict[str, Any]]]:
            fs.invalidate_cache()
            entries = _call(fs, "ls", path, detail=True, limit=4 * _LIMIT)
            return [(each["name"].rstrip("/").removeprefix(f"{path}/"), each) for each in entries]

        return {
            name + "/" * (each["type"] == "directory"): _stamp(each)
            for name, each in self._try(found, key) or ()
            if "/" not in name  # the folder itself, of which buckets may have a marker
        }

    def write(self, content: bytes, key: str = "") -> None:
        """Replace a file in one step."""

        def put(fs: Any, path: str) -> bool:
            if _protocol(fs) in _AT_ONCE:
                _call(fs, "pipe_file", path, content, limit=4 * _LIMIT)
                return True
            with contextlib.suppress(FileExistsError):
                fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            new = f"{path}.{os.getpid()}.partial"
            fs.pipe_file(new, content)
            fs.mv(new, path)
            return True

        if not self._try(put, key):
            raise _FAR.rejected(str(self), "its folder was removed")

    def remove(self, key: str = "", *, is_folder: bool = False) -> None:
        """Remove a file or a folder, if it is there."""
        self._try(lambda fs, path: _call(fs, "rm", path, recursive=is_folder, limit=4 * _LIMIT), key)

    def _try(self, act: Callable[[Any, str], Any], key: str) -> Any:
        """Return the result of an operation; None if there is no such file."""
        error: Exception | None = None
        for wait in _WAITS:
            time.sleep(wait)
            try:
                fs = self._link.connected()
                path = fs._strip_protocol(f"{self.url}/{key}" if key else self.url)
                # Over ssh, /~/ is the home folder, where connections begin.
                return act(fs, path.removeprefix("/~/") if hasattr(fs, "ftp") else path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except (ImportError, PermissionError, _RefusedError) as refused:
                error = refused
                break
            except Exception as trouble:  # noqa: BLE001  (each file system has errors of its own)
                error = trouble
                self._link.forget()
        assert error is not None
        missing = "; pip install 'stability-workbench[remote]'" if isinstance(error, ImportError) else ""
        raise _FAR.rejected(str(self), reason_of(error) + missing) from error


class _Link:
    """Connection to the file system of a URL: one, or over ssh one for each thread."""

    def __init__(self, url: str) -> None:
        self._url, self._own = url, threading.local()
        self._shared: Any = None
        self._lock = threading.Lock()

    def connected(self) -> Any:
        """Return the file system."""
        if (found := self._shared or getattr(self._own, "fs", None)) is None:
            with self._lock:
                found = self._shared or _connect(self._url)
            if found.async_impl:
                self._shared = found
            else:
                self._own.fs = found
        return found

    def forget(self) -> None:
        """Drop a connection that may be broken."""
        fs, self._own.fs = getattr(self._own, "fs", None), None
        client = getattr(fs, "client", None)
        if client is not None:
            with contextlib.suppress(Exception):
                client.close()


class _RefusedError(Exception):
    """Error that trying again does not change."""


def _call(fs: Any, name: str, *args: Any, limit: float, **options: Any) -> Any:
    """Call a method of a file system, where possible with a limit of its time."""
    if not fs.async_impl:
        return getattr(fs, name)(*args, **options)
    from fsspec.asyn import sync

    return sync(fs.loop, getattr(fs, f"_{name}"), *args, timeout=limit, **options)


def _content(fs: Any, path: str) -> bytes:
    """Return the content of a file."""
    if not hasattr(fs, "ftp"):
        return _call(fs, "cat_file", path, limit=_LIMIT)
    with fs.ftp.open(path, "rb") as file:
        file.prefetch()  # all blocks are requested at once, not one after the other
        return file.read()


def _connect(url: str) -> Any:
    """Return the file system of a URL."""
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    protocol = url.partition(":")[0].lower()
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        # Attempts are repeated here, where they have a limit; one request for a file is enough.
        of_client = {"connect_timeout": 5, "read_timeout": _LIMIT, "retries": {"max_attempts": 1}}
        options |= {"max_concurrency": 1, "config_kwargs": of_client}
    elif protocol in _SSH:
        url, options = _of_ssh(url)
    try:
        fs, _ = url_to_fs(url, skip_instance_cache=True, **(options | conf.get(protocol, {})))
    except ValueError as error:  # no such protocol
        raise _RefusedError(error) from error
    if protocol in _SSH:
        fs.ftp.get_channel().settimeout(_LIMIT)
    return fs


def _of_ssh(url: str) -> tuple[str, dict[str, Any]]:
    """Return URL and options of a connection over ssh, with the aliases and keys of the user's own configuration."""
    import paramiko

    class KnownHosts(paramiko.MissingHostKeyPolicy):
        def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
            known = paramiko.HostKeys()
            with contextlib.suppress(OSError):
                known.load(os.path.expanduser("~/.ssh/known_hosts"))
            if not known.check(hostname, key):
                raise _RefusedError(f"the key of {hostname} is not in ~/.ssh/known_hosts; connect once with ssh")

    match = re.fullmatch(r"(\w+)://(?:([^/@]*)@)?([^/:]+)(?::(\d+))?(.*)", url)
    if match is None:
        raise _RefusedError("a URL over ssh is ssh://user@host:port/path")
    protocol, user, host, port, path = match.groups()
    config: Any = paramiko.SSHConfig()
    with contextlib.suppress(OSError):
        config = paramiko.SSHConfig.from_path(os.path.expanduser("~/.ssh/config"))
    own = config.lookup(host)
    host, port, user = own["hostname"], port or own.get("port", "22"), user or own.get("user")
    options: dict[str, Any] = dict.fromkeys(("timeout", "banner_timeout", "auth_timeout"), _LIMIT)
    options["host_key_policy"] = KnownHosts()
    if "identityfile" in own:
        options["key_filename"] = own["identityfile"]
    jump = own.get("proxyjump")
    if command := own.get("proxycommand") or (f"ssh -W {host}:{port} {jump}" if jump else None):
        options["sock"] = paramiko.ProxyCommand(command)
    return f"{protocol}://{f'{user}@' if user else ''}{host}:{port}{path}", options


def _stamp(info: dict[str, Any]) -> Stamp:
    at: Any = next((info[name] for name in ("mtime", "LastModified", "updated", "created") if info.get(name)), None)
    at = datetime.fromisoformat(at.replace("Z", "+00:00")) if isinstance(at, str) else at
    seconds = at.timestamp() if isinstance(at, datetime) else at
    return Stamp(f"{info.get('ETag', '')} {seconds} {info.get('size', '')}", seconds)


def _protocol(fs: Any) -> str:
    return fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
