"""Decisions after an assessment: start, measure, change a setting, monitor, use KSS, stop rules."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.assessment.failure_modes.plan_criteria import BROKEN_TRIALS, RISK
from workbench.assessment.failure_modes.size_ranges import Sizes
from workbench.assessment.plan_risk import middle_rate
from workbench.assessment.verdict import FIRST_STEP, verdict_of
from workbench.formatting import band_in_words
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
#: Criteria of routing that only initialization decides.
_OF_FRESH_ROUTER = ("routing_entropy_share_min", "max_violation_max")
#: A rate nearer to the middle of the useful ones than by this factor is not worth a change.
_NEAR = 1.2
#: Factor of a stop rule over the largest value in trials that did not diverge.
_SLACK = 2.0


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
        tree: Tree with ``criteria``, ``failure_modes``, ``rehearsal`` and, if they were tried, ``changes``; its
            attributes record whether a stand-in was measured, whose numbers are never proposed for the design.
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
        *_start(verdict_of(criteria, modes), modes, affordable < plan.training.n_steps), *_rate(tree, plan),
        *_changes(tree, plan, stand_in), *_budget(plan, affordable), *_monitors(modes), *_stop_rules(tree, stand_in),
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
        yield Decision(DecisionKind.MEASURE, FIRST_STEP, criterion=RISK)


def _rate(tree: xr.DataTree, plan: AssessmentPlan) -> Iterator[Decision]:
    """Find the useful rates, and until then take the middle of the predicted ones; after broken trials see `_tried`."""
    if str(tree["criteria"].to_dataset().sel(criterion=RISK)["state"].values) not in BAD_STATES:
        return
    yield Decision(
        DecisionKind.MEASURE,
        "find the useful rates with wb.find_rate: settings alone place the largest one only to within a factor of "
        f"{_factor(tree['risk'].to_dataset()):.2g} (80 % interval)",
        criterion=RISK,
    )
    rate = DEFAULT_RATE if plan.training.learning_rate is None else plan.training.learning_rate
    middle = middle_rate(tree["risk"].to_dataset())
    if "changes" not in tree and max(middle / rate, rate / middle) > _NEAR:
        yield Decision(
            DecisionKind.CHANGE,
            f"{'raise' if middle > rate else 'lower'} the peak rate to the middle of those predicted to learn well",
            "learning_rate", f"{rate:g}", f"{middle:.2g}", RISK,
        )  # fmt: skip


def _factor(risk: xr.Dataset) -> float:
    """By which factor the useful edge may be larger than predicted."""
    return float(risk["useful_edge_high"][0] / risk["useful_edge"][0])


def _changes(tree: xr.DataTree, plan: AssessmentPlan, stand_in: str) -> Iterator[Decision]:
    criteria = tree["criteria"].to_dataset()
    bad = {
        str(name): criteria.sel(criterion=name)
        for name, state in zip(criteria["criterion"].values, criteria["state"].values, strict=True)
        if state in BAD_STATES
    }
    if "changes" in tree:
        criterion = next((name for name in (BROKEN_TRIALS, RISK) if name in bad), "")
        yield from _tried(tree["changes"].to_dataset(), criterion, stand_in)
    if "rate_over_edge" in bad:
        rate = plan.training.learning_rate or math.nan
        proposed = float(f"{rate / float(bad['rate_over_edge']['value']):.2g}")
        yield Decision(
            DecisionKind.CHANGE,
            "lower the peak rate to what the ladder predicts for the target size, or parametrize by muP and "
            "carry the small model's rate over", "learning_rate", f"{rate:g}", f"{proposed:g}", "rate_over_edge",
        )  # fmt: skip
    if "hardware" in tree:
        yield from _remedies(tree["hardware"].to_dataset(), bad)
    gains = [name for name in bad if name.startswith(("gradient_gain", "signal_gain", "branch_ratio"))]
    if gains:
        yield Decision(
            DecisionKind.CHANGE,
            "bring the gain of every block near 1: start the embeddings at a spread near 1, so that no "
            "branch outweighs the stream, or scale the output matrices of the branches by 1 / sqrt(2 blocks)",
            "initialization", "as it is", "larger embeddings, or branches / sqrt(2 blocks)", gains[0],
        )  # fmt: skip
    start = [name for name, row in bad.items() if str(row["failure_mode"].values) == "initialization_out_of_band"]
    if start and not gains:
        row = bad[start[0]]
        yield Decision(
            DecisionKind.CHANGE, f"bring the {row['title'].values} of the fresh model into the healthy band",
            "initialization", f"{float(row['value']):.3g}", band_in_words(float(row["low"]), float(row["high"])),
            start[0],
        )  # fmt: skip
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
    routes = [name for name, row in bad.items() if str(row["failure_mode"].values) == "routing_oscillation"]
    if routes and routes[0] in _OF_FRESH_ROUTER:
        yield Decision(
            DecisionKind.CHANGE,
            "start the matrices of the routers at a smaller spread, so that no fresh router is sure of its "
            "choices", "router initialization", "as it is", "half as large", routes[0],
        )  # fmt: skip
    elif routes:
        yield Decision(
            DecisionKind.CHANGE,
            "raise the auxiliary balance loss or lower the router's rate until routing settles",
            "balance_coefficient", "as it is", "twice as large", routes[0],
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
        words = {
            "learning_rate": "lower the peak rate",
            "clip_norm": "clip the gradient norm",
            "warmup": "warm up longer",
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
    """Limits of the first updates, from the trials that did not diverge; a stand-in's do not apply to the design."""
    pilot = tree["rehearsal"].to_dataset()
    kept = ~pilot["has_diverged"].values
    n = pilot.attrs["n_updates"]
    if not kept.any():
        first = int(np.nanmin(pilot["divergence_step"].values))
        of = f" of {stand_in}" if stand_in else ""
        yield Decision(
            DecisionKind.STOP_RULE,
            f"it was started unchanged: all trials{of} broke, the first after {first} updates", "", "", "",
            BROKEN_TRIALS, path="/rehearsal", variable="divergence_step",
            selection={"trial": int(np.nanargmin(pilot["divergence_step"].values))},
        )  # fmt: skip
        return
    if stand_in:
        yield Decision(
            DecisionKind.STOP_RULE,
            "wb.Alarms sounds, or the loss or the gradient norm is not finite",
            criterion=BROKEN_TRIALS,
        )
        return
    for name, words in (("loss", "loss"), ("grad_norm", "gradient norm")):
        # As a ratio, because another seed and batch begin at another value.
        values = pilot[name].values / pilot[name].values[:, :1]
        values = np.where(kept[:, None] & np.isfinite(values), values, -np.inf)
        trial, step = (int(i) for i in np.unravel_index(int(np.argmax(values)), values.shape))
        limit = f"{_SLACK * float(values[trial, step]):.2g}"
        text = (
            f"the {words} exceeds {limit} times its first value within the first {n} updates at the peak rate, twice "
            "the most of the trials"
        )
        yield Decision(
            DecisionKind.STOP_RULE, text, name, "", f"{limit} x first", BROKEN_TRIALS,
            path="/rehearsal", variable=name, selection={"trial": trial, "step": step},
        )  # fmt: skip
