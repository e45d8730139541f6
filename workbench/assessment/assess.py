"""Assess an architecture and a plan before compute is committed: measurements, criteria, verdict and decisions."""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from workbench.assessment.compute_cost import flops_per_token, steps_in_budget
from workbench.assessment.decisions import decide
from workbench.assessment.failure_modes import judged
from workbench.assessment.failure_modes.size_ranges import Sizes
from workbench.assessment.measured_model import MeasuredModel, measured_model, planned_task, require_loss
from workbench.assessment.plan_changes import possible_changes, try_changes
from workbench.assessment.plan_trials import N_TRIALS, N_UPDATES, try_plan
from workbench.assessment.rate_pilot import BUDGET, rate_pilot
from workbench.assessment.standard_start import with_standard_start
from workbench.assessment.structure import measure_structure
from workbench.assessment.verdict import column_state, summary_of, verdict_of
from workbench.errors import AnatomyError
from workbench.hardware import AssessmentPlan, assess_hardware, read_plan
from workbench.io.progress import Progress
from workbench.io.provenance import versions
from workbench.koopman.spectra import RankWarning
from workbench.models.batches import take_rows
from workbench.models.losses import token_loss
from workbench.models.model_sizes import model_sizes
from workbench.models.profile import profile
from workbench.rates.find_rate import is_of_adam
from workbench.schema.runs import SCHEMA_VERSION
from workbench.schema.statuses import BAD_STATES
from workbench.tasks import as_task
from workbench.tasks.task import require_seed
from workbench.training.training_plan import DEFAULT_RATE, TrainingPlan

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from workbench.tasks import Task

#: Parts of every assessment, and the percentage of the time that each usually takes.
PARTS = {
    "structure": 5,
    "spectra": 2,
    "useful rates": 65,
    "the first updates, tried out": 22,
    "number formats and devices": 6,
}
#: Parts that follow where something is wrong, in the same units.
_FURTHER = {"changes to the plan": 40, "a standard initialization": 2}
#: Updates after which pilot and trials say how far they are.
_TOLD_EVERY = 20
#: Token states of the spectra, fresh models of a design whose structure is averaged, and their examples.
N_SNAPSHOTS, N_SEEDS, N_ROWS = 1024, 2, 8


def assess(
    subject: Any,
    task: Any = None,
    *,
    plan: Any = None,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    seed: int = 0,
    progress: bool | Callable[[str], None] = True,
) -> xr.DataTree:
    """Assess before training whether an architecture will train under a plan, why, and what to do.

    A model or an opened checkpoint is measured with its own parameters. A design is built with fresh ones: at full
    size, if it has at most four million, otherwise as a stand-in (64 wide, 256 tokens). Two things are asked. Its
    *structure*: numbers of fresh models that do not depend on the scale of the residual stream are compared with those
    of designs that are known to have trained (``data/README.md``); a stand-in has all blocks of the design then, and
    matrices with the variances of the full width (`workbench.scaling.width_matching`). And the *plan*: a pilot finds
    the useful rates, and trials at the planned rate show whether it diverges; a stand-in has at most four blocks then,
    its library's own initialization, and rates larger by the ratio of the widths, Adam's rule, with the rule's error.
    The subject is left unchanged.

    Nothing is concluded outside of what was measured: a band judges only sizes between those of the designs behind it.

    Args:
        subject: A module, an opened checkpoint, or any source that `workbench.design` takes.
        task: The task it will be trained on; see `workbench.tasks.as_task`. None: the plan's task, which by default is
            synthetic text that fits the model.
        plan: Path of a TOML file, its sections as a mapping, or from `workbench.hardware.read_plan`; None: AdamW at
            1e-3 for 1,000 updates, on one device in float32.
        loss: Function from logits and targets to a 0-dim tensor, as in `workbench.train`; of a model whose output is no
            tensor and has no ``logits``, from the whole output and targets. With another one than the default the
            numbers of predicted classes are not measured.
        seed: Seed of fresh parameters and of data.
        progress: Show what is measured and how far it is; or a function that gets each text, whose exceptions end it.

    Returns:
        DataTree of kind "assessment". Root attributes: ``verdict`` ("proceed", "cannot say", "at risk", "refuse"),
        ``exit_status`` (0, 4, 1, 2), ``structure_state`` and ``pilot_state`` ("healthy", "at risk", "failing", "not
        measured"), ``summary``, the plan as JSON, versions, and sizes: ``width`` and ``depth`` of the
        subject, ``measured_width`` and ``measured_depth`` of the model that was run, ``is_stand_in`` (0, 1).
        Nodes: ``structure``, ``pilot``, ``trials`` (where the rate can be carried over), ``hardware``, ``criteria``,
        ``failure_modes``, ``decisions``; where the residual stream can be read ``flow`` and ``spectra``; where trials
        diverged ``changes``; where the structure is flagged ``other_start``, the structure with a standard
        initialization.

    Raises:
        OptionError: If the plan has an unknown key or an impossible value, or does not fit the subject; if the model
            does not run on the task, or its output and the targets do not fit the loss.
        CheckpointError: If there is no such design.

    Example:
        >>> import workbench as wb
        >>> options = {"d_model": 8, "n_layers": 2, "n_heads": 1, "vocab_size": 16, "max_length": 8}
        >>> tree = wb.assess(options, plan={"training": {"n_steps": 10, "batch_size": 4}})
        >>> tree.attrs["verdict"], tree.attrs["exit_status"]  # nothing was measured of models so thin
        ('cannot say', 4)
    """
    require_seed(seed)
    plan = read_plan(plan)
    measured = measured_model(subject, seed=seed, width=plan.target.width, depth=plan.target.depth)
    plan.check_against(measured.design or measured.model)
    with Progress(progress, f"assessed {measured.name}", total=sum(PARTS.values()), unit="%") as bar:
        return assess_measured(measured, task, plan, loss, seed, bar)


def assess_measured(
    measured: MeasuredModel,
    task: Any,
    plan: AssessmentPlan,
    loss: Callable[[Tensor, Tensor], Tensor],
    seed: int,
    bar: Progress,
) -> xr.DataTree:
    """As `assess`, of a model that has been built, with a plan that fits it."""
    import xarray as xr

    start = time.monotonic()
    bench = _Bench.of(measured, task, plan, loss, seed)
    tree = xr.DataTree.from_dict(_measured(bench, bar))
    sizes = _sizes(measured, tree["flow"].sizes["layer"] if "flow" in tree else 0, plan)
    tree.attrs = {
        "kind": "assessment",
        "subject": measured.name,
        "plan": json.dumps(plan.as_dict(), default=str),
        "n_weights": measured.n_weights,
        **sizes.attributes,
        "has_own_weights": int(measured.is_own),
        "task": json.dumps(bench.task.describe(), default=str),
        "steps_in_budget": steps_in_budget(plan, flops_per_token(measured, plan)),
        "seed": seed,
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "schema_version": SCHEMA_VERSION,
    }
    conclude(tree, plan, try_changes=lambda tree: bench.changes(tree, bar), try_start=lambda: bench.other_start(bar))
    tree.attrs["duration"] = time.monotonic() - start
    return tree


def _sizes(measured: MeasuredModel, n_blocks: int, plan: AssessmentPlan) -> Sizes:
    """Sizes of the model that was run and of the subject; number of blocks as seen, where its design is not known."""
    width = measured.width or int(model_sizes(measured.model).width or 0)
    run = width, measured.depth or n_blocks
    target = (
        plan.target.width or measured.target_width or run[0],
        plan.target.depth or measured.target_depth or run[1],
    )
    n_run = sum(weight.numel() for weight in measured.model.parameters())
    experts = model_sizes(measured.design or measured.model).n_experts or 0
    # A design may be too large because of its vocabulary alone, which is smaller in a stand-in.
    is_stand_in = run != target or n_run < measured.n_weights
    return Sizes(*target, *run, experts, is_stand_in) if is_stand_in else Sizes(*run, *run, experts)


@dataclass(frozen=True)
class _Bench:
    """The model, task and plan of the measurements."""

    measured: MeasuredModel
    task: Task
    plan: AssessmentPlan
    training: TrainingPlan
    loss: Callable[[Tensor, Tensor], Tensor]
    seed: int

    @classmethod
    def of(
        cls, measured: MeasuredModel, task: Any, plan: AssessmentPlan, loss: Callable[[Tensor, Tensor], Tensor],
        seed: int,
    ) -> _Bench:  # fmt: skip
        if task is None:
            task = planned_task(measured.model, plan, seed=seed, loss=loss)
        else:
            require_loss(measured.model, task := as_task(task), loss)
        training = plan.training_plan()
        training = replace(training, learning_rate=training.learning_rate or DEFAULT_RATE)
        return cls(measured, task, plan, training, loss, seed)

    @property
    def settings(self) -> dict[str, Any]:
        """The training plan as keywords."""
        return {item.name: getattr(self.training, item.name) for item in fields(TrainingPlan)}

    @property
    def width_ratio(self) -> float:
        """Width of the planned model over that of the one that is run."""
        wanted = self.plan.target.width or self.measured.target_width
        return 1.0 if wanted is None or self.measured.width is None else wanted / self.measured.width

    @property
    def on_trial(self) -> TrainingPlan | None:
        """The plan as it is tried: at a rate that is larger for a thinner model; None: its rule is not known."""
        if self.width_ratio == 1:
            return self.training
        if not is_of_adam(self.training.optimizer):
            return None
        return replace(self.training, learning_rate=(self.training.learning_rate or DEFAULT_RATE) * self.width_ratio)

    def batches(self) -> list[tuple[Any, Any]]:
        """A few examples of each of the first two batches, with targets."""
        found = []
        for (inputs, targets), _ in zip(self.task.stream(0), range(2), strict=False):
            is_tensor = isinstance(inputs, torch.Tensor)
            rows = slice(0, N_ROWS)
            found.append((take_rows(inputs, rows), take_rows(targets, rows)) if is_tensor else (inputs, targets))
        return found

    def structure(self, *, standard: bool = False) -> tuple[xr.Dataset, xr.Dataset | None]:
        """The structure of fresh models, as they begin or with a standard initialization, and the flow of the first."""
        depth = self.plan.target.depth or self.measured.target_depth
        n_seeds = 1 if standard else N_SEEDS
        models = self.measured.siblings(n_seeds, depth)
        if standard:
            blocks = depth or model_sizes(self.measured.model).depth or 1
            models = (with_standard_start(model, blocks) for model in models)
        batches = self.batches()
        return measure_structure(
            models, batches[0], batches[-1][0], self.training, width_ratio=self.width_ratio, loss=self.loss
        )

    def other_start(self, bar: Progress) -> xr.Dataset:
        """The structure with a standard initialization."""
        _begin_further(bar, "a standard initialization")
        return self.structure(standard=True)[0]

    def changes(self, tree: xr.DataTree, bar: Progress) -> xr.Dataset:
        """Try single changes to the plan."""
        _begin_further(bar, "changes to the plan")
        tried = self.on_trial
        assert tried is not None  # because its trials diverged
        best = float(tree["pilot"].to_dataset()["best_rate"]) * self.width_ratio
        changes = possible_changes(tried, best)
        number = itertools.count()

        def say(change: str) -> None:
            bar.step(change, next(number) / len(changes))

        return try_changes(self.measured.model, self.task, changes, n_updates=N_UPDATES, loss=self.loss, say=say)


def _measured(bench: _Bench, bar: Progress) -> dict[str, xr.Dataset]:
    """All measurements, by their path in the tree."""
    measured, model, parts = bench.measured, bench.measured.model, {}
    depth = bench.plan.target.depth or measured.target_depth
    bar.begin("structure", PARTS["structure"])
    parts["/structure"], flow = bench.structure()
    if flow is not None:
        parts["/flow"] = flow
        bar.begin("spectra", PARTS["spectra"])
        # Where the flow can be read, other states may be passed on beside the stream, which have no spectra.
        with suppress(AnatomyError), warnings.catch_warnings():
            warnings.simplefilter("ignore", RankWarning)  # the rank is recorded
            parts["/spectra"] = profile(
                measured.fresh(depth=depth), bench.task.probe(N_SNAPSHOTS), n_snapshots=N_SNAPSHOTS, seed=bench.seed,
                progress=False,
            )  # fmt: skip
    bar.begin("useful rates", PARTS["useful rates"])
    parts["/pilot"] = rate_pilot(
        model, bench.task, bench.training, width_ratio=bench.width_ratio, loss=bench.loss,
        on_update=_told(bar, BUDGET),
    )  # fmt: skip
    if bench.on_trial is not None:
        bar.begin("the first updates, tried out", PARTS["the first updates, tried out"])
        after_update = _told(bar, N_TRIALS * N_UPDATES)
        parts["/trials"] = try_plan(model, bench.task, bench.on_trial, loss=bench.loss, on_update=after_update)
    bar.begin("number formats and devices", PARTS["number formats and devices"])
    parts["/hardware"] = assess_hardware(model, bench.task, bench.plan, seed=bench.seed, loss=bench.loss, say=bar.step)
    return parts


def _told(bar: Progress, n_updates: int) -> Callable[[], None]:
    """A function to call after each of so many updates, which tells the bar of some of them."""
    number = itertools.count(1)

    def after_update() -> None:
        if not (n := next(number)) % _TOLD_EVERY:
            bar.step(f"{n} of {n_updates} updates", n / n_updates)

    return after_update


def _begin_further(bar: Progress, part: str) -> None:
    """Begin a part that was not expected."""
    bar.total = (bar.total or 0) + _FURTHER[part]
    bar.begin(part, _FURTHER[part])


def conclude(
    tree: xr.DataTree,
    plan: AssessmentPlan,
    *,
    try_changes: Callable[[xr.DataTree], xr.Dataset] | None = None,
    try_start: Callable[[], xr.Dataset] | None = None,
) -> None:
    """Judge the measurements and decide what to do, in place; earlier conclusions are replaced.

    Args:
        tree: The measured parts, with the attributes ``subject`` and ``steps_in_budget`` and the sizes.
        plan: The assessed plan.
        try_changes: Called with the judged tree where a trial diverged; None: ``changes`` are left unchanged.
        try_start: Called where the structure is flagged: the structure with a standard initialization.

    Adds the nodes ``criteria``, ``failure_modes``, ``decisions`` and perhaps ``changes`` and ``other_start``, and the
    attributes
    ``verdict``, ``exit_status`` and ``summary``.
    """
    import xarray as xr

    criteria, modes = judged(tree)
    tree["criteria"], tree["failure_modes"] = xr.DataTree(criteria), xr.DataTree(modes)
    if try_changes is not None and "trials" in tree and float(tree["trials"]["share_broken"]) > 0:
        tree["changes"] = xr.DataTree(try_changes(tree))
    if try_start is not None and column_state(criteria, "structure") in BAD_STATES:
        tree["other_start"] = xr.DataTree(try_start())
    tree["decisions"] = xr.DataTree(decide(tree, plan, affordable=float(tree.attrs["steps_in_budget"])))
    verdict = verdict_of(criteria)
    tree.attrs["structure_state"], tree.attrs["pilot_state"] = (
        column_state(criteria, part).value for part in ("structure", "pilot")
    )
    tree.attrs["verdict"], tree.attrs["exit_status"] = verdict.value, verdict.exit_status
    pilot = tree["pilot"].to_dataset() if "pilot" in tree else None
    summary = summary_of(str(tree.attrs["subject"]), verdict, criteria, modes, Sizes.of(tree), pilot)
    rest = {name: value for name, value in tree.attrs.items() if name != "summary"}
    tree.attrs = {"summary": summary, **rest}  # the answer first, where a cell shows the tree
