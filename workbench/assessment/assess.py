"""Assess an architecture and a plan before compute is committed: measurements, criteria, verdict and decisions."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.assessment.affordable_ladder import ladder
from workbench.assessment.compute_cost import flops_per_token, steps_in_budget
from workbench.assessment.decisions import decide
from workbench.assessment.depth_flow import depth_flow
from workbench.assessment.failure_modes import judged
from workbench.assessment.failure_modes.size_ranges import Sizes
from workbench.assessment.flow_numbers import flow_numbers
from workbench.assessment.measured_model import MeasuredModel, measured_model, planned_task
from workbench.assessment.pilot_run import N_UPDATES, pilot_run
from workbench.assessment.plan_changes import possible_changes, try_changes
from workbench.assessment.plan_risk import middle_rate, plan_risk
from workbench.assessment.verdict import summary_of, verdict_of
from workbench.flow.flow_measurement import measure
from workbench.hardware import AssessmentPlan, assess_hardware, read_plan
from workbench.io.provenance import versions
from workbench.koopman.spectra import RankWarning
from workbench.models.calling import on_device_of
from workbench.models.model_sizes import model_sizes
from workbench.models.profile import profile
from workbench.risk.risk import over_rates
from workbench.scaling.width_matching import WIDTH_ERROR
from workbench.schema.runs import SCHEMA_VERSION
from workbench.sweeps import measure_case
from workbench.tasks import as_task
from workbench.tasks.task import require_seed
from workbench.training.training_plan import DEFAULT_RATE, TrainingPlan

if TYPE_CHECKING:
    import xarray as xr

    from workbench.tasks import Task

#: Token states of the spectra, models of a design whose flow is averaged, and examples that flow is measured on.
N_SNAPSHOTS, N_SEEDS, N_FLOW_ROWS = 1024, 3, 8
#: Why the gradient norm of a thin stand-in is not judged.
UNSEEN_GRADIENT = "a thin model stood in for the target, and its gradients reach fewer weights"
#: Rates, as multiples of the planned one, of the curve of risk.
RATE_SPAN, N_RATES = 100.0, 25


def assess(
    subject: Any,
    task: Any = None,
    *,
    plan: Any = None,
    seed: int = 0,
    progress: bool | Callable[[str], None] = False,
) -> xr.DataTree:
    """Assess before training whether an architecture will train under a plan, why, and what to do.

    A model or an opened checkpoint is measured with its own parameters. A design is built with fresh ones: at full
    size, if it has at most four million, otherwise as a stand-in (64 wide, at most 4 blocks, 256 tokens). Measurements
    before training, once also at the full depth, use thin models whose matrices have the variances of the target's
    width (`workbench.scaling.width_matching`); trials train a thin model with its library's own initialization, and the
    change of rates with width is extrapolated from a ladder of widths. The subject is left unchanged.

    Nothing is concluded outside of the measured range. The risk of not learning well, that of an explosion and the
    useful rates are given within the range of width, depth and number of updates that was measured, and for no
    stand-in; a healthy band judges only the sizes of the healthy models behind it. Diverged trials of the plan always
    count against it.

    Args:
        subject: A module, an opened checkpoint, or any source that `workbench.design` takes.
        task: The task it will be trained on; see `workbench.tasks.as_task`. None: the plan's task, which by default is
            synthetic text that fits the model.
        plan: Path of a TOML file, its sections as a mapping, or from `workbench.hardware.read_plan`; None: AdamW at
            1e-3 for 1,000 updates, on one device in float32.
        seed: Seed of fresh parameters and of data.
        progress: Print on standard error what is measured; or a function that receives it.

    Returns:
        DataTree of kind "assessment". Root attributes: ``verdict`` ("proceed", "cannot say", "at risk", "refuse"),
        ``exit_status`` (0, 4, 1, 2), ``summary``, the plan as JSON, versions, and sizes: ``width`` and ``depth`` of the
        subject, ``measured_width`` and ``measured_depth`` of the model that was run, ``is_stand_in`` (0, 1).
        Nodes: ``spectra``, ``flow``, ``flow_numbers``, ``initialization``, ``case`` (what the risk is predicted
        from), ``risk`` (NaN where it is not known), ``rehearsal``, ``hardware``, ``criteria``, ``failure_modes``,
        ``decisions``; where the risk is known ``risk_over_rates``; of a stand-in ``scaling``, ``depth_flow``,
        ``flow_at_depth``; where a trial diverged ``changes``.

    Raises:
        OptionError: If the plan has an unknown key or an impossible value, or does not fit the subject.
        CheckpointError: If there is no such design.
        AnatomyError: If the subject's residual stream cannot be read.

    Example:
        >>> import workbench as wb
        >>> options = {"d_model": 8, "n_layers": 2, "n_heads": 1, "vocab_size": 16, "max_length": 8}
        >>> plan = {"training": {"n_steps": 10, "batch_size": 4}, "assessment": {"seeds": [0], "widths": [4, 8]}}
        >>> tree = wb.assess(options, plan=plan)
        >>> tree.attrs["verdict"], tree.attrs["exit_status"]  # nothing was measured of models so thin
        ('cannot say', 4)
    """
    import xarray as xr

    start = time.monotonic()
    say = _say(progress)
    require_seed(seed)
    plan = read_plan(plan)
    measured = measured_model(subject, seed=seed, width=plan.target.width, depth=plan.target.depth)
    plan.check_against(measured.design or measured.model)
    bench = _Bench.of(measured, task, plan, seed)
    tree = xr.DataTree.from_dict(_measured(bench, say))
    sizes = _sizes(measured, tree["case"].to_dataset(), plan)
    tree["risk"] = xr.DataTree(plan_risk(tree["case"].to_dataset(), stand_in=stands_for_nothing(sizes)))
    if np.isfinite(float(tree["risk"].to_dataset()["failure"][0])):
        tree["risk_over_rates"] = xr.DataTree(risk_around(tree["case"].to_dataset()))
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
    say("failure modes")
    conclude(tree, plan, try_changes=lambda tree: bench.changes(tree, say))
    tree.attrs["duration"] = time.monotonic() - start
    return tree


def _sizes(measured: MeasuredModel, case: xr.Dataset, plan: AssessmentPlan) -> Sizes:
    """Sizes of the model that was run and of the subject."""
    run = int(case["d_model"][0]), int(case["n_layers"][0])
    own = measured.width or run[0], measured.depth or run[1]
    target = (
        plan.target.width or measured.target_width or own[0],
        plan.target.depth or measured.target_depth or own[1],
    )
    n_run = sum(weight.numel() for weight in measured.model.parameters())
    experts = model_sizes(measured.design or measured.model).n_experts or 0
    # A design may be too large because of its vocabulary alone, which is smaller in a stand-in.
    is_stand_in = own != target or n_run < measured.n_weights
    return Sizes(*target, *run, experts, is_stand_in) if is_stand_in else Sizes(*run, *run, experts)


def stands_for_nothing(sizes: Sizes) -> str:
    """Why the risk of a stand-in is not that of the design, in one sentence; empty if the model itself was run."""
    if not sizes.is_stand_in:
        return ""
    return (
        f"What was tried out is {sizes.stand_in}, and neither its risk nor its useful rates are those of a model "
        f"{sizes.width:,} wide with {sizes.blocks:,}."
    )


def risk_around(case: xr.Dataset) -> xr.Dataset:
    """The risk of a case at rates below and above the planned one.

    Args:
        case: From `workbench.sweeps.measure_case`, one run whose risk is known.
    """
    rates = float(case["learning_rate"][0]) * np.geomspace(1 / RATE_SPAN, RATE_SPAN, N_RATES)
    return over_rates(case, rates)


@dataclass(frozen=True)
class _Bench:
    """The model, task and plan of the measurements."""

    measured: MeasuredModel
    task: Task
    plan: AssessmentPlan
    training: TrainingPlan
    seed: int

    @classmethod
    def of(cls, measured: MeasuredModel, task: Any, plan: AssessmentPlan, seed: int) -> _Bench:
        if task is None:
            task = planned_task(measured.model, plan, seed=seed)
        training = plan.training_plan()
        return cls(
            measured, as_task(task), plan, replace(training, learning_rate=training.learning_rate or DEFAULT_RATE), seed
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The training plan as keywords."""
        return {item.name: getattr(self.training, item.name) for item in fields(TrainingPlan)}

    def rows(self) -> tuple[Any, Any]:
        """A few examples of the first batch, with targets."""
        inputs, targets = next(iter(self.task.stream(0)))
        if isinstance(inputs, torch.Tensor):
            return inputs[:N_FLOW_ROWS], targets[:N_FLOW_ROWS]
        return inputs, targets

    def changes(self, tree: xr.DataTree, say: Callable[[str], None]) -> xr.Dataset:
        """Try single changes to the plan."""
        say("changes to the plan")
        possible = possible_changes(
            self.training,
            middle_rate(tree["risk"].to_dataset()),
            float(tree["case"].to_dataset()["rehearsed_rate"][0]),
        )
        step = _part_of(say, "changes to the plan")
        return try_changes(self.measured.model, self.task, possible, n_updates=N_UPDATES, say=step)


def _measured(bench: _Bench, say: Callable[[str], None]) -> dict[str, xr.Dataset]:
    """All measurements, by their path in the tree."""
    measured, model = bench.measured, bench.measured.model
    inputs, targets = (on_device_of(model, part) for part in bench.rows())
    is_thin = not measured.is_target_size
    log_error = WIDTH_ERROR if is_thin else 0.0
    fresh = measured.fresh()
    parts: dict[str, xr.Dataset] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RankWarning)  # the rank is recorded
        say("spectra")
        parts["/spectra"] = profile(
            fresh, bench.task.probe(N_SNAPSHOTS), n_snapshots=N_SNAPSHOTS, seed=bench.seed, progress=False
        )
        say("information flow")
        flows = [
            measure(sibling, inputs, targets=targets, jacobian=i == 0)
            for i, sibling in enumerate(measured.siblings(N_SEEDS))
        ]
        parts["/flow"], parts["/flow_numbers"] = flows[0], flow_numbers(flows, log_error=log_error)
        if is_thin and measured.target_depth is not None:
            say(f"information flow at {measured.target_depth} blocks")
            parts["/depth_flow"], parts["/flow_at_depth"] = depth_flow(
                lambda depth, seed: measured.fresh(seed, depth),
                measured.target_depth,
                inputs,
                targets,
                log_error=log_error,
            )
        say("risk")
        name = f"stand-in of {measured.name}" if is_thin else measured.name
        case = measure_case(model, bench.task, architecture=name, n_snapshots=N_SNAPSHOTS, **bench.settings)
    parts["/case"] = case.drop_vars("eigenvalue")  # which is in the spectra
    parts["/initialization"] = initialization(case, bench.task) if not is_thin else _start_of(fresh, bench)
    say("the first updates, tried out")
    parts["/rehearsal"] = pilot_run(model, bench.task, bench.training)
    if is_thin and measured.design is not None:
        say("a ladder of sizes")
        parts["/scaling"] = ladder(
            measured.design, bench.task, bench.training, bench.plan, seed=bench.seed,
            progress=_part_of(say, "a ladder of sizes"),
        )  # fmt: skip
    say("number formats and devices")
    parts["/hardware"] = assess_hardware(
        model, bench.task, bench.plan, seed=bench.seed, say=_part_of(say, "number formats and devices")
    )
    return parts


def initialization(case: xr.Dataset, task: Task) -> xr.Dataset:
    """How a fresh model starts, 0-dim.

    Args:
        case: From `workbench.sweeps.measure_case`, one run.
        task: Task whose number of choices defines a guess, where it is known.
    """
    import xarray as xr

    n_choices = getattr(task, "vocab_size", None) or getattr(task, "n_classes", None)
    loss = float(case["initial_loss"][0])
    data = {
        "loss_over_guess": (
            (),
            loss / math.log(n_choices) if n_choices and n_choices > 1 else math.nan,
            {"long_name": "initial loss over that of a guess", "units": "1"},
        )
    }
    for name in ("logit_std", "scale_response", "stream_rms_first", "stream_rms_last", "initial_grad_norm"):
        data[name] = ((), float(case[name][0]), case[name].attrs)
    return xr.Dataset(data)


def _start_of(fresh: torch.nn.Module, bench: _Bench) -> xr.Dataset:
    """How a thin stand-in of the target's width starts; its gradients reach fewer weights than the target's."""
    case = measure_case(fresh, bench.task, n_snapshots=N_SNAPSHOTS, runs_pilot=False, **bench.settings)
    found = initialization(case, bench.task)
    found["initial_grad_norm"][...] = math.nan
    found["initial_grad_norm"].attrs["unseen"] = UNSEEN_GRADIENT
    return found


def _part_of(say: Callable[[str], None], part: str) -> Callable[[str], None]:
    """Report a step of a part; an exception of the receiver ends the assessment."""
    return lambda step: say(f"{part}: {step}")


def _say(progress: bool | Callable[[str], None]) -> Callable[[str], None]:
    if callable(progress):
        return progress
    if not progress:
        return lambda _: None
    import sys

    return lambda text: print(f"measuring {text} ...", file=sys.stderr, flush=True)


def conclude(
    tree: xr.DataTree, plan: AssessmentPlan, *, try_changes: Callable[[xr.DataTree], xr.Dataset] | None = None
) -> None:
    """Judge the measurements and decide what to do, in place; earlier conclusions are replaced.

    Args:
        tree: The measured parts, with the attributes ``subject`` and ``steps_in_budget`` and the sizes.
        plan: The assessed plan.
        try_changes: Called with the judged tree where a trial diverged; None: ``changes`` are left unchanged.

    Adds the nodes ``criteria``, ``failure_modes``, ``decisions`` and perhaps ``changes``, and the attributes
    ``verdict``, ``exit_status`` and ``summary``.
    """
    import xarray as xr

    criteria, modes = judged(tree)
    tree["criteria"], tree["failure_modes"] = xr.DataTree(criteria), xr.DataTree(modes)
    if try_changes is not None and float(tree["rehearsal"]["share_broken"]) > 0:
        tree["changes"] = xr.DataTree(try_changes(tree))
    tree["decisions"] = xr.DataTree(decide(tree, plan, affordable=float(tree.attrs["steps_in_budget"])))
    verdict = verdict_of(criteria, modes)
    tree.attrs["verdict"], tree.attrs["exit_status"] = verdict.value, verdict.exit_status
    tree.attrs["summary"] = summary_of(str(tree.attrs["subject"]), verdict, criteria, modes, Sizes.of(tree))
