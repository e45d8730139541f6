"""Copy the store of a run to a URL while it is written.

A process of its own copies, so that nothing of the file systems' libraries runs in the training: neither their threads
nor their draws of random numbers. It outlives a killed training, and then copies the last rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workbench.errors import StoreError
from workbench.io.far_places import FarPlace, UnreachableError, place_of
from workbench.io.run_index import ALL, INDEX, entry_path, far_entries, is_alive
from workbench.io.run_lock import has_writer
from workbench.io.stages import stage_name
from workbench.schema.runs import IDENTITY
from workbench.schema.statuses import RunState

#: Seconds: to wait for the first answer, between two copies, between two signs of life, between two looks at the index,
#: for the last copy, and for that of a killed training.
_FIRST, _EVERY, _ALIVE, _INDEX, _LAST, _ORPHANED = 20.0, 5.0, 20.0, 60.0, 30.0, 120.0
_LONGEST_WAIT, _N_AT_ONCE = 30.0, 8
_SEVERAL = "pass resume=True to continue it, overwrite=True to replace it, or choose another URL"


class CopiedPath(type(Path())):  # type: ignore[misc]
    """Path of a store that is copied to a URL."""

    url = ""

    def __reduce__(self) -> Any:
        return store_path, (self.url,)


def store_path(store: str | os.PathLike[str]) -> Path:
    """Return the path of the store of a run; that of a URL is in ``runs/``, from where it is copied."""
    place = store if isinstance(store, Path) else place_of(store, "store")
    if isinstance(place, Path):
        return place
    digest = hashlib.blake2b(place.url.encode(), digest_size=4).hexdigest()
    path = CopiedPath("runs", f"{place.name.removesuffix('.zarr')}.{digest}.zarr")
    path.url = place.url
    return path


def stage_path(path: Path, index: int) -> Path:
    """Return the path of the store of one stage of a pipeline."""
    if isinstance(path, CopiedPath):
        return store_path(FarPlace(path.url).beside(stage_name(FarPlace(path.url).name, index)).url)
    return path.with_name(stage_name(path.name, index))


def bring(path: Path) -> None:
    """Copy the run at the URL of a path to the path, if there is one and the path does not exist."""
    if isinstance(path, CopiedPath) and not path.exists():
        with _started(path, task="bring") as process:
            answer, _ = process.communicate()
        said = _said(answer) or {"state": "", "why": f"the process that copies it ended with {process.returncode}"}
        if said["state"] != "ready":
            raise StoreError(f"The run at {FarPlace(path.url)} cannot be continued: {said['why']}.")


class RunCopy:
    """The copy of a store, made by another process; ``warn`` is called with a sentence when it begins to fail."""

    def __init__(self, path: CopiedPath, *, overwrite: bool, resume: bool) -> None:
        self.url, self.path, self.trouble = str(FarPlace(path.url)), path, ""
        self._process = _started(path, task="copy", overwrite=overwrite, resume=resume)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._said, end = b"", time.monotonic() + _FIRST
        while b"\n" not in self._said and (left := end - time.monotonic()) > 0 and self._process.poll() is None:
            select.select([self._process.stdout], [], [], min(left, 1.0))
            self.hear()
        self.trouble = ""  # the first block warns of it
        if (first := _said(self._said)) and first["state"] == "refused":
            self._process.kill()
            self._process.wait()
            raise StoreError(f"The run at {self.url} cannot be written: {first['why']}.")

    def hear(self) -> str:
        """Return a sentence to warn of if copying has begun to fail; else nothing."""
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._said += self._process.stdout.read() or b""
        said = _said(self._said) or {"state": "ready", "why": ""}
        had, self.trouble = self.trouble, said["why"] if said["state"] != "ready" else ""
        if self._process.poll() not in (None, 0) and not self.trouble:
            self.trouble = "the process that copies it has ended"
        if not self.trouble or had:
            return ""
        goes_on = "it is tried again" if said["state"] == "trouble" else "it is not tried again"
        return (
            f"The run is not copied to {self.url} ({self.trouble}). Training continues, the run is recorded in "
            f"{self.path}, and {goes_on}."
        )

    def close(self) -> str:
        """End the copy after the last commit; return a sentence if rows are missing in it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"end\n")
            self._process.stdin.close()
        try:
            self._process.wait(_LAST + 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.hear()
        if not self.trouble:
            return ""
        return f"The copy of the run at {self.url} lacks the last rows ({self.trouble}); all are in {self.path}."


def _started(path: CopiedPath, **job: Any) -> subprocess.Popen[bytes]:
    """Start the process that copies; its settings of file systems are those of this one, and go through a pipe."""
    from fsspec.config import conf

    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from workbench.io.run_copy import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    job |= {"path": os.path.abspath(path), "url": path.url, "parent": os.getpid()}
    assert process.stdin is not None
    process.stdin.write(json.dumps(job | {"conf": conf}, default=str).encode() + b"\n")
    process.stdin.flush()
    return process


def _said(text: bytes) -> dict[str, Any] | None:
    """Return the last complete message of the process that copies."""
    lines = text.rpartition(b"\n")[0].splitlines()
    return json.loads(lines[-1]) if lines else None


def main() -> None:
    """Copy in this process what the first line of its input names, until the input or its parent ends."""
    job = json.loads(sys.stdin.readline())
    from fsspec.config import conf

    conf.update(job["conf"])
    with contextlib.suppress(OSError):
        os.nice(5)
    copier = _Copier(Path(job["path"]), FarPlace(job["url"]), job["parent"])
    if job["task"] == "bring":
        copier.attempt(copier.bring)
    elif copier.attempt(lambda: copier.check(overwrite=job["overwrite"], resume=job["resume"])) != "refused":
        copier.work()


class _Copier:
    """What the process does that copies."""

    def __init__(self, path: Path, place: FarPlace, parent: int) -> None:
        self.path, self.place, self.parent = path, place, parent
        self.token = os.urandom(8).hex()
        self.replaces = False
        self._identity: Any = None
        self._writer: Any = None
        self._done: dict[str, tuple[int, int]] = {}
        self._root = self._entry = b""
        self._told_at = self._indexed_at = -float("inf")

    def attempt(self, act: Any) -> str:
        """Do something, say how it went, and return the state: ready, trouble (to be tried again) or refused."""
        try:
            act()
            state, why = "ready", ""
        except (UnreachableError, OSError) as error:
            state, why = "trouble", str(error).rstrip(".")
        except StoreError as error:
            state, why = "refused", str(error).rstrip(".")
        with contextlib.suppress(OSError):
            sys.stdout.write(json.dumps({"state": state, "why": why}) + "\n")
            sys.stdout.flush()
        return state

    def check(self, *, overwrite: bool, resume: bool) -> None:
        """Raise a StoreError if the place holds another run, or one that is being written."""
        self.replaces = overwrite
        self._check_writer()
        root = self.place.read("zarr.json")
        if root is not None and overwrite and b'"schema_version"' not in root:
            raise StoreError("the workbench did not write what is there, so overwrite=True does not replace it")
        if root is not None and not (overwrite or resume):
            raise StoreError(f"it exists already; {_SEVERAL}")

    def bring(self) -> None:
        """Copy the run to its path."""
        from workbench.io.atomic import replacing

        def copy(key: str, to: Path) -> None:
            for name in self.place.listed(key.rstrip("/")):
                if name.endswith("/"):
                    copy(f"{key}{name}", to / name)
                elif (content := self.place.read(f"{key}{name}")) is not None:
                    to.mkdir(parents=True, exist_ok=True)
                    (to / name).write_bytes(content)

        self._check_writer()
        if self.place.read("zarr.json") is not None:
            with replacing(self.path) as partial:
                copy("", partial)

    def work(self) -> None:
        """Copy each commit until the training ends."""
        wait, changed_at = _EVERY, -float("inf")
        state = "ready"
        while (ending := self._ending(min(wait, 0.5))) is None:
            now = time.monotonic()
            is_due = now >= changed_at + wait and (self._has_news() or now >= self._told_at + _ALIVE)
            if is_due or (state == "ready" and self._has_alarm()):
                changed_at, state = now, self.attempt(self.copy)
                if state == "refused":
                    return
                wait = _EVERY if state == "ready" else min(2 * wait, _LONGEST_WAIT)
        end = time.monotonic() + ending
        while self.attempt(lambda: self.copy(is_last=True)) == "trouble" and time.monotonic() < end:
            time.sleep(1.0)

    def copy(self, *, is_last: bool = False) -> None:
        """Copy what has changed, the root last, so that readers see complete commits alone; and the entry."""
        try:
            root = (self.path / "zarr.json").read_bytes()
        except FileNotFoundError:
            return  # the training has not begun, or the store was removed
        attrs = json.loads(root)["attributes"]
        self._writer = self._writer or attrs.get("writer")
        if attrs.get("writer") != self._writer:
            raise StoreError(f"{attrs.get('writer')} has continued the run")
        self._check_writer()
        if self._identity is None:
            self._take_place(attrs.get(IDENTITY))
        files = {
            str(file.relative_to(self.path)): (at.st_mtime_ns, at.st_size)
            for file in self.path.rglob("*")
            if not file.name.startswith(".") and ".partial" not in file.name and (at := file.stat()) and file.is_file()
        }
        files.pop("zarr.json", None)
        changed = [key for key, stamp in files.items() if self._done.get(key) != stamp]

        def put(key: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self.place.write((self.path / key).read_bytes(), key)
                self._done[key] = files[key]

        with ThreadPoolExecutor(_N_AT_ONCE) as pool:
            list(pool.map(put, changed))
        if root != self._root:
            self.place.write(root, "zarr.json")
            self._root = root
        for key in self._done.keys() - files.keys():  # dropped by a resumed run
            self.place.remove(key)
            del self._done[key]
        self._tell(is_last=is_last)

    def _tell(self, *, is_last: bool) -> None:
        """Replace the entry of the run in the index, with a sign of life; and now and then the file of all entries."""
        self._entry = entry_path(self.path).read_bytes() if entry_path(self.path).exists() else b"{}"
        entry = json.loads(self._entry)
        if is_last and entry.get("state") == RunState.RUNNING and has_writer(self.path) is False:
            entry["state"] = str(RunState.UNCLOSED)
        entry["copier"] = {"token": self.token, "heard": time.time(), "writer": self._writer}
        self.place.beside(INDEX, f"{self.place.name}.json").write(json.dumps(entry).encode())
        self._told_at = time.monotonic()
        if is_last or self._told_at >= self._indexed_at + _INDEX:
            self._indexed_at = self._told_at
            entries = far_entries(self.place.beside())
            if ALL in entries:
                self.place.beside(INDEX, ALL).write(json.dumps(entries[ALL]).encode())

    def _take_place(self, identity: Any) -> None:
        """Remove an earlier run that is to be replaced, its root first; raise if another run is there."""
        there = self.place.read("zarr.json")
        attrs = {} if there is None else json.loads(there).get("attributes") or {}
        if there is not None and attrs.get(IDENTITY) != identity:
            if not self.replaces:
                raise StoreError(f"another run is there; {_SEVERAL}")
            self.place.remove("zarr.json")
            self.place.remove(is_folder=True)
        self._identity = identity

    def _check_writer(self) -> None:
        """Raise if another process copies to the place."""
        content = self.place.beside(INDEX, f"{self.place.name}.json").read()
        entry = json.loads(content or b"{}")
        other = entry.get("copier") or {}
        if is_alive(entry) and other.get("token") != self.token:
            raise StoreError(f"it is being written by {other.get('writer')}; close that run, or choose another URL")

    def _has_news(self) -> bool:
        with contextlib.suppress(OSError):
            return (self.path / "zarr.json").read_bytes() != self._root
        return False

    def _has_alarm(self) -> bool:
        """Return whether the entry has changed without a commit, which an alarm does at once."""
        with contextlib.suppress(OSError):
            return entry_path(self.path).read_bytes() != self._entry and not self._has_news() and bool(self._root)
        return False

    def _ending(self, seconds: float) -> float | None:
        """Wait, and return the seconds for the last copy if the training has ended; else None."""
        readable, _, _ = select.select([sys.stdin], [], [], seconds)
        if readable:
            return _LAST if sys.stdin.readline().strip() == "end" else _ORPHANED
        return _ORPHANED if os.getppid() != self.parent else None
