"""Sources of the workbench: samples, designs, files and folders, each with the call that opens it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from workbench import zoo
from workbench.errors import StoreError
from workbench.formatting import duration
from workbench.hardware.plan import SECTIONS
from workbench.io.files import FileKind
from workbench.io.training_logs import is_log
from workbench.models.state_files import STATE_SUFFIXES
from workbench.models.weight_folders import has_weights, is_adapter
from workbench.scaling.known_designs import KNOWN
from workbench.schema.statuses import RunState
from workbench.studies import samples
from workbench.widgets.timeline_parts.followed_run import SILENT_AFTER
from workbench.widgets.workbench_parts.calls import Derived, LibraryCall, quoted


class Kind(StrEnum):
    """Kind of a source."""

    CHECKPOINT = "checkpoint"
    DESIGN = "design"
    PUBLISHED = "published design"
    RUN = "run"
    LOG = "log"
    SWEEP = "sweep"
    REPORT = "report"
    PLAN = "plan"


@dataclass(frozen=True)
class Source:
    """A row of the list: a unique name in a group, and the call that opens it, or text that is passed to functions."""

    name: str
    kind: Kind
    group: str
    value: LibraryCall | Derived | str
    tip: str = ""
    path: Path | None = None
    mark: str = ""


#: Titles of the groups, in the order of the list.
SAMPLES, OPENED, FOLDER, DESIGNS = "Samples", "Opened", "Folder", "Designs"
RECORDED, DIVERGED, FAILED = "Recorded runs", "Diverged runs", "Failed runs"
SWEEPS, PUBLISHED = "Sweeps and reports", "Published designs"
GROUPS = (OPENED, SAMPLES, FOLDER, DESIGNS, RECORDED, DIVERGED, FAILED, SWEEPS, PUBLISHED)
#: Groups that are closed at first, because they are long or rarely needed.
CLOSED = (DIVERGED, FAILED, SWEEPS, PUBLISHED)

#: Name -> options of small designs.
_SMALL: dict[str, dict[str, Any]] = {
    "Pre-LN design": {"norm": "pre_ln"},
    "Post-LN design": {"norm": "post_ln"},
    "RMSNorm design": {"norm": "rms_norm"},
    "No-Norm design": {"norm": "none"},
    "MoE design": {"family": "moe"},
    "Mamba design": {"family": "mamba"},
}
_SIZE = {"d_model": 64, "n_layers": 4}
_SETS = {"training set": "fit", "test set": "locked"}
_FAILED = ("architecture", "hyperparameter", "precision")


@cache
def shipped() -> tuple[Source, ...]:
    """Return all sources that ship with the workbench; no file is opened."""
    found = []
    for name in samples.names():
        call = LibraryCall("wb.samples.load", (name,), variable=name, topic=name)
        found.append(Source(name, Kind.CHECKPOINT, SAMPLES, call, "sample model"))
    for name, options in _SMALL.items():
        call = LibraryCall("wb.zoo.ArchitectureConfig", options=tuple((options | _SIZE).items()), variable="design")
        found.append(Source(name, Kind.DESIGN, DESIGNS, call, "small design of wb.zoo, width 64, 4 blocks"))
    for group, kind, mark in ((RECORDED, "healthy", ""), (DIVERGED, "diverged", ", diverged")):
        opened = LibraryCall(
            "wb.samples.recorded_runs",
            () if kind == "healthy" else (kind,),
            variable="recorded" if kind == "healthy" else "diverged",
            topic="recorded runs",
        )
        found += [Source(name + mark, Kind.RUN, group, _item(opened, name), f"recorded run, {kind}") for name in RUNS]
    for name in _FAILED:
        path = LibraryCall("wb.samples.failed_run", (name,))
        run = LibraryCall("wb.open_run", (path,), variable=name, topic=name)
        found.append(Source(f"failed: {name}", Kind.RUN, FAILED, run, "failed run; its cause is known"))
    for title, name in _SETS.items():
        study = LibraryCall("wb.samples.open", ("rate_study", name), variable="study", topic="rate study")
        found.append(
            Source(f"rate study, {title}", Kind.SWEEP, SWEEPS, study, "losses at learning rates around the best")
        )
    kss = LibraryCall("wb.samples.open", ("kss_rates",), variable="study", topic="rates with KSS")
    found.append(Source("rates with KSS", Kind.SWEEP, SWEEPS, kss, "losses at learning rates, with and without KSS"))
    reports = LibraryCall("wb.samples.open", ("assessments",), variable="assessed", topic="assessments")
    found.append(Source("four published designs", Kind.REPORT, SWEEPS, reports, "recorded assessments, side by side"))
    found += [
        Source(name, Kind.PUBLISHED, PUBLISHED, name, "published design, built from its configuration")
        for name in KNOWN
    ]
    return tuple(found)


#: Names of the recorded runs, in the order of `workbench.samples.recorded_runs`, which takes seconds to open them.
RUNS = (
    "Pre-LN", "Post-LN", "RMSNorm", "DeepNorm", "DeepNorm, DeepNet's", "SubLN", "No-Norm", "Fixup", "ReZero",
    "Parallel", "MoE top-1", "MoE top-2", "MoE top-4", "Mamba", "KAN B=4", "KAN B=8", "ViT Pre-LN", "ViT RMSNorm",
)  # fmt: skip


def _item(opened: LibraryCall, name: str) -> Derived:
    """Return one of the runs of a call, by name."""
    return Derived(opened, f"[{quoted(name)}]", lambda runs: runs[name], variable=name)


def subject_or_model(source: Source) -> LibraryCall | Derived | str:
    """Return the model of a checkpoint or of a small design, as `workbench.profile` takes it."""
    if source.kind == Kind.DESIGN:
        return LibraryCall("wb.zoo.build", (source.value,), variable="model", topic=source.name)
    return source.value


def is_of_zoo(model: Any) -> bool:
    """Return whether a model is built from a configuration of the zoo."""
    return isinstance(model, zoo.ZooModel)


#: Limits of a search, so that it takes a fraction of a second in any folder.
_DEEPEST, _MOST_ENTRIES, _SECONDS, _MOST_FOUND = 4, 5000, 0.5, 200
#: Folders that are never searched.
_SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages", "build", "dist"})
_CHECKPOINT_FILES = (*STATE_SUFFIXES, ".gguf")
_PLAN = FileKind("a plan", "choose another file", most_bytes=100_000)
_METADATA = FileKind("the metadata of a store", "choose another store")


#: Kind of a file or folder -> function that opens it; the others are passed as a path.
_OPENED_BY = {
    Kind.RUN: "wb.open_run",
    Kind.REPORT: "wb.open_run",
    Kind.LOG: "wb.read_log",
    Kind.SWEEP: "wb.open_sweep",
    Kind.CHECKPOINT: "wb.open_checkpoint",
}


class FoundSources(NamedTuple):
    """The sources in a folder."""

    sources: tuple[Source, ...]
    is_complete: bool


def search(folder: Path) -> FoundSources:
    """Return the runs, logs, sweeps, checkpoints and plans in a folder, to a limited depth and for a limited time."""
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
                known = {"sweep": Kind.SWEEP} | dict.fromkeys(("assessment", "diagnosis", "comparison"), Kind.REPORT)
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
    whole, here = path.absolute(), Path.cwd()
    shown = whole.relative_to(here).as_posix() if whole.is_relative_to(here) else str(whole)
    value: LibraryCall | str = shown
    if kind in _OPENED_BY:
        value = LibraryCall(_OPENED_BY[kind], (shown,), variable=path.name.partition(".")[0], topic=name)
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
        raise StoreError(f"{text} is neither a run, a log, a sweep, a checkpoint, a design nor a plan; choose one.")
    return source_at(path, kind, OPENED, base=folder)


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
