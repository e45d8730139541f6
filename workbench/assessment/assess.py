"""Assess an architecture and a training plan before training: measurements, criteria, verdict and decisions."""

from __future__ import annotations

import copy
import itertools
import json
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from workbench.assessment.criteria import Sizes
from workbench.assessment.decisions import decide
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
from workbench.assessment.verdict import column_state, evaluate_criteria, summary_of, verdict_of
from workbench.callbacks.train import train
from workbench.errors import AnatomyError, OptionError
from workbench.formatting import counted
from workbench.hardware import assess_hardware, read_plan
from workbench.hardware.plan import AssessmentPlan
from workbench.io.progress import Progress
from workbench.io.provenance import versions
from workbench.koopman.spectra import RankWarning
from workbench.models.batches import take_examples
from workbench.models.losses import token_loss
from workbench.models.model_sizes import model_sizes
from workbench.models.profile import profile
from workbench.option_checks import checked
from workbench.option_kinds import Seed
from workbench.rates.find_rate import is_of_adam
from workbench.schema.runs import SCHEMA_VERSION
from workbench.schema.statuses import BAD_STATES, Verdict
from workbench.tasks import as_task
from workbench.training.training_plan import DEFAULT_RATE

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
      blocks of the design, and its matrices have the variances of the full width (`workbench.scaling.matched_width`).
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
    start, model = time.monotonic(), measured.model
    if task is None:
        task = planned_task(model, plan, seed=seed, loss=loss)
    else:
        require_loss(model, task := as_task(task), loss)
    training = plan.training_plan()
    training = replace(training, learning_rate=training.learning_rate or DEFAULT_RATE)
    target, depth = plan.target.width or measured.target_width, plan.target.depth or measured.target_depth
    width_ratio = 1.0 if target is None or measured.width is None else target / measured.width
    # A narrower model is tried at a larger rate, and not at all if no rule for that rate is known.
    on_trial = replace(training, learning_rate=(training.learning_rate or DEFAULT_RATE) * width_ratio)
    parts: dict[str, xr.Dataset] = {}

    def begin(part: str) -> None:
        bar.total = (bar.total or 0) + _FURTHER.get(part, 0)
        bar.begin(part, (PARTS | _FURTHER)[part])

    def structure(models: Iterable[nn.Module]) -> tuple[xr.Dataset, xr.Dataset | None]:
        """Measure freshly initialized models on a few examples of each of the first two batches."""
        batches = [
            tuple(take_examples(part, slice(0, N_EXAMPLES)) for part in batch)
            if isinstance(batch[0], torch.Tensor)
            else batch
            for batch in itertools.islice(task.stream(0), 2)
        ]
        return measure_structure(models, batches[0], batches[-1][0], training, width_ratio=width_ratio, loss=loss)

    def standard_start() -> xr.Dataset:
        begin("a standard initialization")
        blocks = depth or model_sizes(model).depth or 1
        return structure(with_standard_start(each, blocks) for each in measured.siblings(1, depth))[0]

    def changes(tree: xr.DataTree) -> xr.Dataset:
        begin("changes to the plan")
        tried = possible_changes(on_trial, float(tree["pilot"].to_dataset()["best_rate"]) * width_ratio)
        number = itertools.count()

        def report(change: str) -> None:
            bar.step(change, next(number) / len(tried))

        return try_changes(model, task, tried, n_updates=N_UPDATES, loss=loss, report=report)

    begin("structure")
    parts["/structure"], flow = structure(measured.siblings(N_SEEDS, depth))
    if flow is not None:
        parts["/flow"] = flow
        begin("spectra")
        # The flow of some models can be read although their spectra cannot, because blocks exchange further states.
        with suppress(AnatomyError), warnings.catch_warnings():
            warnings.simplefilter("ignore", RankWarning)  # the rank is recorded
            parts["/spectra"] = profile(
                measured.fresh(depth=depth), task.probe(N_SNAPSHOTS), n_snapshots=N_SNAPSHOTS, seed=seed, progress=False
            )
    begin("useful rates")
    parts["/pilot"] = rate_pilot(
        model, task, training, width_ratio=width_ratio, loss=loss, on_update=_progress_of(bar, BUDGET)
    )
    if width_ratio == 1 or is_of_adam(training.optimizer):
        begin("trials of the first updates")
        after_update = _progress_of(bar, N_TRIALS * N_UPDATES)
        parts["/trials"] = try_plan(model, task, on_trial, loss=loss, on_update=after_update)
    begin("number formats and devices")
    parts["/hardware"] = assess_hardware(model, task, plan, seed=seed, loss=loss, on_hazard=bar.step)
    tree = xr.DataTree.from_dict(parts)
    sizes = _sizes(measured, flow.sizes["layer"] if flow is not None else 0, plan)
    tree.attrs = {
        "kind": "assessment",
        "subject": measured.name,
        "plan": json.dumps(plan.as_dict(), default=str),
        "n_weights": measured.n_weights,
        **sizes.attributes,
        "has_own_weights": int(measured.is_own),
        "task": json.dumps(task.describe(), default=str),
        "steps_in_budget": steps_in_budget(plan, flops_per_token(measured, plan)),
        "seed": seed,
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "schema_version": SCHEMA_VERSION,
    }
    conclude(tree, plan, try_changes=changes, try_start=standard_start)
    tree.attrs["duration"] = time.monotonic() - start
    return tree


def _sizes(measured: MeasuredModel, n_blocks: int, plan: AssessmentPlan) -> Sizes:
    """Return the sizes of the subject and of the measured model; an unknown depth is the number of observed blocks."""
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


def _progress_of(bar: Progress, n_updates: int) -> Callable[[], None]:
    """Return a function to call after each of ``n_updates`` updates, which reports some of them to the progress bar."""
    number = itertools.count(1)

    def after_update() -> None:
        if not (n := next(number)) % _PROGRESS_EVERY:
            bar.step(f"{n} of {n_updates} updates", n / n_updates)

    return after_update


def conclude(
    tree: xr.DataTree,
    plan: AssessmentPlan,
    *,
    try_changes: Callable[[xr.DataTree], xr.Dataset] | None = None,
    try_start: Callable[[], xr.Dataset] | None = None,
) -> None:
    """Evaluate the measurements and decide what to do, in place; earlier conclusions are replaced."""
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


#: Number of timed updates of each design, taken in turns; the median excludes the influence of slow first updates.
N_TIMED = 12
#: Losses are rounded to multiples of this when designs are compared, in nat.
SAME_LOSS = 0.02
#: Time of these updates, as a percentage of the time of an assessment.
_TIME_OF_STEPS = 3
#: Names of the comparison's own parts, which no design may have.
_RESERVED = ("designs",)
#: Columns that are variables of the pilot of each design.
OF_PILOT = [f"{name}{end}" for name in ("useful_edge", "best_rate") for end in ("", "_low", "_high")]


@checked
def compare_designs(
    designs: Mapping[str, Any],
    task: Any = None,
    *,
    plan: Any = None,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    seed: Seed = 0,
    progress: bool | Callable[[str], None] = True,
) -> xr.DataTree:
    """Assess several designs under one plan, and compare verdicts, useful rates, losses and compute cost.

    Args:
        designs: Name -> subject, as in `workbench.assess`; at least two.
        task: As in `workbench.assess`; the same for all designs.
        plan: As in `workbench.assess`, with the budget in ``[budget]``.
        loss: As in `workbench.assess`; the same for all designs.
        seed: Seed of freshly initialized parameters and of data.
        progress: As in `workbench.assess`.

    Returns:
        DataTree of kind "comparison": the assessment of each design under its name, and the node ``designs`` with dim
        ``design``:

        - ``verdict``, ``structure_state`` and ``pilot_state``;
        - ``useful_edge`` (largest useful learning rate) and ``best_rate``, each with ``_low`` and ``_high``, and
          ``rate_margin`` (largest useful rate over the planned rate); NaN where the pilot did not find them;
        - ``loss_at_best``: held-out loss at the best rate in the last round of the pilot, of the model that was run,
          in nat; NaN if no round finished;
        - ``n_weights``: number of parameters;
        - ``flops_per_token``: compute cost, forward and backward;
        - ``relative_step_time``: time of an update of the measured model, over that of the fastest one;
        - ``steps_in_budget``: NaN if the plan sets no budget;
        - ``is_dominated``: whether another design is at least as good in verdict, loss at its best rate and compute
          cost, and better in one of them.

    Raises:
        OptionError: If there are fewer than two designs, a name cannot be used in a tree, or the plan does not fit a
            design.

    Example:
        >>> import workbench as wb
        >>> designs = {"small": "gpt2", "state space": "mamba-130m"}
        >>> tree = wb.compare_designs(designs, plan="plan.toml")  # doctest: +SKIP
        >>> tree = wb.samples.open("assessments")  # a recorded comparison of four published designs
        >>> tree["designs"]["design"].values.tolist()
        ['gpt2', 'llama-2-7b', 'mixtral-8x7b', 'qwen3-8b']

    See Also:
        `workbench.assess`: Assesses one design.
        `workbench.report`: Writes a comparison as a report.
    """
    start = time.monotonic()
    if len(designs) < 2:
        raise OptionError.of("designs", designs, "a mapping of at least two designs", remedy="add another design")
    for name in designs:
        if not name or "/" in name or name in _RESERVED:
            raise OptionError(f"The name '{name}' is not allowed for a design; choose one without '/', not 'designs'.")
    plan = read_plan(plan)
    size = {"width": plan.target.width, "depth": plan.target.depth}
    found = {name: measured_model(subject, seed=seed, **size) for name, subject in designs.items()}
    for each in found.values():  # all plans are checked before the first design is measured
        plan.check_against(each.design or each.model)
    trees, total = {}, len(designs) * (sum(PARTS.values()) + _TIME_OF_STEPS)
    with Progress(progress, f"compared {counted(len(designs), 'design')}", total=total, unit="%") as bar:
        for name, each in found.items():
            bar.heading = f"{name}: "
            trees[name] = assess_measured(each, task, plan, loss, seed, bar)
        bar.heading = ""
        bar.begin("times of an update", len(designs) * _TIME_OF_STEPS)
        times = step_times({name: each.model for name, each in found.items()}, task, plan, loss=loss, seed=seed)
    rows = [_row(trees[name], found[name], plan) for name in designs]
    data = {name: ("design", np.array([row[name] for row in rows])) for name in rows[0]}
    data["relative_step_time"] = ("design", np.array([times[name] for name in designs]) / min(times.values()))
    table = xr.Dataset(data, {"design": list(designs)})
    table["is_dominated"] = ("design", dominated(table))
    for name, (long_name, units) in _MEANING.items():
        for end, about in (("", ""), ("_low", ", lower end"), ("_high", ", upper end")):
            if f"{name}{end}" in table:
                table[f"{name}{end}"].attrs = {"long_name": f"{long_name}{about}", "units": units}
    tree = xr.DataTree.from_dict({"designs": table, **trees})
    tree.attrs = {
        "kind": "comparison",
        "subject": " or ".join(designs),
        "plan": json.dumps(plan.as_dict(), default=str),
        "seed": seed,
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "duration": time.monotonic() - start,
        "schema_version": SCHEMA_VERSION,
    }
    return tree


_MEANING = {
    "verdict": ("verdict", ""),
    "structure_state": ("structure", ""),
    "pilot_state": ("pilot", ""),
    "useful_edge": ("largest useful rate", "1"),
    "best_rate": ("best rate", "1"),
    "rate_margin": ("largest useful rate over the planned rate", "1"),
    "loss_at_best": ("loss at the best rate of the pilot, of the model that was run", "nat"),
    "n_weights": ("parameters", "1"),
    "flops_per_token": ("compute cost per token, forward and backward", "FLOP"),
    "relative_step_time": ("time of an update over that of the fastest design, of the models that were run", "1"),
    "steps_in_budget": ("updates within the budget", "1"),
    "is_dominated": ("another design is nowhere worse in verdict, loss and compute cost, and better in one", ""),
}


def _row(tree: xr.DataTree, measured: MeasuredModel, plan: AssessmentPlan) -> dict[str, Any]:
    pilot = tree["pilot"].to_dataset()
    found = {name: float(pilot[name]) for name in OF_PILOT}
    return {
        **{name: tree.attrs[name] for name in ("verdict", "structure_state", "pilot_state")},
        **found,
        "rate_margin": found["useful_edge"] / float(pilot["planned_rate"]),
        "loss_at_best": float(pilot["loss_at_best"]),
        "n_weights": measured.n_weights,
        "flops_per_token": flops_per_token(measured, plan),
        "steps_in_budget": tree.attrs["steps_in_budget"],
    }


def step_times(
    models: Mapping[str, nn.Module],
    task: Any,
    plan: AssessmentPlan,
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss,
    seed: int,
) -> dict[str, float]:
    """Measure the median seconds of an update of each model, in turns, so that other load slows all equally."""
    runs = {}
    for name, model in models.items():
        batches = planned_task(model, plan, seed=seed, loss=loss) if task is None else task
        runs[name] = train(
            copy.deepcopy(model),
            as_task(batches),
            n_steps=N_TIMED + 1,
            learning_rate=1e-6,
            stops_at_divergence=False,
            loss=loss,
        )
        next(runs[name])
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(N_TIMED):
        for name, run in runs.items():
            start = time.perf_counter()
            next(run)
            taken[name].append(time.perf_counter() - start)
    for run in runs.values():
        cast(Generator[Any, None, None], run).close()
    return {name: float(np.median(seconds)) for name, seconds in taken.items()}


def dominated(table: xr.Dataset) -> np.ndarray:
    """Return for each design whether it is dominated, bool of shape (design,).

    A design is dominated if another one is at least as good in verdict, loss at its best rate and compute cost, and
    better in one of them. Losses are rounded to ``SAME_LOSS``; a design without a loss neither dominates nor is
    dominated.
    """
    scores = np.column_stack(
        [
            [Verdict(verdict).severity for verdict in table["verdict"].values],
            table["flops_per_token"].values,
            np.round(table["loss_at_best"].values / SAME_LOSS),
        ]
    )
    return np.array([any((other <= own).all() and (other < own).any() for other in scores) for own in scores])
