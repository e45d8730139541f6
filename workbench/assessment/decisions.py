"""Decisions after an assessment: start, measure, change a setting, monitor, use KSS, stop rules."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.assessment.failure_modes.pilot_criteria import BROKEN_TRIALS, RATE, SLOW_RATE
from workbench.assessment.failure_modes.size_ranges import Sizes
from workbench.assessment.standard_start import WORDS
from workbench.assessment.verdict import COLUMNS, FIRST_STEP, verdict_of
from workbench.formatting import short
from workbench.schema.statuses import BAD_STATES, DecisionKind, Verdict
from workbench.training.training_plan import DEFAULT_RATE

if TYPE_CHECKING:
    import xarray as xr

    from workbench.hardware import AssessmentPlan

#: Failure mode -> monitors to record during training, and why. The names are those of the recorder's parts.
_WATCH = {
    "gradient_flow_collapse": ("optimizer: module_grad_norm, update_ratio", "which block's gradients leave first"),
    "attention_degeneracy": (
        "attention: attention_logit_max, attention_entropy_share, effective_rank of D2",
        "a head collapses long before the loss moves",
    ),
    "routing_oscillation": (
        "router: routing_entropy_share, max_violation, routing_change",
        "experts die or swap before the loss moves",
    ),
    "scale_dependent_divergence": ("spectra, curvature: sharpness_rate", "the edge of stability moves with size"),
    "initialization_out_of_band": ("activations: state_norm, log_z", "the stream should come back to scale"),
    "precision_headroom": ("optimizer: gradient_rms_over_eps, update_ratio", "updates shrink where formats lose them"),
    "unsuitable_rate": ("monitors: grad_norm, loss; optimizer: adam_staleness", "spikes of staleness precede the loss"),
}
#: How to find the rate of a design that is too large for the pilot of an assessment.
AT_FULL_WIDTH = "wb.find_rate at full width tells it more closely"
#: Loss above that of the pilot's best rate, after as many updates, at which a run is stopped: of recorded runs of 480
#: updates this stops a quarter of the bad ones and 2 % of the good ones (``data/judge_stop_rules.py``).
STOP_MARGIN = 0.8


@dataclass(frozen=True)
class Decision:
    """One recommended action.

    Attributes:
        kind: Kind of action.
        text: The action; one clause.
        setting: The setting to change, such as ``learning_rate``; empty if none.
        current, proposed: Its current and its proposed value.
        criterion: The evidence, by name; empty: all criteria.
        effect: Its effect where it was tried, one clause; empty: it was not tried.
        path, variable, selection: Where the effect's number is in the tree; empty: there is none.
    """

    kind: DecisionKind
    text: str
    setting: str = ""
    current: str = ""
    proposed: str = ""
    criterion: str = ""
    effect: str = ""
    path: str = ""
    variable: str = ""
    selection: dict[str, int] = field(default_factory=dict)


def decide(tree: xr.DataTree, plan: AssessmentPlan, *, affordable: float = math.nan) -> xr.Dataset:
    """Derive the decisions from an assessment.

    Args:
        tree: Tree with ``criteria``, ``failure_modes``, ``pilot``, ``trials`` and, if they were tried, ``changes``; its
            attributes record whether a stand-in was measured, whose limits are never proposed for the design.
        plan: The assessed plan.
        affordable: Updates within its budget; NaN: it sets none.

    Returns:
        Dataset with dim ``decision``, in the order in which to act: the fields of `Decision`, ``selection`` as JSON.
    """
    import xarray as xr

    modes, criteria = tree["failure_modes"].to_dataset(), tree["criteria"].to_dataset()
    sizes = Sizes.of(tree)
    stand_in = sizes.stand_in if sizes is not None and sizes.is_stand_in else ""
    found = [
        *_start(verdict_of(criteria), modes, affordable < plan.training.n_steps),
        *_one_rate([*_rate(tree, plan), *_changes(tree, plan, stand_in), *_unknown_rate(tree, plan)]),
        *_budget(plan, affordable),
        *_monitors(modes), *_stop_rules(tree, stand_in),
    ]  # fmt: skip
    found.sort(key=lambda decision: list(DecisionKind).index(decision.kind))
    columns: dict[str, list[Any]] = {
        item.name: [getattr(each, item.name) for each in found] for item in fields(Decision)
    }
    columns["selection"] = [json.dumps(selection) for selection in columns["selection"]]
    known = set(criteria["criterion"].values.tolist())
    assert all(not name or name in known for name in columns["criterion"])
    return xr.Dataset(
        {name: ("decision", np.array(values)) for name, values in columns.items()},
        {"decision": np.arange(len(found))},
    )


def _start(verdict: Verdict, modes: xr.Dataset, is_too_long: bool) -> Iterator[Decision]:
    if verdict is Verdict.PROCEED and all(state not in BAD_STATES for state in modes["state"].values):
        how = "with the change and the stop rules below" if is_too_long else "as planned, with the stop rules below"
        yield Decision(DecisionKind.PROCEED, f"start the run {how}")
    if verdict is Verdict.CANNOT_SAY:
        yield Decision(DecisionKind.MEASURE, FIRST_STEP, criterion=RATE)


def _rate(tree: xr.DataTree, plan: AssessmentPlan) -> Iterator[Decision]:
    """The best rate that the pilot found, where the planned one is not among the useful ones."""
    states = tree["criteria"].to_dataset()["state"]
    bad = next((name for name in (RATE, SLOW_RATE) if str(states.sel(criterion=name).values) in BAD_STATES), "")
    if not bad:
        return
    pilot, word = tree["pilot"].to_dataset(), "lower" if bad == RATE else "raise"
    rate = DEFAULT_RATE if plan.training.learning_rate is None else plan.training.learning_rate
    best, low, high, upper = (
        float(pilot[name]) for name in ("best_rate", "best_rate_low", "best_rate_high", "useful_edge_high")
    )
    sizes = Sizes.of(tree)
    ratio = 1.0 if sizes is None else sizes.width / sizes.run_width
    effect = _brought(pilot, rate * ratio, best * ratio)
    if ratio != 1 and bad == RATE:  # published rates lie above the best one of a thinner model
        text = f"to below {upper:.2g}, the upper end of the useful edge ({AT_FULL_WIDTH})"
        proposed, variable = f"{upper:.2g}", "useful_edge_high"
    else:
        text, proposed = f"to {best:.2g}, the best one that the pilot found", f"{best:.2g} ({low:.2g} to {high:.2g})"
        variable = "best_rate"
    yield Decision(
        DecisionKind.CHANGE, f"{word} the peak rate from {rate:g} {text}", "learning_rate", f"{rate:g}", proposed, bad,
        effect, path="/pilot", variable=variable,
    )  # fmt: skip


def _unknown_rate(tree: xr.DataTree, plan: AssessmentPlan) -> Iterator[Decision]:
    """How to find a rate where the trials broke and the pilot found none."""
    state = str(tree["criteria"].to_dataset()["state"].sel(criterion=BROKEN_TRIALS).values)
    if state in BAD_STATES and not math.isfinite(float(tree["pilot"].to_dataset().get("best_rate", math.nan))):
        rate = DEFAULT_RATE if plan.training.learning_rate is None else plan.training.learning_rate
        text = f"then find a peak rate with wb.find_rate: at {rate:g} the trials broke, and no useful rate is known"
        yield Decision(DecisionKind.CHANGE, text, "learning_rate", f"{rate:g}", criterion=BROKEN_TRIALS)


def _one_rate(changes: list[Decision]) -> list[Decision]:
    """The changes with one proposal of a rate: the first, that of the pilot, where the trials proposed one as well."""
    rates = [each for each in changes if each.setting == "learning_rate"]
    return [each for each in changes if each not in rates[1:]]


def _brought(pilot: xr.Dataset, rate: float, best: float) -> str:
    """What the best rate brought the pilot beside the planned one, where it tried one near that."""
    n = int(pilot["loss_at_best"].attrs["n_updates"]) if "loss_at_best" in pilot else 0
    if not n:
        return ""
    losses = pilot["loss"].sel(n_updates=n).mean("seed")
    losses = losses[np.isfinite(losses.values)]
    at = [int(np.abs(np.log(losses["rate"].values / each)).argmin()) for each in (rate, best)]
    if not 0.5 < rate / float(losses["rate"][at[0]]) < 2:
        return ""
    before, after = (float(losses[i]) for i in at)
    return f"the pilot's loss after {n} updates {short(before)} → {short(after)} nat"


def _changes(tree: xr.DataTree, plan: AssessmentPlan, stand_in: str) -> Iterator[Decision]:
    criteria = tree["criteria"].to_dataset()
    bad = {
        str(name): criteria.sel(criterion=name)
        for name, state in zip(criteria["criterion"].values, criteria["state"].values, strict=True)
        if state in BAD_STATES
    }
    if "changes" in tree:
        yield from _tried(tree["changes"].to_dataset(), BROKEN_TRIALS, stand_in)
    if "hardware" in tree:
        yield from _remedies(tree["hardware"].to_dataset(), bad)
    yield from _start_again(tree, [row for name, row in bad.items() if name in COLUMNS["structure"]])
    heads = [name for name, row in bad.items() if str(row["failure_mode"].values) == "attention_degeneracy"]
    if heads:
        yield Decision(
            DecisionKind.CHANGE,
            "normalize queries and keys, which bounds the attention logits",
            "qk_norm",
            "off",
            "on",
            heads[0],
        )


def _start_again(tree: xr.DataTree, bad: list[xr.Dataset]) -> Iterator[Decision]:
    """Another initialization where the structure is flagged, with what it brought where it was tried."""
    if not bad:
        return
    first = bad[0]
    name = str(first["criterion"].values)
    effect, path, variable = "", "", ""
    if "other_start" in tree:
        after = tree["other_start"].to_dataset()
        told = [
            f"{row['title'].values} {short(float(row['value']))} → {short(float(after[str(row['criterion'].values)]))}"
            for row in bad
        ]
        effect = "; ".join(told)
        path, variable = "/other_start", name
    yield Decision(
        DecisionKind.CHANGE, WORDS, "initialization", "as it is", "standard", name, effect, path, variable,
    )  # fmt: skip


def _budget(plan: AssessmentPlan, affordable: float) -> Iterator[Decision]:
    n_steps = plan.training.n_steps
    if affordable < n_steps:
        yield Decision(
            DecisionKind.CHANGE,
            "end with what the budget pays for, or raise it: the schedule ends after more updates than that",
            "n_steps", f"{n_steps:,}", f"{affordable:,.0f}",
        )  # fmt: skip


def _tried(changes: xr.Dataset, criterion: str, stand_in: str) -> Iterator[Decision]:
    """The changes with which no trial diverged; if there are none, those that helped most."""
    of = f" of {stand_in}" if stand_in else ""
    n_broken, n_trials = changes["n_broken"].values, changes["n_trials"].values
    best = n_broken.min() if len(n_broken) else 0
    for i in np.flatnonzero(n_broken == best):
        setting = str(changes["setting"].values[i])
        kept = int(n_trials[i] - n_broken[i])
        effect = f"{kept} of {int(n_trials[i])} trials{of} with it did not break"
        current, proposed = str(changes["current"].values[i]), str(changes["proposed"].values[i])
        if stand_in and setting == "learning_rate":  # the useful rates of a small model are not those of a large one
            proposed = f"below {current}"
        found = AT_FULL_WIDTH if stand_in else "wb.find_rate tells which rates learn well"
        words = {
            "learning_rate": f"lower the peak rate {'' if stand_in else 'to '}{proposed} ({found})",
            "clip_norm": f"clip the gradient norm at {proposed}",
            "warmup": f"warm up longer, over {proposed} updates",
            "kss": "switch on Koopman Spectral Shaping",
        }
        if kept:
            yield Decision(
                DecisionKind.KSS if setting == "kss" else DecisionKind.CHANGE,
                words[setting], setting, current, proposed, criterion, effect,
                path="/changes", variable="n_broken", selection={"change": int(i)},
            )  # fmt: skip


def _remedies(hardware: xr.Dataset, bad: dict[str, xr.Dataset]) -> Iterator[Decision]:
    for i, name in enumerate(hardware["hazard"].values):
        if f"hazard_{name}" in bad and str(hardware["remedy_setting"].values[i]):
            setting, value = str(hardware["remedy_setting"].values[i]), str(hardware["remedy_value"].values[i])
            yield Decision(
                DecisionKind.CHANGE, f"set {setting} to {value}", setting, "as planned", value, f"hazard_{name}",
                path="/hardware", variable="effect", selection={"hazard": i},
            )  # fmt: skip


def _monitors(modes: xr.Dataset) -> Iterator[Decision]:
    """Monitors to record: first those of the failure modes at risk, and always gradients and loss."""
    for name, state, worst in zip(
        modes["failure_mode"].values, modes["state"].values, modes["worst_criterion"].values, strict=True
    ):
        if state in BAD_STATES or name == "unsuitable_rate":
            what, why = _WATCH[str(name)]
            yield Decision(DecisionKind.MONITOR, f"record {what}: {why}", "wb.Recorder", "", what, str(worst))


def _stop_rules(tree: xr.DataTree, stand_in: str) -> Iterator[Decision]:
    """When to stop the run; the losses of a stand-in are not those of the design."""
    trials = tree["trials"].to_dataset() if "trials" in tree else None
    if trials is not None and trials["has_diverged"].values.all():
        first = int(np.nanmin(trials["divergence_step"].values))
        of = f" of {stand_in}" if stand_in else ""
        yield Decision(
            DecisionKind.STOP_RULE,
            f"it was started unchanged: all trials{of} broke, the first after {first} updates", "", "", "",
            BROKEN_TRIALS, path="/trials", variable="divergence_step",
            selection={"trial": int(np.nanargmin(trials["divergence_step"].values))},
        )  # fmt: skip
        return
    best = tree["pilot"].to_dataset().get("loss_at_best") if "pilot" in tree else None
    if not stand_in and best is not None and math.isfinite(best):
        n, loss = int(best.attrs["n_updates"]), float(best)
        limit = f"{loss + STOP_MARGIN:.3g} nat"
        yield Decision(
            DecisionKind.STOP_RULE,
            f"the training loss exceeds {limit} after {n} updates, {STOP_MARGIN} nat more than the pilot's best rate",
            "loss", "", limit, RATE, path="/pilot", variable="loss_at_best",
        )  # fmt: skip
    yield Decision(
        DecisionKind.STOP_RULE, "wb.Alarms sounds, or the loss or the gradient norm is not finite",
        criterion=BROKEN_TRIALS,
    )  # fmt: skip
