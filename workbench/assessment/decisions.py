"""Decisions after an assessment: start, measure, change a setting, use KSS, monitor, stop."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import xarray as xr

from workbench.assessment.criteria import BROKEN_TRIALS, RATE, SLOW_RATE, Sizes
from workbench.assessment.structure import WORDS
from workbench.assessment.verdict import COLUMNS, FIRST_STEP, verdict_of
from workbench.formatting import short
from workbench.hardware.plan import AssessmentPlan
from workbench.schema.statuses import BAD_STATES, DecisionKind, Verdict
from workbench.training.training_plan import DEFAULT_RATE

#: Failure mode -> monitors to record during training, by part and name of the recorder, and why.
_WATCH = {
    "gradient_flow_collapse": ("optimizer: module_grad_norm, update_ratio",
        "this shows which block's gradients leave the healthy range first"),
    "attention_degeneracy": ("attention: attention_logit_max, attention_entropy_share, effective_rank of D2",
        "a head collapses long before the loss changes"),
    "routing_oscillation": ("router: routing_entropy_share, max_violation, routing_change",
        "dead experts and changes of the routing appear before the loss changes"),
    "scale_dependent_divergence": ("spectra, curvature: sharpness_rate",
        "the edge of stability depends on the size of the model"),
    "initialization_out_of_band": ("activations: state_norm, log_z",
        "the residual stream should return to a healthy scale"),
    "precision_headroom": ("optimizer: gradient_rms_over_eps, update_ratio",
        "updates shrink where a number format rounds them away"),
    "unsuitable_rate": ("monitors: grad_norm, loss; optimizer: adam_staleness", "Adam staleness rises before the loss"),
}  # fmt: skip
#: Advice for a design that is too large for the pilot of an assessment, as a clause about its learning rate.
AT_FULL_WIDTH = "wb.find_rate at full width estimates it more precisely"
#: Excess of the loss over that of the pilot's best rate, after the same number of updates, at which a run is stopped,
#: in nat. Of recorded runs of 480 updates, this rule stops a quarter of the bad and 2 % of the good ones
#: (``data/judge_stop_rules.py``).
STOP_MARGIN = 0.8


@dataclass(frozen=True)
class Decision:
    """One recommended action, as one clause, with the setting to change and its values.

    ``criterion`` is what it is based on (empty for all), ``effect`` what it did when it was tried, and path, variable
    and selection are the place of that number in the tree.
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
    """Derive the decisions from an assessment."""
    modes, criteria = tree["failure_modes"].to_dataset(), tree["criteria"].to_dataset()
    sizes, n_steps, verdict = Sizes.of(tree), plan.training.n_steps, verdict_of(criteria)
    proxy = sizes.proxy if sizes is not None and sizes.is_stand_in else ""
    found = []
    if verdict is Verdict.PROCEED and all(state not in BAD_STATES for state in modes["state"].values):
        how = "with the change and" if affordable < n_steps else "as planned, with"
        found.append(Decision(DecisionKind.PROCEED, f"start the run {how} the stop rules below"))
    if verdict is Verdict.CANNOT_SAY:
        found.append(Decision(DecisionKind.MEASURE, FIRST_STEP, criterion=RATE))
    bad = {
        str(name): criteria.sel(criterion=name)
        for name, state in zip(criteria["criterion"].values, criteria["state"].values, strict=True)
        if state in BAD_STATES
    }
    rate = DEFAULT_RATE if plan.training.learning_rate is None else plan.training.learning_rate
    changes = [*_rate(tree, rate, bad), *_changes(tree, bad, proxy), *_unknown_rate(tree, rate, bad)]
    rates = [each for each in changes if each.setting == "learning_rate"]
    # Only the first proposal of a learning rate is kept, which is that of the pilot if there is one.
    found += [each for each in changes if each not in rates[1:]]
    if affordable < n_steps:
        text = "shorten the schedule to the number of updates that the budget allows, or raise the budget"
        found.append(Decision(DecisionKind.CHANGE, text, "n_steps", f"{n_steps:,}", f"{affordable:,.0f}"))
    found += [*_monitors(modes), *_stop_rules(tree, proxy)]
    found.sort(key=lambda decision: list(DecisionKind).index(decision.kind))
    columns: dict[str, list[Any]] = {
        item.name: [getattr(each, item.name) for each in found] for item in fields(Decision)
    }
    columns["selection"] = [json.dumps(selection) for selection in columns["selection"]]
    known = set(criteria["criterion"].values.tolist())
    assert all(not name or name in known for name in columns["criterion"])
    return xr.Dataset(
        {name: ("decision", np.array(values)) for name, values in columns.items()}, {"decision": np.arange(len(found))}
    )


def _rate(tree: xr.DataTree, rate: float, bad: dict[str, xr.Dataset]) -> Iterator[Decision]:
    """Propose the pilot's best rate if the planned rate is not useful."""
    criterion = RATE if RATE in bad else SLOW_RATE
    if criterion not in bad:
        return
    pilot, word = tree["pilot"].to_dataset(), "lower" if criterion == RATE else "raise"
    best, low, high, upper = (
        float(pilot[name]) for name in ("best_rate", "best_rate_low", "best_rate_high", "useful_edge_high")
    )
    sizes = Sizes.of(tree)
    ratio = 1.0 if sizes is None else sizes.width / sizes.run_width
    effect = _change_of_loss(pilot, rate * ratio, best * ratio)
    if ratio != 1 and criterion == RATE:  # published rates exceed the best rate of a narrower model
        text = f"to below {upper:.2g}, the upper end of the useful edge's interval ({AT_FULL_WIDTH})"
        proposed, variable = f"{upper:.2g}", "useful_edge_high"
    else:
        text, proposed = f"to {best:.2g}, the best rate of the pilot", f"{best:.2g} ({low:.2g} to {high:.2g})"
        variable = "best_rate"
    yield Decision(
        DecisionKind.CHANGE, f"{word} the peak learning rate from {rate:g} {text}", "learning_rate", f"{rate:g}",
        proposed, criterion, effect, path="/pilot", variable=variable,
    )  # fmt: skip


def _unknown_rate(tree: xr.DataTree, rate: float, bad: dict[str, xr.Dataset]) -> Iterator[Decision]:
    """Propose to search for a rate if the trials diverged and the pilot found no useful rate."""
    if BROKEN_TRIALS in bad and not math.isfinite(float(tree["pilot"].to_dataset().get("best_rate", math.nan))):
        text = (
            f"then find a peak learning rate with wb.find_rate, because the trials at {rate:g} diverged and no useful "
            "rate is known"
        )
        yield Decision(DecisionKind.CHANGE, text, "learning_rate", f"{rate:g}", criterion=BROKEN_TRIALS)


def _change_of_loss(pilot: xr.Dataset, rate: float, best: float) -> str:
    """Describe the pilot's losses at the planned and the best rate; empty if it tried no rate near the planned one."""
    n = int(pilot["loss_at_best"].attrs["n_updates"]) if "loss_at_best" in pilot else 0
    if not n:
        return ""
    losses = pilot["loss"].sel(n_updates=n).mean("seed")
    losses = losses[np.isfinite(losses.values)]
    at = [int(np.abs(np.log(losses["rate"].values / each)).argmin()) for each in (rate, best)]
    if not 0.5 < rate / float(losses["rate"][at[0]]) < 2:
        return ""
    before, after = (float(losses[i]) for i in at)
    return f"loss of the pilot after {n} updates: {short(before)} → {short(after)} nat"


def _changes(tree: xr.DataTree, bad: dict[str, xr.Dataset], proxy: str) -> Iterator[Decision]:
    if "changes" in tree:
        yield from _tried(tree["changes"].to_dataset(), BROKEN_TRIALS, proxy)
    if "hardware" in tree:
        hardware = tree["hardware"].to_dataset()
        for i, name in enumerate(hardware["hazard"].values):
            setting, value = (str(hardware[f"remedy_{part}"].values[i]) for part in ("setting", "value"))
            if f"hazard_{name}" in bad and setting:
                yield Decision(
                    DecisionKind.CHANGE, f"set {setting} to {value}", setting, "as planned", value, f"hazard_{name}",
                    path="/hardware", variable="effect", selection={"hazard": i},
                )  # fmt: skip
    yield from _standard_start(tree, [row for name, row in bad.items() if name in COLUMNS["structure"]])
    if heads := [name for name, row in bad.items() if str(row["failure_mode"].values) == "attention_degeneracy"]:
        text = "normalize queries and keys, which bounds the attention logits"
        yield Decision(DecisionKind.CHANGE, text, "qk_norm", "off", "on", heads[0])


def _standard_start(tree: xr.DataTree, bad: list[xr.Dataset]) -> Iterator[Decision]:
    """Propose a standard initialization if the structure is flagged, with its effect if it was tried."""
    if not bad:
        return
    first = bad[0]
    name = str(first["criterion"].values)
    effect, path, variable = "", "", ""
    if "other_start" in tree:
        after = tree["other_start"].to_dataset()
        effects = [
            f"{row['title'].values} {short(float(row['value']))} → {short(float(after[str(row['criterion'].values)]))}"
            for row in bad
        ]
        effect = "; ".join(effects)
        path, variable = "/other_start", name
    yield Decision(
        DecisionKind.CHANGE, WORDS, "initialization", "current", "standard", name, effect, path, variable,
    )  # fmt: skip


def _tried(changes: xr.Dataset, criterion: str, proxy: str) -> Iterator[Decision]:
    """Propose the changes with which the fewest trials diverged."""
    of = f" of {proxy}" if proxy else ""
    n_broken, n_trials = changes["n_broken"].values, changes["n_trials"].values
    best = n_broken.min() if len(n_broken) else 0
    for i in np.flatnonzero(n_broken == best):
        setting = str(changes["setting"].values[i])
        kept = int(n_trials[i] - n_broken[i])
        effect = f"{kept} of {int(n_trials[i])} trials{of} with this change did not diverge"
        current, proposed = str(changes["current"].values[i]), str(changes["proposed"].values[i])
        if proxy and setting == "learning_rate":  # the useful rates of a small model are not those of a large one
            proposed = f"below {current}"
        remark = AT_FULL_WIDTH if proxy else "wb.find_rate finds the useful rates"
        words = {
            "learning_rate": f"lower the peak learning rate {'' if proxy else 'to '}{proposed} ({remark})",
            "clip_norm": f"clip the gradient norm at {proposed}",
            "warmup": f"extend the warm-up to {proposed} updates",
            "kss": "turn on Koopman Spectral Shaping",
        }
        if kept:
            yield Decision(
                DecisionKind.KSS if setting == "kss" else DecisionKind.CHANGE,
                words[setting], setting, current, proposed, criterion, effect,
                path="/changes", variable="n_broken", selection={"change": int(i)},
            )  # fmt: skip


def _monitors(modes: xr.Dataset) -> Iterator[Decision]:
    """Propose monitors to record: those of the failure modes at risk, and always gradient norm and loss."""
    for name, state, worst in zip(
        modes["failure_mode"].values, modes["state"].values, modes["worst_criterion"].values, strict=True
    ):
        if state in BAD_STATES or name == "unsuitable_rate":
            what, why = _WATCH[str(name)]
            yield Decision(DecisionKind.MONITOR, f"record {what}: {why}", "wb.Recorder", "", what, str(worst))


def _stop_rules(tree: xr.DataTree, proxy: str) -> Iterator[Decision]:
    """Propose when to stop the run; losses of a proxy model are not used, because they are not those of the design."""
    trials = tree["trials"].to_dataset() if "trials" in tree else None
    if trials is not None and trials["has_diverged"].values.all():
        first = int(np.nanmin(trials["divergence_step"].values))
        of = f" of {proxy}" if proxy else ""
        yield Decision(
            DecisionKind.STOP_RULE,
            f"it was started with the unchanged plan: all trials{of} diverged, the first after {first} updates",
            "", "", "",
            BROKEN_TRIALS, path="/trials", variable="divergence_step",
            selection={"trial": int(np.nanargmin(trials["divergence_step"].values))},
        )  # fmt: skip
        return
    best = tree["pilot"].to_dataset().get("loss_at_best") if "pilot" in tree else None
    if not proxy and best is not None and math.isfinite(best):
        n, loss = int(best.attrs["n_updates"]), float(best)
        limit = f"{loss + STOP_MARGIN:.3g} nat"
        yield Decision(
            DecisionKind.STOP_RULE,
            f"the training loss exceeds {limit} after {n} updates, which is {STOP_MARGIN} nat above the loss of the "
            "pilot's best rate", "loss", "", limit, RATE, path="/pilot", variable="loss_at_best",
        )  # fmt: skip
    yield Decision(
        DecisionKind.STOP_RULE, "wb.Alarms raises an alarm, or the loss or the gradient norm is not finite",
        criterion=BROKEN_TRIALS,
    )  # fmt: skip
