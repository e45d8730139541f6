"""Replay a practice case from its beginning with the change of `workbench.run_experiment` for one cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from torch import nn

from workbench.course.case_files import Truth
from workbench.course.failure_runs import N_STEPS, SETUPS, BuiltRun, build, held_out_loss, largest_rise
from workbench.diagnosis import CAUSES, Record, Rules, block_at_fault, find_failure, read_record, read_symptoms
from workbench.diagnosis.experiment_runs import Replay
from workbench.diagnosis.experiments import propose
from workbench.errors import OptionError
from workbench.formatting import lowered
from workbench.models.anatomy import read_anatomy
from workbench.monitors import ModelProbe
from workbench.training.training_plan import TrainingPlan

#: Cause -> the change that is replayed, without anything that was measured.
CURES = {
    "learning_rate": "Train with a quarter of the learning rate at every step.",
    "schedule": "Correct the schedule: hold the learning rate where it jumps or decays too early; otherwise warm up.",
    "batch": "Combine four batches into one, and use all examples of each batch.",
    "optimizer_eps": "Set the optimizer's eps to 1e-8.",
    "architecture": "Limit the update of the most unusual block (of every block if none is unusual) to the norm of "
    "the residual stream.",
    "precision": "Compute attention, reductions and parameters in float32.",
    "routing": "Start with small router weights, and use a balance loss with the usual coefficient for all experts.",
    "data": "Skip the batches around the rise of the loss.",
}
#: Kinds of faults that replace the optimizer itself; the change for their cause restores it.
_IN_OPTIMIZER = ("coarse weights", "router rate")
#: Number of tokens of the probe on which unused experts are counted, as in the records.
_N_PROBE_TOKENS = 64


@dataclass(frozen=True)
class Outcome:
    """Result of a replay with one change; ``problem`` is a clause that says why it has no effect on this run."""

    title: str
    problem: str
    losses: np.ndarray
    final_loss: float
    rise: float
    dead_share: float

    @property
    def has_diverged(self) -> bool:
        """Whether the replay diverged."""
        return not math.isfinite(self.final_loss)


def replay(truth: Truth, run: xr.DataTree, cause: str, on_step: Callable[[], object] = lambda: None) -> Outcome:
    """Replay a case from its beginning with the change for a cause."""
    case, record = truth.case, read_record(run)
    made = build(case)
    failure = find_failure(record)
    layers = {"architecture": block_at_fault(read_symptoms(record, failure))}
    uniform = dict.fromkeys(CAUSES, 1 / len(CAUSES))
    proposed = propose(record, failure, uniform, layers, rules=Rules.uniform(), checkpoints={})
    change = next((one for one in proposed if one.cause == cause), None)
    if change is None:
        return _unchanged(truth, record, CURES[cause], "the run's eps is already 1e-8 or smaller")
    names = ("optimizer", "optimizer_options", "learning_rate")
    settings = {name: made.plan[name] for name in names if name in made.plan}
    if any(plant.cause == cause and plant.kind in _IN_OPTIMIZER for plant in case.plants):
        sound = build(case.control).plan
        settings = {name: sound[name] for name in names if name in sound}
    training = settings | {name: made.plan[name] for name in ("clip_norm", "seed")}
    planned = _planned_rates(made, settings)
    again = Replay(planned, None, made.model, made.task, 0, N_STEPS, made.faults, None, training)
    final: dict[str, float] = {}

    def measure(model: nn.Module) -> None:
        final["loss"] = held_out_loss(model, made.task)
        final["dead_share"] = _unused_experts(model, made.task) if SETUPS[case.setup].has_routers else 0.0

    try:
        losses = again.losses(change.change, on_step, at_end=measure)
    except OptionError as error:  # the change is impossible for this model
        return _unchanged(truth, record, change.title, lowered(str(error).partition(";")[0]))
    final_loss = final["loss"] if np.isfinite(losses).all() else math.nan
    return Outcome(change.title, "", losses, final_loss, largest_rise(losses), final["dead_share"])


def _planned_rates(made: BuiltRun, settings: Mapping[str, Any]) -> Record:
    """Return a record that holds the planned learning rate of every step, also of those after a divergence."""
    optimizer = TrainingPlan(n_steps=1, **settings).optimizer_for(made.model)
    peak = max(float(group["lr"]) for group in optimizer.param_groups)
    plan = TrainingPlan(**{name: made.plan[name] for name in ("n_steps", "warmup", "schedule")})
    rates = [peak * plan.rate_factor(step) for step in range(N_STEPS)]
    monitors = xr.Dataset({"learning_rate": ("step", rates)}, {"step": np.arange(N_STEPS)})
    return Record({"monitors": monitors}, xr.DataTree())


def _unused_experts(model: nn.Module, task: Any) -> float:
    """Return the largest fraction of the experts of a block that receive no tokens of a probe."""
    inputs = task.probe(_N_PROBE_TOKENS)
    probe = ModelProbe(model, read_anatomy(model, inputs), inputs)
    dead = probe.take(["router"])["router"]["dead_experts"]
    return float(np.nanmax(dead) / max(probe.n_experts)) if np.isfinite(dead).any() else 1.0


def _unchanged(truth: Truth, record: Record, title: str, problem: str) -> Outcome:
    """Return the result of the run itself, for a change without an effect."""
    losses = np.full(N_STEPS, math.nan)
    losses[record.steps] = record.values("monitors", "loss")
    if record.diverged_at is not None:
        losses[record.diverged_at :] = math.nan
    return Outcome(title, problem, losses, truth.result["final_loss"], truth.result["rise"], truth.result["dead_share"])


def recovered_fraction(truth: Truth, outcome: Outcome) -> float:
    """Return the fraction of the lost progress that a replay recovers, from 0 to 1.

    It is of what separates the run from its control: final held-out loss, temporary rise, or unused experts; in the
    last two, the replay must also learn as much. A run that diverged has lost all that the control learned.
    """
    if outcome.has_diverged:
        return 0.0
    run, control = truth.result, truth.control
    learned = control["start_loss"] - control["final_loss"]
    behind = max(outcome.final_loss - control["final_loss"], 0.0)
    if truth.how in ("spike", "experts died"):
        name = "rise" if truth.how == "spike" else "dead_share"
        left = max(getattr(outcome, name) - control[name], 0.0) / (run[name] - control[name])
        return float(np.clip(1 - max(left, behind / learned), 0, 1))
    end = control["start_loss"] if truth.how == "diverged" else min(run["final_loss"], control["start_loss"])
    return float(np.clip(1 - behind / (end - control["final_loss"]), 0, 1))
