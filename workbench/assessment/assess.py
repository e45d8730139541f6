"""Assess an architecture and a training plan before training: measurements, criteria, verdict and decisions."""

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

from workbench.assessment.decisions import decide
from workbench.assessment.failure_modes import evaluate_criteria
from workbench.assessment.failure_modes.criterion import Sizes
from workbench.assessment.measured_model import (
    MeasuredModel,
    flops_per_token,
    measured_model,
    planned_task,
    require_loss,
    steps_in_budget,
)
from workbench.assessment.plan_trials import (
    BUDGET,
    N_TRIALS,
    N_UPDATES,
    possible_changes,
    rate_pilot,
    try_changes,
    try_plan,
)
from workbench.assessment.structure import measure_structure, with_standard_start
from workbench.assessment.verdict import column_state, summary_of, verdict_of
from workbench.errors import AnatomyError
from workbench.hardware import assess_hardware, read_plan
from workbench.hardware.plan_files import AssessmentPlan
from workbench.io.progress import Progress
from workbench.io.provenance import versions
from workbench.koopman.spectra import RankWarning
from workbench.models.batches import take_examples
from workbench.models.losses import token_loss
from workbench.models.model_sizes import model_sizes
from workbench.models.profile import profile
from workbench.option_checks import Seed, checked
from workbench.rates.find_rate import is_of_adam
from workbench.schema.runs import SCHEMA_VERSION
from workbench.schema.statuses import BAD_STATES
from workbench.tasks import as_task
from workbench.training.training_plan import DEFAULT_RATE, TrainingPlan

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from workbench.tasks import Task

#: Parts of every assessment, and the percentage of the total time that each usually takes.
PARTS = {
    "structure": 5,
    "spectra": 2,
    "useful rates": 65,
    "trials of the first updates": 22,
    "number formats and devices": 6,
}
#: Additional parts that run if a problem is found, as percentages of the same total.
_FURTHER = {"changes to the plan": 40, "a standard initialization": 2}
#: Updates between two progress messages of pilot and trials.
_PROGRESS_EVERY = 20
#: Number of token states for the spectra, number of freshly initialized models over which the structure is averaged,
#: and number of examples in the batches of these models.
N_SNAPSHOTS, N_SEEDS, N_EXAMPLES = 1024, 2, 8


@checked
def assess(
    subject: Any,
    task: Any = None,
    *,
    plan: Any = None,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    seed: Seed = 0,
    progress: bool | Callable[[str], None] = True,
) -> xr.DataTree:
    """Assess before training whether an architecture will train under a plan, why, and what to do.

    A model or an opened checkpoint is measured with its own parameters. A design is built with freshly initialized
    parameters: at full size if it has at most four million, otherwise as a proxy model of width 64 with a vocabulary of
    256 tokens. The subject is left unchanged. Two aspects are assessed:

    - The *structure*: measurements of freshly initialized models that do not depend on the scale of the residual stream
      are compared with those of designs that are known to have trained (``data/README.md``). Here a proxy model has all
      blocks of the design, and its matrices have the variances of the full width (`workbench.scaling.width_matching`).
    - The *plan*: a pilot finds the useful learning rates, and trials at the planned rate show whether it diverges. Here
      a proxy model has at most four blocks and the initialization of its library. Its rates are larger by the ratio of
      the widths (the rule for Adam), and the error of that rule widens their intervals.

    Nothing is concluded beyond what was measured: a healthy band is applied only to sizes between those of the designs
    that it was derived from.

    Args:
        subject: A module, an opened checkpoint, or any source that `workbench.design` takes.
        task: Task on which the subject will be trained; see `workbench.tasks.as_task`. None uses the plan's task, which
            by default is synthetic text that fits the model.
        plan: Path of a TOML file, its sections as a mapping, or a plan from `workbench.hardware.read_plan`. None means
            AdamW with a peak learning rate of 1e-3 for 1,000 updates, on one device in float32.
        loss: Function from logits and targets to a 0-dim tensor, as in `workbench.train`. If the output of the model is
            no tensor and has no ``logits``, the function receives the complete output. With a loss other than the
            default, the measurements of predicted classes are skipped.
        seed: Seed of freshly initialized parameters and of data.
        progress: Whether to show the progress, or a function that receives each progress message; an exception that
            this function raises ends the assessment.

    Returns:
        DataTree of kind "assessment". Root attributes: ``verdict`` ("proceed", "cannot say", "at risk", "refuse"),
        ``exit_status`` (0, 4, 1, 2), ``structure_state`` and ``pilot_state`` ("healthy", "at risk", "failing", "not
        measured"), ``summary``, the plan as JSON, versions, and sizes: ``width`` and ``depth`` of the subject,
        ``measured_width`` and ``measured_depth`` of the model that was run, and ``is_stand_in`` (1 if a proxy model was
        run, else 0). Nodes: ``structure``, ``pilot``, ``trials`` (if the rate can be transferred to the model that was
        run), ``hardware``, ``criteria``, ``failure_modes`` and ``decisions``; ``flow`` and ``spectra`` if the residual
        stream can be read; ``changes`` if trials diverged; ``other_start``, the structure with a standard
        initialization, if the structure is flagged.

    Raises:
        OptionError: If the plan has an unknown key or an impossible value, or does not fit the subject; if the model
            does not run on the task, or its output and the targets do not fit the loss.
        CheckpointError: If there is no such design.

    Example:
        >>> import workbench as wb
        >>> options = {"d_model": 8, "n_layers": 2, "n_heads": 1, "vocab_size": 16, "max_length": 8}
        >>> tree = wb.assess(options, plan={"training": {"n_steps": 10, "batch_size": 4}})
        >>> tree.attrs["verdict"], tree.attrs["exit_status"]  # no reference designs are as narrow as this one
        ('cannot say', 4)

    See Also:
        `workbench.compare_designs`: Assesses several designs under one plan.
        `workbench.report`: Writes an assessment as a report.
        `workbench.find_rate`: Finds the useful learning rates of a model at full size.
    """
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
    """Assess a model that has been built, with a plan that has been checked against it; see `assess`."""
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
    """Return the sizes of the subject and of the measured model.

    If the depth of the design is unknown, it is the number of observed blocks.
    """
    width = measured.width or int(model_sizes(measured.model).width or 0)
    run = width, measured.depth or n_blocks
    target = (
        plan.target.width or measured.target_width or run[0],
        plan.target.depth or measured.target_depth or run[1],
    )
    n_run = sum(weight.numel() for weight in measured.model.parameters())
    experts = model_sizes(measured.design or measured.model).n_experts or 0
    # A design may be too large because of its vocabulary alone, which is smaller in a proxy model.
    is_stand_in = run != target or n_run < measured.n_weights
    return Sizes(*target, *run, experts, is_stand_in) if is_stand_in else Sizes(*run, *run, experts)


@dataclass(frozen=True)
class _Bench:
    """Model, task and plan of the measurements."""

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
        """The training plan as keyword arguments."""
        return {item.name: getattr(self.training, item.name) for item in fields(TrainingPlan)}

    @property
    def width_ratio(self) -> float:
        """Width of the planned model over that of the model that is run."""
        target = self.plan.target.width or self.measured.target_width
        return 1.0 if target is None or self.measured.width is None else target / self.measured.width

    @property
    def on_trial(self) -> TrainingPlan | None:
        """The plan of the trials, with a larger rate for a narrower model; None if no rule for that rate is known."""
        if self.width_ratio == 1:
            return self.training
        if not is_of_adam(self.training.optimizer):
            return None
        return replace(self.training, learning_rate=(self.training.learning_rate or DEFAULT_RATE) * self.width_ratio)

    def batches(self) -> list[tuple[Any, Any]]:
        """Return a few examples of each of the first two batches, with targets."""
        found, examples = [], slice(0, N_EXAMPLES)
        for (inputs, targets), _ in zip(self.task.stream(0), range(2), strict=False):
            is_tensor = isinstance(inputs, torch.Tensor)
            batch = (
                (take_examples(inputs, examples), take_examples(targets, examples)) if is_tensor else (inputs, targets)
            )
            found.append(batch)
        return found

    def structure(self, *, standard: bool = False) -> tuple[xr.Dataset, xr.Dataset | None]:
        """Measure freshly initialized models, with their own or a standard initialization."""
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
        """Measure the structure with a standard initialization."""
        _begin_further(bar, "a standard initialization")
        return self.structure(standard=True)[0]

    def changes(self, tree: xr.DataTree, bar: Progress) -> xr.Dataset:
        """Try single changes to the plan in trials."""
        _begin_further(bar, "changes to the plan")
        tried = self.on_trial
        assert tried is not None  # because its trials diverged
        best = float(tree["pilot"].to_dataset()["best_rate"]) * self.width_ratio
        changes = possible_changes(tried, best)
        number = itertools.count()

        def report(change: str) -> None:
            bar.step(change, next(number) / len(changes))

        return try_changes(self.measured.model, self.task, changes, n_updates=N_UPDATES, loss=self.loss, report=report)


def _measured(bench: _Bench, bar: Progress) -> dict[str, xr.Dataset]:
    """Return all measurements by their path in the tree."""
    measured, model, parts = bench.measured, bench.measured.model, {}
    depth = bench.plan.target.depth or measured.target_depth
    bar.begin("structure", PARTS["structure"])
    parts["/structure"], flow = bench.structure()
    if flow is not None:
        parts["/flow"] = flow
        bar.begin("spectra", PARTS["spectra"])
        # The flow of some models can be read although their spectra cannot, because blocks exchange further states.
        with suppress(AnatomyError), warnings.catch_warnings():
            warnings.simplefilter("ignore", RankWarning)  # the rank is recorded
            parts["/spectra"] = profile(
                measured.fresh(depth=depth), bench.task.probe(N_SNAPSHOTS), n_snapshots=N_SNAPSHOTS, seed=bench.seed,
                progress=False,
            )  # fmt: skip
    bar.begin("useful rates", PARTS["useful rates"])
    parts["/pilot"] = rate_pilot(
        model, bench.task, bench.training, width_ratio=bench.width_ratio, loss=bench.loss,
        on_update=_progress_of(bar, BUDGET),
    )  # fmt: skip
    if bench.on_trial is not None:
        bar.begin("trials of the first updates", PARTS["trials of the first updates"])
        after_update = _progress_of(bar, N_TRIALS * N_UPDATES)
        parts["/trials"] = try_plan(model, bench.task, bench.on_trial, loss=bench.loss, on_update=after_update)
    bar.begin("number formats and devices", PARTS["number formats and devices"])
    parts["/hardware"] = assess_hardware(
        model, bench.task, bench.plan, seed=bench.seed, loss=bench.loss, on_hazard=bar.step
    )
    return parts


def _progress_of(bar: Progress, n_updates: int) -> Callable[[], None]:
    """Return a function to call after each of ``n_updates`` updates, which reports some of them to the progress bar."""
    number = itertools.count(1)

    def after_update() -> None:
        if not (n := next(number)) % _PROGRESS_EVERY:
            bar.step(f"{n} of {n_updates} updates", n / n_updates)

    return after_update


def _begin_further(bar: Progress, part: str) -> None:
    """Begin an additional part of the assessment."""
    bar.total = (bar.total or 0) + _FURTHER[part]
    bar.begin(part, _FURTHER[part])


def conclude(
    tree: xr.DataTree,
    plan: AssessmentPlan,
    *,
    try_changes: Callable[[xr.DataTree], xr.Dataset] | None = None,
    try_start: Callable[[], xr.Dataset] | None = None,
) -> None:
    """Evaluate the measurements and decide what to do, in place; earlier conclusions are replaced.

    Adds the nodes ``criteria``, ``failure_modes``, ``decisions`` and, where they apply, ``changes`` and
    ``other_start``, and the attributes ``verdict``, ``exit_status``, ``structure_state``, ``pilot_state`` and
    ``summary``.

    Args:
        tree: The measured parts, with the attributes ``subject`` and ``steps_in_budget`` and the sizes.
        plan: The assessed plan.
        try_changes: Function that is called with the evaluated tree if a trial diverged; None leaves ``changes``
            unchanged.
        try_start: Function that returns the structure with a standard initialization, called if the structure is
            flagged; None leaves ``other_start`` unchanged.
    """
    import xarray as xr

    criteria, modes = evaluate_criteria(tree)
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
    tree.attrs = {"summary": summary, **rest}  # shown first when a notebook cell displays the tree
