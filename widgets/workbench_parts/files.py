"""Files and folders as sources: what a path or name is, the sources in a folder, and whether a run is being written."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from workbench.errors import StoreError
from workbench.formatting import duration
from workbench.hardware.plan import SECTIONS
from workbench.io.files import FileKind
from workbench.io.training_logs import is_log
from workbench.models.state_files import STATE_SUFFIXES
from workbench.models.weight_folders import has_weights, is_adapter
from workbench.schema.statuses import RunState
from workbench.widgets.timeline_parts.followed_run import SILENT_AFTER
from workbench.widgets.workbench_parts.calls import LibraryCall
from workbench.widgets.workbench_parts.sources import FOLDER, OPENED, Kind, Source, shipped

#: Limits of a search, so that it takes a fraction of a second in any folder.
_DEEPEST, _MOST_ENTRIES, _SECONDS, _MOST_FOUND = 4, 5000, 0.5, 200
#: Folders that are never searched.
_SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages", "build", "dist"})
_CHECKPOINT_FILES = (*STATE_SUFFIXES, ".gguf")
_PLAN = FileKind("a plan", "choose another file", most_bytes=100_000)
_METADATA = FileKind("the metadata of a store", "choose another store")


class FoundSources(NamedTuple):
    """The sources in a folder."""

    sources: tuple[Source, ...]
    is_complete: bool


def search(folder: Path) -> FoundSources:
    """Return the runs, logs, sweeps, checkpoints and plans in a folder, to a limited depth and for a limited time.

    Hidden folders and those of installed packages are skipped, and so is what is inside a store or a checkpoint.
    """
    end, n_left = time.monotonic() + _SECONDS, _MOST_ENTRIES
    places, found, is_complete = [(folder, 0)], [], True
    while places:
        place, depth = places.pop(0)
        try:
            with os.scandir(place) as entries:
                paths = sorted((Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries)
        except OSError:  # not readable, or removed meanwhile
            continue
        n_left -= len(paths)
        for path, is_folder in paths:
            if time.monotonic() > end:  # logs are recognized by their first lines
                break
            if path.name.startswith((".", "_")) or path.name in _SKIPPED:
                continue
            if (kind := quick_kind(path, is_folder=is_folder)) is not None:
                found.append(source_at(path, kind, FOLDER, base=folder))
            elif is_folder and depth < _DEEPEST and not (path / "pyvenv.cfg").exists():
                places.append((path, depth + 1))
            elif is_folder:
                is_complete &= depth < _DEEPEST
        if len(found) >= _MOST_FOUND or n_left < 0 or time.monotonic() > end:
            return FoundSources(tuple(found[:_MOST_FOUND]), is_complete and not places)
    return FoundSources(tuple(found), is_complete)


def quick_kind(path: Path, *, is_folder: bool) -> Kind | None:
    """Return the kind of a path, from its name and small files in it; None if it is no source."""
    try:
        if is_folder:
            if (path / "zarr.json").is_file():
                attributes = _attributes(path)
                known = {
                    "sweep": Kind.SWEEP,
                    "assessment": Kind.REPORT,
                    "diagnosis": Kind.REPORT,
                    "comparison": Kind.REPORT,
                }
                return known.get(str(attributes.get("kind")), Kind.RUN if "schema_version" in attributes else None)
            if is_adapter(path) or ((path / "config.json").is_file() and has_weights(path)):
                return Kind.CHECKPOINT
            return Kind.LOG if is_log(path) else None
        if path.suffix == ".nc":
            return Kind.RUN
        if path.suffix == ".toml":
            return Kind.PLAN if _is_plan(path) else None
        if path.suffix == ".gguf":
            return Kind.CHECKPOINT
        return Kind.LOG if is_log(path) else None
    except OSError:
        return None


def source_at(path: Path, kind: Kind, group: str, *, base: Path) -> Source:
    """Return the source of a path; it is named after its place below a folder."""
    name = path.relative_to(base).as_posix() if path.is_relative_to(base) else path.name
    for ending in (".zarr", ".nc"):
        name = name.removesuffix(ending) or name
    shown = _as_text(path)
    variable = path.name.partition(".")[0]
    value: Any
    if kind in (Kind.RUN, Kind.REPORT):
        value = LibraryCall("wb.open_run", (shown,), variable=variable, topic=name)
    elif kind == Kind.LOG:
        value = LibraryCall("wb.read_log", (shown,), variable=variable, topic=name)
    elif kind == Kind.SWEEP:
        value = LibraryCall("wb.open_sweep", (shown,), variable=variable, topic=name)
    elif kind == Kind.CHECKPOINT:
        value = LibraryCall("wb.open_checkpoint", (shown,), variable=variable, topic=name)
    else:
        value = shown
    return Source(name, kind, group, value, f"{kind}: {shown}", path, mark_of(path, kind))


def mark_of(path: Path, kind: Kind) -> str:
    """Return "live" for a run that is being written, and how long it has been silent if it is no longer; else ""."""
    if kind != Kind.RUN or not path.is_dir():
        return ""
    try:
        if _attributes(path).get("state") != RunState.RUNNING:
            return ""
        silent = time.time() - (path / "zarr.json").stat().st_mtime
    except OSError:
        return ""
    return "live" if silent < SILENT_AFTER else f"silent for {duration(silent)}"


def source_of(text: str, folder: Path) -> Source:
    """Return the source of a path or name: a file or folder, the name of a shipped source, or a name on the hub."""
    text = text.strip()
    if not text:
        raise StoreError("The field is empty; enter a path or a name.")
    if (named := next((source for source in shipped() if source.name == text), None)) is not None:
        return named
    given = Path(text).expanduser()
    path = next((place for place in (given, folder / given) if place.exists()), None)
    if path is None:
        if given.suffix or given.is_absolute() or text.startswith((".", "~")):
            raise StoreError(f"There is no file or folder {text}; check the path.")
        call = LibraryCall("wb.open_checkpoint", (text,), variable=given.name, topic=text)
        return Source(text, Kind.CHECKPOINT, OPENED, call, f"checkpoint of the hub: {text}")
    kind = quick_kind(path, is_folder=path.is_dir())
    if kind is None and (path.suffix in _CHECKPOINT_FILES or (path.is_dir() and any(path.glob("checkpoint-*")))):
        kind = Kind.CHECKPOINT
    if kind is None and (path.name == "config.json" or (path / "config.json").is_file()):
        kind = Kind.PUBLISHED  # a configuration without parameters
    if kind is None:
        raise StoreError(
            f"{text} is neither a run, a log, a sweep, a checkpoint, a design nor a plan; choose one of these."
        )
    return source_at(path, kind, OPENED, base=folder)


def _as_text(path: Path) -> str:
    """Return a path relative to the current folder if it is below it."""
    path, here = path.absolute(), Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else str(path)


def _attributes(store: Path) -> dict[str, Any]:
    """Return the attributes of a Zarr store; empty if they cannot be read."""
    try:
        return dict(_METADATA.json(store / "zarr.json").get("attributes", {}))
    except (StoreError, TypeError, ValueError):  # replaced at this moment, or damaged
        return {}


def _is_plan(path: Path) -> bool:
    try:
        sections = _PLAN.toml(path)
    except StoreError:
        return False
    return "training" in sections and set(sections) <= {"training", "task", *SECTIONS}
