"""The state of runs in a few facts, which a run keeps in an index beside its store, and the list of many runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import StoreError
from workbench.io.far_places import FarPlace, Stamp, place_of
from workbench.io.files import FileKind
from workbench.io.run_lock import has_writer
from workbench.io.stages import stages_at, state_of
from workbench.schema.events import Event
from workbench.schema.statuses import RunState

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from workbench.io.watched_store import FarStore, WatchedStore

#: Folder of the index, beside the runs: one file for each, named after its store.
INDEX = ".index"
#: In an index far away: the file with all entries; what it leaves out at most; seconds within which an entry may change
#: unseen; and files read at once.
ALL, _MANY, _CLOSE, _N_AT_ONCE = ".all.json", 20, 2.0, 8
#: Seconds without a sign of life after which a writer far away may be gone.
_GONE = 60.0
_RUN = FileKind("an undamaged run", "check the path, or write it again with wb.save()", most_bytes=1 << 40)
#: Events that say what an alarm is about.
_ALARMS = ("alarm", "attribution")
_Reader = Callable[[str, str], np.ndarray | None]


def status_of(run: str | os.PathLike[str] | xr.DataTree) -> dict[str, Any]:
    """Return the facts of a run as values of JSON, from its entry in the index if that is of its last block.

    Returns:
        ``path``, ``name``, ``subject``; ``state``, one of `RunState`; ``step``, ``loss`` and ``learning_rate`` of the
        last row; ``started``, ``last_written`` and, for a run that is copied, ``last_heard``, the last sign of life of
        its writer, ISO 8601 in UTC by the clock there; ``n_alarms``; ``first_alarm`` with ``step``,
        ``source``, ``message``, ``layer`` and ``head``; ``cause`` with ``name``, ``score`` and ``message``, as
        attributed to the first alarm; ``contracts_failed``, their names; ``cost``, the share of the training time that
        watching takes. None is what is not known.

    Raises:
        StoreError: If there is no run at the path, or it is damaged.
    """
    if not isinstance(run, str | os.PathLike):
        about = {"path": "", "name": "", "last_written": None, "last_heard": None}
        return about | _facts(run.attrs, _reader_of_tree(run))
    place = place_of(run)
    if stages := stages_at(place):
        from workbench.io.store import open_run

        tree, each = open_run(run), [status_of(getattr(stage, "url", stage)) for stage in stages]
        times = ("last_written", "last_heard")
        latest = {name: max((one[name] for one in each if one[name]), default=None) for name in times}
        return {"path": str(place), "name": _stem(place.name), **latest, **_facts(tree.attrs, _reader_of_tree(tree))}
    if isinstance(place, FarPlace):
        return _told(place, _far_entry(place, _object(place.beside(INDEX, f"{place.name}.json").read())))
    if not (place / "zarr.json").exists():
        from workbench.io.store import open_run_or_log

        tree = open_run_or_log(place)  # which raises the error, if there is no run
        return _told(place, _facts(tree.attrs, _reader_of_tree(tree)) | {"written": place.stat().st_mtime})
    return _told(place, _entry_of(place) or _read(place))


def metrics_of(run: str | os.PathLike[str], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps of a run and a metric at each, NaN where it is unknown; empty if it was not recorded."""
    place = place_of(run)
    if not stages_at(place) and (isinstance(place, FarPlace) or (place / "zarr.json").exists()):
        from workbench.io.watched_store import opened_store

        with _RUN.reading(place):
            read = _reader_of_store(opened_store(place), rows=slice(None))
            step, values = read("monitors", "step"), read("monitors", name)
    else:
        from workbench.io.store import open_run_or_log

        read = _reader_of_tree(open_run_or_log(run))
        step, values = read("monitors", "step"), read("monitors", name)
    if step is None or values is None:
        return np.zeros(0, np.int64), np.zeros(0)
    return step, np.asarray(values, dtype=np.float64)


def last_change(run: str | os.PathLike[str]) -> object:
    """Return what changes with each block of a run and each alarm; None if the run was removed."""
    place = place_of(run)
    with contextlib.suppress(StoreError):
        if stages := stages_at(place):
            return [last_change(getattr(stage, "url", stage)) for stage in stages]
    if isinstance(place, FarPlace):
        stamp = place.stamp("zarr.json")
        return None if stamp is None else (stamp, place.beside(INDEX, f"{place.name}.json").stamp())
    with contextlib.suppress(OSError):
        if not (place / "zarr.json").exists():
            return (place.stat().st_mtime_ns, place.stat().st_size)
        entry = entry_path(place)
        return stamp_of(place), entry.stat().st_mtime_ns if entry.exists() else 0
    return None


def list_runs(folder: str | os.PathLike[str]) -> pd.DataFrame:
    """List the runs in a folder, each with its state, first alarm and cause.

    The facts are read from the index, which runs keep beside their stores as they write. A missing entry, or one that
    is older than its store, is read from the store.

    Args:
        folder: Folder of stores, or its URL for fsspec, such as ``"s3://bucket/runs"``.

    Returns:
        One row for each run, indexed by its name and sorted by the last change, the latest first, with the columns
        ``state``, ``step``, ``loss``, ``learning_rate``, ``started``, ``last_written``, ``first_alarm`` (its step),
        ``alarm`` (its signal), ``cause``, ``n_alarms``, ``contracts_failed``, ``cost`` (share of the training time) and
        ``path``. A store that cannot be read has the state "unreadable".

    Raises:
        StoreError: If there is no such folder.

    Example:
        >>> import workbench as wb
        >>> run = wb.open_run(wb.samples.failed_run("precision"))
        >>> path = wb.save(run, "many/mine.zarr")
        >>> wb.list_runs("many")["state"].to_dict()
        {'mine': 'diverged'}

    See Also:
        `workbench.open_run`: Opens one of the runs.
        `workbench.diagnose`: Finds the causes of a failed run.
    """
    import pandas as pd

    place = place_of(folder, "folder")
    rows = _of_stages(_rows_far(place) if isinstance(place, FarPlace) else _rows_here(place))
    rows.sort(key=lambda row: (row.get("last_written") or "", row["name"]), reverse=True)
    return pd.DataFrame([_row(row) for row in rows], columns=["name", *_COLUMNS]).set_index("name").astype(_COLUMNS)


_COLUMNS = {
    "state": "str", "step": "Int64", "loss": "float64", "learning_rate": "float64", "started": "str",
    "last_written": "str", "first_alarm": "Int64", "alarm": "str", "cause": "str", "n_alarms": "Int64",
    "contracts_failed": "str", "cost": "float64", "path": "str",
}  # fmt: skip


def _of_stages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of runs, those of the stages of a pipeline as one, with the loss of the last stage."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (len(row["name"]), row["name"])):
        stem, _, index = row["name"].rpartition(".stage")
        runs.setdefault(stem if index.isdecimal() and stem else row["name"], []).append(row)
    found = []
    for name, stages in runs.items():
        if len(stages) == 1 or any(row["name"] == name for row in stages):
            found += stages
            continue
        first = min(stages, key=lambda row: (row.get("first_alarm") or {"step": math.inf})["step"])
        found.append(
            stages[-1]
            | {"name": name, "path": stages[0]["path"].replace(".stage0", "")}
            | {"state": state_of([row["state"] for row in stages])}
            | {"first_alarm": first.get("first_alarm"), "cause": first.get("cause")}
            | {"n_alarms": sum(row.get("n_alarms") or 0 for row in stages)}
        )
    return found


def _row(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return a status as a row of a table."""
    alarm, cause = status.get("first_alarm") or {}, status.get("cause") or {}
    flat = {
        "first_alarm": alarm.get("step"), "alarm": alarm.get("source", ""), "cause": cause.get("name", ""),
        "contracts_failed": ", ".join(status.get("contracts_failed") or ()),
    }  # fmt: skip
    return {name: "" if kind == "str" else None for name, kind in _COLUMNS.items()} | {
        name: value for name, value in (dict(status) | flat).items() if value is not None
    }


def first_alarm_and_cause(events: Iterable[Event]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the first alarm among events, and the cause attributed to it, each None if there is none."""
    found = [event for event in events if event.kind in _ALARMS]
    first = min((event for event in found if event.kind == "alarm"), key=lambda event: event.step, default=None)
    if first is None:
        return None, None
    causes = [event for event in found if event.kind == "attribution"]
    # An attribution is recorded when it changes; without one at the alarm, the previous one is still valid.
    known = [event for event in causes if event.step <= first.step][-1:] or causes[:1]
    alarm = {name: getattr(first, name) for name in ("step", "source", "message", "layer", "head")}
    return alarm, {
        "name": known[0].source.replace("_", " "), "score": _number(known[0].score), "message": known[0].message
    } if known else None  # fmt: skip


def facts(attrs: Mapping[Any, Any], last: Mapping[str, Any], events: Iterable[Event], n_alarms: int) -> dict[str, Any]:
    """Return the facts of a run from its attributes, its last row with its step, and its events."""
    alarm, cause = first_alarm_and_cause(events)
    try:
        checks = json.loads(attrs.get("contracts", "{}")).get("checks", [])
    except (ValueError, AttributeError):
        checks = []
    return {
        "subject": str(attrs.get("subject", "")),
        "state": str(attrs.get("state", "")),
        "step": None if last.get("step") is None else int(last["step"]),
        "loss": _number(last.get("loss")),
        "learning_rate": _number(last.get("learning_rate")),
        "started": attrs.get("created"),
        "n_alarms": n_alarms,
        "first_alarm": alarm,
        "cause": cause,
        "contracts_failed": [str(check.get("id")) for check in checks if check.get("status") == "failed"],
        "cost": _number(attrs.get("watching_share")),
    }


def _facts(attrs: Mapping[Any, Any], read: _Reader) -> dict[str, Any]:
    """Return the facts of a run whose columns a function reads."""
    names = ("step", "kind", "source", "score", "message", "layer", "head")
    columns = {name: column.tolist() for name in names if (column := read("events", name)) is not None}
    rows = [row for row, kind in enumerate(columns.get("kind", ())) if kind in (*_ALARMS, "divergence")]
    events = [Event(**{name: column[row] for name, column in columns.items()}) for row in rows]
    last = {}
    for name in ("step", "loss", "learning_rate"):
        column = read("monitors", name)
        last[name] = None if column is None or not len(column) else column[-1]
    found = facts(attrs, last, events, sum(event.kind == "alarm" for event in events))
    if any(event.kind == "divergence" for event in events) and found["state"] != RunState.RUNNING:
        found["state"] = str(RunState.DIVERGED)
    return found


def _reader_of_tree(run: xr.DataTree) -> _Reader:
    def read(part: str, name: str) -> np.ndarray | None:
        node = run.children.get(part)
        return None if node is None or name not in node.variables else np.asarray(node[name].values)

    return read


def _reader_of_store(store: WatchedStore | FarStore, *, rows: slice = slice(-1, None)) -> _Reader:
    """Return a function that reads one column of a store, of the monitors the given rows."""
    import zarr

    members = (store.metadata.get("consolidated_metadata") or {}).get("metadata")
    group = zarr.open_group(store, mode="r", use_consolidated=members is not None)

    def read(part: str, name: str) -> np.ndarray | None:
        key = f"{part}/{name}"
        if key not in (members if members is not None else group):
            return None
        array: Any = group[key]
        return np.asarray(array[rows] if part == "monitors" and array.shape[0] else array[...])

    return read


def _rows_here(folder: Path) -> list[dict[str, Any]]:
    """Return the status of each run in a folder."""
    try:
        stores = [Path(each.path) for each in os.scandir(folder) if os.path.exists(f"{each.path}/zarr.json")]
    except OSError as error:
        raise StoreError(f"{folder} cannot be listed ({error.strerror}); pass a folder that contains runs.") from error
    rows = []
    for store in stores:
        try:
            rows.append(status_of(store))
        except StoreError:
            rows.append({"path": str(store), "name": store.stem, "state": "unreadable"})
    return rows


def _rows_far(folder: FarPlace) -> list[dict[str, Any]]:
    """Return the status of each run in a folder far away, from as few files as possible."""
    entries = far_entries(folder)

    def row(name: str) -> dict[str, Any] | None:
        place, entry = folder.within(name), entries.get(f"{name}.json")
        try:
            if entry is None and place.stamp("zarr.json") is None:
                return None  # another folder
            return _told(place, _far_entry(place, entry))
        except StoreError:
            return {"path": str(place), "name": _stem(name), "state": "unreadable"}

    rows: list[dict[str, Any] | None] = []
    unsure = []
    names = [name[:-1] for name in folder.listed() if name.endswith("/") and not name.startswith(".")]
    if not names and not entries:
        raise StoreError(f"{folder} cannot be listed (it is empty, or missing); pass a folder that contains runs.")
    for name in names:
        entry = entries.get(f"{name}.json")
        # What a writer leaves behind that was cut off may be older than its store.
        if entry is not None and (entry["state"] != RunState.RUNNING or is_alive(entry)):
            rows.append(_told(folder.within(name), entry))
        else:
            unsure.append(name)
    with ThreadPoolExecutor(_N_AT_ONCE) as pool:
        rows += pool.map(row, unsure)
    return [each for each in rows if each is not None]


def far_entries(folder: FarPlace) -> dict[str, dict[str, Any] | None]:
    """Return the entries of the index of a folder far away by their names; None is one that cannot be used.

    Most come from one file with all entries, which writers renew now and then; those that have changed since then, or
    within its last seconds, are read one by one.
    """
    stamps = folder.listed(INDEX)
    known = _object(folder.read(f"{INDEX}/{ALL}")) if ALL in stamps else {}
    at = stamps.pop(ALL, Stamp("", None)).seconds or 0.0
    found: dict[str, dict[str, Any] | None] = {}
    for name, stamp in stamps.items():
        one = known.get(name)
        is_old = stamp.seconds is not None and stamp.seconds < at - _CLOSE
        if isinstance(one, dict) and is_old and one.get("at") == stamp.text and one["entry"].keys() >= _IN_ENTRY:
            found[name] = one["entry"]
    changed = [name for name in stamps if name.endswith(".json") and name not in found]
    with ThreadPoolExecutor(_N_AT_ONCE) as pool:
        for name, content in zip(changed, pool.map(lambda name: folder.read(f"{INDEX}/{name}"), changed), strict=True):
            entry = _object(content)
            found[name] = entry if entry.keys() >= _IN_ENTRY else None
    if len(changed) > _MANY:
        found[ALL] = {name: {"at": stamps[name].text, "entry": entry} for name, entry in found.items()}
    return found


def _far_entry(place: FarPlace, entry: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entry of a store far away if it is of its last block; else what its store says."""
    from workbench.io.watched_store import FarStore

    store = FarStore(place)
    if entry and entry.keys() >= _IN_ENTRY and entry["digest"] == digest_of(store.root):
        return dict(entry)
    with _RUN.reading(place):
        found = _facts(store.attrs, _reader_of_store(store))
    return found | {"written": None if store.stamp is None else store.stamp.seconds}


def _read(path: Path) -> dict[str, Any]:
    """Make the entry of a store again from its content."""
    from workbench.io.watched_store import WatchedStore

    with _RUN.reading(path):
        stamp, root = stamp_of(path), (path / "zarr.json").read_bytes()
        store = WatchedStore(path)
        found = _facts(store.metadata.get("attributes") or {}, _reader_of_store(store))
    found |= {"stamp": stamp, "digest": digest_of(root), "written": stamp[0] / 1e9}
    write_entry(path, found)
    return found


def _told(place: Path | FarPlace, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status of a run from its entry, with what changes without being written."""
    found = {name: value for name, value in entry.items() if name not in ("stamp", "digest", "written", "copier")}
    if found["state"] == RunState.RUNNING and isinstance(place, Path) and has_writer(place) is False:
        found["state"] = str(RunState.UNCLOSED)
    about = {"path": str(place), "name": _stem(place.name), "last_written": _time(entry["written"])}
    return about | {"last_heard": _time(entry.get("copier", {}).get("heard"))} | found


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def is_alive(entry: Mapping[str, Any]) -> bool:
    """Return whether the process that copies a run has given a sign of life in the last minute."""
    heard = (entry.get("copier") or {}).get("heard", 0.0)
    return entry.get("state") == RunState.RUNNING and abs(time.time() - heard) < _GONE


def _stem(name: str) -> str:
    return name.removesuffix(".zarr")


def stamp_of(path: Path) -> list[int]:
    """Return what changes with each commit to a store here."""
    at = (path / "zarr.json").stat()
    return [at.st_mtime_ns, at.st_ino, at.st_size]


def digest_of(root: bytes | None) -> str:
    """Return what identifies the last commit to a store anywhere: a digest of its consolidated metadata."""
    return hashlib.blake2b(root or b"", digest_size=8).hexdigest()


class RunEntry:
    """The entry of a run that is being written; a resumed run continues with the facts of its store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        known = status_of(path)
        self._n_alarms, self._events = known["n_alarms"], list[Event]()
        self._last = {name: known[name] for name in ("step", "loss", "learning_rate")}
        if (alarm := known["first_alarm"]) is not None:
            self._events.append(Event(kind="alarm", **alarm))
            if (cause := known["cause"]) is not None:
                score = math.nan if cause["score"] is None else cause["score"]
                self._events.append(Event(alarm["step"], "attribution", cause["name"], score, cause["message"]))

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        """Take the metrics of an update."""
        self._last = {"step": step, **{name: values.get(name) for name in ("loss", "learning_rate")}}

    def event(self, event: Event) -> bool:
        """Take an event, and return whether the entry changes with it."""
        if event.kind not in _ALARMS:
            return False
        self._n_alarms += event.kind == "alarm"
        is_later = event.kind == "alarm" and any(known.kind == "alarm" for known in self._events)
        self._events += [] if is_later else [event]
        return True

    def write(self, attrs: Mapping[str, Any], root: bytes) -> None:
        """Replace the entry, for the attributes and the metadata of the last commit."""
        found = facts(attrs, self._last, self._events, self._n_alarms)
        with contextlib.suppress(OSError):  # the store was removed
            found |= {"stamp": stamp_of(self.path), "digest": digest_of(root), "written": time.time()}
            write_entry(self.path, found)


def write_entry(path: Path, entry: Mapping[str, Any]) -> None:
    """Replace the entry of a run in one step; where that is not possible, its facts are read from its store."""
    place = entry_path(path)
    new = place.with_name(f".{place.name}.{os.getpid()}.partial")
    try:
        place.parent.mkdir(exist_ok=True)
        new.write_text(json.dumps(entry, allow_nan=False))
        new.replace(place)
    except (OSError, ValueError):
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def entry_path(path: Path) -> Path:
    """Return the path of the entry of a store in the index."""
    return path.parent / INDEX / f"{path.name}.json"


def _entry_of(path: Path) -> dict[str, Any] | None:
    """Return the entry of a store here; None if there is none, or it is of an earlier block."""
    with contextlib.suppress(OSError):
        entry = _object(entry_path(path).read_bytes())
        return entry if entry.keys() >= _IN_ENTRY and entry["stamp"] == stamp_of(path) else None
    return None


def _object(content: bytes | None) -> dict[str, Any]:
    """Return the object of a JSON file; empty if it is damaged."""
    try:
        found = json.loads(content or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _number(value: Any) -> float | None:
    try:
        return float(value) if math.isfinite(value) else None
    except TypeError:
        return None


#: What an entry holds at least; those of other versions are made again.
_IN_ENTRY = facts({}, {}, (), 0).keys() | {"stamp", "digest", "written"}
