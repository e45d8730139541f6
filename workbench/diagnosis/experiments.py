"""Deciding experiments: one change for each cause, the step at which to begin, and the expected outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench.diagnosis.causes import CAUSES
from workbench.diagnosis.failed_run import Record
from workbench.diagnosis.failure import Failure
from workbench.diagnosis.ranking import Rules
from workbench.schema.statuses import FailureKind

#: Fixed cost of a replay, which is added to that of its steps when experiments are ordered.
FIXED_COST = 0.05
#: No experiment is proposed for causes with a smaller probability.
_LEAST_PROBABILITY = 0.01
#: Steps replayed after the step at which the record shows the failure.
_MARGIN = 15
#: Fraction of a stalled run that is replayed, and the minimum and maximum number of steps.
_STALLED_SHARE, _FEWEST, _MOST = 0.3, 30, 200
#: Proposed warm-up, as a fraction of the run.
_WARM_UP = 0.15
#: The rate jumps if it rises by this factor from one step to the next.
_JUMP = 1.5


@dataclass(frozen=True)
class Experiment:
    """A replay of a part of the run with one change, compared with an unchanged replay.

    Attributes:
        cause: The cause that the experiment decides about.
        title: Description of the change, as a noun phrase.
        change: The change as plain values, for `workbench.run_experiment`.
        n_steps: Steps to replay.
        from_step: Step of the checkpoint at which the replay begins; 0 for the initial parameters.
        if_right: Expected outcome if it is this cause.
        if_wrong: Expected outcome if it is another cause.
        cost: Steps of both replays over the steps of the run.
        information: Mutual information of the outcome and the cause, in bits, with the frequencies of outcomes in
            replays of recorded runs.
    """

    cause: str
    title: str
    change: Mapping[str, Any]
    n_steps: int
    from_step: int
    if_right: str
    if_wrong: str
    cost: float
    information: float


def propose(
    record: Record,
    failure: Failure,
    probability: Mapping[str, float],
    layers: Mapping[str, int],
    *,
    rules: Rules,
    checkpoints: Mapping[int, Path],
) -> list[Experiment]:
    """Propose deciding experiments, in order of information per cost."""
    n_all = int(record.steps[-1] - record.steps[0]) + 1
    found = []
    for cause, p in probability.items():
        if p < _LEAST_PROBABILITY or cause not in CAUSES or cause == "nothing":
            continue
        title, change, begins_anew = _change(cause, record, failure, layers.get(cause, -1))
        if cause == "optimizer_eps" and _eps(record) <= change["value"]:
            continue  # the change would have no effect
        from_step = 0 if begins_anew else max((step for step in checkpoints if step <= failure.step), default=0)
        n_steps = _length(record, failure, from_step, acts_at=int(change.get("at", 0)))
        if failure.is_stalled:
            if_right = "the loss of the changed replay decreases faster than that of the unchanged replay"
            if_wrong = "both replays end at about the same loss"
        else:
            if_right = "the loss of the changed replay remains low, while the unchanged replay fails again"
            if_wrong = "the changed replay fails like the unchanged replay"
        information = rules.information(probability, cause)
        cost = 2 * n_steps * (change.get("factor", 1) if cause == "batch" else 1) / n_all
        found.append(Experiment(cause, title, change, n_steps, from_step, if_right, if_wrong, cost, information))
    return sorted(found, key=lambda e: -e.information / (e.cost + FIXED_COST))


def _eps(record: Record) -> float:
    """Return the eps of the run's optimizer; infinite if it is not an Adam optimizer."""
    known = str(record.setting("training", "optimizer", default="")).lower()
    if not known.startswith("adam"):
        return math.inf
    return float(record.setting("training", "optimizer_options", "eps", default=1e-8))


def _length(record: Record, failure: Failure, from_step: int, *, acts_at: int) -> int:
    """Return the number of steps to replay, which ends shortly after the failure.

    A stalled run has no such step; a fraction of it is replayed, counted from the step at which the change acts.
    """
    last = int(record.steps[-1])
    if failure.is_stalled:
        n_steps = int(np.clip(_STALLED_SHARE * (last + 1), _FEWEST, _MOST))
        return min(max(acts_at - from_step, 0) + n_steps, max(last + 1 - from_step, n_steps))
    if failure.kind is FailureKind.DIVERGED:
        end = record.diverged_at if record.diverged_at is not None else last
        return max(end - from_step + _MARGIN, _MARGIN)
    rises = failure.smooth - np.minimum.accumulate(failure.smooth)
    peak = int(record.steps[int(np.argmax(rises))])
    return max(peak - from_step + _MARGIN, _MARGIN)


def _change(cause: str, record: Record, failure: Failure, layer: int) -> tuple[str, dict[str, Any], bool]:
    """Return the change as text and as plain values, and whether it must act from the initial parameters on."""
    if cause == "learning_rate":
        rate = record.monitor("learning_rate")
        is_known = rate is not None and bool(np.isfinite(rate).any())
        lower = f" ({np.nanmax(rate) / 4:.2g} at its peak)" if rate is not None and is_known else ""
        return f"a quarter of the learning rate{lower}", {"setting": "learning_rate", "factor": 0.25}, False
    if cause == "schedule":
        return _schedule_change(record, failure)
    if cause == "batch":
        return "four batches combined into one", {"setting": "batch", "factor": 4}, False
    if cause == "optimizer_eps":
        return "the optimizer's eps set to 1e-8", {"setting": "optimizer_eps", "value": 1e-8}, False
    if cause == "architecture":
        which = f"block {layer}" if layer >= 0 else "every block"
        return (
            f"the update of {which} limited to the norm of the residual stream",
            {"setting": "architecture", "layer": layer, "limit": 1.0}, False,
        )  # fmt: skip
    if cause == "precision":
        return ("attention, reductions and parameters in float32", {"setting": "precision", "value": "float32"}, False)
    if cause == "routing":
        return (
            "small router weights and a balance loss with the usual coefficient",
            {"setting": "routing", "balance": 0.01, "router_rms": 0.05}, False,
        )  # fmt: skip
    first = failure.step - 5
    last = max(_end_of_burst(record, failure), failure.step + 5)
    return (
        f"batches {max(first, 0)} to {last} skipped",
        {"setting": "data", "first": max(first, 0), "last": last},
        False,
    )


def _schedule_change(record: Record, failure: Failure) -> tuple[str, dict[str, Any], bool]:
    rate = record.monitor("learning_rate")
    recorded = int(record.setting("training", "warmup", default=0) or 0)
    n_warm = max(20, 3 * recorded, round(_WARM_UP * len(record.steps)))
    if rate is not None:
        near = slice(max(1, failure.row - 40), failure.row + 20) if not failure.is_stalled else slice(4, None)
        before, after = rate[near.start - 1 : near.stop][:-1] if near.stop else rate[near.start - 1 : -1], rate[near]
        n = min(len(before), len(after))
        factors = after[:n] / np.maximum(before[:n], 1e-30)
        if n and near.start >= 4 and np.nanmax(factors) >= _JUMP:
            at = near.start + int(np.nanargmax(factors))
            value = float(np.nanmax(rate[max(0, at - 40) : at]))
            return (
                f"the learning rate held at {value:.3g} instead of jumping",
                {"setting": "schedule", "hold": value, "at": int(record.steps[at])},
                False,
            )
        if failure.is_stalled and rate[-1] < 0.1 * np.nanmax(rate):
            value = float(np.nanmax(rate)) / 2
            return (
                f"the learning rate held at {value:.3g} instead of decaying",
                {"setting": "schedule", "hold": value, "at": 0},
                False,
            )
    return f"a warm-up of {n_warm} steps", {"setting": "schedule", "warmup": n_warm}, True


def _end_of_burst(record: Record, failure: Failure) -> int:
    """Return the last batch of the burst: the step at which 70 % of the rise was recovered, or the end of the run."""
    rises = failure.smooth - np.minimum.accumulate(failure.smooth)
    peak = int(np.argmax(rises))
    back = np.flatnonzero(rises[peak:] < 0.3 * rises[peak])
    row = peak + int(back[0]) if len(back) else len(rises) - 1
    return int(record.steps[row])
