"""Sources of the workbench: sample data, designs, and files, each with the call that opens it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from workbench import zoo
from workbench.scaling.known_designs import KNOWN
from workbench.studies import samples
from workbench.widgets.workbench_parts.calls import Derived, LibraryCall, quoted

if TYPE_CHECKING:
    from pathlib import Path


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
    """A row of the list.

    Attributes:
        name: Its unique name.
        kind: Its kind.
        group: Title of its group in the list.
        value: The call that opens it; a name or a path if it is passed to functions as text.
        tip: What it is, and the code or path.
        path: Path of a file or folder; None for samples.
        mark: Remark beside the name, such as "live"; empty for none.
    """

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
    found = [
        Source(
            name,
            Kind.CHECKPOINT,
            SAMPLES,
            LibraryCall("wb.samples.load", (name,), variable=name, topic=name),
            "sample model",
        )
        for name in samples.names()
    ]
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
