"""The state of runs in a few facts, which a run keeps in an index beside its store, and the list of many runs."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import StoreError
from workbench.io.files import FileKind, as_path
from workbench.io.run_lock import has_writer
from workbench.io.watched_store import WatchedStore
from workbench.schema.events import Event
from workbench.schema.statuses import RunState

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

#: Folder of the index, beside the runs: one file for each, named after its store.
INDEX = ".index"
_RUN = FileKind("an undamaged run", "check the path, or write it again with wb.save()", most_bytes=1 << 40)
#: Events that say what an alarm is about.
_ALARMS = ("alarm", "attribution")
_Reader = Callable[[str, str], np.ndarray | None]


def status_of(run: str | os.PathLike[str] | xr.DataTree) -> dict[str, Any]:
    """Return the facts of a run as values of JSON, from its entry in the index if that is of its last block.

    Returns:
        ``path``, ``name``, ``subject``; ``state``, one of `RunState`; ``step``, ``loss`` and ``learning_rate`` of the
        last row; ``started`` and ``last_written``, ISO 8601 in UTC; ``n_alarms``; ``first_alarm`` with ``step``,
        ``source``, ``message``, ``layer`` and ``head``; ``cause`` with ``name``, ``score`` and ``message``, as
        attributed to the first alarm; ``contracts_failed``, their names; ``cost``, the share of the training time that
        watching takes. None is what is not known.

    Raises:
        StoreError: If there is no run at the path, or it is damaged.
    """
    if not isinstance(run, str | os.PathLike):
        return _facts(run.attrs, _reader_of_tree(run)) | {"path": "", "name": "", "last_written": None}
    path = as_path(run)
    if not (path / "zarr.json").exists():
        from workbench.io.store import open_run_or_log

        tree = open_run_or_log(path)  # which raises the error, if there is no run
        about = {"path": str(path), "name": path.stem, "last_written": _time(path.stat().st_mtime)}
        return _facts(tree.attrs, _reader_of_tree(tree)) | about
    found = _entry_of(path)
    if found is None:
        found = _read(path)
        write_entry(path, found)
    return _told(path, found)


def list_runs(folder: str | os.PathLike[str]) -> pd.DataFrame:
    """List the runs in a folder, each with its state, first alarm and cause.

    The facts are read from the index, which runs keep beside their stores as they write. A missing entry, or one that
    is older than its store, is read from the store.

    Args:
        folder: Folder of stores.

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

    folder = as_path(folder)
    try:
        stores = [
            Path(each.path) for each in os.scandir(folder) if os.path.exists(os.path.join(each.path, "zarr.json"))
        ]
    except OSError as error:
        raise StoreError(f"{folder} cannot be listed ({error.strerror}); pass a folder that contains runs.") from error
    rows = []
    for store in stores:
        try:
            rows.append(status_of(store))
        except StoreError:
            rows.append({"path": str(store), "name": store.stem, "state": "unreadable"})
    rows.sort(key=lambda row: (row.get("last_written") or "", row["name"]), reverse=True)
    return pd.DataFrame([_row(row) for row in rows], columns=["name", *_COLUMNS]).set_index("name").astype(_COLUMNS)


_COLUMNS = {
    "state": "str", "step": "Int64", "loss": "float64", "learning_rate": "float64", "started": "str",
    "last_written": "str", "first_alarm": "Int64", "alarm": "str", "cause": "str", "n_alarms": "Int64",
    "contracts_failed": "str", "cost": "float64", "path": "str",
}  # fmt: skip


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


def _reader_of_store(store: WatchedStore) -> _Reader:
    """Return a function that reads one column of a store, of the monitors the last row alone."""
    import zarr

    members = (store.metadata.get("consolidated_metadata") or {}).get("metadata")
    group = zarr.open_group(store, mode="r", use_consolidated=members is not None)

    def read(part: str, name: str) -> np.ndarray | None:
        key = f"{part}/{name}"
        if key not in (members if members is not None else group):
            return None
        array: Any = group[key]
        return np.asarray(array[-1:] if part == "monitors" and array.shape[0] else array[...])

    return read


def _read(path: Path) -> dict[str, Any]:
    """Return the entry of a run as read from its store."""
    with _RUN.reading(path):
        stamp = stamp_of(path)
        store = WatchedStore(path)
        found = _facts(store.metadata.get("attributes") or {}, _reader_of_store(store))
        return found | {"stamp": stamp}


def _told(path: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the status of a local run from its entry, with what changes without being written."""
    found = {name: value for name, value in entry.items() if name != "stamp"}
    if found["state"] == RunState.RUNNING and has_writer(path) is False:
        found["state"] = str(RunState.UNCLOSED)
    return {"path": str(path), "name": path.stem, "last_written": _time(entry["stamp"][0] / 1e9)} | found


def stamp_of(path: Path) -> list[int]:
    """Return what changes with each commit to a store."""
    at = (path / "zarr.json").stat()
    return [at.st_mtime_ns, at.st_ino, at.st_size]


def entry_path(path: Path) -> Path:
    """Return the path of the entry of a store in the index."""
    return path.parent / INDEX / f"{path.name}.json"


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


def _entry_of(path: Path) -> dict[str, Any] | None:
    """Return the entry of a store; None if there is none, or it is of an earlier block."""
    try:
        entry = json.loads(entry_path(path).read_bytes())
        return entry if entry["stamp"] == stamp_of(path) and entry.keys() >= _IN_ENTRY else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _number(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


#: What an entry holds at least; those of other versions are made again.
_IN_ENTRY = facts({}, {}, (), 0).keys()
