"""Run an experiment: replay a part of a run from a checkpoint, unchanged and with one change, on copies."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import nn

from workbench.callbacks.faults import Fault
from workbench.callbacks.train import train
from workbench.diagnosis.causes import CAUSES
from workbench.diagnosis.checkpoint_evidence import check_fits, checkpoints_of
from workbench.diagnosis.diagnose import answer_of
from workbench.diagnosis.experiments import ACT_ON, FIXED_COST, ReplaySchedule, ShiftedTask, change_model, shifted
from workbench.diagnosis.failed_run import Record, read_record, running_median
from workbench.diagnosis.ranking import REPLAYED, Rules
from workbench.errors import CheckpointError, OptionError
from workbench.io.progress import Progress
from workbench.models.checkpoint import load_weights
from workbench.models.subject import Subject
from workbench.option_kinds import PositiveFloat, PositiveInt
from workbench.schema.statuses import FailureKind
from workbench.tasks import Task, as_task
from workbench.training.recording import read_checkpoint
from workbench.training.training_plan import TrainingPlan
from workbench.zoo.module_of import module_of

#: A rise by this fraction of the recorded rise counts as a recurrence of the failure.
_RECURRENCE = 0.4
#: Window of the running median of the loss, in steps.
_WINDOW = 7
#: A loss has risen if it rises by more than this multiple of its noise.
_NOISES = 10.0
#: It must also rise by at least this fraction of its lowest value, because the noise of a run that diverges immediately
#: is unknown.
_LEAST_RISE = 0.5
#: Relative tolerance between the first loss of a replay from step 0 and the recorded one.
_FIRST_LOSS = 0.2


def run_experiment(
    tree: xr.DataTree,
    experiment: str | int = 0,
    *,
    model: Subject | nn.Module,
    task: Any,
    run: Any = None,
    checkpoints: str | os.PathLike[str] | None = None,
    n_steps: PositiveInt | None = None,
    faults: Sequence[Fault] = (),
    optimizer: str | torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
    learning_rate: PositiveFloat | None = None,
    clip_norm: PositiveFloat | None = None,
    precision: str | None = None,
    seed: int | None = None,
    rules: Rules | None = None,
    progress: bool | Callable[[str], None] = True,
) -> xr.DataTree:
    """Replay a part of a failed run twice, unchanged and with one change, and update the causes by the outcome.

    The replays run on copies; neither the model nor the run or its checkpoints are changed. The same arguments yield
    the same numbers.

    Args:
        tree: Tree from `workbench.diagnose`.
        experiment: Name of a cause, or position in ``tree["experiments"]``, 0 for the first.
        model: Model of the run. If the replay begins at step 0, it must have the initial parameters of the run; they
            are compared with the run's checkpoint of step 0 or, without one, by the loss of the first batch.
        task: The task of the run; batch n of its stream is the batch of step n.
        run: The run; None for the store that the diagnosis was made from.
        checkpoints: Folder of the checkpoints; None for the folder next to the store. An experiment from step 0 needs
            no checkpoint.
        n_steps: Steps to replay; None for the proposed number.
        faults: Faults that were injected into the run (`workbench.faults`), if any. They act in both replays as they
            did in the run, except those that act on the setting that the experiment changes.
        optimizer: Optimizer of the run, as in `workbench.TrainingPlan`; required if it was a custom one. Here and
            below, None uses the recorded value.
        optimizer_options: Further arguments of the optimizer.
        learning_rate: Peak learning rate of the run.
        clip_norm: Largest norm of all gradients together.
        precision: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        seed: Seed of dropout and other randomness in the training.
        rules: Rules of the diagnosis; None for the shipped ones.
        progress: Whether to show the progress, or a function that receives each progress message; an exception that
            this function raises ends the experiment.

    Returns:
        The tree with the row of the experiment filled in: ``outcome`` (a sentence), ``is_done``, ``supports``,
        ``value`` and ``twin_value`` (mean loss over the last fifth of the changed and of the unchanged replay, in nat;
        NaN if it diverged). If the failure recurred in the unchanged replay, the probabilities of the causes, their set
        and order, and the information of the other experiments are updated by Bayes' rule, with the frequencies of
        outcomes in replays of recorded runs. Repeating the same experiment changes nothing. The set is then that of
        recorded runs after one replay, and its coverage is not stated.

    Raises:
        OptionError: If there is no such experiment, the rules are not those of the diagnosis, a setting is impossible,
            or a replay from step 0 begins with another loss than the run.
        CheckpointError: If the checkpoint is missing or does not fit the model, or if the replay begins at step 0 and
            the model does not have the parameters of that step.
        StoreError: If the run cannot be read.

    Example:
        >>> import workbench as wb
        >>> path = wb.samples.failed_run("architecture")
        >>> model = wb.open_checkpoint(path.with_suffix(".checkpoints") / "step-00000000").model
        >>> task = wb.tasks.associative_recall(length=5, vocab_size=10, n_pairs=2, seed=31)
        >>> tree = wb.run_experiment(wb.diagnose(path), model=model, task=task, n_steps=5)
        >>> int(tree["experiments"]["is_done"].sum())
        1

    See Also:
        `workbench.diagnose`: Ranks the causes and proposes the experiments.
        `workbench.train`: Trains the replays.
    """
    table = tree["experiments"].to_dataset()
    at = _place(table, experiment)
    rules = Rules.shipped() if rules is None else rules
    has_set = "is_possible" in tree["causes"]  # trees of older versions have no set, and are not updated
    if has_set and set(tree["causes"].to_dataset()["cause"].values.tolist()) & set(CAUSES) != set(rules.causes):
        raise OptionError("The diagnosis was made with other rules than these; pass its rules as rules=.")
    row = table.isel(experiment=at)
    change = json.loads(str(row["change"].values))
    from_step = int(row["from_step"].values)
    n_steps = int(row["n_steps"].values) if n_steps is None else n_steps
    if n_steps < 1:
        raise OptionError.of("n_steps", n_steps, "at least 1")
    source = tree.attrs.get("run") if run is None else run
    if source is None or (isinstance(source, str) and not source):
        raise OptionError("The diagnosis was not made from a store; pass run= with the run it was made from.")
    given = {
        "optimizer": optimizer,
        "optimizer_options": optimizer_options,
        "learning_rate": learning_rate,
        "clip_norm": clip_norm,
        "precision": precision,
        "seed": seed,
    }
    training = {name: value for name, value in given.items() if value is not None}
    replay = Replay(
        read_record(source), source, module_of(model), as_task(task), from_step, n_steps, faults, checkpoints, training
    )
    kind, step, title = tree.attrs["failure_kind"], int(tree.attrs["failure_step"]), str(row["title"].values)
    with Progress(progress, "replayed", total=2 * n_steps, unit="step") as bar:
        bar.describe("unchanged")
        control = replay.losses({}, bar.update)
        replay.check_begins_as_recorded(control)
        bar.describe("changed")
        answer = replay.answer(FailureKind(kind), step, control, change, title, bar.update)
    was_done = "is_done" in table and bool(table["is_done"].values[at])
    done = tree.copy()
    done["experiments"] = xr.DataTree(_with_answer(table, at, answer))
    if answer.is_decided and not was_done and has_set:  # repeating a replay adds no information
        weigh(done, str(row["cause"].values), supports=answer.supports, rules=rules)
    return done


@dataclass(frozen=True)
class Answer:
    """The outcome, as a sentence, of one replay with a change.

    ``is_decided`` tells whether the failure recurred unchanged; the values are mean losses over the last fifth, NaN for
    divergence.
    """

    outcome: str
    is_decided: bool
    supports: bool
    value: float
    control_value: float


def _with_answer(table: xr.Dataset, at: int, answer: Answer) -> xr.Dataset:
    """Return the experiments with the outcome of one of them."""
    level = "mean loss over the last fifth of the {} replay; NaN if it was not run or diverged"
    about = {
        "outcome": ("", "", "the outcome; empty if the experiment was not run"),
        "is_done": (False, "", "whether the experiment was run"),
        "supports": (False, "", "whether the outcome supports the cause"),
        "value": (math.nan, "nat", level.format("changed")),
        "twin_value": (math.nan, "nat", level.format("unchanged")),
    }
    new = dict(zip(about, (answer.outcome, True, answer.supports, answer.value, answer.control_value), strict=True))
    columns = {}
    for name, (empty, units, meaning) in about.items():
        values = table[name].values.tolist() if name in table else [empty] * table.sizes["experiment"]
        values[at] = new[name]
        columns[name] = (
            "experiment",
            np.array(values),
            {"long_name": name.replace("_", " "), "units": units, "meaning": meaning},
        )
    return table.assign(columns)


def _place(table: xr.Dataset, experiment: str | int) -> int:
    causes = [str(cause) for cause in table["cause"].values] if "cause" in table else []
    if isinstance(experiment, str):
        if experiment not in causes:
            raise OptionError.of("experiment", experiment, tuple(causes) or "left out, as no experiment is proposed")
        return causes.index(experiment)
    if not 0 <= experiment < len(causes):
        raise OptionError.of("experiment", experiment, f"0 to {len(causes) - 1} or the name of a cause")
    return experiment


class Replay:
    """Settings and data that both replays share."""

    def __init__(
        self,
        record: Record,
        source: Any,
        model: nn.Module,
        task: Task,
        from_step: int,
        n_steps: int,
        faults: Sequence[Fault],
        checkpoints: Any,
        training: Mapping[str, Any],
    ) -> None:
        self.record, self.model, self.task = record, model, task
        self.from_step, self.n_steps, self.faults = from_step, n_steps, tuple(faults)
        found = checkpoints_of(source, checkpoints)
        self.place = found.get(from_step) if from_step else None
        if from_step and self.place is None:
            known = ", ".join(map(str, found))
            raise CheckpointError(
                f"The replay begins at the checkpoint of step {from_step}, but there are "
                + (f"only checkpoints of steps {known}" if found else "no checkpoints next to the run")
                + "; pass checkpoints= with the folder of that checkpoint."
            )
        if from_step in found:
            check_fits(found[from_step], model=model)
        self.has_first = from_step == 0 and 0 in found
        if self.has_first:
            _check_is_first(model, found[0])
        recorded = record.setting("training", default={})
        settings = {item.name for item in fields(TrainingPlan)}
        self.plan = {
            name: value
            for name, value in recorded.items()
            if name in settings and name not in ("n_steps", "warmup", "schedule")
        }
        self.plan.pop("stops_at_divergence", None)
        self.plan |= training
        options = self.plan.get("optimizer_options", {})
        if isinstance(options.get("betas"), list):
            self.plan["optimizer_options"] = {**options, "betas": tuple(options["betas"])}

    def losses(
        self,
        change: Mapping[str, Any],
        on_step: Callable[[], object] = lambda: None,
        *,
        at_end: Callable[[nn.Module], object] = lambda _: None,
    ) -> np.ndarray:
        """Return the loss of each replayed step; NaN from the step at which it diverged."""
        model = copy.deepcopy(self.model)
        setting = str(change.get("setting", ""))
        plan = dict(self.plan)
        if setting == "precision":
            plan["precision"] = change["value"]
        optimizer = self._optimizer(model, plan, change)
        faults = [
            shifted(fault, self.from_step) for fault in self.faults if not isinstance(fault, ACT_ON.get(setting, ()))
        ]
        task = ShiftedTask(self.task, self.from_step, change)
        removes = change_model(model, task, change)
        peak = max(float(group["lr"]) for group in optimizer.param_groups)
        keep = {
            name: plan[name]
            for name in ("clip_norm", "precision", "seed", "loss_limit", "grad_norm_limit")
            if name in plan
        }
        schedule = ReplaySchedule(self._rates(peak), self.from_step, peak, change)
        try:
            records = train(
                model, task, optimizer=optimizer, schedule=schedule, n_steps=self.n_steps, faults=faults, **keep
            )
            found = []
            for record in records:
                found.append(math.nan if record.diverged else record.loss)
                on_step()
            at_end(model)
        finally:
            for remove in removes:
                remove()
        return np.array(found + [math.nan] * (self.n_steps - len(found)))

    def answer(
        self,
        kind: FailureKind,
        step: int,
        control: np.ndarray,
        change: Mapping[str, Any],
        title: str,
        on_step: Callable[[], object] = lambda: None,
    ) -> Answer:
        """Replay with a change, and compare the losses with those of the unchanged replay."""
        changed = self.losses(change, on_step)
        has_failed = _have_failed(kind, self.record, step, control, changed)
        value, control_value = _level(changed), _level(control)
        outcome, supports = _verdict(kind, title, has_failed, value, control_value, changed, control)
        return Answer(outcome, has_failed[0], supports, value, control_value)

    def check_begins_as_recorded(self, control: np.ndarray) -> None:
        """Raise an error if the first loss differs from that of the run, unless a checkpoint was compared."""
        loss = float(self.record.values("monitors", "loss")[0])
        if self.from_step or self.has_first or self.record.steps[0] != 0 or not np.isfinite([loss, control[0]]).all():
            return
        if abs(control[0] - loss) > _FIRST_LOSS * abs(loss):
            raise OptionError(
                f"The replay from step 0 begins with a loss of {control[0]:.3g}, but the run began with {loss:.3g}; "
                "pass the model with the initial parameters of the run, and the run's own task, precision and faults."
            )

    def _optimizer(self, model: nn.Module, plan: Mapping[str, Any], change: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Return the optimizer with the state of the checkpoint, at the peak rate."""
        given = {name: plan[name] for name in ("optimizer", "optimizer_options", "learning_rate") if name in plan}
        optimizer = TrainingPlan(n_steps=1, **given).optimizer_for(model)
        peaks = [float(group["lr"]) for group in optimizer.param_groups]
        if self.place is not None:
            load_weights(model, self.place)
            if (self.place / "training.pt").exists():  # other checkpoints hold no optimizer state
                optimizer.load_state_dict(read_checkpoint(self.place).optimizer)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak
            if change.get("setting") == "optimizer_eps":
                if "eps" not in group:
                    raise OptionError(f"{type(optimizer).__name__} has no eps to change; try that of another cause.")
                group["eps"] = change["value"]
        return optimizer

    def _rates(self, peak: float) -> np.ndarray:
        """Return the learning rate of each step of the run, from step 0."""
        rate = self.record.monitor("learning_rate")
        last = int(self.record.steps[-1])
        if rate is None:
            return np.full(last + 1, peak)
        known = np.isfinite(rate)
        return np.interp(np.arange(last + 1), self.record.steps[known], rate[known])


def _check_is_first(model: nn.Module, place: Path) -> None:
    """Raise an error if the parameters of the model are not those of the run's first checkpoint."""
    first = copy.deepcopy(model)
    load_weights(first, place)
    for (name, own), right in zip(model.state_dict().items(), first.state_dict().values(), strict=True):
        if not torch.allclose(own, right, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise CheckpointError(
                f"The replay begins at step 0, but the model's {name} differs from that in {place}; pass the model "
                "with its initial parameters, which wb.open_checkpoint() of that folder returns."
            )


def _have_failed(
    kind: FailureKind, record: Record, step: int, control: np.ndarray, changed: np.ndarray
) -> tuple[bool, bool]:
    """Return whether the unchanged and the changed replay failed as the run did."""
    if kind is FailureKind.STALLED:
        return True, not _is_lower(changed, control)
    loss = record.values("monitors", "loss")
    loss = loss[np.isfinite(loss)]
    if not len(loss):  # no finite loss was recorded, so any finite replay is another outcome
        return not np.isfinite(control).all(), not np.isfinite(changed).all()
    if kind is FailureKind.DIVERGED:  # a loss diverges within a few steps, which a running median would hide
        recorded = float(np.max(loss - np.minimum.accumulate(loss)))
        rise = max(_RECURRENCE * recorded, _NOISES * _noise(loss), _LEAST_RISE * float(np.min(loss)))
        return _has_risen(control, rise), _has_risen(changed, rise)
    smooth = running_median(loss, _WINDOW)
    rise = _RECURRENCE * float(np.max(smooth - np.minimum.accumulate(smooth)))
    return _has_risen(control, rise, window=_WINDOW), _has_risen(changed, rise, window=_WINDOW)


def _has_risen(losses: np.ndarray, rise: float, *, window: int = 1) -> bool:
    """Return whether the loss diverged, or rose by more than ``rise`` above its lowest level so far."""
    if not np.isfinite(losses).all():
        return True
    smooth = running_median(losses, min(window, len(losses)))
    return bool(np.max(smooth - np.minimum.accumulate(smooth)) > max(rise, 1e-9))


def _noise(losses: np.ndarray) -> float:
    """Return a robust estimate of the noise of the loss from step to step."""
    return 1.48 * float(np.median(np.abs(np.diff(losses)))) / math.sqrt(2) if len(losses) > 2 else 0.0


def _is_lower(changed: np.ndarray, control: np.ndarray) -> bool:
    """Return whether the changed replay ends lower than the unchanged one by more than the noise."""
    if not np.isfinite(changed).all():
        return False
    if not np.isfinite(control).all():
        return True
    n_last = max(3, len(changed) // 5)
    noise = _noise(control) * math.sqrt(2 / n_last)
    return _level(control) - _level(changed) > max(2.5 * noise, 0.02 * abs(_level(control)))


def _level(losses: np.ndarray) -> float:
    """Return the mean loss over the last fifth; NaN if it diverged."""
    return float(np.mean(losses[-max(1, len(losses) // 5) :]))


def _verdict(
    kind: FailureKind,
    title: str,
    failed: tuple[bool, bool],
    value: float,
    control_value: float,
    changed: np.ndarray,
    control: np.ndarray,
) -> tuple[str, bool]:
    """Return the outcome as a sentence, and whether it supports the cause."""

    def ending(losses: np.ndarray, level: float) -> str:
        bad = np.flatnonzero(~np.isfinite(losses))
        return f"diverged after {bad[0]} steps" if len(bad) else f"ended at a loss of {level:.3g}"

    ends = f"with {title}, the replay {ending(changed, value)}; unchanged, it {ending(control, control_value)}"
    control_failed, changed_failed = failed
    if not control_failed:
        return f"Undecided, because the failure did not recur in the unchanged replay: {ends}.", False
    answer = "This is evidence against the cause" if changed_failed else "This supports the cause"
    if kind is not FailureKind.STALLED:
        answer += f", because the failure {'recurs' if changed_failed else 'does not recur'}"
    return f"{answer}: {ends}.", not changed_failed


def weigh(tree: xr.DataTree, change: str, *, supports: bool, rules: Rules) -> None:
    """Update the causes of a diagnosis by the outcome of one replay, in place."""
    causes = tree["causes"].to_dataset()
    before = dict(zip(map(str, causes["cause"].values), causes["probability"].values.tolist(), strict=True))
    after = rules.after(before, change, supports=supports)
    established = json.loads(tree.attrs.get("established", "[]"))
    possible = established or rules.set_of(after, REPLAYED)
    causes = causes.sel(cause=list(after))
    causes["probability"].values[:] = list(after.values())
    causes["is_possible"].values[:] = [cause in possible for cause in after]
    tree["causes"] = xr.DataTree(causes)
    experiments = tree["experiments"].to_dataset().copy(deep=True)
    information = np.array([rules.information(after, str(cause)) for cause in experiments["cause"].values])
    if "is_done" in experiments:  # repeating an experiment adds no information
        information[experiments["is_done"].values] = 0.0
    experiments["information"].values[:] = information
    worth = information / (experiments["cost"].values + FIXED_COST)
    experiments["order"].values[np.argsort(-worth, kind="stable")] = np.arange(1, len(worth) + 1)
    tree["experiments"] = xr.DataTree(experiments)
    layers = dict(zip(map(str, causes["cause"].values), causes["layer"].values.tolist(), strict=True))
    tree.attrs |= answer_of(tree.attrs, after, layers, possible)
    tree.attrs.pop("coverage", None)  # the coverage was measured without replays
    tree.attrs["n_replays"] = int(tree.attrs.get("n_replays", 0)) + 1
